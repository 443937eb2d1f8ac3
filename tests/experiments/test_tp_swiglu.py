"""tp-swiglu: what is legal, and what its rows say. Launched once with real ranks for all tests."""

import json

import pytest

from rlkernel.collectives.catalogue import SWIGLU as FAULTS
from rlkernel.experiments import tp_swiglu
from rlkernel.experiments.case import UsageError, parse_params
from rlkernel.experiments.tp_swiglu import Params, cases
from rlkernel.grid import Grid
from tests.experiments.launched import measure, select


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
        ({"seed": 2**64}, "seed=18446744073709551616 is not possible"),
        ({"seed": -1}, "seed=-1 is not possible"),
        ({"mode": "missing_norm_reduce"}, "cannot show .*sequence_parallel=on"),
        ({"mode": "wrong_group_forward_reduce", "nproc": 4}, "shown at nproc=2 with dp=2"),
        ({"mode": "missing_data_reduce", "nproc": 4}, "shown at nproc=1 or 2 with dp=2"),
        ({"nproc": 16, "size": "smallest"}, "the smallest size: expected one of 1, 2, 4, 8"),
        ({"mode": "arrival_order_forward_reduce"}, "needs nproc >= 4"),
        (
            {"mode": "arrival_order_forward_reduce", "nproc": 4, "dtype": "bf16"},
            "sums that round",
        ),
        ({"twin": "torch", "fault": "missing_forward_reduce"}, "our own twin only"),
        (
            {"twin": "torch", "sequence_parallel": "on", "size": "realistic"},
            "twin=torch is not possible",
        ),
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
        *((1, f) for f in FAULTS if FAULTS[f].smallest.tp == 1),
        (2, "none"),
        *((2, f) for f in FAULTS if FAULTS[f].smallest.tp <= 2 and not FAULTS[f].only),
    ]
    lanes = {c.fault for c in found if c.grid == Grid(dp=2)}
    assert lanes == {"missing_data_reduce", "doubled_data_reduce", "averaged_data_reduce"}


def test_the_smallest_size_covers_every_p_and_every_fault():
    """Article where that is possible, realistic at P = 8 and under sequence parallel; each fault
    once a P and dtype, beside a correct twin of its own kind.
    """
    everything = {"nproc": "2,4,8", "size": "smallest", "sequence_parallel": "off,on"}
    found = cases(params(**everything, mode="catalogue", seed="11", dtype="fp32,bf16"))
    where = {}
    for case in found:
        size, split = case.parameters["size"], case.parameters["sequence_parallel"]
        assert (
            size == ("article" if split == "off" and case.grid.tp < 8 else "realistic")
            or (
                case.fault.startswith("arrival")
                and case.dtype == "bf16"  # adds exactly at the article
            )
            or case.fault == "none"
        )
        where.setdefault((case.grid.tp, case.dtype, case.fault), []).append((size, split))
    for tp in (2, 4, 8):
        for dtype in ("fp32", "bf16"):
            for name, fault in FAULTS.items():
                spots = where.get((tp, dtype, name), [])
                assert len(spots) == bool(fault.grid(tp)), (tp, dtype, name)
                assert set(spots) <= set(where[tp, dtype, "none"])
    assert params(size="smallest").size and {
        c.parameters["size"]
        for c in cases(params(size="smallest", nproc="2,8", sequence_parallel="off"))
    } == {"article", "realistic"}


@pytest.fixture(scope="module")
def measured(shared_results):
    """One launch: the article's fixture with its faults, and torch's twin beside ours."""
    return measure("tp-swiglu", shared_results, nproc="1,2,4", mode="catalogue", twin="ours,torch")


@pytest.fixture(scope="module")
def realistic(shared_results):
    """One launch: the realistic size with its faults at P = 2 and 8 under SP, BF16."""
    given = {"nproc": "2,8", "size": "realistic", "dtype": "bf16", "seed": "11"}
    asked = {"mode": "catalogue", "sequence_parallel": "on"} | given
    return measure("tp-swiglu", shared_results, **asked)


@pytest.fixture(scope="module")
def healthy(shared_results):
    """One launch: the correct twin at the realistic size, both dtypes."""
    given = {"nproc": "2,4,8", "size": "realistic", "dtype": "fp32,bf16", "seed": "11"}
    return measure("tp-swiglu", shared_results, sequence_parallel="off,on", **given)


