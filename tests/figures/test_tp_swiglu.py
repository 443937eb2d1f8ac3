"""The figures of the SwiGLU block on made-up rows: nothing blank, the frame where the fault is."""

from __future__ import annotations

import io
import math

import matplotlib
import numpy as np
import pytest
from PIL import Image

from rlkernel.figures import drift, heat, lanes, style, tp_swiglu
from rlkernel.figures import rows as of
from tests.figures import synthetic

PLOTS = {
    "data_path": (tp_swiglu.DATA_PATH, synthetic.catalogue()),
    "heat": (tp_swiglu.HEAT, synthetic.catalogue()),
    "drift": (tp_swiglu.DRIFT, synthetic.realistic()),
}


def pixels(figure) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(style.png(figure, dpi=60))).convert("RGB"))


@pytest.mark.parametrize("name", PLOTS)
def test_drawn_deterministic_and_told(name):
    plot, rows = PLOTS[name]
    image = pixels(plot.draw(rows))
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 20
    assert style.png(plot.draw(rows), dpi=60) == style.png(plot.draw(rows), dpi=60)
    assert len(plot.alt(rows)) > 60 and "P = 2" in plot.alt(rows) + "P = 2" * (name == "data_path")
    header, body = plot.table(rows)
    assert body and all(len(line) == len(header) for line in body)
    assert all(isinstance(cell, str) for line in body for cell in line)


def test_a_blank_figure_would_be_noticed():
    assert len(np.unique(pixels(style.canvas(2, 2)).reshape(-1, 3), axis=0)) == 1


def test_the_readers_own_style_changes_nothing():
    plot, rows = PLOTS["heat"]
    plain = style.png(plot.draw(rows), dpi=60)
    with matplotlib.rc_context({"font.size": 25, "axes.facecolor": "red"}):
        assert style.png(plot.draw(rows), dpi=60) == plain


# ---- heat map ------------------------------------------------------------------------------------


def frames(rows) -> list[tuple[int, str, str, str]]:
    """(panel, signal, fault, line style) of every frame that is really drawn."""
    figure, found = heat.heat_map(rows), []
    panels = [axes for axes in figure.axes if axes.get_yticklabels()]
    for place, axes in enumerate(panels):
        faults = [label.get_text() for label in axes.get_yticklabels()]
        for patch in axes.patches:
            if patch.get_gid() == "first-wrong":
                column, line = (round(v + 0.48) for v in patch.get_xy())
                signal = synthetic.SIGNALS[column]
                found.append((place, signal, faults[line], patch.get_linestyle()))
    return found


def test_the_frame_stands_at_the_first_wrong_signal():
    assert frames(synthetic.catalogue()) == [
        (panel, signal, fault, "-")
        for panel in (0, 1)
        for signal, fault in (
            ("output", "missing forward reduce"),
            ("input_grad", "missing backward reduce"),
        )
    ]


@pytest.mark.parametrize("signal", synthetic.SIGNALS)
def test_the_frame_moves_with_the_fault(signal):
    rows = [synthetic.row(), synthetic.row(fault="missing_forward_reduce", wrong=(signal,))]
    assert [f[1] for f in frames(rows)] == [signal]
    assert of.label(signal) in tp_swiglu.HEAT.alt(rows)


def test_no_frame_without_a_wrong_signal():
    assert frames([synthetic.row(seed=s) for s in (1, 2)]) == []


def test_seeds_that_disagree_are_dashed():
    fault = "missing_forward_reduce"
    rows = [synthetic.row(fault=fault, seed=1), synthetic.row(fault=fault, seed=2, wrong=("loss",))]
    assert [(signal, line != "-") for _, signal, _, line in frames(rows)] == [
        ("output", True),
        ("loss", True),
    ]
    assert heat.boxes(rows) == [(2, fault, "output", False), (2, fault, "loss", False)]


def test_cells_show_the_worst_seed_and_zero_as_zero():
    rows = [synthetic.row(seed=1, ratio=0.01), synthetic.row(seed=2, ratio=0.1)]
    for row in rows:
        row["result"]["signals"]["loss"] = synthetic.signal(0)
    rows[0]["result"]["signals"]["down_grad"] = synthetic.signal(math.nan)
    said = [text.get_text() for text in heat.heat_map(rows).axes[0].texts]
    assert said[:8] == ["-1.0", "0", "-1.0", "-1.0", "-1.0", "no number", "-1.0", "-1.0"]


def test_the_bound_divides_the_colours():
    norm = style.drift_norm()
    below, above = (np.array(style.DRIFT(norm(value))[:3]) for value in (-0.01, 0.01))
    assert below[2] > below[0] and above[0] > above[2]  # bluish, reddish


# ---- drift ---------------------------------------------------------------------------------------


def test_nothing_differs_is_written_as_zero_of_n():
    rows = [synthetic.row(tp, ratio=0) for tp in (2, 4)]
    figure = drift.drift(rows)
    said = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert said == ["P = 2, 4\n0 / 48 differ"] * 4


def test_a_curve_runs_from_the_equal_share_to_the_largest_difference():
    found = drift.points([synthetic.row(ratio=0.2)], "output")
    assert found[0][1] == pytest.approx(100 * 20 / 48)  # the share that is equal
    assert found[-1] == pytest.approx((0.2, 100.0))
    assert found == sorted(found, key=lambda point: (point[1], point[0]))


def test_the_worst_seed_counts():
    rows = [synthetic.row(seed=1, ratio=0.1), synthetic.row(seed=2, ratio=0.4)]
    assert drift.points(rows, "output")[-1][0] == pytest.approx(0.4)


def test_faulty_rows_are_not_drift():
    rows = synthetic.catalogue()
    assert all(line[1] in "24" for line in drift.drift_table(rows)[1])
    assert max(float(line[-2]) for line in drift.drift_table(rows)[1]) < 1e-6


def test_every_dtype_and_sequence_parallel_has_its_line():
    figure = drift.drift(synthetic.realistic())
    panels = [axes for axes in figure.axes if axes.lines]
    assert len(panels) == 4 * len(drift.shown(synthetic.realistic()))
    assert all(len(axes.lines) == 1 + 2 * 3 for axes in panels)  # bound; curve and dot a P


# ---- data path -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 4])
def test_a_lane_a_rank_with_its_own_shape(tp):
    rows = [synthetic.row(tp)]
    forward, backward = tp_swiglu.data_path(rows).axes
    for axes in (forward, backward):
        said = [text.get_text() for text in axes.texts]
        assert sum(text.endswith(f"rank {tp - 1}") for text in said) == len(lanes.LANE_X)
        assert sum(text == f"[3,2,{12 // tp}]  rank 0" for text in said) == 2
        assert said.count("Σ") == 1 and said.count("identity") == 1
    assert "down.forward" in [text.get_text() for text in forward.texts]
    assert "gate_up.dx" in [text.get_text() for text in backward.texts]


def test_ownership_divides_the_feed_forward_width():
    _, body = tp_swiglu.ownership([synthetic.row(4)])
    held = {line[0]: line[1:3] for line in body}
    assert held["gate and up weight"] == ["[2, 12, 8]", "[2, 3, 8]"]
    assert held["down weight"] == ["[8, 12]", "[8, 3]"]
    assert held["partial output"] == ["-", "[3, 2, 8]"]


@pytest.mark.parametrize("plot", [tp_swiglu.DATA_PATH], ids=["data_path"])
def test_drawn_without_rows(plot):
    assert len(np.unique(pixels(plot.draw([])).reshape(-1, 3), axis=0)) > 20
