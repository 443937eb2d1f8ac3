"""A timeline from inside a GEMM that exchanges: tiles on SMs, flags that come and flags that go.

    on its way    arriving: from the first tile's begin until the last peer's flag was seen
                  leaving:  from the end of the first tile for a peer until the same
    at work       an SM between the begin and the end of a tile, but while that tile's own loads
                  stood at a flag
    hidden        at work while data is on its way / that time, over all SMs that had tiles
    exposed       while data is on its way: an SM's waits at flags (mean over SMs), plus the tail in
                  which no SM has a tile left

All that an SM does not do while data is on its way counts against `hidden`, the unequal last wave
of tiles too, which is there without any exchange. A flag that nobody looks for is seen later than
it came. Times are nanoseconds of one GPU's clock; those of two are never compared. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlkernel.records.intervals import Interval, difference, intersection, total, union

BINS = 96  # of a drawing, along the time
OWN, FAR, WAIT, IDLE = "o", "f", "w", "."  # what an SM does in a bin
Flags = dict[tuple[int, int], int]  # (rank, chunk) -> ns
Stretch = tuple[str, str, int, int]  # track, name, start, end


@dataclass(frozen=True)
class Tile:
    """begin, end of an SM's tile; asked, came: when its loads turned to a flag, and saw it; 0, 0
    where they knew that it was set. Its rows are those of a rank and token."""

    begin: int
    end: int
    sm: int
    asked: int
    came: int
    rank: int
    token: int
    chunk: int

    @property
    def wait(self) -> Interval:
        """While its own loads stood at a flag and nothing else was left to multiply."""
        return max(self.begin, self.asked), min(self.end, self.came)


@dataclass(frozen=True)
class Gemm:
    """One launch on one rank. own: that rank's position in its group. released, came: of a GEMM
    whose results leave, when a peer's flag was raised from here, and when a peer's was seen here.
    """

    name: str
    arrive: bool
    own: int
    tiles: tuple[Tile, ...]
    released: Flags
    came: Flags

    @property
    def start(self) -> int:
        return min(tile.begin for tile in self.tiles)

    @property
    def done(self) -> int:
        return max(tile.end for tile in self.tiles)

    @property
    def end(self) -> int:
        return max([self.done, *self.came.values()])


def gemm(
    name: str, arrive: bool, own: int, tiles: Sequence[Sequence[int]],
    places: Sequence[Sequence[int]], flags: Sequence[Sequence[Sequence[int]]],
) -> Gemm:  # fmt: skip
    """From what kernels/a2a_gemm.py gives: tiles [tiles][begin, end, SM, asked, came], places
    [tiles][token, rank, chunk, row, column], flags [raised, asked, came][rank][chunk], 0: never.
    """
    made = tuple(Tile(*t, p[1], p[0], p[2]) for t, p in zip(tiles, places, strict=True))
    released, came = (
        {(r, c): ns for r, row in enumerate(flags[kind]) for c, ns in enumerate(row) if ns}
        for kind in (0, 2)
    )
    if arrive:
        for tile in made:
            if tile.came:
                key = tile.rank, tile.chunk
                came[key] = min(tile.came, came.get(key, tile.came))
    return Gemm(name, arrive, own, made, released, came)


def on_the_way(one: Gemm) -> Interval | None:
    """(start, end) of the time in which data of peers travels; None: nothing does."""
    far = [tile.end for tile in one.tiles if tile.rank != one.own]
    if not far or not one.came:
        return None
    start, end = one.start if one.arrive else min(far), max(one.came.values())
    return (start, end) if end > start else None


def summary(one: Gemm, bins: int = BINS) -> dict:
    """What a row keeps of one GEMM: microseconds since its first tile began, and what each SM did
    in each of `bins` equal parts of the time."""
    window, sms = on_the_way(one), sorted({tile.sm for tile in one.tiles})
    us = lambda ns: round(ns / 1e3, 3)  # noqa: E731
    kept = {
        "gemm": one.name, "arrive": one.arrive, "own": one.own, "sms": len(sms),
        "tiles": len(one.tiles), "span_us": us(one.end - one.start),
        "longest_wait_us": us(max(0, *(b - a for a, b in (t.wait for t in one.tiles)))),
        "arrivals": [[r, c, us(ns - one.start)] for (r, c), ns in sorted(one.came.items())],
        "releases": [[r, c, us(ns - one.start)] for (r, c), ns in sorted(one.released.items())],
        "lanes": lanes(one, bins),
    }  # fmt: skip
    if window is None:
        return kept | {"on_way_us": None, "hidden": None, "exposed_us": None}
    works, waits = 0, 0
    for sm in sms:
        mine = [tile for tile in one.tiles if tile.sm == sm]
        stood = union(tile.wait for tile in mine)
        busy = difference(union((tile.begin, tile.end) for tile in mine), stood)
        works += total(intersection(busy, [window]))
        waits += total(intersection(stood, [window]))
    waited, tail = waits / len(sms), max(0, window[1] - max(window[0], one.done))
    return kept | {
        "on_way_us": [us(at - one.start) for at in window],
        "at_work_us": us(works / len(sms)), "waited_us": us(waited), "tail_us": us(tail),
        "exposed_us": us(waited + tail), "hidden": works / len(sms) / (window[1] - window[0]),
    }  # fmt: skip


def together(gemms: Sequence[dict]) -> dict:
    """One rank's summaries of one call -> {"hidden", "exposed_us", "on_way_us"} of the call."""
    found = [one for one in gemms if one["hidden"] is not None]
    way = sum(one["on_way_us"][1] - one["on_way_us"][0] for one in found)
    return {
        "on_way_us": round(way, 3),
        "exposed_us": round(sum(one["exposed_us"] for one in found), 3),
        "hidden": sum(one["at_work_us"] for one in found) / way if way else None,
    }


