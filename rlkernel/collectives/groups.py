"""From a grid of integers to process groups: who made them, who owns them, and how long anybody may
wait in one.

`World.join` is called once by every rank that torchrun started. One world hosts grids of any
smaller size as subgroups of its first ranks. Every group gets the timeout explicitly:
torch.distributed does not hand a world's down.
"""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from rlkernel.collectives.agreement import HeaderAgreement, StoreAgreement
from rlkernel.collectives.comm import Comm, Link
from rlkernel.collectives.errors import PeerLost
from rlkernel.collectives.roll_call import RollCall
from rlkernel.collectives.transport import ProcessGroupTransport, StagedTransport
from rlkernel.contract import ReductionTree
from rlkernel.grid import GROUP_AXES, Grid

BACKENDS = {"gloo": "cpu", "nccl": "cuda", "symmetric": "cuda"}
PROCESS_GROUPS = ("gloo", "nccl")  # who can move anything between any ranks
START_S = 120.0  # how long ranks may come one after the other when a world is made


class World:
    """All ranks of one launch. backend "gloo" (cpu) or "nccl" (cuda, RCCL included); timeout_s
    bounds every wait. device "cuda" with gloo: tensors on GPUs that ranks may share, every message
    staged through the host. "symmetric": groups of one host share memory, others use nccl; with
    device "cpu" its stand-in in host memory, and gloo.
    """

    def __init__(self, store: dist.Store, backend: str, timeout_s: float, device: str = "") -> None:
        self.store, self.backend, self.timeout_s = store, backend, timeout_s
        self.device = _device(device or BACKENDS[backend])
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.moves_by = _process_groups(backend, self.device)
        self._groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._arenas: dict[tuple[int, ...], Callable] = {}
        self._hosts = ""

    @classmethod
    def join(cls, backend: str = "gloo", timeout_s: float = 25.0, device: str = "") -> World:
        """Meet the other ranks through torchrun's rendezvous. Raises ValueError for a backend or
        device not there.
        """
        if backend not in BACKENDS:
            raise ValueError(
                f"backend {backend!r} is not supported: expected one of {', '.join(BACKENDS)}"
            )
        device = device or BACKENDS[backend]
        if backend == "nccl" and device != "cuda":
            raise ValueError(f"backend nccl moves cuda tensors, not those of {device}: use gloo")
        if device == "cuda":
            if not torch.cuda.is_available():
                raise ValueError(f"backend {backend} on cuda needs a GPU and none is visible")
            # More ranks than GPUs share them in turn: right for bits, never for timing.
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        # Importing torch takes the ranks of a busy machine seconds that no peer is to blame for.
        patience = datetime.timedelta(seconds=max(timeout_s, START_S))
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=patience)))
        store.set_timeout(patience)
        dist.init_process_group(
            _process_groups(backend, device),
            store=dist.PrefixStore("torch", store),
            rank=rank,
            world_size=size,
            timeout=patience,
        )
        world = cls(dist.PrefixStore("rlkernel", store), backend, timeout_s, device)
        world.meet("joined", patience.total_seconds())
        return world

    def comm(self, grid: Grid, contract: ReductionTree | None = None) -> Comm | None:
        """The seam for one grid on the world's first ranks. All ranks of the world must call it;
        None outside the grid.
        """
        if grid.size > self.size:
            raise ValueError(f"grid {grid} needs {grid.size} ranks, this world has {self.size}")
        groups: dict[str, dist.ProcessGroup | None] = {}
        for axis in GROUP_AXES:
            for ranks in grid.groups(axis):
                group = self._group(ranks, self.moves_by)
                if self.rank in ranks:
                    groups[axis] = group
        control = self._group(tuple(range(grid.size)), "gloo")
        if self.rank >= grid.size:
            return None
        made = (self.store, self.timeout_s, control, self.device)
        comm = _comm(grid, self.rank, groups, contract, *made)
        if self.backend == "symmetric":
            comm.links = {axis: self._sharing(link) for axis, link in comm.links.items()}
        return comm

    def meet(self, tag: str, timeout_s: float) -> None:
        """Wait for all ranks of the world through the store; no collective is pending meanwhile.
        `tag` is used once.
        """
        self.store.set(f"meet/{tag}/{self.rank}", "here")
        for peer in range(self.size):
            try:
                self.store.wait([f"meet/{tag}/{peer}"], datetime.timedelta(seconds=timeout_s))
            except RuntimeError as error:
                message = f"rank {peer} did not come to the meeting {tag!r} within {timeout_s:g} s"
                raise PeerLost(message, ranks=(peer,), site=tag) from error

    def _sharing(self, link: Link) -> Link:
        """The same group over memory that its ranks share, if all of them are on one host."""
        if link.size == 1 or not self._on_one_host(link.ranks):
            return link
        from rlkernel.collectives.arenas import open_arena
        from rlkernel.collectives.symmetric import SymmetricTransport

        device = torch.device(self.device)
        group = self._groups[self.moves_by, link.ranks]

        @functools.cache
        def opened():
            at = (link.ranks, link.index, device, self.store, self.timeout_s)
            return open_arena(group, *at)

        # One arena a set of ranks, however many seams are made over it.
        arena = self._arenas.setdefault(link.ranks, opened)
        transport = SymmetricTransport(group, link.ranks, link.index, device, arena)
        agreement = StoreAgreement(self.store, link.ranks, self.rank, self.timeout_s)
        return Link(link.ranks, link.index, transport, agreement)

    def _on_one_host(self, ranks: tuple[int, ...]) -> bool:
        from rlkernel.collectives.arenas import host_id

        if not self._hosts:  # every world asks anew
            self._hosts = f"hosts/{self.store.add(f'worlds/{self.rank}', 1)}"
            self.store.set(f"{self._hosts}/{self.rank}", host_id())
        keys = [f"{self._hosts}/{rank}" for rank in ranks]
        self.store.wait(keys, datetime.timedelta(seconds=max(self.timeout_s, START_S)))
        return len({self.store.get(key) for key in keys}) == 1

    def leave(self) -> None:
        self._arenas.clear()
        dist.destroy_process_group()

    def _group(self, ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup | None:
        """Made once for each set of ranks, by all ranks of the world in the same order. None for a
        lone rank.
        """
        if len(ranks) == 1:
            return None
        if (backend, ranks) not in self._groups:
            timeout = datetime.timedelta(seconds=self.timeout_s)
            self._groups[backend, ranks] = dist.new_group(
                list(ranks), timeout=timeout, backend=backend
            )
        return self._groups[backend, ranks]


def comm_over(
    grid: Grid,
    groups: Mapping[str, dist.ProcessGroup],
    *,
    store: dist.Store,
    contract: ReductionTree,
    timeout_s: float = 25.0,
) -> Comm:
    """The seam over process groups that somebody else made: {"tp": group, ...}.

    Each group's global ranks are checked against the grid, in order. Raises ValueError for an
    uninitialised torch.distributed, a world size that is not the grid's, a group that is not the
    row or column of this rank, and a backend that is not known.
    """
    if not dist.is_initialized():
        raise ValueError(
            "torch.distributed is not initialised: call init_process_group before building a Comm"
        )
    if dist.get_world_size() != grid.size:
        raise ValueError(
            f"grid {grid} has {grid.size} rank(s), the world has {dist.get_world_size()}"
        )
    rank = dist.get_rank()
    for axis, group in groups.items():
        if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
            raise ValueError(
                f"{axis} group {group!r} is not a process group that rank {rank} belongs to"
            )
        grid.check_group(dist.get_process_group_ranks(group), axis, rank)
    device = _device("cpu" if dist.get_backend() == "gloo" else "cuda")
    return _comm(grid, rank, groups, contract, store, timeout_s, dist.group.WORLD, device)


def alone(device: torch.device | str = "cpu", contract: ReductionTree | None = None) -> Comm:
    """The seam of a single rank, without torch.distributed: nothing ever moves."""
    links = {axis: Link((0,), 0, None, None) for axis in GROUP_AXES}
    return Comm(Grid(), 0, links, contract or ReductionTree(), device=device)


def _process_groups(backend: str, device: str) -> str:
    """The process groups beside which shared memory is used, or those that were asked for."""
    if backend != "symmetric":
        return backend
    return "gloo" if device == "cpu" else "nccl"


def comm_of(group: dist.ProcessGroup | None, axis: str = "ep", timeout_s: float = 25.0) -> Comm:
    """The seam over one process group that somebody else made, in the group's own rank order.

    For a group that is no row or column of a grid, expert parallelism's: any size, any subset of
    the world. It has that one axis, so `collect` is not for it. None: a lone rank. Its store is
    that of the default group. Raises ValueError for a group that this rank is not in.
    """
    if group is None:
        return Comm(Grid(), 0, {axis: Link((0,), 0, None, None)}, ReductionTree())
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(f"{axis} group {group!r} is not a process group that this rank belongs to")
    rank, store = dist.get_rank(), dist.PrefixStore("rlkernel", _default_store())
    device = _device("cpu" if dist.get_backend(group) == "gloo" else "cuda")
    link = _link(group, rank, store, timeout_s, device)
    roll_call = RollCall(store, rank, timeout_s)
    return Comm(Grid(), rank, {axis: link}, ReductionTree(), device=device, roll_call=roll_call)


def _default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _device(kind: str) -> str:
    return f"cuda:{torch.cuda.current_device()}" if kind == "cuda" else kind


def _comm(grid, rank, groups, contract, store, timeout_s, control, device) -> Comm:
    links = {axis: _link(group, rank, store, timeout_s, device) for axis, group in groups.items()}
    roll_call = RollCall(store, rank, timeout_s)
    return Comm(
        grid,
        rank,
        links,
        contract or ReductionTree(),
        device=device,
        control=control,
        roll_call=roll_call,
    )


def _link(
    group: dist.ProcessGroup | None, rank: int, store: dist.Store, timeout_s: float, device: str
) -> Link:
    if group is None:
        return Link((rank,), 0, None, None)
    staged = dist.get_backend(group) == "gloo" and device != "cpu"
    transport = (StagedTransport if staged else ProcessGroupTransport)(group, timeout_s)
    if transport.backend not in PROCESS_GROUPS:
        raise ValueError(
            f"backend {transport.backend!r} is not supported: expected one of "
            f"{', '.join(PROCESS_GROUPS)}"
        )
    if transport.backend == "gloo":
        agreement = HeaderAgreement(transport, transport.ranks)
    else:
        agreement = StoreAgreement(store, transport.ranks, rank, timeout_s)
    return Link(transport.ranks, transport.index, transport, agreement)
