"""What a profiler's trace says: torch.profiler's chrome JSON -> who did what when -> how much
communication ran beside compute.

    hidden = |communication and compute at once| / |communication|

over unions of intervals, one rank at a time. What is communication, compute or neither: kinds.py. A
fused kernel's inside is not visible in a trace, so a range with one has no hidden fraction at all.

Profilers are known to lose the first kernels of a trace. What was launched inside a marked range
and has no kernel, and a repetition that has fewer than the others, raise MissingKernels: half a
trace would show half an exchange.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlkernel.records import intervals
from rlkernel.records.kinds import COMPUTE, DEVICE, KINDS, cpu_kind, is_launch, kernel_kind, label
from rlkernel.records.schedule import Span, critical, length, timeline

HIDDEN_INSIDE = "not visible in this trace"
UNKNOWN = -1  # a launch that the profiler did not log: some calls of the driver


class TraceError(ValueError):
    """A file that is no trace, or a trace that does not hold what was asked for."""


class MissingKernels(TraceError):
    """The trace lacks kernels of the marked range: nothing may be concluded from it."""


@dataclass(frozen=True)
class Mark:
    """A `record_function` range of the CPU, in ns since the epoch."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Trace:
    """One rank's trace. `lost`: launches (ns, name) that have no kernel."""

    rank: int
    device: str  # cuda or cpu
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...] = ()
    lost: tuple[tuple[int, str], ...] = field(default=(), repr=False)


# ---- reading -------------------------------------------------------------------------------------


