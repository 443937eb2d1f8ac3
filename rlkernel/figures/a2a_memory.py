"""Figure of what each schedule of the A2A-FFN takes of its GPU at the peak, over `none`.

Device-wide, as the driver counts it: weights, workspaces and memory that is mapped for peers are in
it. Taken at the first chunk count of a row.
"""

from __future__ import annotations

from . import Plot, Rows, Table, schedules, style
from . import rows as of
from .schedules import LOOK, Line

MUST, BEYOND = 0.10, 0.0  # over none, of the fused kernel: what it may take, what it should
COMMAND = f"{schedules.COMMAND} --no-compile --overlap with-sm,sm-free,kernel"
NOT_MEASURED = f"NOT MEASURED here. On a machine with two GPUs: {COMMAND}"
GIB = 2**30


def measured(rows: Rows) -> list[Line]:
    """Every schedule whose peak a row holds, `none` first."""
    return [
        Line(row, name, 1 if name == "none" else int(of.option(row, "chunks", "1").split("+")[0]))
        for row in rows if row["case"]["fault"] == "none"
        for name in schedules.ORDER if name in (row["result"].get("memory") or {})
    ]  # fmt: skip


def peaks(line: Line) -> list[int]:
    """Bytes, rank by rank."""
    return line.row["result"]["memory"][line.schedule]


def over(line: Line) -> list[float]:
    """Of each rank's GPU, what it takes more than `none` there; a fraction with its sign."""
    base = line.row["result"]["memory"]["none"]
    return [own / other - 1 for own, other in zip(peaks(line), base, strict=True)]


@style.styled
def memory(rows: Rows):
    """Peak over none's in percent, a bar a rank, with the bytes behind it. Red: the limit."""
    found = [line for line in measured(rows) if line.schedule != "none"]
    if not found:
        return schedules.gap("no peak was taken", COMMAND)
    figure = style.canvas(style.WIDTH, 0.85 + 0.5 * len(found))
    axes = figure.subplots()
    for place, line in enumerate(found):
        ranks = list(zip(over(line), peaks(line), strict=True))
        height = 0.8 / len(ranks)
        for rank, (more, peak) in enumerate(ranks):
            y = place - 0.4 + (rank + 0.5) * height
            axes.barh(y, 100 * more, height=0.86 * height, lw=0, gid="peak",
                      color=LOOK[line.schedule]["color"])  # fmt: skip
            axes.annotate(f"rank {rank}: {more:+.1%}, {peak / GIB:.2f} GiB",
                          (max(100 * more, 0), y), (6, 0), textcoords="offset points",
                          va="center", fontsize=8.5)  # fmt: skip
    axes.axvline(0, color=style.INK, lw=1)
    axes.axvline(100 * MUST, color=style.LIMIT, lw=1.2, gid="limit")
    axes.set_yticks(range(len(found)), [schedules.title(line, found) for line in found],
                    color=style.INK)  # fmt: skip
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.margins(x=0.3)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("peak over that of none, %")
    return figure


def memory_alt(rows: Rows) -> str:
    found = measured(rows)
    if not found:
        return NOT_MEASURED
    parts = []
    for line in found:
        ranks = enumerate(zip(over(line), peaks(line), strict=True))
        told = [f"rank {rank} {more:+.1%} ({peak / GIB:.2f} GiB)" for rank, (more, peak) in ranks]
        parts.append(f"{schedules.title(line, found)}: {', '.join(told)}")
    return f"Peak memory over that of none, limit {MUST:+.0%}. {'; '.join(parts)}."


def memory_table(rows: Rows) -> Table:
    found = measured(rows)
    body = [
        [schedules.title(line, found), str(rank), f"{peak:,}", f"{peak / GIB:.2f}",
         f"{more:+.2%}", _held(line, more)]
        for line in found
        for rank, (more, peak) in enumerate(zip(over(line), peaks(line), strict=True))
    ]  # fmt: skip
    header = ["schedule", "rank", "peak, bytes", "GiB", "over none", f"limit {MUST:+.0%}"]
    return (header, body) if body else (["not measured"], [[NOT_MEASURED]])


def _held(line: Line, more: float) -> str:
    """Only the fused kernel is held to it."""
    if line.schedule != "kernel":
        return "-"
    return "holds" if more <= MUST else "missed"


MEMORY = Plot(
    "What each schedule takes at its peak",
    memory,
    memory_alt,
    memory_table,
    "Of the whole GPU: weights, inputs, workspaces and what is mapped for peers. Each schedule "
    "without what the others keep. Red: what the fused kernel may take beyond none.",
)
