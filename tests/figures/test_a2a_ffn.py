"""The figures of the A2A-FFN on made-up rows of two GPUs and of two gloo ranks."""

from __future__ import annotations

import copy

import pytest

from rlkernel.figures import a2a_cost, a2a_ffn, a2a_sharing, schedules
from tests.figures import exchanges, looks

PLOTS = {
    "timelines": a2a_ffn.TIMELINES, "hidden": a2a_ffn.HIDDEN, "critical": a2a_ffn.CRITICAL,
    "times": a2a_ffn.TIMES, "sweep": a2a_ffn.SWEEP, "sharing": a2a_ffn.SHARING,
}  # fmt: skip
GPU = exchanges.gpu()
FORWARD = GPU[:1]
ONE = [exchanges.row()]  # four schedules, four chunks each


@pytest.mark.parametrize("name", PLOTS)
def test_drawn_deterministic_and_told(name):
    looks.drawn_and_told(PLOTS[name], GPU if name == "sharing" else FORWARD)


@pytest.mark.parametrize("name", PLOTS)
def test_what_was_not_measured_is_a_box_with_the_command(name):
    plot, rows = PLOTS[name], [exchanges.row(traced=False, timed=())]
    said = " ".join(looks.words(plot.draw(rows).axes[0]))
    assert "NOT MEASURED here" in said and schedules.COMMAND in said
    assert schedules.COMMAND in plot.alt(rows) and schedules.COMMAND in plot.table(rows)[1][0][0]


def marks(axes, gid: str) -> list:
    return [line for line in axes.lines if line.get_gid() == gid]


def patches(axes, gid: str) -> list:
    return [patch for patch in axes.patches if patch.get_gid() == gid]


