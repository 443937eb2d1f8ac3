"""Two fresh processes, one seed: one hash. A process that says another hash is counted."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from rlkernel.experiments.case import Case
from rlkernel.ffn import fresh
from rlkernel.grid import Grid

AT = {"m": 9, "hidden": 64, "intermediate": 128, "contracts": "tree8.bf16+chain", "dx": "packed"}
CASE = Case("det-ffn", Grid(), "bf16", 11, parameters=AT | {"what": "hash"})
CPU = torch.device("cpu")


def hashes(**more) -> dict[str, str]:
    return fresh.hashes({**AT, "seed": 11, "device": "cpu", **more})


def test_each_variant_has_its_hash_and_each_seed_another():
    here = hashes()
    assert list(here) == ["tree8.bf16 dx packed", "chain dx packed"]
    assert len(set(here.values())) == 2 and hashes() == here
    assert not set(here.values()) & set(hashes(seed=12).values())


def test_processes_that_agree_pass_and_one_that_does_not_is_named(monkeypatch):
    here = hashes()
    other = {**here, "chain dx packed": "0" * 16}
    for fresh_ones, wrong in (([here, here], 0), ([here, other], 1), ([other, other], 2)):
        row = fresh._row(here, fresh_ones)
        counts = {line["contract"]: line["mismatches"] for line in row["lines"]}
        assert counts == {"tree8.bf16": 0, "chain": wrong}
        assert row["passed"] is (wrong == 0) is row["checks"][0][1]
        assert row["checks"][0][2] == f"{2 - bool(wrong)} of 2 variants"


def test_the_processes_are_others_and_are_asked_for_the_same(monkeypatch):
    asked = []

    class Process:
        returncode = 0

        def __init__(self, command, env, **_):
            asked.append((command, env))

        def communicate(self, timeout):
            return json.dumps(fresh.hashes(json.loads(asked[0][0][-1]))), ""

        def __enter__(self):
            return self

        def __exit__(self, *_):
            asked.append("waited for")

        def kill(self):
            asked.append("killed")

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(fresh.subprocess, "Popen", Process)
    assert fresh.hash_row(CASE, CPU)["digest"] == hashes()
    (first, env), second, *ended = asked
    assert ended == ["killed"] * 2 + ["waited for"] * 2, "never waited for while it may still run"
    assert (first, env) == second and first[:3] == [sys.executable, "-m", "rlkernel.ffn.fresh"]
    assert "TRITON_INTERPRET" not in env and env["PYTHONPATH"].startswith(str(fresh.ROOT))


def test_a_process_that_dies_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="a fresh process ended with 1"):
        fresh.hash_row(CASE, CPU)
