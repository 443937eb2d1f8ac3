"""The same content, the same name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlkernel.records.keys import device_name, digest, reuse_key

ROOT = Path(__file__).resolve().parents[2]
HERE = {"torch": "2.13.0", "triton": "3.7.1", "nccl": None, "cpu": "CPU", "cores": 2, "gpus": []}


def test_digest_does_not_depend_on_order_or_kind_of_list():
    assert digest({"a": 1, "b": (1, 2)}) == digest({"b": [1, 2], "a": 1})
    assert digest({"a": 1}) != digest({"a": 2}) and len(digest(None)) == 64


def test_digest_is_the_same_in_every_process():
    code = "from rlkernel.records import digest; print(digest({'ü': [1.5, None], 'a': 'b'}))"
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code]
        out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
        assert out.strip() == digest({"a": "b", "ü": [1.5, None]})


@pytest.mark.parametrize("name", ["torch", "triton", "nccl", "cpu"])
def test_reuse_ends_where_the_machine_differs(name):
    assert reuse_key("case", "source", HERE) != reuse_key("case", "source", HERE | {name: "other"})


def test_reuse_depends_on_case_and_source_and_on_nothing_else():
    key = reuse_key("case", "source", HERE)
    assert len(key) == 16 and key == reuse_key("case", "source", HERE | {"cores": 64})
    assert key != reuse_key("other", "source", HERE) != reuse_key("case", "other", HERE)


def test_the_device_is_what_computes():
    gpu = HERE | {"gpus": [{"name": "NVIDIA H200"}] * 2}
    assert device_name(gpu, "cpu") == "CPU" and device_name(gpu, "cuda") == "NVIDIA H200"
    assert reuse_key("c", "s", gpu, "cuda") != reuse_key("c", "s", gpu, "cpu")
