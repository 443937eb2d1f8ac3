"""Stretches of time as sets: (start, end) in whole nanoseconds, half open.

A set is a list of them, ascending, neither touching nor overlapping; `union` makes one of anything.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]


def union(spans: Iterable[Interval]) -> list[Interval]:
    """The time that at least one of the stretches covers, as a set."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """What two sets have in common."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """What a set has and the other one has not."""
    left = []
    for start, end in a:
        for low, high in b:
            if high <= start:
                continue
            if low >= end:
                break
            if low > start:
                left.append((start, low))
            start = max(start, high)
        if start < end:
            left.append((start, end))
    return left


def total(spans: list[Interval]) -> int:
    """Nanoseconds in a set."""
    return sum(end - start for start, end in spans)
