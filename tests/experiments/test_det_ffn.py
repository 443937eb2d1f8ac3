"""det-ffn: what is legal, what its command line ends with, and that a wrong schedule is refused.

Both launches run beside each other, once for all tests; the census of every schedule is run and
looked at by the page's tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rlkernel.__main__ as command_line
from rlkernel import records
from rlkernel.contract import ReductionTree
from rlkernel.experiments import det_ffn
from rlkernel.experiments.case import Case, UsageError, parse_params
from rlkernel.ffn import measure, official
from rlkernel.grid import Grid
from rlkernel.kernels import census, reference, select
from tests.experiments import launched as picking

ROOT = Path(__file__).resolve().parents[2]
RIGHT = ("--what", "gemm,ffn", "--m", "1,17", "--json")  # as the page asks
WRONG = ("--what", "gemm", "--m", "1", "--contract", "tree2.bf16,chain", "--json")


# ---- the command line ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launched(tmp_path_factory, shared_results):
    """name -> (exit code, summary, record) of a right and of a faulty run on the CPU."""
    started = {}
    for name, more in {"right": RIGHT, "wrong": (*WRONG, "--fault", "extra-rounding")}.items():
        root = shared_results if name == "right" else tmp_path_factory.mktemp(name)
        command = [sys.executable, "-m", "rlkernel", "det-ffn", "--device", "cpu", *more]
        started[name] = root, subprocess.Popen(
            [*command, "--results", str(root), "--timeout", "250"],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    found = {}
    for name, (root, process) in started.items():
        out, errors = process.communicate(timeout=280)
        assert out, errors
        found[name] = process.returncode, json.loads(out), records.find("det-ffn", root)[0]
    return found


def test_the_right_bits_are_exit_0(launched):
    code, summary, record = launched["right"]
    assert code == 0 and summary["passed"] is True and summary["mismatches"] == 0
    assert [case["case"] for case in summary["cases"]] == [
        "gemm M=1", "gemm M=17", "ffn M=1", "ffn M=17", "fp16 M=8",
    ]  # fmt: skip
    lines = [line for row in record.rows for line in row["result"].get("lines", ())]
    assert len(lines) == 2 * (6 + 1) * 4
    assert summary["elements"] == sum(x["elements"] for x in lines)
    assert {line["contract"] for line in lines} == set(det_ffn.CONTRACTS)
    assert not any(line["mismatches"] or "median_us" in line for line in lines)


def test_a_tree_of_fp32_is_as_near_to_fp64_as_the_chain(launched):
    _, _, record = launched["right"]
    rows = picking.select(record, m=17)
    lines = [line for row in rows for line in row["result"]["lines"]]
    error = {(li["operator"], li["contract"]): li["drift"]["rel_l2"] for li in lines}
    for operator in {li["operator"] for li in lines}:
        fp32, chain = error[operator, "tree8.fp32"], error[operator, "chain"]
        assert fp32 == pytest.approx(chain, rel=0.02)
        assert chain < error[operator, "tree2.bf16"] < error[operator, "tree8.bf16"]


def test_the_official_layer_was_there(launched):
    _, _, record = launched["right"]
    *_, small, ffn, fp16 = (row["result"] for row in record.rows)
    for one in (small, ffn):
        assert one["official"].startswith("transformers ")
        assert set(one["peak_bytes"].values()) == {None}
        assert all(0 <= li["differ_from_official"] < li["elements"] for li in one["lines"])
    assert 0 < fp16["drift"]["rel_l2"] < 1e-2


def test_an_extra_rounding_is_exit_1_and_names_every_product(launched):
    code, summary, record = launched["wrong"]
    assert code == 1 and summary["passed"] is False and record.status == "ok"
    (row,) = record.rows
    differ = {(li["operator"], li["contract"]) for li in row["result"]["lines"] if li["mismatches"]}
    # At M = 1 the reduction of dW has one term: nothing can be rounded on the way.
    products = {"gate forward", "down forward", "down dX", "gate dX"}
    assert differ == {(name, contract) for name in products for contract in ("tree2.bf16", "chain")}
    failed = [check["name"] for check in record.run["verdict"]["checks"] if not check["passed"]]
    assert "gemm M=1 extra-rounding: down forward tree2.bf16: the oracle's bits" in failed
    assert "first at" in next(li["first"] for li in row["result"]["lines"] if li["mismatches"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--what", "gem"], "what='gem' is not possible (did you mean gemm?)"),
        (["--contract", "tree8"], "contract='tree8' is not possible"),
        (["--m", "0"], "each m must be at least 1 row"),
        (["--samples", "-1"], "samples and warmup cannot be negative"),
        (["--seed", "-1"], "seed=-1 is not possible"),
        (["--contracts", "chain"], "unknown flag --contracts; did you mean --contract?"),
        (["--size", "qwen4"], "did you mean qwen3"),
    ],
)
def test_bad_usage_is_exit_2_and_named(words, says, results, capsys):
    assert command_line.main(["det-ffn", *words]) == 2
    assert says in capsys.readouterr().err
    assert not list(results.iterdir()), "nothing was launched"


# ---- parameters ----------------------------------------------------------------------------------


def params(**given):
    return parse_params(det_ffn.Params, given)


def test_cases_in_order_and_the_observation_last():
    found = det_ffn.cases(params(what="gemm,ffn", m="1,17", seed="11,12"))
    at = [(case.parameters["what"], case.parameters["m"], case.seed) for case in found]
    assert at[:4] == [("gemm", 1, 11), ("gemm", 1, 12), ("gemm", 17, 11), ("gemm", 17, 12)]
    assert at[-2:] == [("fp16", 8, 11), ("fp16", 8, 12)] and len({c.key for c in found}) == 10
    faulty = det_ffn.cases(params(fault="extra-rounding"))
    assert {case.fault for case in faulty} == {"extra-rounding"}
    assert "fp16" not in {case.parameters["what"] for case in faulty}
    with pytest.raises(UsageError):
        det_ffn.cases(params(m="4,0"))


def test_how_it_is_timed_is_no_part_of_a_census():
    timed, untimed = (
        {case.parameters["what"]: case.key for case in det_ffn.cases(params(samples=n))}
        for n in (40, 0)
    )
    assert timed["census"] == untimed["census"] and timed["gemm"] != untimed["gemm"]


# ---- a schedule that is wrong --------------------------------------------------------------------


@pytest.fixture
def refusals(monkeypatch):
    """The schedules that are refused, none at first; forgotten behind the test."""
    found: dict = {}
    monkeypatch.setattr(select, "_refused", found)
    return found


def leaves_from_the_right(a, b, out, tree, choice=None):
    """A schedule that folds from the right: right on one leaf or two, wrong on more."""
    nodes = [tree.leaf(a[:, lo:hi], b[lo:hi]) for lo, hi in tree.bounds(a.shape[1])]
    while len(nodes) > 1:
        nodes.append(tree.joint(nodes.pop(), nodes.pop()))
    out.copy_(nodes[0])
    return choice


def row_of(contract: str) -> dict:
    at = {"what": "census", "m": 17, "hidden": 16, "intermediate": 128, "contracts": contract}
    return measure.census_row(Case("det-ffn", Grid(), seed=11, parameters=at), torch.device("cpu"))


# Which data show a fold from the right. Integers are exact in FP32 in any order.
SHOWN = {
    "tree8.bf16": {"normal", "cancellation", "integers"},
    "tree8.fp32": {"normal", "cancellation", "residual"},
}


@pytest.mark.parametrize("contract", det_ffn.CONTRACTS)
def test_a_wrong_schedule_is_counted_and_refused(contract, refusals, monkeypatch):
    monkeypatch.setattr(select, "gemm", leaves_from_the_right)
    monkeypatch.setattr(measure, "ANCHORS", (1, 2))
    result = row_of(contract)
    differ = {found["family"] for found in result["census"] if found["mismatches"]}
    held = {name: held for name, held, *_ in result["checks"]}
    wrong = contract in SHOWN
    assert differ == SHOWN.get(contract, set())
    assert held[f"{contract}: all schedules agree"] is result["passed"] is not wrong
    assert list(refusals) == [("twin", contract)] * wrong
    assert list(result["refused"]) == [f"twin under {contract}"] * wrong
    assert all(" data, a[" in why and "first at" in why for why in result["refused"].values())


def test_what_is_refused_is_not_chosen_again(refusals, monkeypatch):
    """Played as if this process ran kernels in the interpreter, where decode is legal too."""
    monkeypatch.setattr(select.bf16, "INTERPRETED", True)
    monkeypatch.setattr(select.gemm_decode, "refuses", lambda *_: None)
    a, b, out = (torch.zeros(s, dtype=torch.bfloat16) for s in ((3, 64), (64, 32), (3, 32)))

    def schedules(tree):
        return {choice.schedule for choice in select.choices(a, b, out, tree)}

    tree, other = ReductionTree(), ReductionTree(2, "bf16")
    assert schedules(tree) == schedules(other) == {"tile", "decode"}
    select.refuse("decode", tree.name, "it differs")
    assert schedules(tree) == {"tile"} and schedules(other) == {"tile", "decode"}
    assert select.refused() == {"decode under tree8.bf16": "it differs"}


def test_a_planted_order_is_found_out_but_refuses_nobody(refusals):
    tree, device = ReductionTree(2, "bf16"), torch.device("cpu")
    found = census.census(3, 64, 8, tree, seed=0, device=device, run_as=ReductionTree(4, "bf16"))
    assert any(one["mismatches"] for one in found) and not refusals


def test_a_wrong_activation_is_found_by_the_census_of_gate_and_up(refusals, monkeypatch):
    """Rounded once behind the product, not behind the activation as well."""
    assert not any(one["mismatches"] for one in fused_census())

    def rounded_once(choice, x, w_gate, w_up, *outs):
        def run(x, w_gate, w_up, *outs):
            gate, up, _ = reference.gate_up(x, w_gate, w_up)
            product = torch.nn.functional.silu(gate.float()) * up.float()
            for out, value in zip(outs, (product, gate, up)):
                out.copy_(value)

        return run

    monkeypatch.setattr(select, "prepared_gate_up", rounded_once)
    wrong = {one["family"] for one in fused_census() if one["mismatches"]}
    assert "normal" in wrong and list(refusals) == [("twin", "gate_up")]


def fused_census() -> list[dict]:
    return census.gate_up_census(5, 32, 24, seed=1, device=torch.device("cpu"))


# ---- the opponent --------------------------------------------------------------------------------


def test_without_transformers_nothing_is_measured_against_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    at = {"what": "ffn", "m": 1, "hidden": 16, "intermediate": 16, "contracts": "chain"}
    case = Case("det-ffn", Grid(), parameters=at | {"samples": 0})
    ffn = measure.ffn_row(case, torch.device("cpu"))
    assert ffn["passed"] and "differ_from_official" not in ffn["lines"][0]
    fp16 = measure.fp16_row(case, torch.device("cpu"))
    pin = next(
        line
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if "transformers" in line
    )
    for said in (ffn["official"], fp16["not_measured"]):
        assert said.startswith("transformers is not installed") and said.endswith(pin)


def test_the_official_layer_holds_these_very_weights():
    gate, up, down = (torch.randn(s).bfloat16() for s in ((8, 4), (8, 4), (4, 8)))
    layer = official.official_mlp(gate, up, down)
    assert type(layer).__module__ == "transformers.models.qwen3.modeling_qwen3"
    assert layer.gate_proj.weight.data_ptr() == gate.data_ptr()
    x = torch.randn(3, 4).bfloat16()
    expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    assert torch.equal(layer(x), expected)