@pytest.mark.parametrize("twin", ["ours", "torch"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_twin_trains_like_the_dense_block(measured, tp, twin):
    rows = select(measured, tp=tp, fault="none", twin=twin)
    assert [row["case"]["seed"] for row in rows] == [11, 12, 13, 14, 15]
    for row in rows:
        signals = row["result"]["signals"]
        assert list(signals) == list(tp_swiglu.SIGNALS)
        assert row["passed"] and row["result"]["first_wrong"] is None
        if twin == "ours":
            bounds = {s: report["bound"] for s, report in signals.items()}
            assert bounds == dict.fromkeys(signals, 1e-7) | {"output": 5e-7, "loss": 5e-7}
            assert signals["output"]["max_abs"] <= 5e-7 and signals["loss"]["max_abs"] <= 5e-7
            assert all(signals[s]["max_abs"] <= 1e-7 for s in tp_swiglu.SIGNALS[2:])


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_caught_where_it_must_show_first(measured, realistic, fault):
    rows = select(measured, fault=fault) + select(realistic, fault=fault)
    assert rows, "a fault that is never run is not caught"
    for row in rows:
        result = row["result"]
        assert result["first_wrong"] == FAULTS[fault].first_wrong and result["caught"], row["case"]
        assert result["seen_by"] == FAULTS[fault].detector and not row["passed"]


@pytest.mark.parametrize("tp", [2, 4])
def test_a_missing_backward_reduction_leaves_output_and_loss_right(measured, tp):
    good = select(measured, tp=tp, fault="none", twin="ours")
    broken = select(measured, tp=tp, fault="missing_backward_reduce")
    for healthy, bad in zip(good, broken, strict=True):
        for untouched in ("output", "loss", "gate_up_grad", "down_grad", "down_bias_grad"):
            assert bad["result"]["digest"][untouched] == healthy["result"]["digest"][untouched]
        for wrong in ("input_grad", "norm_grad", "post_step"):
            assert bad["result"]["signals"][wrong]["excess"] > 100


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_realistic_size_with_and_without_sequence_parallel(healthy, tp, dtype):
    plain, split = select(healthy, tp=tp, dtype=dtype)
    assert plain["passed"] and split["passed"]
    assert plain["result"]["digest"]["down_grad"] == split["result"]["digest"]["down_grad"]
    assert plain["result"]["digest"]["gate_up_grad"] == split["result"]["digest"]["gate_up_grad"]
    assert "gate_up.gather" in split["paths"] and "gate_up.gather" not in plain["paths"]


def test_two_fresh_launches_give_the_same_hashes(measured, tmp_path):
    again = measure("tp-swiglu", tmp_path, nproc="2", mode="equivalence", seed="11,12")
    for row in again.rows:
        (before,) = select(measured, tp=2, fault="none", twin="ours", seed=row["case"]["seed"])
        assert row["result"]["digest"] == before["result"]["digest"]


def test_verdict_summary_and_table(measured):
    catalogue = params(nproc="1,2,4", mode="catalogue", twin="ours,torch")
    verdict = tp_swiglu.verdict(catalogue, measured.rows)
    groups = len(measured.rows) // 5
    assert verdict["passed"] and len(verdict["checks"]) == groups
    rows = select(measured, tp=2, fault="missing_backward_reduce")
    single = params(mode="missing_backward_reduce")
    assert not tp_swiglu.verdict(single, rows)["passed"]
    said = json.loads(json.dumps(tp_swiglu.summary(single, rows)))
    assert said["first_wrong"] == "input_grad" and said["passed"] is False
    assert said["world_size"] == 2 and len(said["cases"]) == 5
    for key in tp_swiglu.EXPERIMENT.json_keys.values():
        assert said[key] == max(case[key] for case in said["cases"]), key
    parts = ("input", "norm", "gate_up", "down", "down_bias")
    assert {f"{part}_grad_max_abs_diff" for part in parts} < set(said)
    header, body = tp_swiglu.table(catalogue, measured.rows)
    assert len(body) == groups and all(len(line) == len(header) for line in body)
    for line in body:
        assert ("!" in " ".join(line)) == (line[-1] != "-") or "arrival" in line[0]
    assert len({line[0] for line in body}) == groups, "two groups must not look alike"


def test_a_catalogue_fails_when_a_fault_is_caught_elsewhere(measured):
    rows = json.loads(json.dumps(select(measured, tp=2, twin="ours")))
    assert tp_swiglu.verdict(params(mode="catalogue"), rows)["passed"]
    assert rows[-1]["case"]["fault"] != "none"
    rows[-1]["result"]["first_wrong"] = "post_step"
    assert not tp_swiglu.verdict(params(mode="catalogue"), rows)["passed"]
