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
    assert marks == pytest.approx([time for time, *_ in BESIDE.values()])
    names = [label.get_text() for label in one.get_yticklabels()]
    assert names[2:] == ["32 SMs held", "32 SMs that copy"]
    assert "tensor cores 87%" in looks.words(one)[0] and "1,362 MHz" in looks.words(one)[0]


def test_the_table_of_what_is_beside_says_rates_and_both_ratios():
    header, body = counters.sharing_table(every())
    held = next(cells for cells in body if cells[1] == "32 SMs held")
    assert held[header.index("cycles / alone")] == "1.430"
    assert held[header.index("time / alone (p10, p90)")].startswith("1.260")
    assert [cells[header.index("moves alone, GB/s")] for cells in body[:2]] == ["-", "446"]


def test_bytes_stand_over_those_that_are_needed():
    left, right = counters.loads(every()).axes
    points = {mark.get_gid(): list(mark.get_xdata()) for mark in left.lines if mark.get_gid()}
    assert points["read"] == pytest.approx([1.0, 1.25, 1.25, 1.25])
    assert points["written"] == pytest.approx([1.0] * 4)
    rates = [bar.get_width() for bar in right.patches if bar.get_gid() == "rate"]
    assert rates == pytest.approx([1.0, 0.5, 0.5, 0.5])
    header, body = counters.loads_table(every())
    assert body[1][header.index("memory, GB/s")] == "2,500"


def test_a_call_begins_with_its_first_work():
    figure = counters.over_time(every())
    tensor, *_ = (curve for axes in figure.axes for curve in axes.lines
                  if curve.get_gid() == "tensor_cycles")  # fmt: skip
    assert list(tensor.get_xdata()) == [20.0 * n for n in range(1, 11)]
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
