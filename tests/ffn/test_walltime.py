"""Timed layouts: what is timed has the right bits, the faster opponent counts, gaps are told.

Two ranks that are timed for real: ranks.py.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from rlkernel.collectives.groups import alone
from rlkernel.collectives.transport import StagedTransport
from rlkernel.experiments.case import Case
from rlkernel.ffn import exactness, memory, opponents, walltime
from rlkernel.grid import Grid
from rlkernel.run import aligned

AT = {
    "what": "time", "m": 9, "hidden": 64, "intermediate": 128, "layout": "tp2",
    "sequence_parallel": False, "contracts": "tree8.bf16+tree8.fp32", "dx": "separate+packed",
    "dw": "auto", "graph": True, "warmup": 0.0, "samples": 2, "transport": "auto",
}  # fmt: skip


def row(comm=None, **more) -> dict:
    case = Case("det-ffn", Grid(), "bf16", 11, parameters=AT | more)
    return walltime.time_row(case, comm or alone())


def test_a_forward_a_contract_and_a_step_a_variant_beside_the_official_layer():
    found = row()
    assert found["passed"] and found["mismatches"] == 0 and found["elements"] > 9 * 64
    lines = [(line["operator"], line["contract"], line["dx"]) for line in found["lines"]]
    assert lines == [
        *(("forward", contract, "-") for contract in ("tree8.bf16", "tree8.fp32")),
        *(("step", contract, dx) for contract in ("tree8.bf16", "tree8.fp32")
          for dx in ("separate", "packed")),
    ]  # fmt: skip
    assert all(line["against"] == "official" and line["mode"] == "eager" for line in found["lines"])
    assert all(set(line["ratios"]) == {"official"} for line in found["lines"])
    assert len(found["samples"]) == 2 * ((2 + 1) + (4 + 1))
    assert found["protocol"]["eager"]["of"] == "the slowest rank of each sample"
    assert found["official"].startswith("transformers ")
    assert found["opponents"]["official compiled"] == "on GPUs only"
    assert found["not_captured"] == "a CUDA graph needs a GPU"
    assert set(found["peak_bytes"]["step"].values()) == {None} and found["beside_bytes"] is None


def test_what_is_timed_with_wrong_bits_fails(monkeypatch):
    right = exactness.build
    monkeypatch.setattr(exactness, "build", lambda fault, *rest: right("local-left-fold", *rest))
    found = row(contracts="tree8.bf16", samples=0)
    assert not found["passed"] and all(line["mismatches"] for line in found["lines"])
    assert found["not_measured"] == "no samples were asked for" and "samples" not in found


def test_without_the_official_layer_there_is_a_time_but_no_ratio(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = row(contracts="tree8.bf16", dx="separate")
    assert found["official"].startswith("transformers is not installed")
    assert all(line["median_us"] > 0 and "ratio" not in line for line in found["lines"])


def test_the_ratio_is_to_the_faster_opponent():
    times = {"ours": (4.0, 6.0), "slow": (8.0, 8.0), "fast": (2.0, 2.0)}
    samples = [{"variant": name, "round": n, "us": us}
               for name, found in times.items() for n, us in enumerate(found)]  # fmt: skip
    found = walltime._times(samples, "ours", ("slow", "fast"))
    assert found["against"] == "fast" and found["ratio"]["median"] == pytest.approx(2.5)
    assert found["ratios"]["slow"]["median"] == pytest.approx(0.625) and found["slow_us"] == 8.0


@pytest.mark.parametrize(("chips", "shared"), [(["a", "b"], False), (["a", "a"], True)])
def test_ranks_that_share_a_gpu_are_not_timed(monkeypatch, chips, shared):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a")
    )
    comm = SimpleNamespace(device=torch.device("cuda", 0), collect=lambda _: chips,
                           grid=Grid(tp=2))  # fmt: skip
    assert walltime._shared(comm) is shared
    monkeypatch.setattr(walltime, "_shared", lambda comm: True)
    found = row(contracts="tree8.bf16", dx="separate")
    assert "ranks share a GPU" in found["not_measured"] and "median_us" not in found["lines"][0]


def test_where_it_can_be_captured_both_sides_are_timed_as_graphs_too(monkeypatch):
    asked = []

    def prepare(work, protocol):
        asked.append((protocol.graph, protocol.repeats))
        return work

    monkeypatch.setattr(aligned, "prepare", prepare)
    monkeypatch.setattr(walltime, "_not_captured", lambda comm: "")
    few = {"contracts": "tree8.bf16", "dx": "separate"}
    found = row(**few)
    modes = [(line["operator"], line["mode"]) for line in found["lines"]]
    assert modes == [(kind, mode) for kind in walltime.KINDS for mode in ("eager", "graph")]
    assert asked == [(False, 1)] * 2 + [(True, 8)] * 2 + [(False, 1)] * 2 + [(True, 8)] * 2
    assert found["protocol"]["graph"]["repeats"] == 8 and found["protocol"]["eager"]["repeats"] == 1
    assert {line["mode"] for line in row(**few, graph=False)["lines"]} == {"eager"}


def test_what_is_staged_is_not_captured():
    staged = object.__new__(StagedTransport)
    for transport, said in ((staged, "staged through the host"), (None, "")):
        comm = SimpleNamespace(device=torch.device("cuda", 0),
                               links={"tp": SimpleNamespace(transport=transport)})  # fmt: skip
        assert said in walltime._not_captured(comm) and bool(walltime._not_captured(comm)) == bool(
            said
        )


def test_the_floor_is_a_ranks_share():
    most = {"flops_per_us": 1e6, "bytes_per_us": 1e3}
    at = {"m": 1000, "hidden": 1000, "intermediate": 1000}
    comm = SimpleNamespace(grid=Grid(cp=2, tp=2))
    moved = 2 * (3e6 / 2 + 2 * 1e6 / 2)
    assert walltime._floor(at, comm, "forward", most) == pytest.approx(moved / 1e3)
    assert walltime._floor(at, comm, "step", most | {"bytes_per_us": 1e9}) == pytest.approx(
        18e9 / 4 / 1e6
    )
    assert walltime._floor(at, comm, "step", None) is None


# ---- opponents, memory ---------------------------------------------------------------------------


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Weights that say that they lie on a GPU, and a compiler that returns a layer of its own."""
    compiled = torch.nn.Identity()
    monkeypatch.setattr(opponents, "official_mlp", lambda *weights: torch.nn.Linear(1, 1))
    monkeypatch.setattr(torch, "compile", lambda layer, dynamic: compiled)
    return [SimpleNamespace(is_cuda=True)] * 3, compiled


