"""The backend's own all-reduce, through the seam, in place: for sums that are a single addition.

A library adds up in an order of its own choosing. Between two ranks there is only one addition, and
it commutes, so whatever algorithm and protocol the library picks, the bits are those of a tree with
two leaves, provided the wire carries what a joint rounds to. More ranks are refused.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from rlkernel.collectives.comm import Call, Comm
from rlkernel.collectives.transport import StagedTransport


def all_reduce_in_place(comm: Comm, x: Tensor, site: str, axis: str = "tp") -> Tensor:
    """x becomes the sum of every rank's x and is returned; synchronous.

    x is contiguous, in the contract's dtype, on a group of at most two ranks. Raises ValueError for
    anything else before something moves, Disagreement and PeerLost as `Comm.all_reduce` does.
    """
    comm._check_sum(x, site, axis)
    size = comm.links[axis].size
    if size > 2:
        raise ValueError(
            f"{site}: the backend adds {size} ranks in an order of its own: "
            f"sum them by the tree (reduction='tree')"
        )
    if x.dtype != comm.contract.dtype:
        raise ValueError(
            f"{site}: the backend adds in {x.dtype}, {comm.contract.name} rounds to "
            f"{comm.contract.dtype}: hand the partial over in that dtype"
        )
    if not x.is_contiguous():
        raise ValueError(f"{site}: a sum in place needs a contiguous partial: make one first")
    total = comm._observed("backend_all_reduce", x, site, axis, 0, _add, None)
    return x if total is x else x.copy_(total)


def _add(call: Call, x: Tensor) -> Tensor:
    if call.link.size == 1:
        return x
    transport = call.link.transport
    staged = x.cpu() if isinstance(transport, StagedTransport) else x
    transport._wait(dist.all_reduce(staged, group=transport.group, async_op=True))
    return x if staged is x else x.copy_(staged)
