"""What the plugin's kernel is held to, and what records say of each bar: one table.

Which rows count: bar_rows.py. The newest record that holds a bar's number answers it, one that is
older than the code only where no other does: nobody chooses the best. What none holds is NOT
MEASURED, with the command that measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from rlkernel import records
from rlkernel.figures import a2a_memory, a2a_settings, schedules
from rlkernel.pages import bar_rows, costs, evidence, required, show
from rlkernel.pages.bar_rows import HOT, SEEDS, Reading, Row
from rlkernel.pages.evidence import Evidence
from rlkernel.records import Record
from rlkernel.records.publish import committed_root

NAME = "a2a-ffn"
FORWARD, BACKWARD = required.FORWARD.command, required.BACKWARD.command
CHECKED = (
    f"{schedules.COMMAND} --no-compile --overlap kernel --check-correctness bitwise --num-tests 0"
)
BITS = f"{CHECKED} --seed {','.join(map(str, range(1, SEEDS + 1)))}"
SMALL = "--batch-size 4 --tokens 16 --dim 128 --k 2"  # bar_rows.PUBLIC


@dataclass(frozen=True)
class Bar:
    """must: what the kernel is accepted at; None where a number has to be reported, whatever it is.
    beyond: what only hiding nearly everything gives. most: both are limits from above. above:
    reaching `must` is not enough. words: both, where numbers do not say it.
    """

    what: str
    must: float | None
    beyond: float | None
    read: Callable[[list[Row]], Iterator[Reading]]
    command: str
    most: bool = False
    above: bool = False
    words: tuple[str, ...] = ()

    def shown(self) -> tuple[str, ...]:
        form = ("at most {:.2f}" if self.most else "{:.2f}").format
        must = "reported" if self.must is None else form(self.must)
        return self.words or (f"over {must}" if self.above else must, form(self.beyond))

    def verdict(self, reading: Reading | None) -> str:
        if reading is None or reading.lacks:
            why = f" ({reading.lacks})" if reading else ""
            return f"NOT MEASURED{why}: {self.command}"
        sign = -1 if self.most else 1
        value, held = sign * reading.value, True
        if self.must is not None:
            held = value > sign * self.must if self.above else value >= sign * self.must
        beyond = held and self.beyond is not None and value >= sign * self.beyond
        return "holds, and beyond" if beyond else "holds" if held else "missed"


_ratio = partial(bar_rows.timed, lambda line: line.speedup)
_eager = partial(bar_rows.timed, lambda line: line.other("eager"))
_compiled = partial(bar_rows.timed, lambda line: line.other("compiled"))
_exposed = partial(bar_rows.timed, bar_rows.exposed, every=True)
_least = tuple(f"at most {one:+.0%}" for one in (a2a_memory.MUST, a2a_memory.BEYOND))
_other = f"({a2a_settings.LABEL})"
_opponents = [
    Bar(f"{schedule} / kernel, each at its best chunk count", 1.00, 1.05,
        partial(bar_rows.opponent, schedule), FORWARD, above=True)
    for schedule in ("with-sm", "sm-free")
]  # fmt: skip
_peaks = [
    Bar(f"peak memory over none, device-wide, {way}", a2a_memory.MUST, a2a_memory.BEYOND,
        partial(bar_rows.memory, backward), command, most=True, words=_least)
    for way, backward, command in (("forward", False, FORWARD),
                                   ("forward and backward", True, BACKWARD))
]  # fmt: skip
EMULATED = (
    f"{schedules.COMMAND} --nodes 2 --no-compile --batch-size 1024 --tokens 32 --overlap "
    "with-sm,kernel --trace"
)
REACHED = 0.80, 0.95  # of what could be hidden between nodes
_nodes = [
    Bar(f"of what could be hidden, two emulated nodes with a GPU each, {way}", *REACHED,
        partial(bar_rows.between_nodes, backward), f"{EMULATED} {more}")
    for way, backward, more in (
        ("forward", False, "--compute-scale 8 --chunks 4,8 --warmup 3 --num-tests 61"),
        ("forward and backward", True,
         "--backward --compute-scale 3 --chunks 8 --warmup 2 --num-tests 71"),
    )
]  # fmt: skip
# From this project's requirements of the fused kernel, for two H200s at the default workload: they
# were set before it was measured.
BARS = (
    Bar(f"bits of the forward, default and public shape, {SEEDS} seeds", 1, None, bar_rows.bits,
        f"{BITS}; {BITS} {SMALL}", words=("equal, fused", "-")),
    Bar("bits of the forward, the 32 configurations of the matrix", 0, 1, bar_rows.matrix,
        f"{CHECKED} --matrix full", words=("none unequal", "32 of 32 equal, most fused")),
    Bar("none / kernel, forward", 1.18, 1.22, partial(_ratio, False), FORWARD),
    Bar("none / kernel, forward and backward", 1.10, 1.14, partial(_ratio, True), BACKWARD),
    Bar(f"eager none / kernel, forward {_other}", 2.0, 2.15, partial(_eager, False), FORWARD),
    Bar(f"compiled none / kernel, forward {_other}", 1.3, 1.4, partial(_compiled, False), FORWARD),
    Bar("exposed communication / T comm, forward", 0.10, 0.03, partial(_exposed, False), FORWARD,
        most=True),
    *_opponents,
    Bar("hidden inside the kernels, forward, each rank", None, 0.95, bar_rows.inside, FORWARD),
    *_nodes,
    *_peaks,
)  # fmt: skip
HEADER = ["bar", "must", "beyond", "measured (p10, p90)", "read", "verdict", "record", "machine"]


def readings(found: Iterable[Record]) -> list[tuple[Bar, Reading | None]]:
    """Each bar with the first reading that decides it, else the first one; None without any."""
    ended = [r for r in found if r.experiment == NAME and r.status == "ok"]
    newest = sorted(ended, key=lambda r: r.run.get("started", ""), reverse=True)
    rows = [(r, row) for r in sorted(newest, key=evidence.is_stale) for row in r.rows]
    told = []
    for bar in BARS:
        each = list(bar.read(rows))
        told.append((bar, next((r for r in each if not r.lacks), each[0] if each else None)))
    return told


def table(
    found: Iterable[Record], where: Callable[[Record], str]
) -> tuple[list[str], list[list[str]]]:
    """A line a bar. where: how a record is named."""
    body = []
    for bar, read in readings(found):
        body.append([*_cells(bar, read), *(_sources(read.found, where) if read else ["-"] * 2)])
    return HEADER, body


def _cells(bar: Bar, read: Reading | None) -> list[str]:
    """What a line says besides where it was read."""
    said = (read.said, read.how) if read else ("-", "-")
    return [bar.what, *bar.shown(), *said, bar.verdict(read)]


def _sources(found: Iterable[Record], where: Callable[[Record], str]) -> list[str]:
    """[names of the records, their machines], each once."""
    once = {r.path: r for r in found}.values()
    return [", ".join(dict.fromkeys(map(of, once))) for of in (where, lambda r: r.machine_label)]


def tabulate(run: str = "") -> None:
    """The table on a page: of what was measured here, or lies at or below `run`, and of what was
    published.
    """
    mine = evidence.below(run) if run else records.find(NAME)
    both = [*mine, *records.find(NAME, committed_root(), published=True)]
    every = {r.path.resolve(): r for r in both}.values()  # `run` may be a published one
    show.table(Evidence(NAME, {}, None), *table(every, _place), "What the fused kernel is held to.")


def lines(found: list[Record]) -> list[str]:
    """The table in README.md; [] before a time of the kernel is measured."""
    told = readings(found)
    if not any(read and read.how.startswith(HOT) for _, read in told):
        return []
    heads = [name for name in HEADER if name not in ("record", "machine")]
    used = [record for _, read in told if read for record in read.found]
    names, machines = _sources(used, costs.source)
    body = [_cells(bar, read) for bar, read in told]
    return ["", *costs.markdown(heads, body), "", f"From {names}; {machines}."]


def _place(record: Record) -> str:
    return evidence.place(record) + costs.STALE * evidence.is_stale(record)
