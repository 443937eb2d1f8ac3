"""The three questions of the front page, each answered from records in one sentence and a figure.

A number here is added up from rows of records, which are named beside it; what no record answers
stands there as a gap with its command. A stale record speaks only where no fresh one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rlkernel import records
from rlkernel.figures import Plot, a2a_ffn, catalogue, cost, ffn_layer, schedules
from rlkernel.figures.schedules import Line, signed
from rlkernel.pages import costs, evidence, required
from rlkernel.records import Record
from rlkernel.records.publish import committed_root

COMMAND = "python -m rlkernel"
SHORT = 3  # lines of COVERED and NOT COVERED that the front page shows


@dataclass(frozen=True)
class Fact:
    """One sentence, and the records that its numbers were read from."""

    text: str
    found: tuple[Record, ...]


@dataclass
class Story:
    """question: the headline. word: the verdict in a word or two; good: does it answer yes?"""

    name: str
    question: str
    asks: str
    experiments: tuple[str, ...]
    word: str = "not measured"
    good: bool | None = None
    facts: list[Fact] = field(default_factory=list)  # the first one is the verdict
    gaps: list[tuple[str, str]] = field(default_factory=list)  # what is missing, its command
    plot: Plot | None = None
    shown: Record | None = None  # what the plot draws

    @property
    def machines(self) -> list[str]:
        """What the evidence comes from."""
        return list(dict.fromkeys(r.machine_label for fact in self.facts for r in fact.found))

    def answer(self, good: bool, yes: str, no: str) -> None:
        """One more record's word: a single no decides."""
        self.good = good and self.good is not False
        self.word = yes if self.good else no

    def unknown(self, does: str, command: str = "") -> None:
        """No record does what the verdict needs, which is said in its place."""
        self.facts.append(Fact(f"No record {does}.", ()))
        if command:
            self.gap(f"a record that {does}", f"{COMMAND} {command}")

    def gap(self, what: str, command: str) -> None:
        self.gaps.append((f"NOT MEASURED: {what}", command))

    def coverage(self, key: str) -> tuple[list[str], int]:
        """The first lines of `covered` or `not_covered` of its records, and how many there are."""
        used = {r.path: r for fact in self.facts for r in fact.found}.values()
        told = {"covered": evidence.covered, "not_covered": evidence.not_covered}[key](used)
        gaps = {gap for gap, _ in self.gaps}  # which stand there with their command
        lines = [line for line in told if line not in gaps]
        return lines[:SHORT], len(lines)


def told() -> list[Story]:
    """The three, in the order in which a reader meets them."""
    return [same_bits(), missing_sum(), hidden()]


def same_bits() -> Story:
    story = Story(
        "same-bits", "Same bits?", "Does my FFN give the same bits when I change batch, TP, CP or "
        "SP, forward and backward, and what does that cost?", ("det-ffn", "wire", "ws2"),
    )  # fmt: skip
    found = _records("det-ffn")
    layers = _fresh_first(r for r in found if _what(r) == {"layer"} and _faultless(r))
    for same in filter(None, ([r for r in layers if _on(r, d)] for d in ("cuda", "cpu"))):
        rows = [row for record in same for row in record.rows]
        differ, of = (sum(row["result"][k] for row in rows) for k in ("mismatches", "elements"))
        layouts = sorted({row["case"]["parameters"]["layout"] for row in rows})
        story.answer(all(r.passed for r in same) and differ == 0, "yes", "no")
        story.facts.append(Fact(
            f"{differ:,} of {of:,} elements differ from one rank's, forward, dX and dW, on "
            f"{', '.join(layouts)}.", tuple(same),
        ))  # fmt: skip
    if not layers:
        story.unknown("compares a layout with one rank", "det-ffn --layout tp2_cp2_sp")
    timed, trained = costs.timed(_fresh_first(found)), costs.trained(_fresh_first(found))
    for what, words, record in (("ffn", "A forward", timed), ("train", "A training step", trained)):
        if record:
            story.facts.append(Fact(_ratios(record, what, words), (record,)))
        else:
            command = f"{COMMAND} det-ffn --device cuda --size qwen3 --graph true --what {what}"
            story.gap(f"{words.lower()} beside the official layer", command)
    for record in _by_device(_records("ws2"), _faultless):
        story.facts.append(Fact(
            f"{_held(record)} checks hold before and behind every sum on two nodes with two ranks "
            f"each ({required.stands(record)}).", (record,),
        ))  # fmt: skip
    exact = next(iter(layers), None), ffn_layer.EXACT
    story.shown, story.plot = (timed, cost.COST) if timed else exact
    return story


