"""Reading rows of a2a-ffn: what its figures share; pure, of plain dicts.

A row is one workload; every schedule and chunk count of it was timed in the same rounds, call by
call. A `Line` is one of them. Times are microseconds of the slowest rank of each round.
"""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from . import Rows, style
from . import rows as of

ORDER = ("none", "with-sm", "sm-free", "kernel")
TIMES = ("serial", "overlap", "comm", "wire", "comp")
COMMAND = "python -m rlkernel a2a-ffn --device cuda --nproc 2"
NOT_MEASURED = f"NOT MEASURED here. On a machine with two GPUs: {COMMAND}"
EXPOSED = "#f6d5cb"
NOISE, FADED = 0.25, 0.35  # half the width of a 95 % interval from which an estimate is pale

LOOK = {
    "none": {"color": style.MUTED, "marker": "v"},
    "with-sm": {"color": style.RANKS[5], "marker": "s"},
    "sm-free": {"color": style.RANKS[2], "marker": "D"},
    "kernel": {"color": style.RANKS[0], "marker": "o"},
}
# What a stretch of a trace is, the same in every figure.
KINDS = {
    "gemm": ("product", "#1f5a99"),
    "elementwise": ("element-wise", "#8fb8dd"),
    "comm": ("communication", "#e3941c"),
    "copy": ("packing, copy", "#aab4be"),
    "wait": ("waiting", "#ded6ea"),
    "fused": ("fused: exchange and product", "#9a5fb0"),
    "idle": ("idle", "#f1f3f5"),
}
COMPUTE = ("gemm", "elementwise")


@dataclass(frozen=True)
class Line:
    """One schedule at one chunk count of one row, in one state of the chip (None: not timed)."""

    row: dict
    schedule: str
    chunks: int = 1
    path: str = ""
    state: str | None = None

    @property
    def variant(self) -> str:
        """Its name in times, samples and traces."""
        return self.schedule if self.schedule == "none" else f"{self.schedule}/{self.chunks}"

    @property
    def backward(self) -> bool:
        return of.option(self.row, "backward").lower() == "true"

    @property
    def ranks(self) -> int:
        """P, those that exchange."""
        return of.lanes(self.row)

    @property
    def direction(self) -> str:
        return "forward and backward" if self.backward else "forward"

    @property
    def where(self) -> str:
        """Ranks, dtype and sizes: lines that differ here are no answers to each other."""
        sizes = ", ".join(of.option(self.row, name) for name in ("batch", "tokens", "dim", "k"))
        return f"P = {self.ranks} {self.row['case']['dtype']} ({sizes})"

    @property
    def timed(self) -> dict:
        """What was timed of this schedule; {} where nothing was, and for none."""
        return self._state.get("schedules", {}).get(self.variant, {})

    @property
    def times(self) -> dict[str, dict]:
        """serial, overlap, comm, wire, comp -> a term, those that were measured."""
        terms = {**self._state.get("terms", {})}
        found = {"serial": terms.get("none"), "overlap": self.timed or None}
        found |= {name: terms.get(name) for name in ("comm", "wire", "comp")}
        return {name: term for name, term in found.items() if term}

    def us(self, name: str, rank: int | None = None) -> float | None:
        """The median of one of the times: of the slowest rank of each round, or of one rank."""
        term = self.times.get(name)
        if not term:
            return None
        return (term["slowest"] if rank is None else term["ranks"][rank])["median_us"]

    @property
    def speedup(self) -> dict | None:
        """T serial / T overlap, paired by round: {"median", "p10", "p90"}."""
        return self.timed.get("ratio")

    @property
    def estimate(self) -> dict | None:
        """(T serial - T overlap) / T comm with its sign: {"median", "p10", "p90", "mean", "ci95"},
        ci95 being half the width of the mean's 95 % interval.
        """
        return self.timed.get("hidden")

    @property
    def noisy(self) -> bool:
        """Whether the estimate could as well be another one: it is shown pale, and says so."""
        return bool(self.estimate) and self.estimate["ci95"] > NOISE

    @property
    def ceiling(self) -> float | None:
        """1 + T comm / T comp of the same run: what hiding all of the communication would give."""
        comm, comp = self.us("comm"), self.us("comp")
        return 1 + comm / comp if comm and comp else None

    @property
    def balance(self) -> float | None:
        """T comp / T comm of the same run."""
        comm, comp = self.us("comm"), self.us("comp")
        return comp / comm if comm and comp else None

    @property
    def reached(self) -> dict[str, dict]:
        """Between nodes, by "time" and by "trace": hidden / min(1, T comp / T comm) as {"mean",
        "ci95", "why"}, why it is no measurement; {} on one node.
        """
        return self.timed.get("reached", {})

    def other(self, how: str) -> dict | None:
        """`none` with torch's operators between its products, "eager" or "compiled", over this:
        paired as `speedup` is, and other settings, so no like for like.
        """
        told = self._state.get("others", {}).get(how, {})
        return told.get("ratio", {}).get(self.variant)

    @property
    def seen(self) -> list[dict]:
        """What the analyser said of each rank's trace (records/trace.py); [] without one."""
        return (self.row["result"].get("seen") or {}).get(self.variant, [])

    @property
    def slowest(self) -> dict:
        """The traced rank whose call took longest."""
        return max(self.seen, key=lambda rank: rank["span_us"])

    @property
    def least(self) -> float | None:
        """The hidden fraction in the trace of the rank that hides least."""
        told = [rank["hidden"] for rank in self.seen if rank["hidden"] is not None]
        return min(told) if told else None

    @property
    def _state(self) -> dict:
        return (self.row["result"].get("times") or {}).get(self.state, {})


