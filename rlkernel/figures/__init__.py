"""Figures: one file an experiment, each function (rows of a record) -> matplotlib Figure, without
I/O.

A figure never stands alone. `Plot` binds three functions of the same rows: what is drawn, the
sentence that replaces the drawing for somebody who cannot see it, and the numbers behind it as a
table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[dict]
Table = tuple[list[str], list[list[str]]]


@dataclass(frozen=True)
class Plot:
    """A drawing, its text alternative and its numbers, all computed from the same rows."""

    title: str
    draw: Callable[[Rows], Figure]
    alt: Callable[[Rows], str]
    table: Callable[[Rows], Table]
    note: str = ""  # how to read it, in one or two sentences
