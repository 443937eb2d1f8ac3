"""a2a-ffn under two agents of two ranks each: bits, gradients, times and traces, and what it may be
called. One launch, once for all tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlkernel import records
from rlkernel.experiments import a2a_ffn, a2a_nodes, ws2
from rlkernel.experiments.case import UsageError, parse_params
from rlkernel.run import nodes, plan

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("--nodes 2 --nproc 4 --batch-size 4 --tokens 16 --dim 32 --k 2 --no-compile --warmup 1 "
         "--num-tests 6 --overlap kernel --backward --check-correctness bitwise --trace "
         "--device cpu --timeout 100 --json").split()  # fmt: skip


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """(summary, record)."""
    root = tmp_path_factory.mktemp("two-agents")
    done = subprocess.run(
        [sys.executable, "-m", "rlkernel", "a2a-ffn", *WORDS, "--results", str(root)], cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = root.glob("a2a-ffn/*/run.json")
    return json.loads(done.stdout), records.read(path.parent)


def test_the_bits_are_those_of_none_forward_and_backward(launched):
    summary, record = launched
    assert summary["passed"]
    (line,) = record.rows[0]["result"]["lines"]
    assert line["whole batch"]["mismatches"] == 0 < line["whole batch"]["elements"]
    grads = line["whole batch backward"]
    assert len(grads) == 13 and not any(g["mismatches"] for g in grads.values())


def test_the_path_names_both_levels(launched):
    summary, record = launched
    paths = summary["cases"][0]["paths"]
    gloo = "process-group/gloo"
    assert paths["kernel/4"] == (
        "chunks: kernel, 4 token slices (4 backward) in two levels, nodes of 2+2 ranks: "
        f"inside by {gloo}, between by {gloo}; rows of the own node first in forward and backward"
    )
    sites = record.rows[0]["paths"]
    assert "all_to_all over ep in two levels" in "".join(sites[s] for s in ("dispatch", "combine"))


def test_places_are_measured_and_one_host_is_never_two(launched):
    summary, record = launched
    at = record.rows[0]["result"]["topology"]
    assert (at["hosts"], at["nodes"], at["gpus"]) == (1, 2, 0) and "one host" in at["kind"]
    assert [rank["node"] for rank in at["ranks"]] == [0, 0, 1, 1]
    assert record.run["topology"]["agents"] in (nodes.NAMESPACES, nodes.LOOPBACK)
    assert summary["cases"][0]["case"].startswith("P=4 B=4 T=16 D=32 k=2 on 2 agents of one host")
    assert f"{at['kind']}: 2 + 2 ranks" in record.run["covered"]
    assert record.run["not_covered"][0] == "partial milestone: two real nodes NOT COVERED"


def test_times_and_traces_of_every_rank(launched):
    _, record = launched
    row = record.rows[0]
    assert {sample["rank"] for sample in record.samples} == {0, 1, 2, 3}
    assert all((record.path / f"trace/rank{rank}.json.gz").is_file() for rank in range(4))
    for variant in ("none", "kernel/4"):
        told = row["result"]["seen"][variant]
        assert [rank["rank"] for rank in told] == [0, 1, 2, 3]
        assert all(len(rank["each"]) == rank["repeats"] == 9 for rank in told)
    header, body = a2a_ffn.table(a2a_ffn.Params(), record.rows)
    assert header[-1] == a2a_nodes.COLUMN and {len(line) for line in body} == {len(header)}
    reached = {line[2]: line[-1] for line in body}
    assert reached["none"] == "-" and reached["kernel/4"].startswith("time ")
    assert "trace " in reached["kernel/4"]


# ---- what it may be called -----------------------------------------------------------------------


def row(kind, hosts, of=(0, 0, 1, 1), passed=True):
    ranks = [{"rank": r, "host": node % hosts, "node": node, "gpu": r} for r, node in enumerate(of)]
    at = {"kind": kind, "hosts": hosts, "nodes": len(set(of)), "gpus": len(of), "ranks": ranks}
    return {"passed": passed, "result": {"topology": at, "lines": [], "checks": []}}


def test_only_two_hosts_are_real_nodes():
    real = row("real nodes", 2)
    emulated = row("emulated nodes on one host (NCCL_HOSTID)", 1, (0, 1))
    assert a2a_nodes.told(real) == "2 real nodes"
    assert a2a_nodes.told(emulated) == "2 emulated nodes"
    assert a2a_nodes.told(row("one agent on one host", 1, (0, 0))) == ""
    assert a2a_nodes.coverage([real]) == (["real nodes: 2 + 2 ranks"], [])
    covered, missing = a2a_nodes.coverage([emulated, row("real nodes", 2, passed=False)])
    assert covered == ["emulated nodes on one host (NCCL_HOSTID): 1 + 1 ranks"]
    assert missing == [a2a_nodes.MISSING]
    assert a2a_nodes.coverage([{"passed": True, "result": {}}]) == ([], [a2a_nodes.MISSING])


def test_a_figure_without_its_interval_is_not_shown():
    sound = {"comp_over_comm": 0.8, "mean": 0.843, "ci95": 0.021, "why": ""}
    wide = sound | {"why": "+0.84 ± 0.21, wider than 0.05"}
    said = a2a_nodes.reached({"time": sound, "trace": wide})
    assert said == "time +0.84 ± 0.02, trace NOT MEASURED: +0.84 ± 0.21, wider than 0.05"
    unfair = sound | {"why": "not fair"}
    assert a2a_nodes.reached({"time": unfair, "trace": unfair}) == (
        "time and trace NOT MEASURED: not fair"
    )


# ---- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, says",
    [
        ({"nodes": "3"}, "nodes=3: expected 1 or 2 here; real ones: NNODES"),
        ({"nodes": "2", "nproc": "1"}, "nproc=1 does not divide over nodes=2"),
    ],
)
def test_what_cannot_run_is_refused(given, says):
    with pytest.raises(UsageError, match=says):
        a2a_ffn.cases(parse_params(a2a_ffn.Params, given))


def test_nodes_of_a_run():
    asked = {"nodes": "2", "nproc": "2,4", "device": "cpu"}
    made = plan.make("a2a-ffn", asked, None, force=True)
    assert made.nodes == 2 and [batch.world for batch in made.batches] == [2, 4]
    assert len({case.key for case in [*made.cases, *a2a_ffn.cases(a2a_ffn.Params())]}) == 3
    assert plan.nodes_of(a2a_ffn, a2a_ffn.Params()) == 1
    assert plan.nodes_of(ws2, ws2.Params()) == 2
