"""What the tests of all figures ask of a drawing."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from rlkernel.figures import Plot, style


def pixels(figure) -> np.ndarray:
    """[height, width, 3] of the figure as it is saved."""
    return np.asarray(Image.open(io.BytesIO(style.png(figure, dpi=60))).convert("RGB"))


def drawn_and_told(plot: Plot, rows) -> None:
    """Not blank, the same bytes twice, a text alternative, a table of text with equal lines."""
    assert len(np.unique(pixels(plot.draw(rows)).reshape(-1, 3), axis=0)) > 20
    assert style.png(plot.draw(rows), dpi=60) == style.png(plot.draw(rows), dpi=60)
    assert len(plot.alt(rows)) > 60
    header, body = plot.table(rows)
    assert body and all(len(line) == len(header) for line in body)
    assert all(isinstance(cell, str) for line in body for cell in line)


def words(axes) -> list[str]:
    """Every text on axes, in the order in which it was drawn."""
    return [text.get_text() for text in axes.texts]
