"""Traces that a person can open: ui.perfetto.dev or chrome://tracing, one process a rank, one track
a stream, and of the profiler's output only what the analysis needs.

What is written reads back (trace.read) and gives the same analysis. No host, user or path is in it.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlkernel.records import kinds, trace

NAME = 120  # characters kept of a kernel's name; its kind is written beside it
HOST_TRACK = 1000  # device streams below, threads of the host from here on
SM_TRACK = 10**6  # tracks from inside of kernels
APART = 10**6  # ns behind a trace at which they begin: another call, on another clock


def merge(target: Path | str, sources: Mapping[int, Path | str]) -> Path:
    """Write the traces of ranks (rank -> file) as one gzipped chrome JSON -> its path.

    Equal sources give equal bytes. Raises TraceError for a source that is no trace.
    """
    books = {rank: trace.load(path) for rank, path in sorted(sources.items())}
    read = {rank: trace.parse(book, rank) for rank, book in books.items()}
    kept = {rank: _kept(book, rank) for rank, book in books.items()}
    base = min((e["start"] for events in kept.values() for e in events), default=0)
    events = [e for r, found in kept.items() for e in _process(read[r], found, base)]
    text = json.dumps(
        {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base}
        | {"merged": list(kept), "traceEvents": events},
        separators=(",", ":"),
    )
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress(text.encode(), mtime=0))
    return target


def append(path: Path | str, rank: int, stretches: Iterable[tuple[str, str, int, int]]) -> None:
    """Put (track, name, start, end in ns) of one rank behind everything in its trace, in place."""
    book, found = trace.load(path), sorted(stretches, key=lambda s: (s[2], -s[3]))
    events = [e for e in book["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    behind = max((float(e["ts"]) + float(e["dur"]) for e in events), default=0.0) + APART / 1e3
    tracks = sorted({s[0] for s in found}, key=lambda t: (len(t), t))
    for track, name, start, end in found:
        book["traceEvents"].append({
            "ph": "X", "cat": kinds.TILE, "name": name, "pid": rank,
            "tid": SM_TRACK + tracks.index(track), "ts": behind + (start - found[0][2]) / 1e3,
            "dur": (end - start) / 1e3, "args": {"track": track},
        })  # fmt: skip
    Path(path).write_bytes(gzip.compress(json.dumps(book).encode(), mtime=0))


def _kept(book: dict, rank: int) -> list[dict]:
    """The events that the analysis reads; parse has put start and end, ns since the epoch, in."""
    events = [e for e in book["traceEvents"] if "start" in e]
    if "merged" in book:
        events = [e for e in events if e["pid"] == rank]
    return [
        e for e in events
        if e.get("cat") in (*kinds.DEVICE, kinds.TILE, "user_annotation") or kinds.is_launch(e)
        or kinds.cpu_kind(e)
    ]  # fmt: skip


def _process(read: trace.Trace, events: list[dict], base: int) -> list[dict]:
    """One rank as a process: names of its tracks first, then what is on them."""
    rank, device = read.rank, read.device == "cuda"
    known = {(s.name, s.start, s.end): s.kind for s in read.spans}
    written = [_meta("process_name", rank, 0, name=f"rank {rank}")]
    written += [_meta("process_sort_index", rank, 0, sort_index=rank)]
    tracks: dict[str, list[dict]] = {}
    for event in sorted(events, key=lambda e: (e["start"], -e["end"])):
        if device and event["cat"] == "cpu_op":
            continue
        tracks.setdefault(_stream(event), []).append(event)
    hosts = sorted(name for name in tracks if not name.startswith("stream"))
    for stream, found in sorted(tracks.items(), key=lambda t: (t[0] in hosts, t[0])):
        first = HOST_TRACK * (1 + hosts.index(stream)) if stream in hosts else int(stream[7:])
        for lane, row in enumerate(_lanes(found)):
            tid = first if lane == 0 else first + HOST_TRACK * 100 * lane
            name = _title(stream, found, known) + (f" ({lane + 1})" if lane else "")
            if device and stream in hosts:
                name = f"launches {1 + hosts.index(stream)}"
            written += [_meta("thread_name", rank, tid, name=name)]
            written += [_meta("thread_sort_index", rank, tid, sort_index=tid)]
            written += [_event(e, rank, tid, base, known) for e in row]
    return written


def _stream(event: dict) -> str:
    if event["cat"] == kinds.TILE:
        return f"stream {event['tid']}"
    if event["cat"] in kinds.DEVICE:
        return f"stream {event.get('args', {}).get('stream', event.get('tid'))}"
    return "gloo" if event["name"].startswith("gloo:") else f"thread {event['tid']}"


def _title(stream: str, events: list[dict], known: dict) -> str:
    """The track's name with the kinds that take most of its time."""
    if events[0]["cat"] == kinds.TILE:
        return events[0]["args"]["track"]
    spent: Counter = Counter()
    for event in events:
        kind = known.get((event["name"], event["start"], event["end"]))
        if kind:
            spent[kind] += event["end"] - event["start"]
    most = ", ".join(kind for kind, _ in spent.most_common(2))
    name = stream if stream.startswith(("stream", "gloo")) else "host"
    return f"{name}: {most}" if most else name


def _lanes(events: list[dict]) -> list[list[dict]]:
    """Rows in which events nest or follow each other, as a viewer draws them; most need one."""
    lanes: list[list[dict]] = []
    open_: list[list[int]] = []
    for event in events:
        for lane, ends in zip(lanes, open_, strict=True):
            while ends and ends[-1] <= event["start"]:
                ends.pop()
            if not ends or event["end"] <= ends[-1]:
                lane.append(event)
                ends.append(event["end"])
                break
        else:
            lanes.append([event])
            open_.append([event["end"]])
    return lanes


def _event(event: dict, rank: int, tid: int, base: int, known: dict) -> dict:
    args = event.get("args", {})
    kept = {
        name: args[name] for name in ("stream", "correlation", "bytes", "track") if name in args
    }
    kind = known.get((event["name"], event["start"], event["end"]))
    if kind and event["cat"] in kinds.DEVICE:
        kept["kind"] = kind
    return {
        "ph": "X", "cat": event["cat"], "name": event["name"][:NAME], "pid": rank, "tid": tid,
        "ts": (event["start"] - base) / 1000, "dur": (event["end"] - event["start"]) / 1000,
        "args": kept,
    }  # fmt: skip


def _meta(what: str, rank: int, tid: int, **args: object) -> dict:
    return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": args}
