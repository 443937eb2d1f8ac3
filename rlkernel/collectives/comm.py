"""The seam: every byte between ranks goes through one Comm, at a named site.

    block code                      Comm                                   transport
    ----------                      ----                                   ---------
    all_reduce(x, "down.forward")   observers, outermost first             swap / gather
                                      -> do the ranks agree?
                                      -> tree in rank order, rounded by the contract

An observer is a function (call, x, proceed) -> tensor. It sees the tensor before and behind the
collective, may time it, capture it, replace it or never proceed. Faults, captures, audits and
timings are observers; the code of a block does not know of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel.collectives import exchange
from rlkernel.collectives.agreement import Agreement
from rlkernel.collectives.errors import PeerLost
from rlkernel.collectives.roll_call import RollCall, blames_a_peer
from rlkernel.collectives.transport import Transport
from rlkernel.contract import ReductionTree
from rlkernel.grid import Grid, is_power_of_two

SUMMABLE = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Link:
    """This rank's end of one group: who is in it, who moves the bytes, how agreement is reached."""

    ranks: tuple[int, ...]
    index: int
    transport: Transport | None
    agreement: Agreement | None

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Call:
    """One use of the seam, as an observer sees it. `span` neighbours of the group take part."""

    kind: str
    site: str
    axis: str
    dim: int
    span: int
    comm: Comm

    @property
    def link(self) -> Link:
        return self.comm.links[self.axis]

    @property
    def contract(self) -> ReductionTree:
        return self.comm.contract

    def gather(self, x: Tensor) -> list[Tensor]:
        """The x of all ranks that take part, in rank order, past agreement and observers."""
        first = self.link.index // self.span * self.span
        return self.link.transport.gather(x)[first : first + self.span]

    def own_chunk(self, x: Tensor) -> Tensor:
        """The part of x that a reduce-scatter leaves on this rank."""
        return x.chunk(self.link.size, self.dim)[self.link.index]


Proceed = Callable[[Tensor], Tensor]
Observer = Callable[[Call, Tensor, Proceed], Tensor]


