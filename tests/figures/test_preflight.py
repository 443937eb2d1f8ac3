"""The preflight's figures on made-up rows."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from rlkernel.figures import preflight, style


def row(tp: int, message: int, micro: float) -> dict:
    seconds = micro * 1e-6
    return {
        "case": {"grid": {"dp": 1, "cp": 1, "tp": tp}, "parameters": {"message": message}},
        "result": {
            "median_seconds": seconds,
            "fastest_seconds": seconds / 2,
            "slowest_seconds": seconds * 3,
        },
        "backend": "gloo",
    }


ROWS = [row(tp, size, 10 * tp + size / 1e4) for tp in (2, 1) for size in (2**23, 2**13)]


@pytest.mark.parametrize("plot", [preflight.WAY, preflight.COST], ids=lambda p: p.title)
def test_drawn_and_told(plot):
    image = Image.open(io.BytesIO(style.png(plot.draw(ROWS), dpi=60))).convert("RGB")
    assert len(np.unique(np.asarray(image).reshape(-1, 3), axis=0)) > 20
    assert len(plot.alt(ROWS)) > 60
    header, body = plot.table(ROWS)
    assert body and all(len(line) == len(header) for line in body)


def test_curves_are_sorted_and_named():
    axes = preflight.cost(ROWS).axes[0]
    assert [text.get_text() for text in axes.texts] == ["1 rank (a copy)", "2 ranks"]
    for line in axes.lines:
        assert list(line.get_xdata()) == sorted(line.get_xdata())
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["8 KiB", "8 MiB"]


def test_table_is_in_microseconds():
    assert preflight.cost_table(ROWS)[1][0] == ["1", "8 KiB", "gloo", "11", "5", "32"]


def test_every_station_is_drawn():
    said = [text.get_text() for text in preflight.way().axes[0].texts]
    assert [s for s in said if s in ("parameters", "cases", "worker", "record", "page")] == [
        "parameters", "cases", "worker", "record", "page",
    ]  # fmt: skip


def test_public_checks_have_no_message_to_draw():
    case = {"grid": {"dp": 1, "cp": 1, "tp": 1}, "parameters": {"what": "complete block at EP=1"}}
    more = [*ROWS, {"case": case, "result": {"checks": []}}]
    assert preflight.cost_table(more) == preflight.cost_table(ROWS)
    assert preflight.cost_alt(more) == preflight.cost_alt(ROWS)
