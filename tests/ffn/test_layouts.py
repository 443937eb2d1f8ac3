"""det-ffn's layer from outside: what is asked for, what is refused, what the command line says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlkernel.collectives.groups import alone
from rlkernel.experiments import det_ffn, layouts
from rlkernel.experiments.case import UsageError, parse_params
from rlkernel.ffn import exactness
from rlkernel.grid import Grid
from rlkernel.run import plan


def asked(**given):
    return det_ffn.cases(parse_params(det_ffn.Params, given))


def test_a_layout_asks_for_the_layer_alone():
    (case,) = asked(layout="tp2_cp2_sp")
    assert case.grid == Grid(cp=2, tp=2) and case.parameters["sequence_parallel"] is True
    assert case.parameters["what"] == "layer" and case.parameters["m"] == 32
    default = "tree8.bf16/tokens:tree2.bf16"
    assert case.parameters["contracts"] == f"{default}+tree8.bf16+tree8.fp32+tree2.bf16"
    assert [c.parameters["layout"] for c in asked(what="layer")] == list(layouts.LAYOUTS)
    (four,) = asked(layout="tp4", size="qwen3")
    held = f"{default}+tree8.bf16+tree8.fp32"
    assert four.parameters["contracts"] == held, "tree2 holds two ranks"
    assert four.parameters["hidden"] == 4096 and four.parameters["m"] == 32
    graphs = asked(what="graph", m="1,512") + asked(what="graph", layout="tp2_sp")
    assert [(c.grid.tp, c.parameters["m"]) for c in graphs] == [(1, 1), (1, 512), (2, 32)]
    timed = asked(what="time", size="qwen3", repeats="7") + asked(what="time", layout="tp4", m="8")
    assert [(c.parameters["layout"], c.parameters["m"]) for c in timed] == [
        ("tp2", 32), ("tp2", 4096), ("tp2_sp", 32), ("tp2_sp", 4096), ("tp4", 8)
    ]  # fmt: skip
    assert "repeats" not in timed[0].parameters and timed[0].parameters["samples"] == 40
    (twice,) = asked(what="hash", dx="packed")
    assert twice.grid == Grid() and twice.parameters["dx"] == "packed"
    mixed = [case.parameters["what"] for case in asked(what="layer,census", m="32")]
    assert mixed == ["census"] + ["layer"] * 8, "the layer last: see cases()"


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("layout is of what=layer, what=graph and what=time", {"what": "gemm", "layout": "tp2"}),
        ("extra-rounding cannot show in time", {"what": "time", "fault": "extra-rounding"}),
        ("extra-rounding cannot show in hash", {"what": "hash", "fault": "extra-rounding"}),
        ("m=3 is not possible on tp2_sp", {"what": "time", "m": "3"}),
        ("device=cpu has none", {"what": "graph", "device": "cpu"}),
        ("cannot be captured", {"what": "graph", "transport": "gloo"}),
        ("leaves16 cannot show in graph", {"what": "graph", "fault": "leaves16"}),
        ("extra-rounding cannot show in graph", {"what": "graph", "fault": "extra-rounding"}),
        ("contract tree2.bf16 .* tp4: 4 ranks need 4 leaves",
         {"layout": "tp4", "contract": "tree2.bf16"}),
        ("contract tree8.bf16/tokens:tree2.bf16 names the tokens",
         {"contract": "tree8.bf16/tokens:tree2.bf16"}),
        ("contract chain is not possible on tp2", {"layout": "tp2", "contract": "chain"}),
        ("m=12 is not possible on tp4_cp2_sp: tokens divide over 8",
         {"layout": "tp4_cp2_sp", "m": "12"}),
        ("m=3 is not possible on tp2_cp2: .* 2 ranks", {"layout": "tp2_cp2", "m": "3"}),
        ("repeats must be at least 2", {"layout": "tp2", "repeats": "1"}),
        ("device=cpu has gloo only", {"layout": "tp2", "device": "cpu", "transport": "nccl"}),
        ("symmetric moves GPU", {"layout": "tp2", "device": "cpu", "transport": "symmetric"}),
        ("layout='tp3' is not possible", {"layout": "tp3"}),
        ("extra-rounding cannot show in layer", {"layout": "tp2", "fault": "extra-rounding"}),
        ("left-fold cannot show in census", {"fault": "left-fold"}),
        ("left-fold cannot show on tp2 .*four ranks", {"layout": "tp2", "fault": "left-fold"}),
        ("exchanged cannot show on tp2_cp2", {"layout": "tp2_cp2", "fault": "exchanged"}),
        ("cannot show on tp2_sp", {"layout": "tp2_sp", "fault": "arrival-order"}),
        ("left-fold cannot show on tp2 ", {"what": "layer", "fault": "left-fold"}),
        ("cannot show on tp4 .*tree8.fp32: .*rounded to bf16",
         {"layout": "tp4", "fault": "left-fold", "contract": "tree8.fp32"}),
        ("four leaves within a rank",
         {"layout": "tp2", "fault": "local-left-fold", "contract": "tree2.bf16"}),
        ("local-left-fold cannot show on tp8 with m=2",
         {"layout": "tp8", "m": "2", "fault": "local-left-fold"}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_a_launch(words, given):
    with pytest.raises(UsageError, match=words):
        asked(**given)


def test_a_control_runs_under_the_contracts_that_show_it():
    for fault, layout, contracts in (
        ("left-fold", "tp4", "tree8.bf16"),
        ("leaves16", "tp2", "tree8.bf16+tree2.bf16"),
        ("local-left-fold", "tp8", "tree8.bf16"),
    ):
        (case,) = asked(layout=layout, fault=fault)
        assert case.parameters["contracts"] == contracts, fault
    shown = {f: [n for n in layouts.LAYOUTS if layouts.shows(f, n, 32, "tree8.bf16")]
             for f in layouts.FAULTS}  # fmt: skip
    assert shown["left-fold"] == ["tp4", "tp8", "tp4_cp2", "tp4_cp2_sp"]
    assert shown["leaves16"] == shown["local-left-fold"] == list(layouts.LAYOUTS)


def test_ranks_share_a_gpu_under_gloo_only():
    machine = {"gpus": ["H200"], "torch": "2.11.0+cu130"}
    cases = asked(layout="tp2_cp2")

    def placed(**given):
        params = parse_params(det_ffn.Params, given)
        where, why = plan.place(params, cases, machine)
        fields = dict.fromkeys(plan.Plan.__dataclass_fields__)
        return plan.Plan(**{**fields, "params": params, "device": where}).backend, where, why

    assert placed(device="cuda", transport="gloo") == ("gloo", "cuda", None)
    assert placed(device="auto", transport="gloo") == ("gloo", "cuda", None)
    assert placed(device="cpu", transport="gloo") == ("gloo", "cpu", None)
    assert placed(device="auto") == ("gloo", "cpu", None)
    backend, _, why = placed(device="cuda", transport="symmetric")
    assert backend == "symmetric" and "needs 4 GPU(s)" in why
    backend, where, why = placed(device="cuda")
    assert (backend, where) == ("nccl", "cuda") and "needs 4 GPU(s), this machine has 1" in why
    assert plan.place(SimpleNamespace(device="cuda"), cases, machine)[1] is not None


def test_triton_and_the_twin_give_the_layer_the_same_digest(root):
    """The kernels' own code in Triton's interpreter, FP32 joints and strided operands included."""
    asked = [("tree8.bf16", "packed"), ("tree8.fp32", "separate")]
    program = (
        "import torch; from rlkernel.ffn.exactness import single\n"
        f"for how in {asked!r}: print(single(12, 64, 128, 11, torch.device('cpu'), *how)[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    here = [exactness.single(12, 64, 128, 11, torch.device("cpu"), *how)[1] for how in asked]
    assert done.stdout.split() == here, done.stderr[-2000:]


# -- the command line ------------------------------------------------------------------------------


def rlkernel(root, *words):
    command = [sys.executable, "-m", "rlkernel", "det-ffn", "--device", "cpu", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280)


def test_two_fresh_launches_of_one_seed_print_the_same_digests(root, results):
    few = ("--layout", "tp2_sp", "--contract", "tree8.bf16", "--repeats", "2", "--json", "--force")
    said = []
    for _ in range(2):
        done = rlkernel(root, *few)
        assert done.returncode == 0, done.stderr[-2000:]
        summary = json.loads(done.stdout)
        assert summary["passed"] and summary["mismatches"] == 0 and summary["elements"] > 10_000
        said.append((summary["cases"][0]["digest"], summary["record"]))
    (first, here), (second, there) = said
    assert here != there and first == second
    assert set(first) == {"tree8.bf16 dx separate dw local", "tree8.bf16 dx packed dw local"}
    (case,) = asked(layout="tp2", contract="tree8.bf16", repeats="2")
    assert exactness.layer_row(case, alone())["digest"] == first, "one rank, a third process"
    other = exactness.layer_row(replace(case, seed=12), alone())["digest"]
    assert not set(first.values()) & set(other.values()), "another seed has other digests"


def test_a_planted_order_is_a_failed_check_and_an_impossible_one_bad_usage(root, results):
    done = rlkernel(root, "--layout", "tp4", "--fault", "left-fold", "--dx", "separate")
    assert done.returncode == 1, done.stderr[-2000:]
    line = next(li for li in done.stdout.splitlines() if "dx separate, dw local" in li)
    assert "layer tp4 M=32 left-fold" in line and " 0 / " not in line
    assert "forward: one rank's bits, 1 variants" in done.stdout and "FAILED" in done.stdout
    refused = rlkernel(root, "--layout", "tp2", "--fault", "left-fold")
    assert refused.returncode == 2 and "cannot show on tp2" in refused.stderr
    assert len(list(results.glob("det-ffn/*"))) == 1, "a refusal leaves no folder"
