"""Figures of hardware counters, on made-up rows."""

from __future__ import annotations

import pytest

from rlkernel.figures import counters, style
from tests.figures import looks
from tests.figures.counted import BESIDE, every, row, timeline

PLOTS = (counters.SHARING, counters.LOADS, counters.OVER_TIME)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda p: p.title)
def test_drawn_and_told(plot):
    looks.drawn_and_told(plot, every())


@pytest.mark.parametrize("plot", PLOTS, ids=lambda p: p.title)
@pytest.mark.parametrize("rows", [[], [row("calibration", "half-copy", lines=[{"kernel": "x"}])]])
def test_what_is_not_there_is_not_measured(plot, rows):
    (axes,) = plot.draw(rows).axes
    told = [*looks.words(axes), plot.alt(rows), plot.table(rows)[1][0][0]]
    assert all("NOT MEASURED" in text and "make counters" in text for text in told)


def test_bars_are_cycles_and_marks_are_time():
    one, two = counters.sharing(every()).axes
    assert [axes.get_title(loc="left") for axes in (one, two)] == ["gemm1", "gemm2"]
    bars = [bar.get_width() for bar in one.patches if bar.get_gid() == "cycles"]
    marks = [mark.get_xdata()[0] for mark in one.lines if mark.get_gid() == "time"]
    assert bars == pytest.approx([cycles - 1 for _, cycles, _ in BESIDE.values()])
    assert all(bar.get_x() == 1 for bar in one.patches if bar.get_gid() == "cycles")
    assert marks == pytest.approx([time for time, *_ in BESIDE.values()])
    names = [label.get_text() for label in one.get_yticklabels()]
    assert names == ["alone", "copies to and from the host", "32 SMs held", "32 SMs that copy"]
    said = looks.words(one)[0]
    assert all(words in said for words in ("tensor cores 87%", "1,362 MHz", "1.50 + 1.00 GB"))
    spread = [line.get_segments()[0][:, 0].tolist() for line in one.collections]
    assert spread == [pytest.approx([t - 0.01, t + 0.01]) for t, *_ in BESIDE.values()]
    assert "beside alone" not in counters.sharing_alt(every())


@pytest.mark.parametrize("plot", PLOTS, ids=lambda p: p.title)
def test_all_of_it_is_inside_and_the_first_line_on_top(plot):
    figure = plot.draw(every())
    figure.canvas.draw()
    for axes in figure.axes:
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        bottom, top = min(bottom, top), max(bottom, top)
        for bar in axes.patches:
            assert left <= bar.get_x() and bar.get_x() + bar.get_width() <= right
            assert bottom <= bar.get_y() and bar.get_y() + bar.get_height() <= top
        for x, y in (xy for curve in axes.lines if curve.get_gid() for xy in curve.get_xydata()):
            assert left <= x <= right and bottom <= y <= top
        for text in axes.texts:
            assert text.get_window_extent().x1 <= figure.bbox.x1
    if plot is not counters.OVER_TIME:
        assert all(axes.yaxis_inverted() for axes in figure.axes)


def test_the_table_of_what_is_beside_says_rates_and_both_ratios():
    header, body = counters.sharing_table(every())
    held = next(cells for cells in body if cells[1] == "32 SMs held")
    assert held[header.index("cycles / alone")] == "1.430"
    assert held[header.index("time / alone (p10, p90)")].startswith("1.260")
    assert [cells[header.index("moves alone, GB/s")] for cells in body[:2]] == ["-", "446"]
    start = header.index("memory read, MB")
    assert held[start:] == ["1,500", "1,000", "11,000", "98%", "87%", "1,362"]


def test_bytes_stand_over_those_that_are_needed():
    left, right = counters.loads(every()).axes
    points = {mark.get_gid(): list(mark.get_xdata()) for mark in left.lines if mark.get_gid()}
    assert points["read"] == pytest.approx([1.0, 1.25, 1.25, 1.25])
    assert points["written"] == pytest.approx([1.0] * 4)
    tensor = [bar.get_width() for bar in right.patches if bar.get_gid() == "tensor"]
    assert tensor == pytest.approx([0.87] * 4)
    rates = [bar.get_width() for bar in right.patches if bar.get_gid() == "rate"]
    assert rates == pytest.approx([1.0, 0.5, 0.5, 0.5])
    header, body = counters.loads_table(every())
    start = header.index("memory read, MB")
    assert body[1][start : start + 5] == ["1,500", "1.250", "1,000", "1.000", "2,500"]


def test_a_call_begins_with_its_first_work():
    figure = counters.over_time(every())
    tensor, *_ = (curve for axes in figure.axes for curve in axes.lines
                  if curve.get_gid() == "tensor_cycles")  # fmt: skip
    assert list(tensor.get_xdata()) == [20.0 * n for n in range(1, 11)]
    assert tensor.get_drawstyle() == "steps-pre"  # these are the ends of the intervals
    header, body = counters.over_time_table(every())
    assert body[0][1] == "200" and body[0][header.index("tensor cores, mean")] == "89%"
    assert body[0][header.index("MHz, least")] == "1,402"
    assert "up to 1,287 GB/s" in counters.over_time_alt(every())


def test_a_call_in_which_nothing_ran_is_no_call():
    still = timeline()
    for seen in still["result"]["timeline"].values():
        seen["sm_cycles"] = [0.0] * 13
    assert counters.over_time_table([still])[0] == ["not measured"]


def test_colours_are_the_house_s():
    assert {counters.READ, counters.WRITTEN, counters.L2, counters.TENSOR} <= set(style.RANKS)
