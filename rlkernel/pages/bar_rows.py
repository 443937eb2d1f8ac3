"""Which rows of a2a-ffn a bar of the fused kernel may be read from, and what each of them says.

Rows of the default workload, on two GPUs of one host, everything like for like, where the kernel
ran fused; times in state `hot`: a chip that was idle answers another question. A reader takes rows
in the order of preference and gives one Reading a row that holds its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rlkernel.figures import a2a_memory, schedules
from rlkernel.figures import rows as of
from rlkernel.figures.schedules import Line
from rlkernel.pages import evidence, raw, required
from rlkernel.records import Record

HOT, EQUAL = "hot", "torch.equal, whole batch"
PUBLIC = {"batch": 4, "tokens": 16, "dim": 128, "k": 2}  # the shape of the public checks
SAME = {"comm_scale": 1, "compute_scale": 1, "comp_only": False, "compile": False, "block": True,
        "elementwise": "norm-gate"}  # fmt: skip
SEEDS = 10
ratio = "{:.3f}".format
Row = tuple[Record, dict]  # a row and where it stands


@dataclass(frozen=True)
class Reading:
    """What records say of one bar. how: state and variant; lacks: why it decides nothing yet."""

    value: float
    said: str
    how: str
    found: tuple[Record, ...]
    lacks: str = ""


# ---- which rows ----------------------------------------------------------------------------------


def _at(rows: Iterable[Row], shape: dict = required.DEFAULT) -> list[Row]:
    """Sound or not, those of that shape on two GPUs of one host, like for like, nothing broken."""
    return [one for one in rows if _like(one[1], {**shape, **SAME})]


def _on(row: dict, gpus: int, nodes: int) -> bool:
    where = row["result"].get("topology") or {}
    cuda = row["result"].get("device") == "cuda"
    return cuda and (where.get("gpus"), where.get("nodes")) == (gpus, nodes)


def _like(row: dict, wanted: dict) -> bool:
    case, at, two = row["case"], row["case"]["parameters"], _on(row, 2, 1)
    plain = (case["grid"]["dp"], case["dtype"], case["fault"]) == (2, "bf16", "none")
    return two and plain and all(at.get(name) == value for name, value in wanted.items())


def _kernels(row: dict) -> list[dict]:
    return [line for line in row["result"].get("lines", ()) if line["schedule"] == "kernel"]


def _ran_fused(line: dict) -> bool:
    return line["rung"] == "fused"


def _fused(rows: list[Row], backward: bool) -> list[Row]:
    """Of the default workload and that direction, where every call of `kernel` ran fused."""
    there = [one for one in _at(rows) if one[1]["case"]["parameters"]["backward"] == backward]
    return [one for one in there if _kernels(one[1]) and all(map(_ran_fused, _kernels(one[1])))]


def _timed_hot(row: dict) -> list[Line]:
    """Every schedule at every chunk count."""
    every = schedules.lines([row], every=True)
    return [line for line in every if line.state == HOT and line.timed]


def _hot(row: dict) -> dict[str, Line]:
    """schedule -> its line at its best chunk count, timed hot."""
    return {line.schedule: line for line in schedules.best(_timed_hot(row))}


# ---- times and memory ----------------------------------------------------------------------------


def timed(value: Callable[[Line], dict | None], backward: bool, rows: list[Row], every=False):
    """A paired number of the kernel's own line: {"median", "p10", "p90"}. every: also its span at
    other chunk counts.
    """
    for record, row in _fused(rows, backward):
        line = _hot(row).get("kernel")
        if line and (told := value(line)):
            said = schedules.spread(told, ratio) + (_elsewhere(value, line, row) if every else "")
            yield Reading(told["median"], said, f"{HOT}, {line.variant}", (record,))


def _elsewhere(value: Callable[[Line], dict | None], best: Line, row: dict) -> str:
    """The span of its medians at other chunk counts; "" with none."""
    others = [value(line) for line in _timed_hot(row)
              if line.schedule == best.schedule and line.variant != best.variant]  # fmt: skip
    medians = [told["median"] for told in others if told]
    span = " to ".join(ratio(one) for one in (min(medians), max(medians))) if medians else ""
    return f"; at other counts {span}" if span else ""


def exposed(line: Line) -> dict | None:
    """Exposed time over T comm."""
    told, comm = line.timed.get("exposed_us"), line.us("comm")
    return {name: told[name] / comm for name in ("median", "p10", "p90")} if told else None


def opponent(schedule: str, rows: list[Row]) -> Iterator[Reading]:
    """Its time over the kernel's, paired by the raw samples of the same rounds."""
    for record, row in _fused(rows, False):
        hot = _hot(row)
        if schedule not in hot or "kernel" not in hot:
            continue
        theirs, ours = hot[schedule], hot["kernel"]
        told = raw.paired(record, row, HOT, theirs.variant, ours.variant)
        value = told["median"] if told else theirs.us("overlap") / ours.us("overlap")
        said = schedules.spread(told, ratio) if told else f"{ratio(value)}, of medians"
        counts = {li["chunks"] for li in row["result"]["lines"] if li["schedule"] == schedule}
        lacks = "" if len(counts) > 1 else "one chunk count only"
        how = f"{HOT}, {theirs.variant} over {ours.variant}"
        yield Reading(value, said, how, (record,), lacks)