def states(row: dict) -> list[str]:
    """The states of the chip in which a row was timed: hot first, as every bar is read there."""
    return sorted(row["result"].get("times") or {}, key=lambda state: state != "hot")


def lines(rows: Rows, every: bool = False) -> list[Line]:
    """Each schedule of each faultless row: in the first of its states, or in every one."""
    found = []
    for row in rows:
        if row["case"]["fault"] != "none" or "lines" not in row["result"]:
            continue
        shown = states(row) or [None]
        for state in shown if every else shown[:1]:
            found.append(Line(row, "none", 1, row["result"].get("none_path", ""), state))
            found += [
                Line(row, one["schedule"], one["chunks"], one.get("path", ""), state)
                for one in row["result"]["lines"]
            ]
    return found


def apart(rows: Rows) -> list[dict]:
    """Rows with one overlapped schedule each, named in their parameters, so that one is chosen."""
    found = []
    for row in rows:
        for line in row["result"].get("lines", ()) if row["case"]["fault"] == "none" else ():
            given = {**row["case"]["parameters"], "schedule": line["variant"]}
            case, result = {**row["case"], "parameters": given}, {**row["result"], "lines": [line]}
            found.append({**row, "case": case, "result": result})
    return found


def best(found: list[Line]) -> list[Line]:
    """One line a workload, state and schedule: the chunk count that is fastest."""
    key = lambda one: (one.where, one.backward, one.state or "", one.schedule)  # noqa: E731
    chosen = [min(same, key=_speed) for same in of.grouped(found, key).values()]
    return sorted(chosen, key=lambda one: (one.where, one.backward, _rank(one)))


def _speed(line: Line) -> float:
    us = line.us("serial" if line.schedule == "none" else "overlap")
    if us is None:
        return line.slowest["span_us"] if line.seen else float("inf")
    return us


def _rank(line: Line) -> int:
    return ORDER.index(line.schedule) if line.schedule in ORDER else len(ORDER)


def reached(line: Line, way: str) -> str:
    """What `Line.reached` says by "time" or "trace", or why not; "-" on one node."""
    told = line.reached.get(way)
    if told is None:
        return "-"
    if told["why"]:
        return f"NOT MEASURED: {told['why']}"
    return f"{signed(told['mean'])} ± {told['ci95']:.2f}"


def reached_both(line: Line) -> str:
    """`+0.96 ± 0.03 by time, +1.02 ± 0.03 by trace`; "" on one node."""
    return ", ".join(f"{reached(line, way)} by {way}" for way in line.reached)


def title(line: Line, among: list[Line], counted: bool = True) -> str:
    """A schedule's name with whatever else differs among the lines."""
    parts = [line.schedule]
    if counted and line.chunks > 1:
        parts.append(f"{line.chunks} chunks")
    if len({one.backward for one in among}) > 1:
        parts.append(line.direction)
    if len({one.where for one in among}) > 1:
        parts.append(line.where)
    return ", ".join(parts)


def micro(us: float, _=None) -> str:
    """Microseconds as an axis shows them."""
    return f"{us / 1000:g} ms" if abs(us) >= 1000 else f"{us:g} µs"


def signed(value: float | None) -> str:
    """A fraction that keeps its sign."""
    return "-" if value is None else f"{value:+.2f}"


def spread(ratio: dict | None, form=signed) -> str:
    """`median (p10, p90)` of a paired ratio."""
    if not ratio:
        return "-"
    return f"{form(ratio['median'])} ({form(ratio['p10'])}, {form(ratio['p90'])})"


def estimated(line: Line) -> str:
    """The estimate in a table: `median (p10, p90)`, with its interval where that is wide."""
    return spread(line.estimate) + (f", {noise(line)}" if line.noisy else "")


def noise(line: Line) -> str:
    return f"noise: ± {line.estimate['ci95']:.2f}"


def kinds_legend(figure, kinds, exposed: bool = False) -> None:
    """What the colours of stretches mean; exposed: with the shading behind them."""
    marks = [Patch(facecolor=KINDS[k][1], label=KINDS[k][0]) for k in KINDS if k in kinds]
    marks += [Patch(facecolor=EXPOSED, label="exposed")] * exposed
    figure.legend(handles=marks, loc="outside upper right", ncols=len(marks), frameon=False,
                  fontsize=8.5)  # fmt: skip


def schedules_legend(figure, names, more=()) -> None:
    marks = [Line2D([], [], label=n, markersize=5, **LOOK[n]) for n in ORDER if n in names]
    marks += list(more)
    figure.legend(handles=marks, loc="outside upper right", ncols=len(marks), frameon=False,
                  fontsize=8.5)  # fmt: skip


def gap(what: str, command: str = COMMAND):
    """The visible gap, where a drawing would stand: what is missing and the command for it."""
    figure = style.canvas(style.WIDTH, 1.3)
    axes = figure.subplots()
    style.bare(axes)
    box = {"boxstyle": "round,pad=1.1", "facecolor": "#fdf5dc", "edgecolor": "#7a5a00", "ls": "--"}
    axes.text(
        0.5, 0.5, f"NOT MEASURED here: {what}\n{command}", ha="center", va="center",
        color="#7a5a00", fontsize=10, linespacing=1.7, bbox=box,
    )  # fmt: skip
    return figure
