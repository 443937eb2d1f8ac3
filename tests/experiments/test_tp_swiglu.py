"""tp-swiglu: what is legal, and what its rows say. Launched once with real ranks for all tests."""

import json

import pytest

from rlkernel.collectives.catalogue import SWIGLU as FAULTS
from rlkernel.experiments import tp_swiglu
from rlkernel.experiments.case import UsageError, parse_params
from rlkernel.experiments.tp_swiglu import Params, cases


def params(**given):
    return parse_params(Params, given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nproc": 3}, "nproc=3 is not possible at the article size: expected one of 1, 2, 4"),
        ({"nproc": 8}, "nproc=8 is not possible at the article size"),
        ({"nproc": 16, "size": "realistic"}, "expected one of 1, 2, 4, 8"),
        ({"sequence_parallel": "on"}, "sequence_parallel=on needs size=realistic"),
        ({"nproc": 1, "mode": "missing_forward_reduce"}, "cannot show on 1 rank"),
        ({"mode": "missing_forward_reduce", "fault": "missing_backward_reduce"}, "contradict"),
        ({"mode": "inspect", "fault": "missing_backward_reduce"}, "contradict"),
        ({"mode": "missing_backwards_reduce"}, "did you mean missing_backward_reduce"),
        ({"dtype": "fp8"}, "dtype='fp8'"),
    ],
)
def test_what_cannot_be_or_cannot_show_is_refused(given, words):
    with pytest.raises(UsageError, match=words):
        cases(params(**given))


def test_a_fault_is_the_same_by_mode_and_by_flag():
    by_mode = cases(params(mode="missing_forward_reduce"))
    assert by_mode == cases(params(fault="missing_forward_reduce"))
    assert {case.fault for case in by_mode} == {"missing_forward_reduce"}


def test_the_catalogue_leaves_out_what_cannot_show():
    found = cases(params(nproc="1,2", mode="catalogue", seed="11"))
    assert [(c.grid.tp, c.fault) for c in found] == [
        (1, "none"),
        (2, "none"),
        *((2, f) for f in FAULTS if FAULTS[f].smallest.tp == 2 and not FAULTS[f].only),
    ]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One launch: the article's fixture with its faults at P = 1, 2, 4."""
    return measure(tmp_path_factory.mktemp("article"), nproc="1,2,4", mode="catalogue")


@pytest.fixture(scope="module")
def realistic(tmp_path_factory):
    """One launch: the realistic size with its faults at P = 2, 4, 8, both dtypes, SP on and off."""
    given = {"nproc": "2,4,8", "size": "realistic", "dtype": "fp32,bf16", "seed": "11"}
    root = tmp_path_factory.mktemp("realistic")
    return measure(root, mode="catalogue", sequence_parallel="off,on", **given)


def measure(root, **given):
    from rlkernel.run import launch

    return launch.measure("tp-swiglu", params(**given), root=root, timeout_s=100, peer_timeout_s=20)


def select(record, **wanted):
    return [
        row
        for row in record.rows
        if all({**row["case"], "tp": row["case"]["grid"]["tp"]}[k] == v for k, v in wanted.items())
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_twin_trains_like_the_dense_block(measured, tp):
    rows = select(measured, tp=tp, fault="none")
    assert [row["case"]["seed"] for row in rows] == [11, 12, 13, 14, 15]
    for row in rows:
        signals = row["result"]["signals"]
        assert list(signals) == list(tp_swiglu.SIGNALS)
        assert signals["output"]["max_abs"] <= 5e-7 and signals["loss"]["max_abs"] <= 5e-7
        assert all(signals[s]["max_abs"] <= 1e-7 for s in tp_swiglu.SIGNALS[2:])
        assert row["passed"] and row["result"]["first_wrong"] is None


@pytest.mark.parametrize("tp", [2, 4])
def test_a_missing_forward_reduction_shows_in_the_output(measured, tp):
    for row in select(measured, tp=tp, fault="missing_forward_reduce"):
        assert row["result"]["first_wrong"] == "output" and row["result"]["caught"]
        assert not row["passed"] and row["result"]["signals"]["output"]["max_abs"] > 0.01


@pytest.mark.parametrize("tp", [2, 4])
def test_a_missing_backward_reduction_leaves_output_and_loss_right(measured, tp):
    healthy = select(measured, tp=tp, fault="none")
    broken = select(measured, tp=tp, fault="missing_backward_reduce")
    for good, bad in zip(healthy, broken, strict=True):
        assert bad["result"]["first_wrong"] == "input_grad" and bad["result"]["caught"]
        for untouched in ("output", "loss", "gate_up_grad", "down_grad", "down_bias_grad"):
            assert bad["result"]["digest"][untouched] == good["result"]["digest"][untouched]
        for wrong in ("input_grad", "norm_grad", "post_step"):
            assert bad["result"]["signals"][wrong]["excess"] > 100


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_realistic_size_with_and_without_sequence_parallel(realistic, tp, dtype):
    rows = select(realistic, tp=tp, dtype=dtype)
    assert len(rows) == 6
    for row in rows:
        assert row["passed"] == (row["case"]["fault"] == "none"), row["case"]
        assert row["result"]["caught"] is (None if row["passed"] else True), row["case"]
    plain, split = (
        next(r for r in rows if r["passed"] and r["case"]["parameters"]["sequence_parallel"] == sp)
        for sp in ("off", "on")
    )
    assert plain["result"]["digest"]["down_grad"] == split["result"]["digest"]["down_grad"]
    assert "gate_up.gather" in split["paths"] and "gate_up.gather" not in plain["paths"]


def test_two_fresh_launches_give_the_same_hashes(measured, tmp_path):
    again = measure(tmp_path, nproc="2", mode="equivalence", seed="11,12")
    for row in again.rows:
        (before,) = select(measured, tp=2, fault="none", seed=row["case"]["seed"])
        assert row["result"]["digest"] == before["result"]["digest"]


def test_verdict_summary_and_table(measured):
    catalogue = params(nproc="1,2,4", mode="catalogue")
    verdict = tp_swiglu.verdict(catalogue, measured.rows)
    assert verdict["passed"] and len(verdict["checks"]) == 7
    rows = select(measured, tp=2, fault="missing_backward_reduce")
    single = params(mode="missing_backward_reduce")
    assert not tp_swiglu.verdict(single, rows)["passed"]
    said = json.loads(json.dumps(tp_swiglu.summary(single, rows)))
    assert said["first_wrong"] == "input_grad" and said["passed"] is False
    assert said["world_size"] == 2 and len(said["cases"]) == 5
    assert {
        f"{name}_grad_max_abs_diff" for name in ("input", "norm", "gate_up", "down", "down_bias")
    } < set(said)
    header, body = tp_swiglu.table(catalogue, measured.rows)
    assert len(body) == 7 and all(len(line) == len(header) for line in body)
    assert (
        body[-1][-1] == "input_grad" and "!" in " ".join(body[-1]) and "!" not in " ".join(body[0])
    )


def test_a_catalogue_fails_when_a_fault_is_caught_elsewhere(measured):
    rows = json.loads(json.dumps(select(measured, tp=2)))
    rows[-1]["result"]["first_wrong"] = "post_step"
    assert not tp_swiglu.verdict(params(mode="catalogue"), rows)["passed"]