def missing_sum() -> Story:
    story = Story(
        "missing-sum", "Which sum is missing?", "Does my tensor-parallel block train like the "
        "dense one, and which collective is wrong if not?", ("tp-swiglu", "tp-gqa", "audit"),
    )  # fmt: skip
    blocks = [r for name in story.experiments[:2] for r in _best(_records(name), _catalogue)]
    if blocks:
        rows = [row for r in blocks for row in r.rows]
        faults = [row for row in rows if row["case"]["fault"] != "none"]
        clean = [row for row in rows if row["case"]["fault"] == "none"]
        caught = sum(bool(row["result"]["caught"]) for row in faults)
        right = sum(bool(row["result"]["passed"]) for row in clean)
        sizes = sorted({row["case"]["grid"]["tp"] for row in rows})
        story.answer(caught == len(faults) and right == len(clean), "named", "not always")
        story.facts.append(Fact(
            f"{caught:,} of {len(faults):,} planted faults are seen first where they must be; "
            f"{right:,} of {len(clean):,} correct twins train like the dense block. "
            f"P = {', '.join(map(str, sizes))}.", tuple(blocks),
        ))  # fmt: skip
    else:
        story.unknown("plants every fault", "tp-swiglu --mode catalogue")
    for record in _best(_records("audit"), lambda r: not _faultless(r)):
        checks = record.run["verdict"]["checks"]
        named = [c for c in checks if c["name"].endswith(": named")]
        story.facts.append(Fact(
            "Of somebody else's block the audit names the first wrong boundary and its cause, from "
            f"values alone: rightly in {sum(c['passed'] for c in named)} of {len(named)} cases.",
            (record,),
        ))  # fmt: skip
    story.shown, story.plot = next(iter(blocks), None), catalogue.CATALOGUE
    return story


def hidden() -> Story:
    story = Story(
        "hidden", "Is communication hidden?", "How much All-to-All does a fused kernel hide behind "
        "GEMM, on one node and across nodes?", ("a2a-ffn", "a2a-gemm", "counters", "exchange"),
        plot=a2a_ffn.TIMES,
    )  # fmt: skip
    found = [r for r in _records("a2a-ffn") if _faultless(r)]
    for need in (required.FORWARD, required.BACKWARD):
        for line, record in _kernels(story, need, found):
            story.facts.append(Fact(f"{_overlap(line)}.", (record,)))
            story.shown = story.shown or record
            if story.word == "not measured":
                story.word, story.good = _how_much(line)
    if not story.facts:
        story.unknown("of two GPUs says how much the default workload hides")
    for need in (required.EMULATED, required.REAL_NODES):
        for line, record in _kernels(story, need, found):
            where = f"{required.stands(record)}, {line.where}"
            story.facts.append(Fact(f"{_overlap(line)} ({where}).{_reached(line)}", (record,)))
    for record in _by_device(found, lambda r: "lines" in r.rows[0]["result"]):
        ways = {line.direction for line in schedules.lines(record.rows)}
        ranks = sorted({row["case"]["grid"]["dp"] for row in record.rows})
        story.facts.append(Fact(
            f"{_held(record)} checks hold that every schedule gives the sequential call's bits, "
            f"{max(ways, key=len)}, on P = {', '.join(map(str, ranks))}.", (record,),
        ))  # fmt: skip
    for record in _fresh_first(r for r in _records("counters") if costs.cycles(r))[:1]:
        told = "; ".join(f"{name} {span}" for name, span in costs.cycles(record).items())
        story.facts.append(Fact(
            f"By hardware counters, cycles of a product over its cycles alone: beside {told}.",
            (record,),
        ))  # fmt: skip
    drawable = _fresh_first(r for r in found if any("times" in row["result"] for row in r.rows))
    story.shown = story.shown or next(iter(drawable), None)
    return story


# ---- sentences -----------------------------------------------------------------------------------


def _ratios(record: Record, what: str, words: str) -> str:
    """The span of a record's ratios to the official layer under its first contract."""
    lines = [x for row in record.rows for x in costs.lines(row, what)]
    first = lines[0]["contract"]
    mine = [x for x in lines if x["contract"] == first]
    ratios = [x["ratios"]["official"]["median"] for x in mine]
    rows = sorted(row["case"]["parameters"]["m"] for row in record.rows if costs.lines(row, what))
    return (
        f"{words} takes {min(ratios):.2f} to {max(ratios):.2f} of the official layer's time, "
        f"{rows[0]:,} to {rows[-1]:,} rows, {first}, as CUDA graphs."
    )