def titles(figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


# ---- timelines -----------------------------------------------------------------------------------


def test_the_schedules_stand_in_their_order_on_one_axis():
    figure = a2a_ffn.timelines(FORWARD)
    assert titles(figure) == ["none", "with-sm, 4 chunks", "sm-free, 4 chunks", "kernel, 4 chunks"]
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    for axes in figure.axes:
        assert [label.get_text() for label in axes.get_yticklabels()] == ["stream 7", "stream 9"]


def test_exposed_communication_is_shaded_and_nothing_else():
    none, chunked, _, kernel = a2a_ffn.timelines(FORWARD).axes
    shaded = [(p.get_x(), p.get_x() + p.get_width()) for p in patches(none, "exposed")]
    assert shaded == [(90, 260), (3540, 3710)]  # both exchanges, none of the packing
    ends = [(p.get_x(), p.get_x() + p.get_width()) for p in patches(chunked, "exposed")]
    assert ends == [(0, 100), (3380, 3480)]
    assert patches(kernel, "exposed") == []  # its inside is not known


def test_a_fused_kernel_has_words_and_no_number():
    rows = [exchanges.row({"kernel/4": 1.2})]
    assert a2a_ffn.timelines(rows).axes[1].get_title(loc="right") == "not visible in this trace"
    assert "not visible in this trace" in a2a_ffn.timelines_alt(rows)
    why = rows[0]["result"]["seen"]["kernel/4"][0]["why"]
    assert [line[-2:] for line in a2a_ffn.timelines_table(rows)[1][2:]] == [["-", why]] * 2
    assert marks(a2a_ffn.hidden(rows).axes[0], "trace") == []
    assert "%" not in a2a_ffn.timelines_alt(rows).split("kernel")[1]


def test_a_stream_too_thin_to_be_seen_is_left_out():
    row = exchanges.row({})
    row["result"]["seen"]["none"][1]["timeline"].append(["stream 11", "copy", 0.0, 3.0])
    (axes,) = a2a_ffn.timelines([row]).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["stream 7", "stream 9"]


def test_the_slowest_rank_is_drawn_and_all_are_told():
    row = exchanges.row({"sm-free/4": 1.1})
    early, late = row["result"]["seen"]["sm-free/4"]
    early["timeline"] = [["stream 7", "gemm", 0.0, 1.0]]
    assert late["span_us"] > early["span_us"]
    assert len(patches(a2a_ffn.timelines([row]).axes[1], "gemm")) == 2
    assert [line[1] for line in a2a_ffn.timelines_table([row])[1]] == ["0", "1"] * 2


# ---- hidden --------------------------------------------------------------------------------------


def test_a_loss_keeps_its_sign_in_figure_table_and_words():
    rows = exchanges.cpu()
    axes = a2a_ffn.hidden(rows).axes[0]
    places = [mark.get_xdata()[0] for mark in marks(axes, "estimate")]
    assert places == pytest.approx([-1.238] * 2, abs=1e-3)
    assert "-1.24" in looks.words(axes) and axes.get_xlim()[0] < -1.28
    assert "estimate -1.24, trace 0.57" in a2a_ffn.hidden_alt(rows)
    assert a2a_ffn.hidden_table(rows)[1][0][1] == "-1.24 (-1.28, -1.20)"
    assert schedules.signed(0.4) == "+0.40" and schedules.signed(-0.4) == "-0.40"


def test_noise_is_pale_and_says_so():
    """Wider than 0.25 either way: the sign stays, the interval stands where p10 to p90 did."""
    row = exchanges.row({"sm-free/2": 1.1, "sm-free/4": 1.15})
    four = row["result"]["times"]["documented"]["schedules"]["sm-free/4"]["hidden"]
    for half, pale in ((0.25, False), (0.26, True), (float("inf"), True)):
        four |= {"ci95": half, "mean": four["median"] + 0.1}
        axes = a2a_ffn.hidden([row]).axes[0]
        (mark,) = marks(axes, "estimate")
        (interval,) = [c for c in axes.collections if c.get_gid() == "interval"]
        assert (mark.get_alpha() < 1) == (interval.get_alpha() < 1) == pale
        said = "noise: ±"
        table = [a2a_ffn.hidden_table([row])[1][0][1], a2a_ffn.SWEEP.table([row])[1][1][3]]
        words = [*looks.words(axes), a2a_ffn.hidden_alt([row]), a2a_ffn.SWEEP.alt([row])]
        assert all((said in text) == pale and text.startswith("+0.65") for text in table)
        assert sum(said in text for text in words) == 3 * pale
        if half == 0.26:
            (ends,) = interval.get_segments()
            assert list(ends[:, 0]) == pytest.approx([four["mean"] - 0.26, four["mean"] + 0.26])
        (curve,) = marks(a2a_ffn.SWEEP.draw([row]).axes[1], "curve")
        assert list(curve.get_xdata()) == ([2] if pale else [2, 4])


def test_estimate_and_trace_are_two_marks():
    axes = a2a_ffn.hidden([exchanges.row({"sm-free/4": 1.1}, ranks=4)]).axes[0]
    assert len(marks(axes, "estimate")) == 1
    (seen,) = marks(axes, "trace")
    assert len(seen.get_xdata()) == 4  # a rank each
    assert list(seen.get_xdata()) != list(marks(axes, "estimate")[0].get_xdata())


def test_the_rank_that_hides_least_counts():
    row = exchanges.row({"sm-free/4": 1.1})
    row["result"]["seen"]["sm-free/4"][1] |= {"hidden": 0.25, "exposed_us": 700.0}
    assert a2a_ffn.hidden_table([row])[1][0][2:4] == ["0.25", "700.0"]


def test_none_hides_nothing_and_is_not_judged():
    assert [line[0] for line in a2a_ffn.hidden_table(exchanges.cpu())[1]] == [
        "with-sm, 2 chunks", "kernel, 2 chunks",
    ]  # fmt: skip


def test_a_lone_rank_has_nothing_to_hide():
    assert a2a_ffn.hidden_table([exchanges.row(ranks=1)])[0] == ["not measured"]


# ---- critical path -------------------------------------------------------------------------------


def test_the_path_is_as_long_as_the_row_says():
    axes = a2a_ffn.critical(ONE).axes[0]
    for place, line in enumerate(schedules.best(schedules.lines(ONE))):
        bars = [p for p in axes.patches if round(p.get_y() + p.get_height() / 2) == place]
        wanted = line.slowest["critical"]
        assert sum(bar.get_width() for bar in bars) == pytest.approx(sum(wanted.values()))


# ---- times ---------------------------------------------------------------------------------------


def test_bars_ceiling_and_speedup_are_those_of_the_row():
    row = exchanges.row({"sm-free/4": 1.1})
    left, right = a2a_cost.times([row]).axes
    widths = {name: patches(left, name)[-1].get_width() for name in schedules.TIMES}
    assert widths == pytest.approx(
        {"serial": 3834, "overlap": 3834 / 1.1, "comm": 774, "wire": 306, "comp": 3060}
    )
    (ceiling,) = marks(right, "ceiling")
    assert ceiling.get_xdata()[0] == pytest.approx(1 + 860 / 3400)
    (speedup,) = marks(right, "speedup")
    assert list(speedup.get_xdata()) == [1, 1.1]
    header, (*_, whole, first, second) = a2a_cost.times_table([row])
    assert whole[header.index("serial / overlap (p10, p90)")] == "1.100 (1.080, 1.120)"
    assert whole[header.index("ceiling")] == "1.253" and whole[1:3] == ["documented", "slowest"]
    assert [line[2] for line in (first, second)] == ["0", "1"] and second[3] == "3,795.7"


def test_hot_is_drawn_and_every_state_is_in_the_table():
    left, _ = a2a_cost.times(FORWARD).axes
    assert patches(left, "comm")[0].get_width() == pytest.approx(860)  # documented: 774
    _, body = a2a_cost.times_table(FORWARD)
    assert {line[1] for line in body} == {"hot", "documented"}


def test_a_schedule_stands_at_its_best_chunk_count():
    rows = [exchanges.row({"sm-free/1": 1.0, "sm-free/4": 1.2, "sm-free/8": 1.1})]
    assert [line.variant for line in schedules.best(schedules.lines(rows))] == ["none", "sm-free/4"]
    assert [line[0] for line in a2a_cost.times_table(rows)[1][::3]] == ["none", "sm-free, 4 chunks"]


def test_rows_of_other_sizes_are_no_answers_to_each_other():
    rows = [exchanges.row({"sm-free/4": g}, batch=b) for b, g in ((512, 1.1), (4, 3.0))]
    names = [line[0] for line in a2a_cost.times_table(rows)[1] if line[2] == "slowest"]
    assert names[1::2] == [f"sm-free, 4 chunks, P = 2 bf16 ({n}, 64, 1280, 6)" for n in (4, 512)]


def test_a_planted_fault_is_in_no_figure():
    assert {line.row["case"]["fault"] for line in schedules.lines(exchanges.cpu())} == {"none"}


# ---- chunk counts --------------------------------------------------------------------------------


def test_one_line_a_schedule_ascending_in_chunks():
    left, right = a2a_cost.sweep(FORWARD).axes
    curves = [line for line in left.lines if len(line.get_xdata()) == 5]
    assert [list(line.get_xdata()) for line in curves] == [[1, 2, 4, 8, 16]] * 3
    assert list(curves[0].get_ydata()) == pytest.approx([0.94, 1.0, 1.04, 1.01, 0.84])
    assert min(min(line.get_ydata()) for line in right.lines) < -0.9  # losses are drawn
    shuffled = copy.deepcopy(FORWARD)
    shuffled[0]["result"]["lines"].reverse()
    assert [line[1] for line in a2a_cost.sweep_table(shuffled)[1]] == ["1", "2", "4", "8", "16"] * 3


# ---- sharing -------------------------------------------------------------------------------------


def test_what_a_product_pays_is_a_bar_from_one():
    rows = [exchanges.row({}, sharing=exchanges.beside())]
    figure = a2a_sharing.sharing(rows)
    assert titles(figure) == ["gemm1", "gemm2"]
    bars = patches(figure.axes[0], "cost")
    assert [bar.get_x() + bar.get_width() for bar in bars] == pytest.approx([1.0, 1.012, 1.081])
    assert "1.081   1,490 MHz" in looks.words(figure.axes[0])
    header, body = a2a_sharing.sharing_table(rows)
    assert "L2 bytes" not in header and body[2][header.index("SMs taken")] == "16"
    assert body[0][-3:] == ["-"] * 3 and body[2][-3:] == ["250", "500,000,000", "100%"]


def test_a_workload_is_shown_once_and_another_one_by_its_name():
    forward, backward, other = (
        exchanges.row({}, sharing=exchanges.beside(), **more)
        for more in ({}, {"backward": True}, {"batch": 64})
    )
    assert titles(a2a_sharing.sharing([forward, backward])) == ["gemm1", "gemm2"]
    named = titles(a2a_sharing.sharing([forward, other]))
    assert len(named) == 4 and "gemm1, P = 2 bf16 (64, 64, 1280, 6)" in named


def test_traces_say_what_all_products_pay_and_nothing_of_fused_ones():
    found = a2a_sharing.traced(ONE)
    assert {one["beside"] for one in found} == {"with-sm, 4 chunks", "sm-free, 4 chunks"}
    ratios = [one["ratio"]["median"] for one in found if one["what"].startswith("all products")]
    assert ratios == pytest.approx([2900 / 2820] * 2)
    slow = exchanges.row({"with-sm/4": 1.0})
    slow["result"]["seen"]["with-sm/4"][1]["kinds"]["gemm"] = 2 * 2820
    products, elementwise = a2a_sharing.sharing([slow]).axes
    assert [list(line.get_xdata()) for line in products.lines[:1]] == [[4]]
    (one,) = [o for o in a2a_sharing.traced([slow]) if o["what"].startswith("all products")]
    assert (one["ratio"]["p10"], one["ratio"]["p90"]) == (pytest.approx(2900 / 2820), 2.0)


def test_products_of_another_direction_are_no_base():
    rows = [exchanges.row({"sm-free/4": 1.1}), exchanges.row({"sm-free/4": 1.1}, backward=True)]
    del rows[1]["result"]["seen"]["none"]
    assert {one["beside"] for one in a2a_sharing.traced(rows)} == {"sm-free, 4 chunks, forward"}
