"""All-to-all through the seam: at once, or in chunks that arrive while others are computed.

    rank 0 gives  [a0 a1]        rank 0 has  [a0 b0]
    rank 1 gives  [b0 b1]   ->   rank 1 has  [a1 b1]      part i of each rank, in rank order

Nothing is added, so no contract is involved. `start` does not ask whether the ranks agree: whoever
moves chunks says so once, ahead of them (Comm.agree), and a late rank then delays exactly the
chunks that it is late with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlkernel.collectives.transport import Arriving

if TYPE_CHECKING:
    from rlkernel.collectives.comm import Comm


def all_to_all(
    comm: Comm, x: Tensor, site: str, axis: str, split_dim: int, concat_dim: int
) -> Tensor:
    """See Comm.all_to_all. Raises ValueError where `split_dim` does not divide over the group."""
    comm._check_site(x, site, axis)
    size = comm._link(site, axis).size
    if x.shape[split_dim] % size:
        raise ValueError(
            f"{site}: dimension {split_dim} of {tuple(x.shape)} does not divide over {axis}={size}"
        )

    def collective(call, x: Tensor) -> Tensor:
        if size == 1:
            return x.clone()
        parts = torch.stack(x.chunk(size, split_dim))
        return concat(call.link.transport.start_all_to_all(parts).wait(), concat_dim)

    return comm._observed("all_to_all", x, site, axis, split_dim, collective)


def concat(parts: Tensor, dim: int) -> Tensor:
    """[P, ...] -> the P tensors one behind the other along `dim`. A view for dim 0."""
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim)


@dataclass
class Arrival:
    """One chunk on its way. `take` returns it; PeerLost names who did not send in time."""

    arriving: Arriving
    guarded: Callable[[Callable[[], Tensor]], Tensor]

    def wait(self) -> Tensor:
        """The backend's own words where it fails: for a thread that only waits."""
        return self.arriving.wait()

    def take(self) -> Tensor:
        return self.guarded(self.arriving.wait)

    def fail(self, error: Exception) -> None:
        """Raise what a waiting thread met, as `take` would."""

        def again() -> Tensor:
            raise error

        self.guarded(again)


def arrived(parts: Tensor) -> Arrival:
    """An arrival that was never sent: nothing moves, nobody is waited for."""
    return Arrival(Arriving(parts), lambda action: action())


def start(comm: Comm, parts: Tensor, site: str, axis: str = "ep", tag: int = 0) -> Arrival:
    """parts [P, ...], part p for rank p -> an arrival of [P, ...], part p from rank p.

    Observers of `site` see what goes in; what comes out is still empty when they look at it. On a
    GPU `parts` belongs to the stream that is current here: where another one waits for the arrival,
    hold `arriving.keep` until this one has waited for that.
    """
    comm._check_site(parts, site, axis)
    link = comm._link(site, axis)
    arriving = Arriving(parts)

    def collective(call, x: Tensor) -> Tensor:
        nonlocal arriving
        alone = link.size == 1
        arriving = Arriving(x) if alone else link.transport.start_all_to_all(x, tag)
        return arriving.landing

    came = comm._observed("all_to_all", parts, site, axis, 0, collective, agree=False)
    if came is not arriving.landing:  # an observer's own; the message is still taken in
        arriving = Arriving(came, arriving.waits, arriving)
    return Arrival(arriving, lambda action: comm._guarded(site, link.ranks, action))
