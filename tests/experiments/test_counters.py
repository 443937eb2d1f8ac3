"""counters: what it refuses, what this machine lacks, and which windows fail a check. The windows
are played; on a GPU the planted fault is half of a copy.
"""

from __future__ import annotations

import pytest

from rlkernel import records
from rlkernel.collectives.groups import alone
from rlkernel.experiments import counters as it
from rlkernel.experiments.case import UsageError, parse_params
from rlkernel.overlap import chip_load
from rlkernel.run import plan

SMS = 132  # of an H200
LINE = {"us": 500.0, "dram_read": 1000.0, "dram_written": 1000.0, "l2": 3000.0, "sm_cycles": 0.9,
        "tensor_cycles": 0.8, "mhz": 1500.0, "gap_ns": 20_000}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("T % P == 0", {"tokens": 63}),
        ("two ranks or more", {"ranks": 1}),
        ("k=0: expected at least 1", {"k": 0}),
        ("sms=0: expected at least 1", {"sms": 0}),
        ("interval_us=0: expected", {"interval_us": 0}),
        ("seed=-1", {"seed": -1}),
    ],
)
def test_refused_before_anything_is_launched(words, asked):
    with pytest.raises(UsageError, match=words):
        it.cases(it.Params(**asked))


@pytest.mark.parametrize("asked", [{"device": "cpu"}, {"what": "gemm1"}, {"fault": "no-copy"}])
def test_words_that_nothing_is_called(asked):
    with pytest.raises(UsageError, match="expected one of"):
        parse_params(it.Params, asked)


def test_calibration_always_comes_along_and_a_fault_breaks_that_alone():
    parts = lambda **asked: [c.parameters["part"] for c in it.cases(it.Params(**asked))]  # noqa: E731
    assert parts() == list(it.WHAT)
    assert parts(what=("sharing",)) == ["calibration", "sharing"]
    assert parts(fault="half-copy") == ["calibration"]


def test_a_machine_without_a_gpu_or_the_library_says_so(monkeypatch):
    params = it.Params()
    device, why = plan.place(params, it.cases(params), {"torch": "2.11.0+cu130", "gpus": []})
    assert device == "cuda" and why.startswith("needs 1 GPU")
    monkeypatch.setattr(plan, "place", lambda *_: ("cuda", None))
    monkeypatch.setattr(it, "lacks", lambda: "needs cupti-python")
    assert plan.make("counters", params, None, True).skip == "needs cupti-python"
    monkeypatch.setattr(it, "lacks", lambda: None)
    assert plan.make("counters", params, None, True).skip is None
    monkeypatch.setattr(plan, "place", lambda *_: ("cuda", "needs 1 GPU"))
    assert plan.make("counters", params, None, True).skip == "needs 1 GPU"


def test_on_gpus_each_world_size_has_a_launch_of_its_own(monkeypatch):
    """What has met in a smaller group waits under other numbers than who has not."""
    asked = {"device": "cuda", "nproc": (2, 4), "overlap": ("kernel",)}
    monkeypatch.setattr(plan, "place", lambda params, *_: (params.device, None))
    worlds = [b.world for b in plan.make("a2a-ffn", asked, None, True).batches]
    assert worlds == [2, 4]
    on_cpu = plan.make("a2a-ffn", {**asked, "device": "cpu"}, None, True)
    assert [b.world for b in on_cpu.batches] == [4]


def ran(part: str, result: dict, params: it.Params | None = None) -> dict:
    cases = {case.parameters["part"]: case for case in it.cases(params or it.Params())}
    return {"case": cases[part].to_dict(), "result": result}


def played(monkeypatch, part: str, **more) -> dict:
    """A part's result on played windows."""
    (case,) = [c for c in it.cases(it.Params(rounds=3)) if c.parameters["part"] == part]
    for name, value in more.items():
        monkeypatch.setattr(chip_load, name, value)
    parts = {"calibration": it._calibration, "sharing": it._sharing, "timeline": it._timeline,
             "kernels": it._kernels}  # fmt: skip
    return parts[part](case, alone(), None, None)


COPY = chip_load.Kernel(lambda: None, 1000, 1000)
STILL = {"dram_read": 0.0, "dram_written": 0.0, "l2": 0.0}


@pytest.mark.parametrize(
    ("line", "idle", "failed"),
    [
        ({}, {}, []),
        ({"dram_read": 1015.0}, {}, []),
        ({"dram_read": 1030.0}, {}, ["a copy's bytes, dram_read"]),
        ({"dram_written": 500.0}, {}, ["a copy's bytes, dram_written"]),
        ({"gap_ns": 60_000}, {}, ["copy: every interval is there"]),
        ({"gap_ns": 0}, {}, ["copy: every interval is there"]),
        ({}, {"dram_written": 31.0}, ["an idle chip moves nothing"]),
    ],
)
def test_calibration(monkeypatch, line, idle, failed):
    result = played(
        monkeypatch, "calibration", copied=lambda device, half: COPY,
        window=lambda *_: LINE | line, idle=lambda *_: STILL | idle, cost=lambda *_: 1.01,
        products=lambda *_: {"gemm1": None},
    )  # fmt: skip
    assert [name for name, held, *_ in result["checks"] if not held] == failed
    assert result["passed"] == (not failed) and result["sampling_costs"] == 1.01


