"""What a fault of ws2 heeds, and that nothing else may be given with it."""

from __future__ import annotations

import pytest

import rlkernel.__main__ as command_line
from rlkernel.experiments import ws2, ws2_faults
from rlkernel.experiments.case import UsageError, parse_params


def asked(fault, **given):
    cases = ws2.cases(parse_params(ws2.Params, {"fault": fault, "device": "cpu", **given}))
    return [(c.parameters["part"], c.parameters["m"], c.parameters["contract"]) for c in cases[1:]]


def test_what_is_given_is_looked_at():
    assert asked("swap-shards", what="forward", contract="tree2.fp32", m="1,4") == [
        ("forward", 1, "tree2.fp32"), ("forward", 4, "tree2.fp32"),
    ]  # fmt: skip
    assert asked("swap-shards", what="backward") == [("backward", 16, "tree2.bf16")]
    assert asked("wire-dtype", m="1,4") == [
        ("wire", 1, "tree2.bf16"), ("wire", 4, "tree2.bf16"),
    ]  # fmt: skip
    assert asked("lost-cp-rank", contract="tree2.fp32", m="4") == [("lost", 4, "tree2.fp32")]
    assert asked("nccl-settings", seed="3") == []


def test_by_default_all_that_shows_it_at_the_most_tokens():
    assert asked("swap-shards") == [
        ("forward", 16, "tree2.bf16"), ("forward", 16, "tree2.fp32"),
        ("backward", 16, "tree2.bf16"),
    ]  # fmt: skip
    assert asked("lost-cp-rank", size="qwen3") == [("lost", 1024, "tree2.bf16")]


@pytest.mark.parametrize("fault", ws2_faults.HEEDED)
def test_a_value_that_changes_nothing_is_refused(fault):
    given = {"what": "forward", "contract": "tree2.fp32", "m": "4", "size": "qwen3", "repeats": "5",
             "message": "2048", "samples": "3", "nccl": "Ring/LL"}  # fmt: skip
    for name, value in given.items():
        device = {"device": "cuda"} if name == "nccl" else {}
        if name in ws2_faults.HEEDED[fault]:
            assert asked(fault, **{name: value}, **device) != asked(fault) or name == "size"
            continue
        with pytest.raises(UsageError) as refused:
            asked(fault, **{name: value}, **device)
        said, heeded = str(refused.value), (*ws2_faults.HEEDED[fault], "seed", "device")
        assert f"{name}={value} changes nothing under fault={fault}: leave it out" in said
        assert said.endswith(f"given may be {', '.join(heeded)}")


@pytest.mark.parametrize(
    "fault, given, says",
    [
        ("swap-shards", {"what": "forward,packed"}, "what=packed does not show .*forward or backw"),
        ("swap-shards", {"what": "backward", "contract": "tree2.fp32"}, "add that contract, or wh"),
        ("lost-cp-rank", {"m": "1,4"}, "m=1,4: .*expected one value"),
        ("lost-cp-rank", {"contract": "tree2.fp32,tree2.bf16"}, "expected one value"),
    ],
)
def test_what_does_not_show_a_fault_is_refused(fault, given, says):
    with pytest.raises(UsageError, match=says):
        asked(fault, **given)


def test_it_is_bad_usage_and_nothing_is_launched(results, capsys):
    words = ["ws2", "--device", "cpu", "--fault", "nccl-settings", "--contract", "tree2.fp32"]
    assert command_line.main(words) == 2
    assert "contract=tree2.fp32 changes nothing" in capsys.readouterr().err
    assert not list(results.glob("ws2/*"))
