"""Sums and gathers by kernels that write into the memory of their peers, on one host.

Besides moving bytes this transport offers whole collectives: the kernel that receives adds, in the
order and with the rounding that the contract gives it (kernels/peer_reduce.py), so the bits are
those of any other transport.

Calls are asynchronous on a GPU and may be captured into a CUDA graph, after a first call outside
it. A rank that does not come within the bound is noticed by the kernels of the others; their
results are NaN in every element, and PeerLost is raised by the next call or by `settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel.collectives.arenas import OpenArena
from rlkernel.collectives.errors import PeerLost
from rlkernel.contract import ReductionTree
from rlkernel.kernels.peer_gather import INTEGERS, all_gather
from rlkernel.kernels.peer_reduce import all_reduce, reduce_scatter


class SymmetricTransport:
    """One rank's end of a group whose ranks share memory; `open` is called at the first use."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        index: int,
        device: torch.device,
        open: Callable[[], OpenArena],
    ) -> None:
        self.group = group  # the same ranks, for who wants another way
        self.ranks, self.index, self.device = tuple(ranks), index, device
        self.name = "symmetric memory" + (", host stand-in" if device.type == "cpu" else "")
        self._open = open
        self._arena: OpenArena | None = None
        self._stream: torch.cuda.Stream | None = None

    # -- a transport ---------------------------------------------------------------------------

    def gather(self, x: Tensor) -> list[Tensor]:
        return list(self._gathered(x).unbind())

    def swap(self, x: Tensor, peer: int) -> Tensor:
        return self._gathered(x)[peer]

    # -- whole collectives ---------------------------------------------------------------------

    def tree_all_reduce(self, x: Tensor, tree: ReductionTree, span: int) -> Tensor:
        """The tree over aligned runs of `span` ranks' x, in x's shape and dtype."""
        x = x.detach().contiguous()
        out = torch.empty_like(x)
        return self._run(all_reduce, x, out, tree, span=span)

    def tree_reduce_scatter(self, x: Tensor, tree: ReductionTree, dim: int) -> Tensor:
        """This rank's chunk along `dim` of the tree over the ranks' x."""
        size = len(self.ranks)
        parts = (
            x.detach()
            .unflatten(dim, (size, x.shape[dim] // size))
            .movedim(dim % x.ndim, 0)
            .contiguous()
        )
        return self._run(reduce_scatter, parts, torch.empty_like(parts[0]), tree)

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x behind the other along the first axis."""
        return self._gathered(x).flatten(0, 1) if x.ndim else self._gathered(x)

    def reach(self, peer: int) -> Tensor:
        """The bytes of a peer's slots, to copy to while no call runs: what the link can do."""
        if self._arena is None:
            self._arena = self._open()
        return self._arena.reach(peer)

    def settle(self) -> None:
        """Wait for this device. Raises PeerLost if any call so far has missed a rank."""
        if self._arena is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._check(self._arena)

    # -- how a call runs -----------------------------------------------------------------------

    def _gathered(self, x: Tensor) -> Tensor:
        """[size, *x.shape]; bits, whatever the dtype."""
        x = x.detach().contiguous()
        out = x.new_empty(len(self.ranks), *x.shape)
        raw = x.reshape(-1).view(torch.uint8)
        kind = next(
            k for k in INTEGERS if raw.numel() % k.itemsize == 0 == raw.data_ptr() % k.itemsize
        )
        # Ranks may take different integers: the bytes of a round are the same.
        source, target = raw.view(kind), out.view(-1).view(torch.uint8).view(kind)
        self._run(all_gather, source, target)
        return out

    def _run(self, collective: Callable, x: Tensor, out: Tensor, *rest, **more) -> Tensor:
        if x.device.type != self.device.type:
            raise ValueError(f"{self.name} is on {self.device}, this tensor on {x.device}: move it")
        if self._arena is None:
            self._arena = self._open()
        self._check(self._arena)
        self._follow()
        collective(x, out, *rest, self._arena.peers, **more)
        if self.device.type == "cpu":
            self._check(self._arena)
        return out

    def _follow(self) -> None:
        """Calls of a group run one behind the other, whatever their streams. Within one captured
        graph the caller sees to it.
        """
        if self.device.type == "cpu" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def _check(self, arena: OpenArena) -> None:
        missing = arena.missing()
        if missing is None:
            return
        bound = f"{arena.peers.limit_ns / 1e9:g} s"
        rank = self.ranks[missing]
        what = f"rank {rank} did not come within {bound}"
        if missing == self.index:
            what = f"rank {rank}, this one, came more than {bound} behind the others"
        where = f"a collective of group {list(self.ranks)} by {self.name}"
        raise PeerLost(f"{what} to {where}", ranks=(rank,))
