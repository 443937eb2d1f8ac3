"""The figures of the attention block on made-up rows: heads, sums, seeds, faults."""

from __future__ import annotations

import pytest

from rlkernel.figures import drift, heat, seeds, tp_gqa
from rlkernel.figures import rows as of
from tests.figures import synthetic
from tests.figures.looks import drawn_and_told, words

PLOTS = {
    "heads": (tp_gqa.HEADS, synthetic.attention()),
    "data_path": (tp_gqa.DATA_PATH, synthetic.attention()),
    "heat": (tp_gqa.HEAT, synthetic.attention()),
    "drift": (tp_gqa.DRIFT, [synthetic.gqa(p) for p in (2, 4, 8)]),
    "seeds": (tp_gqa.SEEDS, [synthetic.gqa(seed=s, twin=t) for t in seeds.NAME for s in (1, 2)]),
}


@pytest.mark.parametrize("name", PLOTS)
def test_drawn_and_told(name):
    drawn_and_told(*PLOTS[name])


# ---- whose head is it ----------------------------------------------------------------------------


def test_a_kv_head_stands_under_its_readers():
    whole, copied = tp_gqa.heads(synthetic.attention()).axes
    assert [w for w in words(whole) if w[0] in "qk"] == ["q0", "q1", "k0 v0", "q2", "q3", "k1 v1"]
    assert [w for w in words(copied) if w[0] in "qk"] == [
        "q0", "k0 v0", "q1", "k0 v0", "q2", "k1 v1", "q3", "k1 v1",
    ]  # fmt: skip
    assert words(whole).count("copy") == 0 and words(copied).count("copy") == 2


def test_copies_add_their_gradients_and_whole_groups_do_not():
    whole, copied = tp_gqa.heads(synthetic.attention()).axes
    sums = [[p for p in axes.patches if p.get_gid() == "sum"] for axes in (whole, copied)]
    assert [len(found) for found in sums] == [1, 1 + 2]  # out.forward; and one a KV head
    first, second, everybody = sums[1]
    assert first.get_x() + first.get_width() < second.get_x()  # neighbours, nobody else
    assert everybody.get_width() > first.get_width() + second.get_width()


def test_each_head_has_exactly_its_owners():
    size = tp_gqa.Sizes()
    for ranks, owners in ((1, 1), (2, 1), (4, 2)):
        held = [size.held(rank, ranks) for rank in range(ranks)]
        assert sorted(h for query, _ in held for h in query) == list(range(4))
        assert sorted(h for _, kv in held for h in kv) == sorted(list(range(2)) * owners)
    _, body = tp_gqa.heads_table([])
    assert body[0] == ["2", "0", "q0, q1", "k0 v0", "0:8", "nobody"]
    assert body[-1] == ["4", "3", "q3", "k1 v1", "12:16", "ranks 2, 3"]


@pytest.mark.parametrize("plot", [tp_gqa.HEADS, tp_gqa.DATA_PATH], ids=lambda p: p.title)
def test_drawn_without_rows(plot):
    drawn_and_told(plot, [])


def test_the_path_names_both_sites_and_local_shapes():
    forward, backward = tp_gqa.data_path([synthetic.gqa(4)]).axes
    assert {"out.forward", "[5,2,1,4]  rank 3", "1 q, 1 kv  rank 0"} <= set(words(forward))
    assert "qkv.dx" in words(backward)
    held = {line[0]: line[1:3] for line in tp_gqa.ownership([synthetic.gqa(4)])[1]}
    assert held["Wk, Wv"] == ["[8, 16]", "[4, 16]"] and held["Wo"] == ["[16, 16]", "[16, 4]"]


# ---- seeds ---------------------------------------------------------------------------------------


def test_the_table_has_the_first_seed_the_largest_and_the_limit():
    rows = [synthetic.gqa(seed=s) for s in (11, 12)]
    rows[1]["result"]["signals"]["loss"] = synthetic.signal(0.5)
    header, body = seeds.seeds_table(rows)
    assert header == ["signal", "P=2: seed 11", "largest of 2", "limit"]
    assert body[1] == ["loss", "2e-07", "5e-07", "1e-06"]
    assert [line[0] for line in body] == ["output", "loss", "dX", "dW", "after step"]


def test_torch_stands_beside_us_and_faults_do_not():
    rows = [synthetic.gqa(twin=t) for t in ("torch", "ours")] + synthetic.attention(sizes=(2,))
    assert len(seeds.seeds_table(rows)[0]) == 1 + 2 * 3
    (axes,) = seeds.seeds(rows).axes
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in dots] == [3] * 5 + [1] * 5
    assert max(x for line in dots for x in line.get_xdata()) < 1e-6  # no fault's 10^-2


def test_equal_bits_lie_in_the_gutter():
    rows = [synthetic.gqa()]
    rows[0]["result"]["signals"]["loss"] = synthetic.signal(0)
    (axes,) = seeds.seeds(rows).axes
    dots = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
    assert dots[1] < min(dots[0], *dots[2:]) and axes.get_xticklabels()[0].get_text() == "0"


# ---- heat map and drift --------------------------------------------------------------------------


def test_the_frame_stands_at_the_first_wrong_signal():
    assert heat.boxes(synthetic.attention(sizes=(4,))) == [
        (4, "missing_output_reduce", "output", True),
        (4, "missing_kv_reduce", "parameter_grad", True),
    ]


def test_a_second_lane_is_told():
    rows = [synthetic.gqa(fault="missing_data_reduce", dp=2, wrong=("parameter_grad",))]
    axes = heat.heat_map(rows).axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["missing data reduce  (dp 2)"]
    assert heat.heat_map_table(rows)[1][0][:2] == ["2", "missing data reduce  (dp 2)"]


def test_bits_that_vary_are_written_where_no_limit_is_broken():
    row = synthetic.gqa(fault="arrival_order_output_reduce")
    row["result"] |= {"first_wrong": "output", "seen_by": "repeat"}
    axes = heat.heat_map([row]).axes[0]
    assert words(axes)[:2] == ["bits vary", "-0.7"]
    frames = [p for p in axes.patches if p.get_gid() == "first-wrong"]
    assert len(frames) == 1 and round(frames[0].get_x() + 0.48) == 0
    assert not of.bits_vary([row], "loss")


def test_drift_shows_the_signals_that_there_are():
    assert drift.shown([synthetic.gqa()]) == ["output", "input_grad", "parameter_grad", "post_step"]
    assert "gate_up_grad" in drift.shown(synthetic.realistic())


def test_torchs_twin_is_not_our_drift():
    rows = [synthetic.gqa(), synthetic.gqa(twin="torch", seed=12)]
    assert drift.drift_table(rows) == drift.drift_table(rows[:1])


def test_a_curve_never_falls():
    """The share of equal elements is that of all ranks, the quantiles are those of the worst."""
    row = synthetic.gqa()
    row["result"]["signals"]["output"] |= {"mismatches": 1}
    shares = [share for _, share in drift.points([row], "output")]
    assert shares == sorted(shares)