def test_the_fault_is_half_of_the_copy(monkeypatch):
    asked = []
    monkeypatch.setattr(chip_load, "copied", lambda device, half: asked.append(half) or COPY)
    monkeypatch.setattr(chip_load, "window", lambda *_: LINE)
    monkeypatch.setattr(chip_load, "idle", lambda *_: STILL)
    monkeypatch.setattr(chip_load, "cost", lambda *_: 1.01)
    monkeypatch.setattr(chip_load, "products", lambda *_: {"gemm1": None})
    for fault in it.FAULTS:
        it._calibration(it.cases(it.Params(fault=fault))[0], alone(), None, None)
    assert asked == [False, True]


@pytest.mark.parametrize(("early", "gap_us"), [(False, 20), (True, 20), (False, 60)])
def test_sharing_pairs_each_round_with_the_product_alone(monkeypatch, early, gap_us):
    held = chip_load.Bystander(None, 10.0, 0, 32)
    seen = []

    def window(counters, work, calls, beside=None, alone_us=0.0):
        seen.append((work, beside is held, alone_us))
        first = len(seen) == 5
        more = {"lasted": not (early and work == "two"), "gb_per_s": 0.0}
        base = LINE | {"us": 500.0 + len(seen), "gap_ns": 1000 * (gap_us if first else 20)}
        return base | ({"us": 2 * base["us"], "mhz": 1800.0, **more} if beside else {})

    result = played(
        monkeypatch, "sharing", window=window,
        products=lambda *_: {"gemm1": "one", "gemm2": "two"},
        bystanders=lambda *_: {"SMs held": held},
    )  # fmt: skip
    lines = {(line["gemm"], line["beside"]): line for line in result["lines"]}
    assert len(seen) == 2 + 3 * 4 and len(result["samples"]) == 3 * 4
    assert {(work, us) for work, beside, us in seen if beside} == {("one", 501), ("two", 502)}
    base, other = lines["gemm1", "alone"], lines["gemm1", "SMs held"]
    assert base["ratio"]["median"] == base["cycles_ratio"] == 1.0 and base["sms"] == 0
    assert other["ratio"]["median"] == pytest.approx(2.0, rel=0.02) and other["sms"] == 32
    assert other["cycles_ratio"] == pytest.approx(2.4, rel=0.02)  # the clock rose by a fifth
    assert "gb_per_s" not in base and result["passed"] == (not early and gap_us < 40)
    if early:
        assert result["checks"][1][2] == "3 ended early"
    header, body = it.table(it.Params(), [ran("sharing", result)])
    assert len(body) == 4 and all(len(line) == len(header) for line in body)


@pytest.mark.parametrize("busy", [0.9, 0.3])
def test_a_timeline_must_show_the_tensor_cores(monkeypatch, busy):
    result = played(
        monkeypatch, "timeline", forwards=lambda *_: {"none": "work"},
        timeline=lambda *_: {"us": [1.0, 2.0], "tensor_cycles": [0.1, busy]},
    )  # fmt: skip
    assert result["passed"] == (busy > 0.5)


def test_each_kernel_stands_beside_the_bytes_that_it_needs(monkeypatch):
    kernels = {"gemm1, library": COPY, "norm_gate forward": chip_load.Kernel(None, 500, 2000)}
    result = played(monkeypatch, "kernels", kernels=lambda *_: kernels.items(),
                    window=lambda *_: LINE)  # fmt: skip
    header, body = it.table(it.Params(), [ran("kernels", result)])
    read, written = header.index("read MB") + 1, header.index("written MB") + 1
    assert [line[read] for line in body] == ["1.000", "2.000"]
    assert [line[written] for line in body] == ["1.000", "0.500"]


def test_what_is_told_follows_the_parts_that_ran():
    result = {"passed": True, "checks": [["a", True, "1", "1"]], "lines": []}
    params = it.Params(what=("sharing",))
    rows = [ran(part, result, params) for part in ("calibration", "sharing")]
    covered, lacking = it.coverage(params, rows)
    assert covered == [it.COVERED["calibration"], it.COVERED["sharing"]]
    assert any("over time" in line and "not among the parts" in line for line in lacking)
    assert it.NOT_COVERED[0] in lacking and "two GPUs" in it.NOT_COVERED[0]
    assert it.verdict(params, rows)["passed"]
    rows[0]["result"] = {**result, "checks": [["a", False, "2", "1"]]}
    assert not it.verdict(params, rows)["passed"] and not it.verdict(params, [])["passed"]
    assert it.summary(params, rows)["parts"]["sharing"]["passed"]


def test_what_is_published_agrees_with_what_is_known_without_counters(published):
    """Tensor cores do 4096 FLOPs a cycle and SM; what the library writes, it writes once."""
    found = records.find("counters", published.parent, published=True)
    (record,) = (r for r in found if r.passed)
    rows = {row["case"]["parameters"]["part"]: row for row in record.rows}
    at = rows["kernels"]["case"]["parameters"]
    lines = {line["kernel"]: line for line in rows["kernels"]["result"]["lines"]}
    flops = 2 * at["batch"] * at["tokens"] * at["dim"] ** 2 * at["k"]  # of gemm2 and dh
    for name, times in {"gemm1": 2, "gemm2": 1, "dh": 1, "dx": 2}.items():
        for way in ("library", "fused"):
            line = lines[f"{name}, {way}"]
            did = line["tensor_cycles"] * line["us"] * line["mhz"] * SMS * 4096
            assert did == pytest.approx(times * flops, rel=0.01)
        line = lines[f"{name}, library"]
        assert line["dram_written"] == pytest.approx(line["written"], rel=0.01)
        assert line["dram_read"] > line["read"]
