"""Which tile, ring and split a Hopper GEMM uses: legal configurations, and the likely fastest.

No choice in this file changes a bit of a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from triton.experimental.gluon import language as gl

from rlkernel.contract import ReductionTree

TILE_M = 128


class CompileTime:
    """Frozen numbers that a kernel takes as one constexpr. What the host calls T.bn is T.BN in a
    kernel: the same number, as the constexpr that Gluon wants.
    """

    def __getattr__(self, name: str) -> gl.constexpr:
        if not name.isupper():
            raise AttributeError(name)
        return gl.constexpr(getattr(self, name.lower()))


@dataclass(frozen=True)
class Tiling(CompileTime):
    """The pipeline: tiles of 128 x `bn`, a ring of `stages` x `bk`, `slots` staging buffers of 8 KB
    a consumer, how the operands lie, and how many boxes of `bn` columns a stage of B has room for.
    """

    bn: int
    bk: int
    stages: int
    slots: int
    a_k_major: bool = True
    b_k_major: bool = True
    b_pitch: int = 1


@dataclass(frozen=True)
class Fold(CompileTime):
    """The tree of a tile: `leaves` over `split` work items, in FP32 words (`wide`) or BF16 pairs.

    What follows from them is stored, not computed on demand: Triton's cache knows a kernel by its
    source and by the repr of its constexprs, and would not see a property that changed.
    """

    leaves: int
    split: int
    wide: bool
    out_bits: int
    bn: int
    item_leaves: int = field(init=False)
    block_columns: int = field(init=False)
    blocks: int = field(init=False)  # of 2048 words, in a half tile
    slot_pitch: int = field(init=False)  # C blocks in 8 KB: two where FP32 words leave as BF16

    def __post_init__(self) -> None:
        columns = 32 if self.wide else 64
        derived = {
            "item_leaves": self.leaves // self.split,
            "block_columns": columns,
            "blocks": self.bn // columns,
            "slot_pitch": 2 if self.wide and self.out_bits == 16 else 1,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Config:
    """A schedule: 128 x `bn` tiles, leaves over `split` work items, bands of `raster` tile rows."""

    bn: int = 128
    split: int = 1
    raster: int = 16


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many programs a persistent kernel starts on this device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_wide(tree: ReductionTree, out_bits: int) -> bool:
    """FP32 words? A chain that ends in BF16 is rounded once, so pairs of BF16 will do."""
    return out_bits == 32 or (tree.leaves > 1 and tree.round_to == "fp32")


def shapes(
    K: int,
    tree: ReductionTree,
    out_bits: int,
    config: Config,
    a_k_major: bool = True,
    b_k_major: bool = True,
) -> tuple[Fold, Tiling]:
    """What the kernel is compiled for. Raises ValueError if this tree has no such configuration."""
    wide = is_wide(tree, out_bits)
    if tree.leaves > 8 or config.split not in (1, 2, 4, 8) or config.split > tree.leaves:
        raise ValueError(
            f"{tree.name} with split={config.split}: leaves are 1, 2, 4 or 8, and a "
            "split is 1, 2, 4 or 8, at most the leaves; use a portable kernel or another config"
        )
    if config.bn not in (128, 256) or (config.bn == 256 and (wide or tree.leaves > 1)):
        raise ValueError(
            f"bn={config.bn} under {tree.name}: tiles are 128 columns wide, or 256 for a "
            "chain that ends in BF16; take another config"
        )
    fold = Fold(tree.leaves, config.split, wide, out_bits, config.bn)
    # 227 KB: a ring of 32 KB stages (48 KB at 256), 8 KB of staging a slot and consumer
    stages, slots = (4, 2) if config.bn == 256 else (5, 4) if wide else (6, 2)
    bk = 64
    if K // tree.leaves % 64:
        bk, stages = 32, 2 * stages
    if K <= 0 or K % (tree.leaves * bk):
        raise ValueError(
            f"K={K} under {tree.name}: the Hopper kernels need a positive multiple of "
            f"{tree.leaves * bk} ({tree.leaves} leaves x {bk}); use a portable kernel"
        )
    return fold, Tiling(config.bn, bk, stages, slots, a_k_major, b_k_major)


def candidates(M: int, N: int, K: int, tree: ReductionTree, out_bits: int = 16) -> Iterator[Config]:
    """Every legal configuration for this problem, one raster each."""
    raster = min(16, -(-M // TILE_M))
    for bn, split in ((128, 1), (256, 1), (128, 2), (128, 4), (128, 8)):
        config = Config(bn, split, raster)
        try:
            shapes(K, tree, out_bits, config)
        except ValueError:
            continue
        yield config


# Clocks, fitted to timings of 20 shapes on an H200 (what is chosen costs at most 0.4 % more than
# the best of the candidates). Only their ratios matter.
MMA_FLOPS = {256: 3944, 128: 3932}  # a clock and SM, by tile width: dense BF16, 4096 at best
FEED_BYTES = 65  # a clock and SM: L2 into shared memory while all SMs ask
DRAM_BYTES = 2250  # a clock: the whole device
FOLD = 30  # a leaf of 128 columns; most of it is done behind the next leaf's first step
FINISH = 60  # a tile's store, most of it in the shadow of the next tile
PUBLISH = 4300  # a subtree root into the L2, and the counter
COLLECT = 1300  # fetching one published root


def cost(
    M: int, N: int, K: int, tree: ReductionTree, out_bits: int, config: Config, sms: int
) -> float:
    """Estimated clocks, but for what all configurations pay. Small M is bound by reading B once,
    large M by the tensor cores, both by whole waves of work items; a split shortens an item but
    pays for the traffic of its roots.
    """
    bn, split = config.bn, config.split
    items = -(-M // TILE_M) * -(-N // bn) * split
    words = bn / 128 * (2 if is_wide(tree, out_bits) else 1)
    per_k = max(2 * TILE_M * bn / MMA_FLOPS[bn], (min(TILE_M, M) + bn) * 2 / FEED_BYTES)
    item = K / split * per_k + tree.leaves / split * FOLD * words
    item += FINISH * words if split == 1 else PUBLISH * words
    last = 0 if split == 1 else COLLECT * split * words
    floor = ((M + N) * K * 2 + M * N * out_bits / 8) / DRAM_BYTES
    return max(-(-items // sms) * item, floor) + last


@lru_cache(maxsize=4096)
def choose(
    M: int, N: int, K: int, tree: ReductionTree, sms: int = 132, out_bits: int = 16
) -> Config:
    """The configuration of the least estimated cost. Raises ValueError if there is none."""
    legal = list(candidates(M, N, K, tree, out_bits))
    if not legal:
        shapes(K, tree, out_bits, Config(128, 1))  # says why
    return min(legal, key=lambda config: cost(M, N, K, tree, out_bits, config, sms))
