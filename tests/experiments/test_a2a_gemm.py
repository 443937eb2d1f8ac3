"""a2a-gemm: what it refuses, real launches of the twin with and without a fault, and its times."""

from __future__ import annotations

import types

import pytest
import torch

from rlkernel.collectives.groups import alone
from rlkernel.experiments import a2a_gemm as it
from rlkernel.experiments.case import UsageError, parse_params
from rlkernel.overlap import gemm_variants, preset_layer
from rlkernel.run import plan, timing
from tests.experiments import launched

SMALL = {"device": "cpu", "batch_size": 5, "tokens": 8, "dim": 144, "k": 2, "lead": (0, 9),
         "chunks": (1, 2), "programs": (4, 3), "raster": (2,), "bn": (128,)}  # fmt: skip
SPEED = {"bmm": 1000.0, "bmm + bias": 1130.0, "chosen": 930.0}


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("T % P == 0", {"tokens": 63}),
        ("two ranks or more", {"ranks": 1}),
        ("k=0: expected at least 1", {"k": 0}),
        ("cannot be negative", {"samples": -1}),
        ("cannot be negative", {"lead": (1, -1)}),
        ("at least 1 each", {"programs": (132, 0)}),
        ("needs a GPU: a CPU has gemm1", {"device": "cpu", "what": ("layer",)}),
        ("breaks a GEMM", {"fault": "swapped-slices", "what": ("pass",)}),
        ("seed=-1", {"seed": -1}),
    ],
)
def test_refused_before_anything_is_launched(words, asked):
    with pytest.raises(UsageError, match=words):
        it.cases(it.Params(**asked))


@pytest.mark.parametrize("asked", [{"bn": "64"}, {"what": "gemm3"}, {"sweep": "stages"}])
def test_words_that_nothing_is_called(asked):
    with pytest.raises(UsageError, match="expected one of"):
        parse_params(it.Params, asked)


def test_parts_and_sizes_follow_the_device():
    gpu, cpu = it.cases(it.Params()), it.cases(it.Params(device="cpu"))
    assert [case.parameters["part"] for case in gpu] == list(it.WHAT)
    assert [case.parameters["part"] for case in cpu] == list(it.GEMMS)
    assert (gpu[0].dtype, gpu[0].parameters["batch"]) == ("bf16", 512)
    assert (cpu[0].dtype, cpu[0].parameters["batch"]) == ("fp32", 130)
    assert "lead" not in gpu[-1].parameters, "a pass has no order of tiles"
    fault = it.cases(it.Params(fault="swapped-slices"))
    assert {case.parameters["part"] for case in fault} == set(it.GEMMS)


def test_one_gpu_is_needed_and_said():
    environment = {"torch": "2.11.0+cu130", "gpus": []}
    device, why = plan.place(it.Params(), it.cases(it.Params()), environment)
    assert device == "cuda" and why.startswith("needs 1 GPU")


def test_what_the_kernel_cannot_take_is_refused_by_the_rank():
    for asked, words in (({"chunks": (16,)}, "16 chunks"), ({"dim": 140}, "multiples of 16")):
        case, *_ = it.cases(it.Params(**SMALL | asked))
        with pytest.raises(UsageError, match=words):
            it.run(case, alone())


def test_a_launch_of_the_twin_and_one_with_a_fault(tmp_path):
    sound = launched.measure("a2a-gemm", tmp_path, **SMALL)
    assert sound.status == "ok" and sound.run["verdict"]["passed"]
    for row in sound.rows:
        lines = row["result"]["lines"]
        names = [line["variant"] for line in lines]
        assert {"bmm", "chosen", "local", "programs 3"} <= set(names)
        assert all(line.get("differ", 0) == 0 and "median_us" not in line for line in lines)
    broken = launched.measure("a2a-gemm", tmp_path, **SMALL, fault="swapped-slices")
    assert not broken.run["verdict"]["passed"] and not any(row["passed"] for row in broken.rows)
    lacking = it.coverage(it.Params(**SMALL), sound.rows)[1]
    assert "needs 1 GPU" in lacking[0]


# -- times, played ---------------------------------------------------------------------------------


@pytest.fixture
def clocked(monkeypatch):
    """Every variant takes 950 µs, or what SPEED says; .timed: the names in the order of a round."""
    seen = types.SimpleNamespace(timed=[])

    def interleaved(variants, protocol):
        seen.timed = list(variants)
        assert protocol.samples == 3 and not protocol.graph
        return [{"variant": name, "round": number, "us": SPEED.get(name, 950.0) + number}
                for number in range(3) for name in variants]  # fmt: skip

    monkeypatch.setattr(it, "_may_time", lambda case, comm: case.parameters["samples"] > 0)
    monkeypatch.setattr(timing, "interleaved", interleaved)
    monkeypatch.setattr(timing, "ceilings", lambda: {"flops_per_us": 6e8, "bytes_per_us": 4e6})
    return seen