def _overlap(line: Line) -> str:
    exposed, share = line.timed.get("exposed"), line.estimate["median"]
    hides = f"{signed(share)} ({schedules.noise(line)})" if line.noisy else signed(share)
    more = ", more than all since its products are faster, too" if share > 1 else ""
    left = ""
    if exposed is not None:
        amount = f"{exposed:.2f}" if exposed > 0 else f"nothing ({exposed:+.2f})"
        left = f"; beside its own kernels without communication {amount} stays exposed"
    return (
        f"The plugin's kernel ({line.path.partition(':')[0]}), {line.direction}: "
        f"{line.speedup['median']:.3f} times as fast as the sequential call, where hiding alone "
        f"allows {line.ceiling:.3f}. By the estimate it hides {hides} of the communication{more}"
        f"{left}"
    )


def _reached(line: Line) -> str:
    """How near it came to what communication and compute allow, where that was asked."""
    told = schedules.reached_both(line)
    return f" Of what it could hide there: {told}." if told else ""


def _how_much(line: Line) -> tuple[str, bool | None]:
    """In a word; a share below zero made the call slower."""
    share = line.estimate["median"]
    if line.noisy:
        return "noise", None
    if share <= 0:
        return "no", False
    return ("mostly", True) if share >= 0.5 else ("partly", True)


# ---- which record --------------------------------------------------------------------------------


def _records(experiment: str) -> list[Record]:
    """Finished ones, measured beside the pages or published; newest first."""
    every = records.find(experiment) + records.find(experiment, committed_root(), published=True)
    done = [r for r in every if r.status == "ok" and r.rows]
    return sorted(done, key=lambda r: (r.run.get("started", ""), r.path.name), reverse=True)


def _best(found: Iterable[Record], fits: Callable[[Record], bool]) -> list[Record]:
    """The fresh record with the most cases, the newest of equals; [] where none fits."""
    fitting = [r for r in found if fits(r)]
    return sorted(fitting, key=lambda r: (evidence.is_stale(r), -len(r.rows)))[:1]


def _by_device(found: Iterable[Record], fits: Callable[[Record], bool]) -> list[Record]:
    """The best one of GPUs, then that of a CPU; one that fails is not passed over for a larger."""
    chosen = []
    for device in ("cuda", "cpu"):
        there = _fresh_first(r for r in found if fits(r) and _on(r, device))
        chosen += sorted(there, key=lambda r: (r.passed, -len(r.rows)))[:1]
    return chosen


def _on(record: Record, device: str) -> bool:
    return record.run.get("device") == device


def _fresh_first(found: Iterable[Record]) -> list[Record]:
    """Those that are fresh, else all of them."""
    every = list(found)
    return [r for r in every if not evidence.is_stale(r)] or every


def _held(record: Record) -> str:
    checks = record.run["verdict"]["checks"]
    return f"{sum(check['passed'] for check in checks):,} of {len(checks):,}"


def _what(record: Record) -> set[str]:
    return {row["case"]["parameters"].get("what", "") for row in record.rows}


def _faultless(record: Record) -> bool:
    return all(row["case"]["fault"] == "none" for row in record.rows)


def _catalogue(record: Record) -> bool:
    return record.run.get("parameters", {}).get("mode") == "catalogue"


def _kernels(story: Story, need: required.Need, found: list[Record]) -> list[tuple[Line, Record]]:
    """The plugin's line of each direction at its best chunk count, hot where that was measured, of
    the newest record that answers, first of those that say what was reached of what could be; []
    where none does, which the story then says.
    """
    every = [
        (line, record)
        for record in _fresh_first(need.answers(found))
        for line in schedules.best([x for x in schedules.lines(record.rows) if x.speedup])
        if line.schedule == "kernel"
    ]
    every.sort(key=lambda one: any(told["why"] for told in one[0].reached.values()))
    chosen: dict[str, tuple[Line, Record]] = {}
    for line, record in every:
        chosen.setdefault(line.direction, (line, record))
    if chosen:
        return [chosen[way] for way in sorted(chosen)]
    if need is required.REAL_NODES:
        story.gaps.append((required.PARTIAL, need.command))
    else:
        story.gap(need.name, need.command)
    return []
