"""Figure of the sequential call under other settings, over each schedule.

`none` has one pass between its products, as every schedule has. With torch's own operators there,
eager or compiled, it is slower for a reason that has nothing to do with overlap: such a ratio is
labelled wherever it is shown.
"""

from __future__ import annotations

from matplotlib.lines import Line2D

from . import Plot, Rows, Table, schedules, style
from .schedules import LOOK, Line

LABEL = "other settings"
HOWS = {"eager": "o", "compiled": "s"}  # how torch's operators run, and its mark
COMMAND = f"{schedules.COMMAND} --no-compile --overlap kernel --other-none {','.join(HOWS)}"
NOT_MEASURED = f"NOT MEASURED here. On a machine with two GPUs: {COMMAND}"


def _timed(rows: Rows, every: bool = False) -> list[Line]:
    """Each schedule at its best chunk count, where `none` was timed under other settings."""
    found = schedules.best([line for line in schedules.lines(rows, every) if line.timed])
    return [line for line in found if any(map(line.other, HOWS))]


@style.styled
def settings(rows: Rows):
    """Time of `none` over the schedule's, with p10 to p90: torch's operators eager and compiled,
    and beside them, hollow, the same settings as the schedule's own."""
    found = _timed(rows)
    if not found:
        return schedules.gap("none under other settings was not timed", COMMAND)
    figure = style.canvas(style.WIDTH, 1.0 + 0.5 * len(found))
    axes = figure.subplots()
    for place, line in enumerate(found):
        colour = LOOK[line.schedule]["color"]
        told = [(how, mark, line.other(how)) for how, mark in HOWS.items() if line.other(how)]
        for how, mark, ratio in (*told, ("same", "D", line.speedup)):
            face = style.PAPER if how == "same" else colour
            axes.hlines(place, ratio["p10"], ratio["p90"], color=colour, lw=2)
            axes.plot([ratio["median"]], [place], marker=mark, color=colour, mfc=face, ls="",
                      markersize=7, gid=how)  # fmt: skip
            axes.annotate(f"{ratio['median']:.3f}", (ratio["median"], place), (0, 9), ha="center",
                          textcoords="offset points", fontsize=8.5)  # fmt: skip
    axes.axvline(1, color=style.LIMIT, lw=1.2, zorder=0)
    axes.set_yticks(range(len(found)), [schedules.title(line, found) for line in found],
                    color=style.INK)  # fmt: skip
    axes.set_ylim(len(found) - 0.5, -0.7)
    axes.margins(x=0.08)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time of none over the schedule's; filled: {LABEL}")
    how = {"linestyle": "", "color": style.INK, "markersize": 7}
    marks = [Line2D([], [], marker=mark, label=f"{name}, {LABEL}", **how)
             for name, mark in HOWS.items()]  # fmt: skip
    marks.append(Line2D([], [], marker="D", mfc=style.PAPER, label="the same settings", **how))
    figure.legend(handles=marks, loc="outside upper right", ncols=3, frameon=False, fontsize=8.5)
    return figure


def settings_alt(rows: Rows) -> str:
    found = _timed(rows)
    if not found:
        return NOT_MEASURED
    parts = []
    for line in found:
        told = [f"{how} {line.other(how)['median']:.3f}" for how in HOWS if line.other(how)]
        parts.append(f"{schedules.title(line, found)}: {', '.join(told)}, "
                     f"under the same settings {line.speedup['median']:.3f}")  # fmt: skip
    return f"Time of none under {LABEL} over that of each schedule. {'; '.join(parts)}."


def settings_table(rows: Rows) -> Table:
    """One line a schedule and state; times of the slowest rank."""
    found = _timed(rows, every=True)
    header = ["schedule", "state", *(f"none, {how}, µs" for how in HOWS),
              *(f"{LABEL}: {how} none / it (p10, p90)" for how in HOWS),
              "same settings: none / it (p10, p90)"]  # fmt: skip
    body = []
    for line in found:
        others = line.row["result"]["times"][line.state]["others"]
        each = [others[how]["slowest"]["median_us"] if how in others else None for how in HOWS]
        body.append([
            schedules.title(line, found), line.state,
            *("-" if us is None else f"{us:,.1f}" for us in each),
            *(schedules.spread(line.other(how), "{:.3f}".format) for how in HOWS),
            schedules.spread(line.speedup, "{:.3f}".format),
        ])  # fmt: skip
    return (header, body) if body else (["not measured"], [[NOT_MEASURED]])


SETTINGS = Plot(
    f"The sequential call under {LABEL}",
    settings,
    settings_alt,
    settings_table,
    f"Not like for like ({LABEL}): torch's own operators between its products, where every "
    "schedule has one pass. Hollow: none as it is everywhere else. Red: as fast as none.",
)
