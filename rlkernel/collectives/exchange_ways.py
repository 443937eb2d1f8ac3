"""An All-to-All over every set of ranks that a grid of nodes has, by everybody who may move it; and
whether each element of it arrives.

A message's words name sender, receiver and call, and what it lands in is poisoned first, so neither
another rank's words nor those of an earlier call pass for the right ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel.collectives import exchange
from rlkernel.collectives.comm import Comm
from rlkernel.collectives.peer_exchange import PeerExchange
from rlkernel.grid import Grid

GROUP, COPIES = "process group", PeerExchange.name
POISON = -1  # every bit set: no pattern holds it


@dataclass(frozen=True)
class Way:
    """Who exchanges (the ranks of `axis`), who moves the bytes, and the call: parts [P, n] int32,
    part p for rank p -> [P, n], part p from rank p.
    """

    scope: str
    axis: str
    by: str
    call: Callable[[Tensor], Tensor]

    @property
    def name(self) -> str:
        return f"{self.scope} by {self.by}"


def scopes(grid: Grid) -> dict[str, str]:
    """scope -> axis of a grid of cp nodes with tp ranks each; `inside` and `across` only where they
    are not the whole group.
    """
    both = {"inside": "tp", "across": "cp"} if grid.tp > 1 and grid.cp > 1 else {}
    return {"group": "world", **both}


def ways(comm: Comm, where: Mapping, message: int, fault: str = "none") -> list[Way]:
    """Every way to exchange `message` bytes a rank, in one order on all ranks. where: what
    topology.described says. Under a fault the seam's own exchange is broken, and nothing else runs.
    """
    found = []
    for scope, axis in scopes(comm.grid).items():
        site = f"{scope} by {GROUP}"
        seam = comm.using(observers=[] if fault == "none" else [OBSERVERS[fault]])
        found.append(Way(scope, axis, GROUP, _through(seam, site, axis)))
        if fault == "none" and may_copy(comm, where, axis):
            size = comm.links[axis].size
            like = torch.empty((size, message // 4 // size), dtype=torch.int32, device=comm.device)
            comm.note(f"{scope} by {COPIES}", f"all_to_all over {axis} by copy engine")
            found.append(Way(scope, axis, COPIES, PeerExchange(comm, like, axis)))
    return found


def _through(seam: Comm, site: str, axis: str) -> Callable[[Tensor], Tensor]:
    return lambda parts: exchange.start(seam, parts, site, axis).take()


def may_copy(comm: Comm, where: Mapping, axis: str) -> bool:
    """Whether copy engines reach all peers: GPUs of one node, one for each rank."""
    near = not peers(comm, where, axis)["inter"] and comm.links[axis].size > 1
    return comm.device.type == "cuda" and near and where["gpus"] == comm.grid.size


def peers(comm: Comm, where: Mapping, axis: str) -> dict[str, int]:
    """{"intra", "inter"}: peers of this rank on its own node and on others; of a grid's axis it is
    the same for every rank.
    """
    nodes = {rank["rank"]: rank["node"] for rank in where["ranks"]}
    others = [nodes[rank] for rank in comm.links[axis].ranks if rank != comm.rank]
    far = sum(node != nodes[comm.rank] for node in others)
    return {"intra": len(others) - far, "inter": far}


# -- what is sent, and what must arrive ------------------------------------------------------------


def words(sender: int, receiver: int, count: int, salt: int, device) -> Tensor:
    """[count] int32, not negative: at no place what another pair of ranks or another salt has."""
    first = (sender * 64 + receiver) * 1_000_003 + salt * 7919
    return ((torch.arange(count, device=device) * 48271 + first) % (2**31 - 1)).int()


def parts(comm: Comm, axis: str, message: int, salt: int, incoming: bool = False) -> Tensor:
    """[P, n] int32 of `message` bytes in all: what this rank sends; incoming: what must arrive."""
    ranks, count = comm.links[axis].ranks, message // 4 // comm.links[axis].size
    pairs = [(rank, comm.rank) if incoming else (comm.rank, rank) for rank in ranks]
    return torch.stack([words(*pair, count, salt, comm.device) for pair in pairs])


def wrong(comm: Comm, way: Way, message: int, salts: range) -> int:
    """Elements of this rank that are not what its peers sent, over one exchange for each salt."""
    count = 0
    for salt in salts:
        given = parts(comm, way.axis, message, salt)
        if way.by == COPIES:
            way.call.poison(POISON)
        comm.collect(None)  # nobody sends into a buffer that is still being poisoned
        with poisoned():
            came = way.call(given)
        count += int((came != parts(comm, way.axis, message, salt, incoming=True)).sum())
        comm.collect(None)
    return count


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch allocates meanwhile is filled with set bits: nothing old passes for new."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


# -- faults ----------------------------------------------------------------------------------------


def _swapped(call, x, proceed):
    """Each rank sends its peers 0 and 1 what is meant for the other."""
    return proceed(x[[1, 0, *range(2, len(x))]])


def _nothing(call, x, proceed):
    """Nobody sends: what is found is what the buffer held."""
    return x.new_empty(x.shape)


OBSERVERS = {"swapped-slices": _swapped, "nothing-sent": _nothing}