def ran(part: str, **more) -> tuple[it.Params, dict]:
    params = it.Params(**{**SMALL, "samples": 3, **more})
    (case,) = [c for c in it.cases(params) if c.parameters["part"] == part]
    return params, {"case": case.to_dict(), "result": it.run(case, alone())}


def test_every_variant_is_paired_with_the_library(clocked):
    params, row = ran("gemm2")
    lines = {line["variant"]: line for line in row["result"]["lines"]}
    assert clocked.timed == list(lines) and len(row["result"]["samples"]) == 3 * len(lines)
    assert lines["chosen"]["speed"]["median"] == pytest.approx(1001 / 931)
    assert lines["chosen"]["speed_bias"]["median"] == pytest.approx(1131 / 931)
    assert lines["raster 2"]["median_us"] == 951
    assert row["result"]["chosen"]["chunks"] == 1
    assert row["result"]["floor_us"] == pytest.approx(2 * 40 * 288 * 144 / 6e8)
    header, body = it.table(params, [row])
    assert len(body) == len(lines) and all(len(line) == len(header) for line in body)
    assert it.verdict(params, [row])["passed"]
    assert "speed" not in {k for line in ran("dh", samples=0)[1]["result"]["lines"] for k in line}


def test_a_variant_with_other_bits_fails_and_has_no_time(clocked, monkeypatch):
    differ = gemm_variants.Bench.differ
    monkeypatch.setattr(
        gemm_variants.Bench, "differ",
        lambda self, gemm, local: 7 if local else differ(self, gemm, local),
    )  # fmt: skip
    params, row = ran("dx")
    lines = {line["variant"]: line for line in row["result"]["lines"]}
    assert lines["local"]["differ"] == 7 and "median_us" not in lines["local"]
    assert "local" not in clocked.timed and lines["chosen"]["speed"]["median"] > 1
    (check, _) = it.verdict(params, [row])["checks"]
    assert not check["passed"] and check["value"] == "1 wrong, local: 7 elements"


class Played:
    """A layer and a pass whose bits are as told; work does nothing."""

    differs: dict = {}
    memory = types.SimpleNamespace(missed=lambda: 0)

    def __init__(self, *_): ...

    def training(self, way):
        return {"output": torch.ones(1)}

    def differ(self, *_):
        return self.differs

    def error(self):
        return 0.02 if self.differs else 0.004

    def variants(self, part=None):
        names = ("none", "fused, flags set") if part else preset_layer.MOVED
        return {name: lambda: None for name in names}

    def bytes_of(self, name):
        return preset_layer.MOVED[name] * 1000


@pytest.mark.parametrize("differs", [{}, {"w1": 3}])
def test_the_layer_and_the_pass(clocked, monkeypatch, differs):
    monkeypatch.setattr(preset_layer, "Layers", Played)
    monkeypatch.setattr(preset_layer, "Pass", Played)
    monkeypatch.setattr(Played, "differs", differs)
    params = it.Params(**{**SMALL, "device": "cuda", "samples": 3})
    cases = {case.parameters["part"]: case for case in it.cases(params)}
    layout = types.SimpleNamespace(rows=10, local=4, dim=144, hidden=288)
    rows = [{"case": cases[part].to_dict(), "result": call(cases[part], alone(), layout)}
            for part, call in (("layer", it._layer), ("pass", it._pass))]  # fmt: skip
    whole, between = (row["result"] for row in rows)
    assert whole["passed"] == between["passed"] == (not differs)
    assert [check[1] for check in between["checks"]] == [not differs] * 2
    floors = [line["floor_us"] for line in whole["lines"]]
    assert [line["pass"] for line in whole["lines"]] == ["forward"] * 2 + ["training"] * 2
    assert floors[2] == pytest.approx(3 * floors[0]) and floors[0] == 6 * 40 * 144 * 288 / 6e8
    shares = {line["variant"]: line["of_copy"]["median"] for line in between["lines"]}
    assert shares == {"copy": 1.0, "forward": 0.75, "backward": 1.25} and between["bar"] == 0.75
    header, body = it.table(params, rows)
    assert len(body) == 7 and body[0][1] == "forward: none"
    assert {s["variant"] for s in whole["samples"]} >= {"forward: none", "training: none"}
