"""The figure of wire on made-up rows."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from rlkernel.figures import style, wire


def line(name: str, message: int, us: float, graph: bool, ratio: float | None) -> dict:
    found = {"variant": name, "message": message, "graph": graph, "floor_us": message / 4e5}
    found |= {"median_us": us, "p10_us": us * 0.9, "p90_us": us * 1.2}
    if ratio:
        found["ratio"] = {"median": ratio, "p10": ratio * 0.9, "p90": ratio * 1.1}
    return found


def row(tp: int, message: int) -> dict:
    us = 10 + message / 2e5
    names = {"this transport": 0.4, "process group": 1.7, "library": None, "one word": 0.3}
    lines = [
        line(name, message, us * (ratio or 1), graph, ratio)
        for name, ratio in names.items()
        for graph in (True, False)
    ]
    case = {"grid": {"dp": 1, "cp": 1, "tp": tp}, "parameters": {"message": message}}
    return {"case": case, "result": {"transport": "symmetric memory", "lines": lines}}


ROWS = [row(tp, size) for tp in (2, 4) for size in (2**24, 2**14)]


def test_drawn_and_told():
    image = Image.open(io.BytesIO(style.png(wire.COST.draw(ROWS), dpi=60))).convert("RGB")
    assert len(np.unique(np.asarray(image).reshape(-1, 3), axis=0)) > 20
    assert "2 ranks, 16 KiB" in wire.cost_alt(ROWS) and "0.40 of the library" in wire.cost_alt(ROWS)
    header, body = wire.cost_table(ROWS)
    assert all(len(found) == len(header) for found in body) and len(body) == 2 * 2 * 2 * 4
    assert body[0][:4] == ["2", "16 KiB", "library all-reduce", "graph"]


def test_a_column_a_group_curves_sorted_and_the_bars_drawn():
    figure = wire.cost(ROWS)
    assert len(figure.axes) == 4
    above, below = figure.axes[0], figure.axes[2]
    assert [t.get_text() for t in above.get_legend().get_texts()] == [
        "library all-reduce", "tree over the process group", "tree over symmetric memory",
    ]  # fmt: skip
    for curve in above.lines:
        assert list(curve.get_xdata()) == sorted(curve.get_xdata())
    assert "as fast as the library" in {text.get_text() for text in below.texts}


def test_nothing_timed_is_a_visible_gap():
    none = [{**r, "result": {**r["result"], "lines": []}} for r in ROWS]
    assert "NOT MEASURED" in wire.cost(none).axes[0].texts[0].get_text()
    assert "NOT MEASURED" in wire.cost_alt(none) and wire.cost_table(none)[0] == ["not measured"]