class Comm:
    """Tree collectives of one rank over the groups of a grid, in fixed order, synchronous.

    Sums take FP32 or BF16 tensors of any layout; `contract` says what leaves and joints round to,
    and its leaf count bounds the group size. Results have the input's dtype. Raises ValueError
    before anything moves for what is not supported, Disagreement when the ranks' calls differ,
    PeerLost when a rank is dead or late.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        links: Mapping[str, Link],
        contract: ReductionTree,
        *,
        device: torch.device | str = "cpu",
        control: dist.ProcessGroup | None = None,
        roll_call: RollCall | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.grid, self.rank, self.contract = grid, rank, contract
        self.links, self.control, self.roll_call = dict(links), control, roll_call
        self.device = torch.device(device)
        self.observers = tuple(observers)
        self._paths: dict[str, str] = {}

    def using(
        self, *, contract: ReductionTree | None = None, observers: Sequence[Observer] = ()
    ) -> Comm:
        """The same groups under another contract and with further observers (outermost first)."""
        other = copy.copy(self)
        other.contract = contract or self.contract
        other.observers = (*observers, *self.observers)
        return other

    def unobserved(self) -> Comm:
        """The same groups and contract with nobody watching, for an observer's own calls."""
        other = copy.copy(self)
        other.observers = ()
        return other

    def paths(self) -> dict[str, str]:
        """Which way the bytes of each site went, for the record."""
        return dict(sorted(self._paths.items()))

    def note(self, site: str, path: str) -> None:
        """Bytes of `site` go another way than through a transport, and this is which."""
        self._paths[site] = path

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: Tensor,
        site: str,
        axis: str = "tp",
        *,
        span: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Tree sum of every rank's x, the same bits on all of them. `out` may be x itself: the sum
        in place. span: sum over aligned runs of that many neighbours only, the lowest levels of the
        tree; the whole group must call it.
        """
        self._check_sum(x, site, axis)
        size = self.links[axis].size
        if span is not None and not (is_power_of_two(span) and span <= size):
            raise ValueError(f"{site}: span={span} must be a power of two of at most {axis}={size}")
        total = self._observed("all_reduce", x, site, axis, 0, self._tree_all_reduce, span)
        return total if out is None else out.copy_(total)

    def reduce_scatter(self, x: Tensor, site: str, axis: str = "tp", *, dim: int = 0) -> Tensor:
        """This rank's chunk along `dim` of the tree sum; bit for bit the slice of all_reduce."""
        self._check_sum(x, site, axis)
        if x.shape[dim] % self.links[axis].size:
            raise ValueError(
                f"{site}: dimension {dim} of {tuple(x.shape)} does not divide over "
                f"{axis}={self.links[axis].size}"
            )
        return self._observed("reduce_scatter", x, site, axis, dim, self._tree_reduce_scatter)

    def all_gather(self, x: Tensor, site: str, axis: str = "tp", *, dim: int = 0) -> Tensor:
        """Every rank's x, concatenated along `dim` in rank order. Any dtype."""
        self._check_site(x, site, axis)
        return self._observed("all_gather", x, site, axis, dim, self._gather)

    def all_to_all(
        self, x: Tensor, site: str, axis: str = "ep", *, split_dim: int, concat_dim: int
    ) -> Tensor:
        """Part i of x along `split_dim` goes to rank i of the group; what comes is concatenated
        along `concat_dim` in rank order. Any dtype. Chunk by chunk beside other work: exchange.py.
        """
        return exchange.all_to_all(self, x, site, axis, split_dim, concat_dim)

    def agree(self, said: str, site: str, axis: str) -> None:
        """Raise Disagreement, naming every rank's word, unless all ranks of the axis say the same.

        For what a sum depends on and the shapes of its summands do not show.
        """
        link = self._link(site, axis)
        if link.size > 1:
            self._guarded(site, link.ranks, lambda: link.agreement.check(site, f"{site} {said}"))

    def collect(self, value: object) -> list:
        """Control plane: every rank's picklable value, in rank order, on every rank. For results,
        not for tensors.
        """
        if self.grid.size == 1:
            return [value]
        for link in self.links.values():  # what kernels have noticed of a peer is told here
            getattr(link.transport, "settle", lambda: None)()
        values: list = [None] * self.grid.size
        self._guarded(
            "collect",
            tuple(range(self.grid.size)),
            lambda: dist.all_gather_object(values, value, group=self.control),
        )
        return values

    # -- how a call runs ---------------------------------------------------------------------------

    def _observed(
        self,
        kind: str,
        x: Tensor,
        site: str,
        axis: str,
        dim: int,
        collective: Callable,
        span: int | None = None,
        agree: bool = True,
    ) -> Tensor:
        call = Call(kind, site, axis, dim, span or self.links[axis].size, self)

        def proceed(x: Tensor) -> Tensor:
            if call.link.size == 1:
                self._paths[site] = f"{kind} over {axis}: one rank, nothing moves"
                return collective(call, x)
            self._paths[site] = (
                f"{kind} {self._contract_of(kind)}over {axis} by {call.link.transport.name}"
            )
            run = self._agreed if agree else lambda call, x, collective: collective(call, x)
            return self._guarded(site, call.link.ranks, lambda: run(call, x, collective))

        for observer in reversed(self.observers):
            proceed = _bind(observer, call, proceed)
        return proceed(x)

    def _agreed(self, call: Call, x: Tensor, collective: Callable) -> Tensor:
        shape = "x".join(map(str, x.shape))
        dtype = str(x.dtype).removeprefix("torch.")
        signature = (
            f"{call.kind} {call.site} {dtype}[{shape}] dim {call.dim} "
            f"over {call.span} of {call.axis} {call.contract.name}"
        )
        call.link.agreement.check(call.site, signature)
        return collective(call, x)

    def _guarded(self, site: str, ranks: tuple[int, ...], action: Callable):
        """Run something that waits for peers; turn the backend's complaint into PeerLost with the
        suspects' ranks.
        """
        try:
            return action()
        except PeerLost as error:
            error.site = error.site or site
            raise
        except (dist.DistError, RuntimeError) as error:
            if self.roll_call is None or not blames_a_peer(error):
                raise
            raise self.roll_call.hold(site, ranks, error) from error

    def _contract_of(self, kind: str) -> str:
        return "" if kind in ("all_gather", "all_to_all") else f"{self.contract.name} "

    # -- trees -------------------------------------------------------------------------------------

    def _tree_all_reduce(self, call: Call, x: Tensor) -> Tensor:
        """Recursive doubling: at level l meet the rank whose bit l differs. log2(P) messages of x's
        size.
        """
        whole = getattr(call.link.transport, "tree_all_reduce", None)
        if whole is not None:
            return whole(x, self.contract, call.span)
        node = self.contract.round(x.clone())
        for level in range(call.span.bit_length() - 1):
            node = self._meet(call.link, level, node, node)
        return node.to(x.dtype)

    def _tree_reduce_scatter(self, call: Call, x: Tensor) -> Tensor:
        """Recursive halving in the same order of joints: at level l give away the chunks whose bit
        l is not mine.
        """
        index, size = call.link.index, call.link.size
        whole = getattr(call.link.transport, "tree_reduce_scatter", None)
        if whole is not None:
            return whole(x, self.contract, call.dim)
        chunks = {i: self.contract.round(chunk) for i, chunk in enumerate(x.chunk(size, call.dim))}
        for level in range(size.bit_length() - 1):
            mine = [i for i in chunks if (i ^ index) >> level & 1 == 0]
            theirs = [i for i in chunks if i not in mine]
            kept, given = (
                torch.stack([chunks[i] for i in mine]),
                torch.stack([chunks[i] for i in theirs]),
            )
            chunks = dict(
                zip(mine, self._meet(call.link, level, given, kept).unbind(), strict=True)
            )
        return chunks[index].to(x.dtype)

    def _meet(self, link: Link, level: int, given: Tensor, kept: Tensor) -> Tensor:
        """Swap `given` with the partner of this level; join what comes with `kept`, the lower rank
        on the left.
        """
        peer = link.index ^ (1 << level)
        came = link.transport.swap(given, peer)
        left, right = (kept, came) if link.index < peer else (came, kept)
        return self.contract.joint(left, right)

    def _gather(self, call: Call, x: Tensor) -> Tensor:
        if call.link.size == 1:
            return x.clone()
        whole = getattr(call.link.transport, "all_gather", None)
        if whole is not None and call.dim == 0:
            return whole(x)
        return torch.cat(call.link.transport.gather(x), dim=call.dim)

    # -- refusals ----------------------------------------------------------------------------------

    def _link(self, site: str, axis: str) -> Link:
        if axis not in self.links:
            raise ValueError(
                f"{site}: no group for axis {axis!r} in grid {self.grid}: "
                f"have {', '.join(self.links)}"
            )
        return self.links[axis]

    def _check_site(self, x: Tensor, site: str, axis: str) -> None:
        transport = self._link(site, axis).transport
        wanted = {
            "process-group/gloo": "cpu",
            "process-group/nccl": "cuda",
            "symmetric memory": "cuda",
        }.get(getattr(transport, "name", ""))
        if wanted and x.device.type != wanted:
            raise ValueError(
                f"{site}: {transport.name} moves {wanted} tensors, this one is on {x.device}: "
                f"move it first"
            )

    def _check_sum(self, x: Tensor, site: str, axis: str) -> None:
        self._check_site(x, site, axis)
        if x.dtype not in SUMMABLE:
            raise ValueError(f"{site}: cannot sum {x.dtype}: a tree sum takes float32 or bfloat16")
        self.contract.subtree(self.links[axis].size)


def _bind(observer: Observer, call: Call, proceed: Proceed) -> Proceed:
    return lambda x: observer(call, x, proceed)
