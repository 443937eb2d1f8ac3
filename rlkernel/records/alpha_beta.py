"""A model of what an exchange costs: alpha-beta for each class of link, fitted to measured points.

    time over the links of one class  =  start + messages * message + bytes / bandwidth
    a group with both classes         =  the slower of the two, or their sum: what fits better

Classes are "intra" (ranks of one node) and "inter" (ranks of two nodes). Errors are relative, twice
as much as bad as half, so that a short message counts as much as a long one; nothing may be
negative. What comes out is a model, never a measurement, and says on each point how far off it is.
Units are microseconds, bytes and GB/s (10^9 bytes a second).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CLASSES = ("intra", "inter")
LEAST = 4  # points of a class: two unknowns, a third if messages vary, and one to err by
ROUNDS = 25  # of weighing anew, at most
COMMAND = "python -m rlkernel exchange"


class NotEnough(ValueError):
    """The points do not determine what is asked of them; the message says what is missing."""


@dataclass(frozen=True)
class Point:
    """One measured exchange: what a rank sends over each class of link, and how long it takes."""

    label: str
    messages: Mapping[str, int]
    sent: Mapping[str, float]
    us: float

    @property
    def links(self) -> tuple[str, ...]:
        return tuple(name for name in CLASSES if self.messages.get(name))


@dataclass(frozen=True)
class LinkCost:
    """start_us: once an exchange; message_us: for each message; gb_s: of all a rank sends."""

    start_us: float
    message_us: float
    gb_s: float

    def us(self, messages: float, sent: float) -> float:
        if not messages:
            return 0.0
        return self.start_us + messages * self.message_us + sent / (self.gb_s * 1e3)


@dataclass(frozen=True)
class Fabric:
    """links: class -> cost. at_once: both classes move at the same time; else one after another."""

    links: Mapping[str, LinkCost]
    at_once: bool = True

    def us(self, messages: Mapping[str, int], sent: Mapping[str, float]) -> float:
        """Raises NotEnough for a class of link that nobody has measured or given."""
        used = [name for name in CLASSES if messages.get(name)]
        for name in used:
            if name not in self.links:
                raise NotEnough(f"no cost of {name} links is known: measure or give one")
        each = [self.links[name].us(messages[name], sent[name]) for name in used]
        return max(each, default=0.0) if self.at_once else sum(each)


@dataclass(frozen=True)
class Error:
    """One point of the model beside the measurement. left_out_us: the model's word on it when it
    was fitted without this point; None where it cannot be.
    """

    label: str
    measured_us: float
    model_us: float
    left_out_us: float | None = None

    @property
    def relative(self) -> float:
        return self.model_us / self.measured_us - 1

    @property
    def left_out(self) -> float | None:
        return None if self.left_out_us is None else self.left_out_us / self.measured_us - 1


def points(rows: Sequence[Mapping], way: str = "process group", graph: bool = False) -> list[Point]:
    """The timed lines of rows of `exchange`, moved by `way` and called so."""
    found = []
    for row in rows:
        grid = row["case"]["grid"]
        for line in row["result"]["lines"]:
            if line["way"] != way or line["graph"] is not graph:
                continue
            label = f"{grid['cp']} x {grid['tp']} {line['scope']} {line['message']} B"
            found.append(Point(label, line["peers"], line["sent"], line["median_us"]))
    return found


def fit(points: Sequence[Point], link: str) -> LinkCost:
    """The cost of one class of link, from the points that use no other. NotEnough for fewer than
    LEAST of them, for one size only, and where time does not grow with bytes.
    """
    pure = [point for point in points if point.links == (link,)]
    sizes = {point.sent[link] for point in pure}
    if len(pure) < LEAST or len(sizes) < 2:
        raise NotEnough(
            f"{link} links: {len(pure)} point(s) of {len(sizes)} size(s) are too few for alpha and "
            f"beta, {LEAST} points of 2 sizes at least: {COMMAND} with more sizes in --message"
        )
    return _cost(pure, link)


def fabric(points: Sequence[Point]) -> Fabric:
    """Every class that the points use, and whether classes move at once: by the mixed points."""
    links = {name: fit(points, name) for name in CLASSES if any(name in p.links for p in points)}
    if not links:
        raise NotEnough(f"no exchange was timed: {COMMAND}")
    mixed = [point for point in points if len(point.links) > 1]

    def loss(one: Fabric) -> float:
        return sum(_off(one.us(point.messages, point.sent), point.us) ** 2 for point in mixed)

    return min((Fabric(links, at_once) for at_once in (True, False)), key=loss)


def errors(points: Sequence[Point]) -> list[Error]:
    """Every point: measured, modelled, and modelled from all the others."""
    whole, found = fabric(points), []
    for point in points:
        others = [other for other in points if other is not point]
        try:
            without = fabric(others).us(point.messages, point.sent)
        except NotEnough:
            without = None
        model = whole.us(point.messages, point.sent)
        found.append(Error(point.label, point.us, model, without))
    return found


def _off(model_us: float, us: float) -> float:
    """A relative error that takes twice as much for as bad as half: 2 sinh(log(model / us) / 2)."""
    return (model_us - us) / (model_us * us) ** 0.5


def _cost(pure: Sequence[Point], link: str) -> LinkCost:
    """The best of all subsets of terms of which none is negative. The term of a message shows only
    where their number varies.
    """
    counts = [point.messages[link] for point in pure]
    lines = [[1.0, float(count), point.sent[link]] for count, point in zip(counts, pure)]
    us, best = [point.us for point in pure], None
    subsets = [(0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)]
    if len(set(counts)) == 1:
        subsets = [(0, 2), (0,), (2,)]
    for used in subsets:
        found = _least([[line[i] for i in used] for line in lines], us)
        if found is None or min(found) < 0:
            continue
        told = [0.0] * 3
        for place, value in zip(used, found):
            told[place] = value
        loss = sum(_off(_dot(line, told), y) ** 2 for line, y in zip(lines, us))
        if best is None or loss < best[0]:
            best = loss, told
    if best is None or best[1][2] <= 0:
        raise NotEnough(
            f"{link} links: time does not grow with bytes, so no bandwidth shows: {COMMAND} with "
            "larger sizes in --message"
        )
    start, message, byte = best[1]
    return LinkCost(start, message, 1e-3 / byte)


def _least(lines: Sequence[Sequence[float]], us: Sequence[float]) -> list[float] | None:
    """x with the smallest errors `_off(line @ x, us)`: weighted least squares, weighted anew from
    what it says; None where nothing is determined or what it says is negative.
    """
    weights, x = [1 / y for y in us], None
    for _ in range(ROUNDS):
        x = _solved(lines, us, weights)
        said = [_dot(line, x) for line in lines] if x else [0.0]
        if min(said) <= 0:
            return None
        before, weights = weights, [1 / (model * y) ** 0.5 for model, y in zip(said, us)]
        if all(abs(new / old - 1) < 1e-6 for new, old in zip(weights, before)):
            break
    return x


def _solved(lines, us, weights) -> list[float] | None:
    """Weighted least squares by the normal equations, columns scaled; None where singular."""
    count = len(lines[0])
    scale = [max(abs(line[i]) * w for line, w in zip(lines, weights)) or 1.0 for i in range(count)]
    rows = [[line[i] * w / scale[i] for i in range(count)] for line, w in zip(lines, weights)]
    rights = [y * w for y, w in zip(us, weights)]
    table = [
        [sum(row[i] * row[j] for row in rows) for j in range(count)]
        + [sum(row[i] * right for row, right in zip(rows, rights))]
        for i in range(count)
    ]
    for i in range(count):
        pivot = max(range(i, count), key=lambda k: abs(table[k][i]))
        table[i], table[pivot] = table[pivot], table[i]
        if abs(table[i][i]) < 1e-12 * len(lines):
            return None
        table[i] = [value / table[i][i] for value in table[i]]
        for k in range(count):
            if k != i:
                table[k] = [a - table[k][i] * b for a, b in zip(table[k], table[i])]
    return [table[i][count] / scale[i] for i in range(count)]


def _dot(line: Sequence[float], x: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(line, x))