def lanes(one: Gemm, bins: int) -> list[str]:
    """A word an SM, in the order of their numbers: in each bin what took most of it."""
    start, width = one.start, (one.end - one.start) / bins or 1
    spent: dict[int, list[dict[str, float]]] = {}
    for tile in one.tiles:
        row = spent.setdefault(tile.sm, [{IDLE: width} for _ in range(bins)])
        low, high = tile.wait
        parts = [(tile.begin, tile.end, OWN if tile.rank == one.own else FAR)]
        if high > low:
            kind = parts[0][2]
            parts = [(tile.begin, low, kind), (low, high, WAIT), (high, tile.end, kind)]
        for begin, end, kind in parts:
            _spend(row, (begin - start) / width, (end - start) / width, kind, width)
    return ["".join(max(b, key=b.get) for b in spent[sm]) for sm in sorted(spent)]


def _spend(row: list[dict[str, float]], begin: float, end: float, kind: str, width: float) -> None:
    for place in range(int(begin), min(int(end) + 1, len(row))):
        part = (min(end, place + 1) - max(begin, place)) * width
        row[place][kind] = row[place].get(kind, 0) + part
        row[place][IDLE] -= part


def stretches(one: Gemm) -> Iterator[Stretch]:
    """For a viewer: a track an SM with its tiles and, inside them, waits; one of flags."""
    for tile in one.tiles:
        track = f"SM {tile.sm}"
        whose = "own" if tile.rank == one.own else f"rank {tile.rank}"
        yield track, f"{one.name}: token {tile.token} of {whose}", tile.begin, tile.end
        low, high = tile.wait
        if high > low:
            yield track, f"waits for rank {tile.rank}", low, high
    for said, flags in (("raised for", one.released), ("seen of", one.came)):
        for (rank, chunk), ns in flags.items():
            yield "flags", f"{one.name}: flag {chunk} {said} rank {rank}", ns, ns + 1000
