"""tp-gqa: what is legal, and what its rows say. Real ranks, few launches."""

import pytest

from rlkernel.collectives.catalogue import GQA as FAULTS
from rlkernel.experiments import tp_gqa
from rlkernel.experiments.case import UsageError, parse_params
from tests.experiments.launched import measure, select


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nproc": 8}, "nproc=8 is not possible at the article size: .*not beyond the query heads"),
        ({"nproc": 3}, "nproc=3 is not possible"),
        ({"nproc": 16, "size": "realistic"}, "expected one of 1, 2, 4, 8"),
        ({"mode": "missing_kv_reduce"}, "cannot show on 2 rank.*needs nproc >= 4"),
        ({"twin": "torch", "nproc": 4}, "twin=torch is not possible at nproc=4"),
        ({"mode": "missing_output"}, "did you mean missing_output_reduce"),
    ],
)
def test_what_cannot_be_or_cannot_show_is_refused(given, words):
    with pytest.raises(UsageError, match=words):
        tp_gqa.cases(parse_params(tp_gqa.Params, given))


@pytest.fixture(scope="module")
def two(shared_results):
    """P = 1 and 2 with all faults, and torch's own twin."""
    return measure("tp-gqa", shared_results, nproc="1,2", mode="catalogue", twin="ours,torch")


@pytest.fixture(scope="module")
def four(shared_results):
    """P = 4: more ranks than KV heads."""
    return measure("tp-gqa", shared_results, nproc="4", mode="catalogue")


@pytest.fixture(scope="module")
def realistic(shared_results):
    """The realistic size: P = 2 and 8 with its faults under sequence parallel, BF16."""
    given = {"nproc": "2,8", "size": "realistic", "dtype": "bf16", "seed": "11"}
    asked = {"mode": "catalogue", "sequence_parallel": "on"} | given
    return measure("tp-gqa", shared_results, **asked)


@pytest.fixture(scope="module")
def healthy(shared_results):
    """The correct twin at the realistic size at every P, both dtypes, SP on and off."""
    given = {"nproc": "2,4,8", "size": "realistic", "dtype": "fp32,bf16", "seed": "11"}
    return measure("tp-gqa", shared_results, sequence_parallel="off,on", **given)


@pytest.mark.parametrize(
    ("tp", "twin"), [(1, "ours"), (2, "ours"), (4, "ours"), (1, "torch"), (2, "torch")]
)
def test_the_twin_trains_like_the_dense_block(two, four, tp, twin):
    rows = select(four if tp == 4 else two, tp=tp, fault="none", twin=twin)
    assert [row["case"]["seed"] for row in rows] == [11, 12, 13, 14, 15]
    for row in rows:
        signals = row["result"]["signals"]
        assert list(signals) == ["output", "loss", "input_grad", "parameter_grad", "post_step"]
        assert row["passed"] and row["result"]["first_wrong"] is None
        if twin == "ours":
            assert signals["output"]["max_abs"] <= 5e-7 and signals["loss"]["max_abs"] <= 5e-7
            assert all(signals[s]["max_abs"] <= 1e-7 for s in tp_gqa.SIGNALS[2:])


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_caught_where_it_must_show_first(two, four, realistic, fault):
    rows = [row for record in (two, four, realistic) for row in select(record, fault=fault)]
    assert rows, "a fault that is never run is not caught"
    for row in rows:
        result = row["result"]
        assert result["first_wrong"] == FAULTS[fault].first_wrong and result["caught"], row["case"]
        assert result["seen_by"] == FAULTS[fault].detector and not row["passed"]


@pytest.mark.parametrize("tp", [2, 4])
def test_a_missing_input_gradient_reduction_leaves_output_and_loss_right(two, four, tp):
    record = four if tp == 4 else two
    good = select(record, tp=tp, fault="none", twin="ours")
    broken = select(record, tp=tp, fault="missing_input_grad_reduce")
    for healthy, bad in zip(good, broken, strict=True):
        for untouched in ("output", "loss"):
            assert bad["result"]["digest"][untouched] == healthy["result"]["digest"][untouched]
        assert bad["result"]["signals"]["input_grad"]["max_abs"] > 1e-3


def test_replicas_of_a_kv_head_sum_their_gradients(four, realistic):
    for record, tp in ((four, 4), (realistic, 8)):
        for row in select(record, fault="none", tp=tp):
            assert "kv.dw" in row["paths"]
            assert row["result"]["shapes"]["rank_local_shapes"]["k_v"][2] == 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_realistic_size_with_and_without_sequence_parallel(healthy, tp, dtype):
    plain, split = select(healthy, tp=tp, dtype=dtype)
    assert plain["passed"] and split["passed"]
    assert "qkv.gather" in split["paths"] and "qkv.gather" not in plain["paths"]