def between_nodes(backward: bool, rows: list[Row]) -> Iterator[Reading]:
    """Hidden over what could be, on two emulated nodes with a GPU each: the lower of both ways."""
    there = [one for one in rows if _on(one[1], 2, 2) and one[1]["case"]["fault"] == "none"]
    for record, row in there:
        every = [one for one in schedules.lines([row], every=True) if one.reached]
        for line in schedules.best([one for one in every if one.backward == backward]):
            told = line.reached.values()
            if line.schedule == "kernel" and not any(one["why"] for one in told):
                said = schedules.reached_both(line)
                how = f"{line.state}, {line.variant}, {line.path.partition(':')[0]}"
                yield Reading(min(one["mean"] for one in told), said, how, (record,))


def inside(rows: list[Row]) -> Iterator[Reading]:
    """The least hidden fraction of the ranks, as the kernels themselves record it."""
    for record, row in _fused(rows, False):
        kept = row["result"].get("inside") or {}
        told = [one["hidden"] for one in kept.get("ranks", ())]
        if told and None not in told:
            said = ", ".join(f"rank {rank} {hidden:.3f}" for rank, hidden in enumerate(told))
            yield Reading(min(told), said, f"one call, {kept['variant']}", (record,))


def memory(backward: bool, rows: list[Row]) -> Iterator[Reading]:
    """What the worst rank takes at its peak beyond none, a fraction."""
    for record, row in _fused(rows, backward):
        for line in a2a_memory.measured([row]):
            if line.schedule == "kernel":
                more = a2a_memory.over(line)
                said = ", ".join(f"rank {rank} {one:+.2%}" for rank, one in enumerate(more))
                yield Reading(max(more), said, f"peak, {line.variant}", (record,))


# ---- bits ----------------------------------------------------------------------------------------


def bits(rows: list[Row]) -> Iterator[Reading]:
    """1 where every seed of both shapes has none's bits over the whole batch and ran fused."""
    told, found, wrong, few = [], [], False, []
    for name, shape in (("default", required.DEFAULT), ("public", PUBLIC)):
        there = _fresh([one for one in _at(rows, shape) if _checked(one[1])])
        seeds = len({row["case"]["seed"] for _, row in there})
        lines = [(row, line) for _, row in there for line in _kernels(row)]
        equal = sum(_equal(row, line) for row, line in lines)
        fused = sum(_ran_fused(line) for _, line in lines)
        told.append(f"{name}: seeds {seeds}, equal {equal} of {len(lines)}, fused {fused}")
        wrong |= min(equal, fused) < len(lines)
        few += [f"{seeds} of {SEEDS} seeds, {name}"] * (seeds < SEEDS)
        found += [record for record, _ in there]
    if found:
        lacks = "" if wrong else "; ".join(few)
        yield Reading(float(not wrong), "; ".join(told), EQUAL, _once(found), lacks)


def matrix(rows: list[Row]) -> Iterator[Reading]:
    """The 32 configurations: -1 where one is unequal, 1 where all are equal and most ran fused.
    Ranks may share a GPU here, since no time is read."""
    from rlkernel.experiments import matrix

    there = [one for one in rows if one[1]["result"].get("device") == "cuda" and _checked(one[1])]
    seen = of.grouped(there, lambda one: _configuration(one[1]))
    each = [_fresh(same) for one, same in seen.items() if one in matrix.FULL]
    if each:
        equal = sum(
            all(_equal(row, li) for _, row in same for li in _kernels(row)) for same in each
        )
        fused = sum(all(_ran_fused(li) for _, row in same for li in _kernels(row)) for same in each)
        most = len(matrix.FULL)
        value = -1.0 if equal < len(each) else float(equal == most and 2 * fused > most)
        said = f"{equal} of {most} equal, {fused} fused, {len(each) - equal} unequal"
        yield Reading(value, said, EQUAL, _once(record for same in each for record, _ in same))


def _configuration(row: dict):
    """As the matrix names it; None where something was scaled or broken."""
    from rlkernel.experiments.matrix import Configuration

    case, at = row["case"], row["case"]["parameters"]
    if case["fault"] != "none" or (at.get("comm_scale"), at.get("compute_scale")) != (1, 1):
        return None
    sizes = (at[name] for name in ("batch", "tokens", "dim", "k", "block"))
    return Configuration(case["grid"]["dp"], *sizes)


def _checks(row: dict, line: dict) -> list[bool]:
    """How the comparison of the whole batch's forward ended; [] where there was none."""
    name = f"{line['variant']}: whole batch"
    return [check[1] for check in row["result"]["checks"] if check[0] == name]


def _checked(row: dict) -> bool:
    return any(_checks(row, line) for line in _kernels(row))


def _equal(row: dict, line: dict) -> bool:
    return _checks(row, line) == [True]


def _fresh(rows: list[Row]) -> list[Row]:
    """Without those that are older than the code, unless all are."""
    return [one for one in rows if not evidence.is_stale(one[0])] or rows


def _once(found: Iterable[Record]) -> tuple[Record, ...]:
    return tuple({record.path: record for record in found}.values())
