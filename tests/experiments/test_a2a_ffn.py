"""a2a-ffn: what is legal, what its command line ends with, its matrix, and the scripts around it.

The launches run beside each other, once for all tests.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rlkernel.__main__ as command_line
from rlkernel import records
from rlkernel.experiments import a2a_ffn, matrix, preflight, public
from rlkernel.experiments.case import UsageError, bare_flags, parse_params
from rlkernel.records import source
from rlkernel.run import launch, traces

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--batch-size 4 --tokens 16 --dim 128 --k 2 --no-compile --warmup 1 --num-tests 3".split()
RUNS = {
    "kernel": ["--nproc", "2", "--overlap", "none,with-sm,kernel", "--backward", "--chunks", "1,4",
               "--check-correctness", "bitwise", "--trace"],
    "alone": ["--nproc", "2", "--overlap", "kernel", "--comp-only"],
    "fault": ["--nproc", "2", "--overlap", "kernel", "--fault", "early-chunk"],
}  # fmt: skip


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """name -> (exit code, summary, record)."""
    started = {}
    for name, words in RUNS.items():
        root = tmp_path_factory.mktemp(name)
        command = [sys.executable, "-m", "rlkernel", "a2a-ffn", "--device", "cpu", *SMALL, *words]
        started[name] = root, subprocess.Popen(
            [*command, "--json", "--results", str(root), "--timeout", "250"],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    found = {}
    for name, (root, process) in started.items():
        out, errors = process.communicate(timeout=280)
        assert out, errors
        (path,) = root.glob("a2a-ffn/*/run.json")
        found[name] = process.returncode, json.loads(out), records.read(path.parent)
    return found


def test_every_schedule_is_equal_and_says_how_it_went(launched):
    code, summary, record = launched["kernel"]
    assert code == 0 and summary["passed"], summary
    assert summary["cases"][0]["paths"] == {
        "with-sm/1": "one-gemm: with-sm, 1 token slices (1 backward) by process-group/gloo",
        "with-sm/4": "chunks: with-sm, 4 token slices (4 backward) by process-group/gloo",
        "kernel/1": "one-gemm: kernel, 1 token slices (1 backward) by process-group/gloo",
        "kernel/4": "chunks: kernel, 4 token slices (4 backward) by process-group/gloo",
    }
    for line in record.rows[0]["result"]["lines"]:
        assert line["forward"]["mismatches"] == 0 and line["forward"]["elements"] == 2 * 16 * 128
        assert line["whole batch"]["elements"] == 4 * 16 * 128
        grads = line["whole batch backward"]
        assert len(grads) == 13 and not any(g["mismatches"] for g in grads.values())
    assert record.rows[0]["paths"]["wire"] == "all_to_all over ep by process-group/gloo"


def test_times_of_every_rank_and_round_and_the_slowest(launched):
    _, _, record = launched["kernel"]
    times = record.rows[0]["result"]["times"]["documented"]
    assert set(times["terms"]) == {"none", "comp", "comm", "wire"}
    variants = {*times["terms"], *times["schedules"], *(f"{v} preset" for v in times["schedules"])}
    kept = [s for s in record.samples if not s["dropped"]]
    assert len(record.samples) == 2 * 3 * len(variants) and len(kept) == 2 * 2 * len(variants)
    assert {(s["rank"], s["variant"]) for s in kept} == {(r, v) for r in (0, 1) for v in variants}
    for name, line in [*times["schedules"].items(), *times["terms"].items()]:
        rounds = [max(s["us"] for s in kept if (s["variant"], s["round"]) == (name, n))
                  for n in (1, 2)]  # fmt: skip
        assert line["slowest"]["mean_us"] == pytest.approx(sum(rounds) / 2)
        assert line["seconds"]["min"] == pytest.approx(line["ranks"][0]["min_us"] / 1e6)
    line = times["schedules"]["kernel/4"]
    assert line["ceiling"] > 1 and {"median", "mean", "ci95", "ranks"} < set(line["hidden"])
    assert line["flops"] == 3 * 6 * 2 * 4 * 8 * 128 * 256
    assert record.run["protocol"]["first dropped"] and not record.run["protocol"]["graph"]


def test_a_trace_of_every_rank_and_what_it_shows(launched):
    _, _, record = launched["kernel"]
    row = record.rows[0]
    assert row["traces"] == ["trace/rank0.json.gz", "trace/rank1.json.gz"]
    variants = {"none", "with-sm/1", "with-sm/4", "kernel/1", "kernel/4"}
    assert set(row["result"]["seen"]) == variants
    for rank, name in enumerate(row["traces"]):
        book = json.loads(gzip.decompress((record.path / name).read_bytes()))
        marks = [e["name"] for e in book["traceEvents"] if e.get("cat") == "user_annotation"]
        for variant in variants:
            assert marks.count(variant) == 3
            told = row["result"]["seen"][variant][rank]
            assert told["rank"] == rank and told["repeats"] == 3 and 0 <= told["hidden"] <= 1


def test_a_known_row_takes_its_traces_along(launched, tmp_path):
    _, _, record = launched["kernel"]
    row, key = record.rows[0], record.rows[0]["key"]
    found = traces.copied(row, record.path, tmp_path)
    assert found == {"traces": [f"trace/{key}/rank{rank}.json.gz" for rank in (0, 1)]}
    for old, new in zip(row["traces"], found["traces"]):
        assert (tmp_path / new).read_bytes() == (record.path / old).read_bytes()
    assert traces.copied(row, tmp_path / "published without", tmp_path) == {"traces": []}
    assert traces.copied({"key": key}, record.path, tmp_path) == {}


def test_the_plugin_counts_as_code_that_measured():
    found = source.closure(a2a_ffn.__name__)
    assert {"rlkernel.plugin", "rlkernel.overlap.fused", "rlkernel.kernels.norm_gate"} <= set(found)


def test_a_planted_ordering_fault_is_exit_1(launched):
    code, summary, record = launched["fault"]
    assert code == 1 and not summary["passed"] and record.status == "ok"
    checks = {c["name"].rpartition(": ")[2]: c for c in record.run["verdict"]["checks"]}
    assert not checks["forward"]["passed"] and "differs from none" in checks["forward"]["value"]


# ---- the matrix and the parameters ---------------------------------------------------------------


def test_without_communication_the_record_says_which_way_and_claims_no_more(launched):
    code, _, record = launched["alone"]
    (row,) = record.rows
    assert code == 0 and row["result"]["comp_paths"]["kernel/4"].startswith("one-gemm: kernel, ")
    assert set(row["result"]["times"]["documented"]["terms"]) == {"comp", "kernel/4 comp"}
    assert any("without communication: one-gemm" in line for line in record.run["covered"])
    assert any("no schedule was checked" in line for line in record.run["not_covered"])


def test_the_matrix_has_32_configurations_of_the_right_shapes():
    assert len(set(matrix.FULL)) == len(matrix.FULL) == 32
    shapes = {}
    for c in matrix.FULL:
        shapes.setdefault((c.tokens, c.dim, c.block), set()).add(c.ranks)
        assert c.tokens % c.ranks == 0 and (c.dim % c.tokens == 0 or not c.block)
    assert shapes[16, 144, True] == shapes[64, 1280, True] == {2, 4, 8}
    assert shapes[20, 140, True] == {2, 4} and shapes[22, 132, True] == {2}
    assert (16, 132, False) in shapes and len(shapes) == 5
    batches = {c.batch for c in matrix.FULL}
    assert {1, 512} <= batches and max(batches) == 512 and {3, 7, 33, 129} <= batches
    assert {c.k for c in matrix.FULL} == {2, 3, 6}
    assert set(matrix.SMALL) < set(matrix.FULL)


def test_the_matrix_counts_how_its_kernels_ran():
    line = {"schedule": "kernel", "rung": "chunks"}
    (case, *_) = a2a_ffn.cases(a2a_ffn.Params(matrix="small", overlap=("kernel",)))
    row = {"case": case.to_dict(), "result": {"checks": [], "lines": [line]}}
    params = a2a_ffn.Params(matrix="small", overlap=("kernel",))
    (last,) = a2a_ffn.verdict(params, [row])["checks"]
    assert last["passed"] and last["value"] == "0 fused, 1 chunks, 0 one-gemm"
    line["rung"] = "none"
    assert not a2a_ffn.verdict(params, [row])["passed"]


def test_defaults_are_the_documented_ones():
    (case,) = a2a_ffn.cases(a2a_ffn.Params())
    at = case.parameters
    assert (at["batch"], at["tokens"], at["dim"], at["k"]) == (512, 64, 1280, 6)
    assert (at["warmup"], at["tests"], at["prewarm_ms"]) == (50, 50, 10.0)
    assert at["flush"] and at["compile"] and case.seed == 42 and case.dtype == "bf16"
    assert at["overlap"] == "none" and at["gemm_backend"] == "bmm" and at["block"]


def test_bare_flags_are_read_as_the_documented_commands_have_them():
    words = "--no-compile --overlap kernel --backward --comp-only=false --tokens 16".split()
    read = bare_flags(a2a_ffn.Params, words)
    assert read == ["--compile", "false", "--overlap", "kernel", "--backward", "true",
                    "--comp-only=false", "--tokens", "16"]  # fmt: skip
    assert bare_flags(a2a_ffn.Params, ["--backward", "false"]) == ["--backward", "false"]


BAD = {
    "T % P": ({"tokens": "18", "nproc": "4"}, "tokens=18 does not divide over 4 ranks"),
    "D % T": ({"dim": "130"}, "D % T must be 0 for the block"),
    "B = 0": ({"batch_size": "0"}, "batch_size=0: expected at least 1"),
    "D = 0": ({"dim": "0", "block": "false"}, "dim=0: expected at least 1"),
    "an endless pause": ({"prewarm_ms": "inf"}, "prewarm_ms=inf: expected from 0 to 60000 ms"),
    "a pause that is no number": ({"prewarm_ms": "nan"}, "prewarm_ms=nan: expected from 0"),
    "three ranks": ({"nproc": "3", "tokens": "18", "dim": "36"}, "nproc=3 is not possible"),
    "fp8": ({"gemm_backend": "fp8"}, "gemm_backend=fp8 is not available here"),
    "fused": ({"fwd_mode": "fused"}, "fwd_mode=fused is not available here"),
    "a float64": ({"dtype": "fp64"}, "dtype='fp64'"),
    "an unknown schedule": ({"overlap": "kernal"}, "did you mean kernel"),
    "the copy engine of a CPU": ({"overlap": "sm-free", "device": "cpu"}, "sm-free copies between"),
    "the copy engine of gloo": ({"overlap": "sm-free", "transport": "gloo"}, "sm-free copies"),
    "a fault of nothing": ({"fault": "early-chunk"}, "breaks an overlapped schedule"),
    "a fault on one rank": (
        {"fault": "early-chunk", "overlap": "kernel", "nproc": "1"}, "cannot show on one rank"),
    "a fault unseen": (
        {"fault": "early-chunk", "overlap": "kernel", "check_correctness": "off"}, "pass unseen"),
    "no other settings": (
        {"other_none": "eager", "elementwise": "torch"}, "other_none times none with torch's"),
    "no chunk": ({"chunks": "0"}, "chunks must be from 1 to 64"),
    "ranks that no configuration has": ({"matrix": "full", "nproc": "16"}, "not of the matrix"),
}  # fmt: skip


@pytest.mark.parametrize("given, says", BAD.values(), ids=BAD)
def test_bad_usage_is_refused_before_a_launch(given, says, results, monkeypatch, capsys):
    monkeypatch.setattr(launch.watch, "run_agent", None)
    words = [w for name, value in given.items() for w in (f"--{name.replace('_', '-')}", value)]
    assert command_line.main(["a2a-ffn", *words]) == 2
    assert says in capsys.readouterr().err and list(results.iterdir()) == []


def test_the_demo_is_sequential_and_fused_forward_and_with_gradients():
    found = a2a_ffn.cases(a2a_ffn.Params(demo=True, tokens=16, dim=128, batch_size=4))
    asked = [(c.parameters["overlap"], c.parameters["backward"]) for c in found]
    assert asked == [("none+with-sm+kernel", False), ("none+with-sm+kernel", True)]


@pytest.mark.parametrize(
    "given, shape",
    [
        ({"device": "cpu"}, (4, 16, 128, 2, False, 20)),
        ({"device": "cpu", "batch_size": 8, "num_tests": 3}, (8, 16, 128, 2, False, 3)),
        ({"device": "cuda"}, (512, 64, 1280, 6, True, 50)),
    ],
    ids=["cpu", "named", "cuda"],
)
def test_the_demo_is_small_on_a_cpu_where_nothing_else_is_said(given, shape):
    params = a2a_ffn.Params(demo=True, **given)
    for case in a2a_ffn.cases(params):
        at = case.parameters
        names = ("batch", "tokens", "dim", "k", "compile", "tests")
        assert tuple(at[name] for name in names) == shape
    told = a2a_ffn.protocol(params)
    assert (told["compile"], told["tests"]) == shape[-2:]


def test_the_table_has_a_column_for_each_word(launched):
    _, _, record = launched["kernel"]
    for rows in (record.rows, launched["fault"][2].rows):
        header, body = a2a_ffn.table(a2a_ffn.Params(), rows)
        assert body and {len(line) for line in body} == {len(header)}


def test_a_layer_alone_needs_no_heads():
    params = parse_params(a2a_ffn.Params, {"dim": "130", "block": "false"})
    assert not a2a_ffn.cases(params)[0].parameters["block"]


# ---- the preflight's public checks ---------------------------------------------------------------


def test_the_public_check_is_three_cases_on_two_gpus():
    cases = preflight.cases(preflight.Params(target="cuda", what="public"))
    assert [case.parameters["what"] for case in cases] == list(public.GPU)
    for case in cases:
        at = case.parameters
        assert (at["batch"], at["tokens"], at["dim"], at["k"]) == (4, 16, 128, 2)
        assert (case.seed, case.grid.size, at["warmup"], at["tests"]) == (7101, 2, 2, 3)
        assert at["gemm_backend"] == "bmm" and not at["compile"]
    asked = [(c.parameters["overlap"], c.parameters["backward"]) for c in cases]
    assert asked == [("none", False), ("kernel", False), ("kernel", True)]
    assert [c.parameters["check_correctness"] for c in cases[1:]] == ["bitwise", "approx"]


def test_a_target_that_is_not_named_has_no_public_check():
    with pytest.raises(UsageError, match="what=public needs target"):
        preflight.cases(preflight.Params(what="public"))
    everything = preflight.cases(preflight.Params(target="cpu"))
    assert len(everything) == len(preflight.cases(preflight.Params())) + 2


def test_the_block_is_checked_at_ep_1():
    from rlkernel.collectives.groups import alone

    cases = preflight.cases(preflight.Params(target="cpu", what="public"))
    assert [case.dtype for case in cases] == ["fp32", "bf16"]
    for case in cases:
        row = {"case": case.to_dict(), "result": preflight.run(case, alone())}
        assert row["result"]["passed"] and len(row["result"]["checks"]) == 14
        assert preflight.verdict(preflight.Params(), [row])["passed"]
        row["result"]["checks"][3][1] = False
        assert not preflight.verdict(preflight.Params(), [row])["passed"]
        assert preflight.table(preflight.Params(), [row])[1] == []
