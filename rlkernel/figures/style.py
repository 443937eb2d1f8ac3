"""One look for every figure: colours, type sizes, and equal PNG bytes for equal data.

The colours are told apart with the common forms of colour blindness, and each of them means one
thing everywhere:

    INK     text and what is measured          RANKS   a tensor that only this rank holds
    MUTED   axes, units, remarks               WHOLE   a tensor that every rank holds in full
    SUM     a place where ranks add            LIMIT   a bound that must not be passed
"""

from __future__ import annotations

import io

import matplotlib
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from PIL import Image  # matplotlib itself writes its PNG with it

WIDTH = 10.6  # inches of a full-width figure

INK, MUTED, FAINT, PAPER = "#1c2733", "#5d6b7a", "#d5dce3", "#ffffff"
SUM = LIMIT = "#c3401f"
WHOLE = "#e8edf2"
RANKS = ("#2f6db5", "#e3941c", "#2a9079", "#9a5fb0", "#6bb3e0", "#b5562f", "#7d8f2a", "#5a5f8f")
PASS, FAIL = "#2a9079", SUM

# One order of additions each; a mark of its own (figures/contracts.py) says the same again.
CONTRACTS = ("#1f5a99", "#e3941c", "#2a9079", "#9a5fb0", "#5d6b7a")

# Ordered amounts (a number of ranks): one hue, light to dark, so that the order is seen without a
# legend.
STEPS = ("#8fb8dd", "#4d8cc7", "#1f5a99", "#0d3259")

# Below the bound cool, above it warm, with a step at the bound: a check is passed or it is not.
DRIFT = LinearSegmentedColormap.from_list(
    "drift",
    [(0, "#7fb2dc"), (0.5, "#e4eff8"), (0.5, "#fde2c6"), (0.7, "#f0a25f"), (1, "#8c2410")],
)

RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "path.simplify": True,
}


def styled(function):
    """Decorator: draw under RC whatever the reader's own matplotlibrc says."""

    def draw(*args, **kwargs):
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **RC, "backend": "agg"}):
            return function(*args, **kwargs)

    draw.__name__, draw.__doc__, draw.__wrapped__ = function.__name__, function.__doc__, function
    return draw


def canvas(width: float, height: float) -> Figure:
    """An empty figure of that size in inches; no window, so nothing has to be closed."""
    return Figure(figsize=(width, height), layout="constrained")


def bare(axes) -> None:
    """Turn axes into a drawing board: no ticks, no frame."""
    axes.set_axis_off()
    axes.set_aspect("auto")


def drift_norm(low: float = -3.0, high: float = 6.0) -> TwoSlopeNorm:
    """Colour scale of log10(difference / bound): the bound (0) sits in the middle of DRIFT."""
    return TwoSlopeNorm(vmin=low, vcenter=0.0, vmax=high)


def ink_on(rgba) -> str:
    """Black or white, whichever is read better on that colour (relative luminance)."""
    red, green, blue = rgba[:3]
    return INK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5 else PAPER


def png(figure: Figure, dpi: int = 200, colours: int = 0) -> bytes:
    """The figure as PNG bytes; equal data give equal bytes (no date, no version in the file).

    colours: of a palette, at most 256, which makes a drawing a third as large; 0: all of them.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    if not colours:
        return buffer.getvalue()
    small = io.BytesIO()
    whole = Image.open(buffer).convert("RGB")
    whole.quantize(colours, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def number(value: float | None, digits: int = 3) -> str:
    """A measured number for a table: `0` for zero, otherwise that many significant digits."""
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.{digits}g}"
