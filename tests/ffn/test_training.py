"""A training step is judged: by its repeat, and by FP32 autograd element for element."""

import pytest
import torch

from rlkernel.experiments.case import Case
from rlkernel.ffn import backward, module, training
from rlkernel.grid import Grid

AT = {"what": "train", "m": 9, "hidden": 32, "intermediate": 64, "samples": 0}


def row(contracts="tree8.bf16+chain"):
    case = Case("det-ffn", Grid(), "bf16", 3, parameters=AT | {"contracts": contracts})
    return training.train_row(case, torch.device("cpu"))


def test_a_step_is_right_under_every_contract():
    result = row("tree8.bf16+tree8.fp32+tree2.bf16+chain")
    assert result["passed"] and len(result["checks"]) == 4 * len(training.OPERATORS) * 2
    judged = [line for line in result["lines"] if line["operator"] != "step"]
    assert all(1e-4 < line["drift"]["rel_l2"] < 1e-2 for line in judged)
    assert result["official"].startswith("transformers")


@pytest.mark.parametrize("spoil", [torch.zeros_like, lambda x: 2 * x, lambda x: x / 2])
def test_a_wrong_gradient_is_outside_of_the_tolerance(monkeypatch, spoil):
    right = backward.gradients

    def wrong(*args):
        dx, d_gate_up, d_down = right(*args)
        return dx, d_gate_up, spoil(d_down)

    monkeypatch.setattr(backward, "gradients", wrong)
    result = row()
    failed = {name for name, held, *_ in result["checks"] if not held}
    assert failed == {f"down dW {c}: FP32 within tolerance" for c in ("tree8.bf16", "chain")}


def test_a_step_that_does_not_repeat_is_seen(monkeypatch):
    right, calls = backward.gradients, []

    def unsteady(*args):
        dx, *others = right(*args)
        calls.append(1)
        dx *= 1 + 2.0**-7 * (len(calls) % 2)
        return dx, *others

    monkeypatch.setattr(backward, "gradients", unsteady)
    failed = {name for name, held, *_ in row()["checks"] if not held}
    assert failed == {f"dX {c}: repeats" for c in ("tree8.bf16", "chain")}


def test_bits_that_are_the_official_layers_are_counted(monkeypatch):
    """With our own chain in its place: the chain has all of its bits, the tree has not."""

    def ours(weights, probe):
        return {"official": module.DeterministicFFN(*weights, contract="chain")}, {"official": "x"}

    monkeypatch.setattr(training, "opponents", ours)
    result = row()
    judged = [line for line in result["lines"] if line["operator"] != "step"]
    differ = {(li["contract"], li["operator"]): li["differ_from_official"] for li in judged}
    assert len(differ) == 2 * len(training.OPERATORS)
    for operator in training.OPERATORS:
        assert differ["chain", operator] == 0 < differ["tree8.bf16", operator]


def test_results_of_the_official_layer_have_the_names_of_ours(monkeypatch):
    """dW of its three weights lie apart: gate, up, down, each far from the others."""
    result = row()
    for line in result["lines"]:
        if line["operator"] != "step":
            assert line["differ_from_official"] < 0.9 * line["elements"], line["operator"]
    assert result["opponents"]["official compiled"] == "on GPUs only"
    assert result["ceilings"] is None and set(result["peak_bytes"]) == {
        "tree8.bf16", "chain", "official"
    }  # fmt: skip