def test_the_compiled_layer_stands_beside_the_plain_one(on_a_gpu):
    weights, compiled = on_a_gpu
    probed = []
    layers, said = opponents.opponents(weights, probed.append)
    assert list(layers) == ["official", "official compiled"] and probed == [compiled]
    assert all(p.requires_grad for p in layers["official"].parameters())
    assert said["official compiled"].startswith("torch ")


def test_a_compiler_that_fails_on_any_rank_is_no_opponent_on_all(on_a_gpu):
    weights, _ = on_a_gpu

    def probe(layer):
        raise RuntimeError("no compiler\nhere")

    layers, said = opponents.opponents(weights, probe)
    assert list(layers) == ["official"] and said["official compiled"] == "RuntimeError: no compiler"
    there = lambda mine: [mine, "OSError: none there"]  # noqa: E731
    layers, said = opponents.opponents(weights, lambda layer: None, there)
    assert list(layers) == ["official"] and said["official compiled"] == "OSError: none there"


def test_peak_counts_weights_and_what_a_call_adds(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert memory.peak(pytest.fail, 7, cpu) is None and memory.beside(cpu) is None
    played = {"synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 100,
              "max_memory_allocated": 130, "mem_get_info": (50, 200),
              "memory_reserved": 110}  # fmt: skip
    for name, value in played.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    calls = []
    assert memory.peak(lambda: calls.append(1), 7, gpu) == 37 and len(calls) == 2
    assert memory.beside(gpu) == 40
