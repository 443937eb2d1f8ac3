"""Ranks that share a GPU: bits are checked, times and traces are withheld, and the row says why."""

from __future__ import annotations

import pytest

from rlkernel.collectives.groups import alone
from rlkernel.experiments import a2a_coverage, a2a_ffn
from rlkernel.overlap import measure, nodes

SMALL = {"device": "cpu", "nproc": (1,), "batch_size": 2, "tokens": 4, "dim": 16, "k": 1,
         "compile": False, "overlap": ("with-sm",), "warmup": 0}  # fmt: skip


def topology(*gpus):
    ranks = [{"rank": rank, "gpu": gpu} for rank, gpu in enumerate(gpus)]
    return {"kind": "one agent on one host", "hosts": 1, "nodes": 1, "gpus": len(set(gpus)),
            "ranks": ranks}  # fmt: skip


def test_only_a_shared_gpu_withholds():
    assert nodes.withheld(topology(0, 1)) == nodes.withheld(topology(None, None)) == ""
    assert nodes.withheld(topology(0, 0)).startswith("2 ranks share a GPU")
    assert nodes.withheld(topology(0, 1, 0, 1)).startswith("4 ranks share 2 GPUs")


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("tests", [2, 0])
@pytest.mark.parametrize("shared", [True, False])
def test_bits_are_checked_all_the_same(monkeypatch, shared, tests, trace):
    if shared:
        monkeypatch.setattr(nodes, "described", lambda comm: topology(0, 0))
    params = a2a_ffn.Params(**SMALL, num_tests=tests, trace=trace)
    (case,) = a2a_ffn.cases(params)
    result = measure.row(case, alone())
    assert result["passed"] and result["checks"] and result["lines"]
    wanted = shared and (tests > 0 or trace)
    assert ("withheld" in result) == wanted
    assert ("times" in result) == (tests > 0 and not shared)
    assert ("seen" in result) == (trace and not shared)
    row = {"key": "k", "case": case.to_dict(), "passed": True, "result": result}
    _, body = a2a_ffn.table(params, [row])
    if wanted:
        assert len(body) == 1 and set(body[0][4:]) == {"-"}
        said = "\n".join(a2a_coverage.coverage([row])[1])
        assert "NOT MEASURED, 2 ranks share a GPU" in said