def load(path: Path | str) -> dict:
    """The JSON of a trace, gzipped or plain. Raises TraceError."""
    try:
        data = Path(path).read_bytes()
        book = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        book["traceEvents"][0]["ph"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
        raise TraceError(f"{Path(path).name} is no chrome trace: {error!r}") from error
    return book


def read(path: Path | str, rank: int | None = None) -> Trace:
    """One rank's trace. rank: which one of a merged file, or what a file that does not say is.

    Raises TraceError for what is no trace, and for a rank that the file does not hold.
    """
    return parse(load(path), rank)


def parse(book: dict, rank: int | None = None) -> Trace:
    """`read` of JSON that is loaded already."""
    ranks = ranks_of(book)
    if len(ranks) > 1 and rank is None or ranks and rank is not None and rank not in ranks:
        raise TraceError(f"the trace holds ranks {', '.join(map(str, ranks))}; asked for {rank}")
    events = [e for e in book["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    if "merged" in book:
        events = [e for e in events if e["pid"] == rank or len(ranks) == 1]
    rank = rank if rank is not None else ranks[0] if ranks else 0
    base = int(book.get("baseTimeNanoseconds", 0))
    for event in events:
        event["start"] = base + round(float(event["ts"]) * 1000)
        event["end"] = event["start"] + round(float(event["dur"]) * 1000)
    notes = [e for e in events if e.get("cat") == "user_annotation"]
    marks = tuple(
        Mark(e["name"], e["start"], e["end"]) for e in sorted(notes, key=lambda e: e["start"])
    )
    if any(e.get("cat") in DEVICE or is_launch(e) for e in events):
        spans, lost = _on_device(events, notes)
        return Trace(rank, "cuda", tuple(spans), marks, tuple(lost))
    return Trace(rank, "cpu", tuple(_on_cpu(events)), marks)


def ranks_of(book: dict) -> list[int]:
    """The ranks that a trace says it holds; [] where it says nothing."""
    if "merged" in book:
        return list(book["merged"])
    info = book.get("distributedInfo", {})
    return [int(info["rank"])] if "rank" in info else []


def _on_device(events: list[dict], notes: list[dict]) -> tuple[list[Span], list[tuple[int, str]]]:
    launches = {e["args"]["correlation"]: e for e in events if is_launch(e)}
    ours = [e for e in events if e.get("cat") in DEVICE]
    labelled = _labelled(launches.values(), notes)
    spans, seen = [], set()
    for event in ours:
        args = event.get("args", {})
        seen.add(args.get("correlation"))
        launch = launches.get(args.get("correlation"))
        kind = args.get("kind") or kernel_kind(
            event["name"], event["cat"], args, labelled.get(args.get("correlation"))
        )
        stream = f"stream {args.get('stream', event.get('tid'))}"
        begun = launch["start"] if launch else UNKNOWN
        spans.append(Span(kind, event["name"], stream, event["start"], event["end"], begun))
    lost = []
    for nest in _nests(launches.values()):  # a runtime call may be logged with the driver's in it
        if not seen & {e["args"]["correlation"] for e in nest}:
            lost.append((nest[0]["start"], nest[0]["name"]))
    return sorted(spans, key=lambda s: (s.start, s.end)), lost


def _labelled(launches: Iterable[dict], notes: Sequence[dict]) -> dict[int, str]:
    """Correlation of a launch -> the kind of the innermost labelled range around it, on its thread;
    of ranges that begin together the first. One sweep a thread.
    """
    ranges, calls, found = {}, {}, {}
    for note in reversed(notes):  # the sort is stable: of equals the first comes last, to the top
        if label(note["name"]):
            ranges.setdefault(note.get("tid"), []).append(note)
    for launch in launches:
        calls.setdefault(launch.get("tid"), []).append(launch)
    for tid, begun in calls.items():
        coming = deque(sorted(ranges.get(tid, ()), key=lambda e: e["start"]))
        open_: list[dict] = []  # by their start; what has ended goes once it is on top
        for launch in sorted(begun, key=lambda e: e["start"]):
            while coming and coming[0]["start"] <= launch["start"]:
                open_.append(coming.popleft())
            while open_ and open_[-1]["end"] < launch["start"]:
                open_.pop()
            if open_:
                found[launch["args"]["correlation"]] = label(open_[-1]["name"])
    return found


def _nests(launches: Iterable[dict]) -> list[list[dict]]:
    """Launches of a thread, those inside another one with it."""
    nests: list[list[dict]] = []
    order = sorted(launches, key=lambda e: (str(e.get("tid")), e["start"], -e["end"]))
    for event in order:
        outer = nests[-1][0] if nests else None
        if outer and outer.get("tid") == event.get("tid") and event["end"] <= outer["end"]:
            nests[-1].append(event)
        else:
            nests.append([event])
    return nests


def _on_cpu(events: list[dict]) -> list[Span]:
    """gloo's spans, which may overlap, as a stream of their own; each thread by its innermost
    range."""
    spans, threads = [], {}
    for event in events:
        kind = cpu_kind(event)
        if event["name"].startswith("gloo:"):
            spans.append(Span("comm", event["name"], "gloo", event["start"], event["end"],
                              event["start"]))  # fmt: skip
        elif kind:
            threads.setdefault(event["tid"], []).append((event["start"], event["end"], kind,
                                                         event["name"]))  # fmt: skip
    busiest = sorted(threads, key=lambda tid: -sum(end - start for start, end, *_ in threads[tid]))
    for number, tid in enumerate(busiest):
        spans += _innermost(threads[tid], f"thread {number}")
    return sorted(spans, key=lambda s: (s.start, s.end))


def _innermost(ranges: list[tuple[int, int, str, str]], stream: str) -> list[Span]:
    """Nested (start, end, kind, name) of a thread -> spans that do not overlap."""
    done: list[Span] = []
    open_: list[list] = []  # [where its own time goes on, end, kind, name], outermost first

    def emit(start: int, end: int, kind: str, name: str) -> None:
        if end > start:
            done.append(Span(kind, name, stream, start, end, start))

    def close(until: int) -> None:
        while open_ and open_[-1][1] <= until:
            at, end, kind, name = open_.pop()
            emit(at, end, kind, name)
            if open_:
                open_[-1][0] = max(open_[-1][0], end)

    for start, end, kind, name in sorted(ranges, key=lambda r: (r[0], -r[1])):
        close(start)
        if open_:
            emit(open_[-1][0], start, *open_[-1][2:])
            end = min(end, open_[-1][1])
            open_[-1][0] = end
        open_.append([start, end, kind, name])
    close(max((r[1] for r in ranges), default=0))
    return done


# ---- what it says --------------------------------------------------------------------------------


def repetitions(found: Trace, mark: str) -> list[list[Span]]:
    """The spans of each marked range of that name, checked to be all of them.

    Raises TraceError without such a range, MissingKernels where kernels are not there.
    """
    named = [m for m in found.marks if m.name == mark]
    if not named:
        there = ", ".join(dict.fromkeys(m.name for m in found.marks)) or "none"
        raise TraceError(f"rank {found.rank}: no range {mark!r} in the trace; there are {there}")
    outer = _outermost(found.marks)
    # The device is idle when a range begins: what is of no known launch is of the last one begun.
    strays = [
        (s, max((m for m in outer if m.start <= s.start), key=lambda m: m.start, default=None))
        for s in found.spans if s.launch == UNKNOWN
    ]  # fmt: skip
    each = []
    for number, m in enumerate(named):
        lost = [name for at, name in found.lost if m.start <= at <= m.end]
        spans = [s for s in found.spans if m.start <= s.launch <= m.end]
        spans += [s for s, of in strays if of == m]
        where = f"rank {found.rank}, {mark!r}, repetition {number + 1} of {len(named)}"
        if lost:
            raise MissingKernels(
                f"{where}: {len(lost)} launches have no kernel in the trace (first: {lost[0]}); "
                "profile again behind a warm-up"
            )
        if not spans:
            raise MissingKernels(f"{where}: nothing ran in it; profile again behind a warm-up")
        each.append(sorted(spans, key=lambda s: (s.start, s.end)))
    if found.device == "cuda":
        counts = [Counter(s.kind for s in spans) for spans in each]
        most = {kind: max(c[kind] for c in counts) for kind in KINDS}
        for number, count in enumerate(counts):
            short = [f"{count[k]} of {most[k]} {k}" for k in KINDS if count[k] < most[k]]
            if short:
                raise MissingKernels(
                    f"rank {found.rank}, {mark!r}, repetition {number + 1} of {len(named)}: only "
                    f"{', '.join(short)}"
                )
    return each


def _outermost(marks: Sequence[Mark]) -> list[Mark]:
    """Ranges inside no other one, the profiler's own steps aside."""
    outer: list[Mark] = []
    for m in marks:
        if not m.name.startswith("ProfilerStep") and (not outer or m.end > outer[-1].end):
            outer.append(m)
    return outer


def overlap(found: Trace, mark: str, expect: Sequence[str] = ()) -> dict:
    """What one rank's marked ranges show, as JSON; microseconds, the mean of the repetitions.

    {"rank", "repeats", "span_us", "comm_us", "comp_us", "overlap_us", "exposed_us", "hidden",
    "each" (hidden, by repetition), "why", "kinds": {kind: us}, "critical": {kind or "idle": us},
    "timeline": [[stream, kind, start, end], ...] of the repetition of median length}. hidden is
    None where `why` says why; under a fused kernel no number is given to communication at all.
    expect: kinds that must be there (MissingKernels).
    """
    each = repetitions(found, mark)
    for kind in expect:
        if not any(s.kind in ("fused", kind) for s in each[0]):
            raise MissingKernels(f"rank {found.rank}, {mark!r}: no {kind} in the trace")
    sets = [_sets(spans) for spans in each]
    mean = lambda ns: round(sum(ns) / len(each) / 1e3, 3)  # noqa: E731
    us = {name: mean(intervals.total(one[name]) for one in sets) for name in sets[0]}
    paths = [critical(spans) for spans in each]
    on_path = [k for k in (*KINDS, "idle") if any(k in path for path in paths)]
    says = {
        "rank": found.rank,
        "repeats": len(each),
        "span_us": mean(map(length, each)),
        "comm_us": us["comm"],
        "comp_us": us["comp"],
        "overlap_us": us["both"],
        "exposed_us": us["exposed"],
        "hidden": None,
        "each": [],
        "why": "",
        "kinds": {k: us[k] for k in KINDS if us[k]},
        "critical": {k: mean(path.get(k, 0) for path in paths) for k in on_path},
        "timeline": timeline(sorted(each, key=length)[len(each) // 2]),
    }
    fused = next((s for spans in each for s in spans if s.kind == "fused"), None)
    whole = sum(intervals.total(one["comm"]) for one in sets)
    if fused:
        says |= dict.fromkeys(("comm_us", "overlap_us", "exposed_us"))
        says["why"] = f"{HIDDEN_INSIDE}: {fused.name[:60]} exchanges inside one kernel"
    elif whole:
        hidden = sum(intervals.total(one["both"]) for one in sets)
        says["hidden"] = round(hidden / whole, 6)
        totals = [[intervals.total(one[name]) for name in ("both", "comm")] for one in sets]
        says["each"] = [round(both / comm, 6) for both, comm in totals if comm]
    else:
        says["why"] = "no communication in this range"
    return says


def _sets(spans: list[Span]) -> dict[str, list[intervals.Interval]]:
    """The time of each kind, of compute, of both at once and of communication alone."""
    sets = {k: intervals.union((s.start, s.end) for s in spans if s.kind == k) for k in KINDS}
    comm = sets["comm"]
    comp = intervals.union(span for kind in COMPUTE for span in sets[kind])
    both, exposed = intervals.intersection(comm, comp), intervals.difference(comm, comp)
    return {**sets, "comp": comp, "both": both, "exposed": exposed}
