"""The schedule that a trace shows: the chain of spans that its length hangs on, and its drawing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

BACK_TO_BACK = 3_000  # ns; a span that starts so soon behind its stream's last waited for no other


@dataclass(frozen=True)
class Span:
    """One thing done: kind, name, stream; start, end and launch in ns since the epoch, launch -1
    where the profiler did not log it."""

    kind: str
    name: str
    stream: str
    start: int
    end: int
    launch: int


def length(spans: list[Span]) -> int:
    """ns from the first start to the last end."""
    return max(s.end for s in spans) - min(s.start for s in spans)


def critical(spans: list[Span]) -> dict[str, int]:
    """ns by kind along the chain that leads to the last span's end, gaps as "idle".

    A trace does not hold all dependencies. So a span waited for its stream's last one where it
    starts right behind it, and else for whatever of the rank ended last before it started.
    """
    spent: Counter = Counter()
    now = max(spans, key=lambda s: (s.end, s.start))
    while True:
        spent[now.kind] += now.end - now.start
        before = [s for s in spans if s.end <= now.start and s.start < now.start]
        if not before:
            return dict(spent)
        near = [s for s in before if s.stream == now.stream and now.start - s.end <= BACK_TO_BACK]
        last = max(near or before, key=lambda s: (s.end, s.start))
        spent["idle"] += now.start - last.end
        now = last


def timeline(spans: list[Span], most: int = 160) -> list[list]:
    """[stream, kind, start_us, end_us] from the first span on, neighbours of a kind as one, so that
    at most about `most` are left."""
    zero = min(s.start for s in spans)
    gap = 0
    while True:
        bars: dict[str, list[list]] = {}
        for s in spans:
            of = bars.setdefault(s.stream, [])
            if of and of[-1][1] == s.kind and s.start - of[-1][3] <= gap:
                of[-1][3] = max(of[-1][3], s.end)
            else:
                of.append([s.stream, s.kind, s.start, s.end])
        if sum(map(len, bars.values())) <= most or gap > length(spans):
            break
        gap = 2 * gap or 1_000
    us = lambda at: round((at - zero) / 1e3, 2)  # noqa: E731
    return [[n, k, us(a), us(b)] for stream in sorted(bars) for n, k, a, b in bars[stream]]
