"""A dense block and its tensor-parallel twin, trained side by side: what all reconstructions share.

A block says how its weights look, how the dense forward goes, which shard a rank owns and how the
twin's forward goes. Everything else is the same for every block and stands here:

    dense   x [S, B, H] -> loss -> backward -> SGD          once a rank, kept for the next case
    twin    its batch of dp, its positions under SP -> loss -> backward -> sum over dp -> SGD

Partial sums travel in FP32 whatever the block's dtype, as the leaves of a tree that rounds to FP32;
what comes out of a linear layer is rounded to the block's dtype once, where the dense block rounds.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlkernel.collectives import regions
from rlkernel.collectives.comm import Comm
from rlkernel.reconstruct.step import Pair, Step, backward, flat, update

EPS = 1e-6
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Block(ABC):
    """A seeded block. std: of the initial weights; None scales each to 1/sqrt(fan-in), so that
    outputs keep an RMS near 1. sequence_parallel: positions are split outside the linear layers.
    """

    seed: int
    dtype: torch.dtype
    std: float | None
    sequence_parallel: bool

    # gradient signal -> the parameters behind it, in the order in which a wrong one would show
    GRADIENTS: ClassVar[Mapping[str, tuple[str, ...]]]

    @abstractmethod
    def initial(self) -> Weights:
        """All weights, the same on every rank, in FP32."""

    @abstractmethod
    def tokens(self) -> tuple[int, int, int]:
        """S, B, H of input, target and output."""

    @abstractmethod
    def contraction(self) -> int:
        """Length of the sum that tensor parallelism splits in forward."""

    @abstractmethod
    def dense(self, weights: Weights, x: Tensor) -> Tensor:
        """The whole block on one process: x [S, B, H] -> [S, B, H]."""

    @abstractmethod
    def shard(self, weights: Weights, comm: Comm) -> Weights:
        """This rank's own copies of its shards; what is replicated is copied whole."""

    @abstractmethod
    def parallel(self, local: Weights, x: Tensor, comm: Comm) -> Tensor:
        """The twin on one rank: x [S, B, H], under sequence parallel its positions [S/P, B, H]."""

    @abstractmethod
    def shapes(self, comm: Comm) -> dict[str, dict[str, list[int]]]:
        """What the dense block holds and what one rank of the twin holds, by name."""

    # -- data and the dense side -------------------------------------------------------------------

    def weights(self, device: torch.device | str = "cpu") -> Weights:
        """All weights in the block's dtype, the same on every rank."""
        return {name: w.to(device, self.dtype) for name, w in self.initial().items()}

    def data(self, step: int) -> tuple[Tensor, Tensor]:
        """Input and target [S, B, H] of one step; other data in every step."""
        g = torch.Generator().manual_seed(self.seed * 1000 + step)
        x, target = (torch.randn(*self.tokens(), generator=g) for _ in range(2))
        return x.to(self.dtype), target.to(self.dtype)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    # -- both sides --------------------------------------------------------------------------------

    def train_both(
        self, comm: Comm, lr: float, *, steps: int = 1, local: Weights | None = None
    ) -> dict[str, Pair]:
        """Train dense block and twin for `steps`; each signal of the twin's last step beside the
        dense slice that it must equal. local: this rank's shards, where somebody loaded them.
        """
        reference = dense_step(self, lr, steps, str(comm.device))
        local = self.shard(self.weights(comm.device), comm) if local is None else local
        for number in range(steps):
            done = self.twin_step(comm, lr, local, *(t.to(comm.device) for t in self.data(number)))
            local = done.updated
        return self.pairs(comm, done, reference)

    def twin_step(self, comm: Comm, lr: float, local: Weights, x: Tensor, target: Tensor) -> Step:
        """One training step of this rank; its loss is that of the whole batch."""
        here = self.part(comm)
        step = backward(
            lambda w, x: self.parallel(w, x, comm), local, x[here], target[here], x.numel()
        )
        # Ranks of one dp lane hold other sequences, under SP also other positions.
        grads = {name: over_data(comm, g, "dw") for name, g in step.grads.items()}
        loss = over_data(comm, step.loss.reshape(1), "loss")
        if self.sequence_parallel:
            loss = comm.all_reduce(loss, "loss.positions")
        return update(step, loss[0], grads, local, lr)

    def part(self, comm: Comm) -> tuple[slice, slice]:
        """(positions, sequences) of the whole input that this rank holds."""
        s, b, _ = self.tokens()
        rank, grid = comm.rank, comm.grid
        split = self.sequence_parallel
        at = grid.shard(s, "tp", rank, "sequence S") if split else slice(None)
        return at, grid.shard(b, "grad", rank, "batch B")

    def pairs(self, comm: Comm, twin: Step, dense: Step) -> dict[str, Pair]:
        """The signals in the order in which a wrong one would show."""
        here, (s, b, h) = self.part(comm), self.tokens()
        grads, updated = self.shard(dense.grads, comm), self.shard(dense.updated, comm)
        found = {
            "output": Pair(twin.output, dense.output[here], self.contraction()),
            "loss": Pair(twin.loss, dense.loss, s * b * h),
            "input_grad": Pair(twin.input_grad, dense.input_grad[here], self.contraction()),
        }
        for signal, names in self.GRADIENTS.items():
            mine, right = ({n: held[n] for n in names if n in held} for held in (twin.grads, grads))
            found[signal] = Pair(flat(mine), flat(right), s * b)
        found["post_step"] = Pair(flat(twin.updated), flat(updated), s * b)
        return found


@functools.lru_cache(maxsize=16)  # the seeds of one dtype; every rank keeps its own
def dense_step(block: Block, lr: float, number: int, device: str) -> Step:
    """The dense block's training step of that number, from 1; the same for every fault and grid,
    hence kept.
    """
    weights = block.weights(device)
    for earlier in range(number):
        x, target = (t.to(device) for t in block.data(earlier))
        step = backward(block.dense, weights, x, target, x.numel())
        done = update(step, step.loss, step.grads, weights, lr)
        weights = done.updated
    return done


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / rms(x) * weight over the last dimension; statistics in FP32, as Qwen3's norm has them."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def enter(n: Tensor, comm: Comm, layer: str, split: bool) -> Tensor:
    """Into the column-parallel `layer`: replicated in every rank, in FP32.

    Its gradient is a partial sum of each rank, reduced at "<layer>.dx".
    """
    if split:
        return regions.gather(n.float(), comm, f"{layer}.gather", f"{layer}.dx")
    return regions.copy(n.float(), comm, f"{layer}.dx")


def leave(partial: Tensor, comm: Comm, layer: str, split: bool) -> Tensor:
    """Out of the row-parallel `layer`: the FP32 sum of the ranks' partials at "<layer>.forward"."""
    if split:
        return regions.scatter(partial, comm, f"{layer}.forward", f"{layer}.gather")
    return regions.reduce(partial, comm, f"{layer}.forward")


def over_data(comm: Comm, x: Tensor, site: str) -> Tensor:
    """Sum over the ranks that hold the same shard and other tokens; nothing where there are
    none.
    """
    return comm.all_reduce(x, site, "grad") if comm.grid.axis_size("grad") > 1 else x
