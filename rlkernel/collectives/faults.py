"""Ways to break a block at the seam, each with the place where it must show. Imports no torch.

A fault is an observer bound to one site. It states the smallest group on which it can show, the
first signal that must go wrong, and the check that sees it; a fault asked for on a smaller grid is
refused, because it would pass unseen.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rlkernel.collectives.comm import Call, Observer, Proceed


@dataclass(frozen=True)
class At:
    """Apply an observer at one site and let every other call pass."""

    site: str
    observer: Observer

    def __call__(self, call: Call, x: Tensor, proceed: Proceed) -> Tensor:
        return self.observer(call, x, proceed) if call.site == self.site else proceed(x)


def missing(call: Call, x: Tensor, proceed: Proceed) -> Tensor:
    """The sum is left out: each rank goes on with its own partial."""
    return _as_result(call, x).clone()


def left_fold(call: Call, x: Tensor, proceed: Proceed) -> Tensor:
    """((r0 + r1) + r2) + ... instead of the tree. The same as the tree at two ranks."""
    return _in_order(call, x, range(call.link.size))


def exchanged(call: Call, x: Tensor, proceed: Proceed) -> Tensor:
    """Ranks 1 and 2 change places in the tree. Needs four ranks."""
    parts = call.link.transport.gather(call.contract.round(x))
    parts[1], parts[2] = parts[2], parts[1]
    return _as_result(call, call.contract.fold(parts).to(x.dtype))


@dataclass
class ArrivalOrder:
    """Add the ranks' partials one after the other in an order that changes from call to call.

    `orders` forces the sequence of permutations; by default all of them in turn. Two partials
    commute, so it takes four ranks to show.
    """

    orders: list[tuple[int, ...]] | None = None
    calls: int = field(default=0, init=False)

    def __call__(self, call: Call, x: Tensor, proceed: Proceed) -> Tensor:
        orders = self.orders or list(itertools.permutations(range(call.link.size)))
        self.calls += 1
        return _in_order(call, x, orders[(self.calls - 1) % len(orders)])


@dataclass(frozen=True)
class Fault:
    """One entry of a block's catalogue.

    site: where it bites. first_wrong: the earliest signal that must leave its bound. smallest: the
    smallest tensor-parallel group on which it shows. detector: the check that sees it. says: one
    sentence for a reader.
    """

    name: str
    site: str
    observer: Observer
    first_wrong: str
    says: str
    smallest: int = 2
    detector: str = "equivalence"

    def observers(self) -> tuple[Observer, ...]:
        return (At(self.site, self.observer),)


def _catalogue(*faults: Fault) -> Mapping[str, Fault]:
    return {fault.name: fault for fault in faults}


SWIGLU = _catalogue(
    Fault(
        "missing_forward_reduce",
        "down.forward",
        missing,
        first_wrong="output",
        says="each rank takes its partial down projection for the whole output",
    ),
    Fault(
        "missing_backward_reduce",
        "gate_up.dx",
        missing,
        first_wrong="input_grad",
        says="each rank sends only its own features' gradient on into the norm",
    ),
)


def _in_order(call: Call, x: Tensor, order) -> Tensor:
    """Left fold of the ranks' partials in the given order, rounded like the joints of the
    contract.
    """
    parts = call.link.transport.gather(call.contract.round(x))
    first, *rest = order
    total = parts[first]
    for i in rest:
        total = call.contract.joint(total, parts[i])
    return _as_result(call, total.to(x.dtype))


def _as_result(call: Call, total: Tensor) -> Tensor:
    """What the caller of this kind of collective expects of a full-size tensor."""
    return call.own_chunk(total) if call.kind == "reduce_scatter" else total
