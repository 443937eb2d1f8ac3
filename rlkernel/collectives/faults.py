"""Ways to break a block at the seam, each with the place where it must show. Imports no torch.

A fault is an observer bound to one site, or a way in which shards are loaded. It states the
smallest grid on which it can show, the first signal that must go wrong, how many steps that takes,
and the check that sees it; a fault asked for on a grid where it cannot show is refused, because it
would pass unseen. The blocks' catalogues stand in catalogue.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlkernel.grid import Grid

if TYPE_CHECKING:
    from torch import Tensor

    from rlkernel.collectives.comm import Call, Comm, Observer, Proceed

Weights = Mapping[str, "Tensor"]
MOST_WITH_LANES = 4  # ranks of a grid with a second data-parallel lane


@dataclass(frozen=True)
class Fault:
    """One entry of a block's catalogue.

    kind: what an audit should call it. site: where it bites, and observer: made for each case from
    the rank's local weights. Or load: (local weights, comm) -> the weights that the rank trains
    with.

    first_wrong: the earliest signal that must leave its bound, after `steps` steps. detector:
    "equivalence" (the signal leaves its bound) or "repeat" (its bits change between repeats of the
    same step). smallest: the smallest grid on which it shows. only: the option of the block without
    which the site does not exist. fixture: what the block's initial state needs for it to show.
    says: one sentence for a reader.
    """

    name: str
    kind: str
    site: str
    first_wrong: str
    says: str
    observer: Callable[[Weights], Observer] | None = None
    load: Callable[[Weights, Comm], Weights] | None = None
    smallest: Grid = Grid(tp=2)
    steps: int = 1
    detector: str = "equivalence"
    only: str = ""
    fixture: Mapping[str, float] = field(default_factory=dict)

    def put_into(self, comm: Comm, local: Weights) -> tuple[Comm, Weights]:
        """(seam, weights) of a rank that trains under the fault. Every rank calls it."""
        seam = comm
        if self.observer:
            seam = comm.using(observers=(At(self.site, self.observer(local)),))
        return seam, self.load(local, comm) if self.load else local

    def grid(self, tp: int) -> Grid | None:
        """The grid on which the fault is shown with `tp` tensor-parallel ranks, None if on none.

        A second data-parallel lane doubles the ranks, so those grids end at four ranks.
        """
        dp = self.smallest.dp
        if tp < self.smallest.tp or (dp > 1 and dp * tp > MOST_WITH_LANES):
            return None
        return Grid(dp=dp, tp=tp)


def always(observer: Observer) -> Callable[[Weights], Observer]:
    """An observer that needs nothing of the rank's weights and keeps no state."""
    return lambda local: observer


@dataclass(frozen=True)
class At:
    """Apply an observer at one site and let every other call pass."""

    site: str
    observer: Observer

    def __call__(self, call: Call, x: Tensor, proceed: Proceed) -> Tensor:
        return self.observer(call, x, proceed) if call.site == self.site else proceed(x)


# -- observers -------------------------------------------------------------------------------------


def missing(call: Call, x: Tensor, proceed: Proceed) -> Tensor:
    """The sum is left out: each rank goes on with its own partial."""
    return _as_result(call, x).clone()


def doubled(call: Call, x: Tensor, proceed: Proceed) -> Tensor:
    """The sum runs twice: the second one adds up what every rank already holds in full."""
    return proceed(x) * call.span


def averaged(call: Call, x: Tensor, proceed: Proceed) -> Tensor:
    """The mean instead of the sum."""
    return proceed(x) / call.span


def wrong_group(call: Call, x: Tensor, proceed: Proceed) -> Tensor:
    """The sum runs over other ranks: over all of its axis where a part of it is due, over tensor-
    parallel ranks where data-parallel ones are, over data-parallel ranks otherwise.
    """
    other, site = call.comm.unobserved(), f"{call.site}.wrong"
    crossed = "tp" if call.axis in ("dp", "grad") else "dp"
    axis = call.axis if call.span < call.link.size else crossed
    if call.kind == "reduce_scatter":
        return other.reduce_scatter(x, site, axis, dim=call.dim)
    return other.all_reduce(x, site, axis)


def left_fold(call: Call, x: Tensor, proceed: Proceed) -> Tensor:
    """((r0 + r1) + r2) + ... instead of the tree. The same as the tree at two ranks."""
    return _in_order(call, x, range(call.span))


def exchanged(call: Call, x: Tensor, proceed: Proceed) -> Tensor:
    """Ranks 1 and 2 change places in the tree. Needs four ranks."""
    parts = call.gather(call.contract.round(x))
    parts[1], parts[2] = parts[2], parts[1]
    return _as_result(call, call.contract.fold(parts).to(x.dtype))


@dataclass
class ArrivalOrder:
    """Add the ranks' partials one after the other in an order that changes from call to call.

    `orders` forces the sequence of permutations, by default it is shuffled by the call's number:
    the same on every rank. Two partials commute, so it takes four ranks to show.
    """

    orders: list[tuple[int, ...]] | None = None
    calls: int = field(default=0, init=False)

    def __call__(self, call: Call, x: Tensor, proceed: Proceed) -> Tensor:
        self.calls += 1
        if self.orders:
            order = self.orders[(self.calls - 1) % len(self.orders)]
        else:
            order = random.Random(self.calls).sample(range(call.span), call.span)
        return _in_order(call, x, order)


@dataclass
class Stale:
    """The result of the step before, as after an asynchronous sum that nobody waited for."""

    previous: Tensor | None = field(default=None, init=False)

    def __call__(self, call: Call, x: Tensor, proceed: Proceed) -> Tensor:
        fresh = proceed(x)
        late, self.previous = self.previous, fresh.clone()
        return fresh if late is None else late


@dataclass(frozen=True)
class BiasOnEveryRank:
    """Each rank adds the bias to its partial, so the sum holds it P times (the block's own
    once).
    """

    bias: Tensor

    def __call__(self, call: Call, x: Tensor, proceed: Proceed) -> Tensor:
        return proceed(x + self.bias.detach().to(x.dtype) * (call.span - 1) / call.span)


# -- loading ---------------------------------------------------------------------------------------


def swap_shards(name: str, dim: int) -> Callable[[Weights, Comm], Weights]:
    """Neighbouring ranks (0 and 1, 2 and 3, ...) hold each other's shard of one weight."""

    def load(local: Weights, comm: Comm) -> Weights:
        link = comm.links["tp"]
        held = comm.unobserved().all_gather(local[name], f"{name}.load", dim=dim)
        return {**local, name: held.chunk(link.size, dim)[link.index ^ 1].clone()}

    return load


def _in_order(call: Call, x: Tensor, order) -> Tensor:
    """Left fold of the ranks' partials in the given order, rounded like the contract's joints."""
    parts = call.gather(call.contract.round(x))
    first, *rest = order
    total = parts[first]
    for i in rest:
        total = call.contract.joint(total, parts[i])
    return _as_result(call, total.to(x.dtype))


def _as_result(call: Call, total: Tensor) -> Tensor:
    """What the caller of this kind of collective expects of a full-size tensor."""
    return call.own_chunk(total) if call.kind == "reduce_scatter" else total
