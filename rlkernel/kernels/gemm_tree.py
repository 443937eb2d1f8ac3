"""C = a @ b under a reduction tree: the schedule that runs on every Triton backend.

A program owns one tile of C. It walks the leaves from left to right, keeps the roots of finished
subtrees in registers (at most log2(leaves) of them, in the tree's dtype) and folds as soon as two
neighbours are there:

    leaf      0    1    2    3    4  ...          pending behind leaf 4:  [joint 0..3, leaf 4]
               \\  /      \\  /
              joint     joint
                  \\     /
                   joint

Tile shapes change nothing in the result: each element's additions are the contract's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract import ReductionTree, balanced
from rlkernel.kernels.bf16 import INTERPRETED, dot, to_bf16
from rlkernel.kernels.fold import check_devices, check_output, joint, narrowed
from rlkernel.kernels.launch import Launch

MOST_LEAVES = 16  # the walk is unrolled
STEP = tl.constexpr(16)  # the matrix instructions' smallest k
JOINT = tl.constexpr(-1)
GROUP = 8  # tile rows that share the columns of b in L2


@dataclass(frozen=True)
class Config:
    """How one launch is cut: a tile of C, the k-step, warps a program, stages of the pipeline."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def gemm_tree(
    a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree, config: Config | None = None
) -> Tensor:
    """a[M, K] @ b[K, N] under `tree` (1 to 16 leaves) -> out[M, N], which is also returned.

    a, b: BF16; out: BF16 or FP32; all with any strides and any alignment. The root is rounded
    once more to out's dtype where that differs from the tree's. An empty leaf is absent. K = 0
    gives +0.0. `out` must not share memory with a or b.

    Floor: 2 M N K operations; 2 M K + 2 K N bytes read, M N times out's element size written.
    Raises TypeError for a wrong dtype, ValueError for shapes, tile or device, before any launch.
    """
    prepared(a, b, out, tree, config)(a, b, out)
    return out


def prepared(
    a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree, config: Config | None = None
) -> Callable[[Tensor, Tensor, Tensor], object]:
    """gemm_tree, checked and decided: a call for operands that look like these (launch.py)."""
    check(a, b, out, tree)
    (m, k), n = a.shape, b.shape[1]
    if not m or not n or not k:
        return lambda a, b, out: out.zero_()
    config = config or default_config(m, n, k, tree)
    _check_config(config)
    grid = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    # A leaf's length in STEPs, where all leaves have that one.
    units = k // (tree.leaves * STEP.value)
    numbers = (m, n, k, units, 0.0, *a.stride(), *b.stride(), *out.stride())
    meta, options = constants((m, n, k), tree, config, out.dtype)
    launch = Launch(a.device, _gemm_tree, (grid,), meta, **options)
    return lambda a, b, out: launch(a, b, out, *numbers)


def constants(
    shape: tuple[int, int, int],
    tree: ReductionTree,
    config: Config,
    out_dtype: torch.dtype,
) -> tuple[dict[str, object], dict[str, object]]:
    """What the compiler knows of a launch for (M, N, K): the kernel's constants, and options."""
    m, n, k = shape
    bounds = tree.bounds(k)
    longest = max(hi - lo for lo, hi in bounds)
    told = k < tree.leaves  # absent leaves are told; the others are computed
    even = not told and k % (tree.leaves * STEP.value) == 0
    meta = {
        "LEAVES": tree.leaves,
        "ORDER": order(bounds),
        "EDGES": (0, *(hi for _, hi in bounds)) if told else (),
        "EVEN": even,
        "ONE_STEP": longest <= config.block_k,
        "MASK_M": m % config.block_m != 0,
        "MASK_N": n % config.block_n != 0,
        "MASK_K": not even or longest % config.block_k != 0,
        "NODE_BF16": tree.dtype == torch.bfloat16,
        "OUT_BF16": out_dtype == torch.bfloat16,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": GROUP,
        "ARCH": "" if INTERPRETED else "hip" if torch.version.hip else "cuda",
    }
    return meta, {"num_warps": config.warps, "num_stages": config.stages}


def order(bounds: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """What a program does, in postfix: a leaf's number, or JOINT for the two latest nodes.

    Four leaves: 0 1 + 2 3 + +. Absent leaves do not occur.
    """
    leaves = [(i,) if hi > lo else None for i, (lo, hi) in enumerate(bounds)]
    return balanced(leaves, lambda left, right: (*left, *right, JOINT.value))


@triton.jit(do_not_specialize=["k_size", "units"])
def _gemm_tree(
    a_ptr,
    b_ptr,
    out_ptr,
    m_size,
    n_size,
    k_size,
    units,
    nought,  # 0.0
    a_m,
    a_k,
    b_k,
    b_n,
    out_m,
    out_n,
    LEAVES: tl.constexpr,
    ORDER: tl.constexpr,
    EDGES: tl.constexpr,
    EVEN: tl.constexpr,
    ONE_STEP: tl.constexpr,  # no leaf is longer than BLOCK_K
    MASK_M: tl.constexpr,
    MASK_N: tl.constexpr,
    MASK_K: tl.constexpr,
    NODE_BF16: tl.constexpr,
    OUT_BF16: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ARCH: tl.constexpr,
):
    # Neighbouring programs go down a column of at most GROUP tiles: their operands meet in L2.
    tiles_m, tiles_n = tl.cdiv(m_size, BLOCK_M), tl.cdiv(n_size, BLOCK_N)
    band = tl.program_id(0) // (GROUP * tiles_n)
    within = tl.program_id(0) % (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    tile_m, tile_n = band * GROUP + within % height, within // height

    # 64 bits: M * K, K * N and M * N may pass 2^31.
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    keep_m = (rows < m_size) | (not MASK_M)
    keep_n = (cols < n_size) | (not MASK_N)
    a_tile = a_ptr + rows[:, None] * a_m + ks.to(tl.int64)[None, :] * a_k
    b_tile = b_ptr + ks.to(tl.int64)[:, None] * b_k + cols[None, :] * b_n

    # The compiler turns x + dot(a, b, 0) into dot(a, b, x), which is another order of additions;
    # it cannot do so with a zero that it does not know.
    zeros = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32) + nought

    loaded = ()
    if ONE_STEP:  # nothing to pipeline: ask for all operands before the first is used
        for i in tl.static_range(LEAVES):
            lo, hi = leaf_slice(0, k_size, units * STEP, i, LEAVES, EDGES, EVEN)
            keep_k = (ks < hi - lo) | (not MASK_K)
            x = _load(a_tile, lo, a_k, keep_m[:, None] & keep_k[None, :])
            y = _load(b_tile, lo, b_k, keep_k[:, None] & keep_n[None, :])
            loaded = loaded + ((x, y),)

    pending = ()
    for step in tl.static_range(len(ORDER)):
        if ORDER[step] == JOINT:
            pending = (kept(joint(pending[1][0], pending[0]), ARCH), pending[1][1])
        else:
            if ONE_STEP:
                acc = dot(loaded[ORDER[step]][0], loaded[ORDER[step]][1], zeros)
            else:
                lo, hi = leaf_slice(0, k_size, units * STEP, ORDER[step], LEAVES, EDGES, EVEN)
                acc = zeros
                for k in range(lo, hi, BLOCK_K):
                    keep_k = (ks < hi - k) | (not MASK_K)
                    x = _load(a_tile, k, a_k, keep_m[:, None] & keep_k[None, :])
                    y = _load(b_tile, k, b_k, keep_k[:, None] & keep_n[None, :])
                    acc = dot(x, y, acc)
            if NODE_BF16:
                pending = (kept(to_bf16(acc), ARCH), pending)
            else:
                pending = (kept(acc, ARCH), pending)

    at = out_ptr + rows[:, None] * out_m + cols[None, :] * out_n
    tl.store(at, narrowed(pending[0], OUT_BF16), mask=keep_m[:, None] & keep_n[None, :])


@triton.jit
def _load(tile, k, stride, keep):
    """The tile moved to k. Both operands are masked: NaN * 0 would be NaN."""
    return tl.load(tile + tl.cast(k, tl.int64) * stride, mask=keep, other=0.0)


@triton.jit
def kept(node, ARCH: tl.constexpr):
    """The node itself, computed here and not later.

    LLVM would move the roundings down to the joint, behind the loops of the leaves between, and
    keep all their FP32 accumulators alive. It does not move an assembly with side effects.
    """
    PACK: tl.constexpr = 32 // node.dtype.primitive_bitwidth
    if ARCH == "cuda":
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [node], dtype=node.dtype, is_pure=False, pack=PACK
        )
    elif ARCH == "hip":
        return tl.inline_asm_elementwise(
            "", "=v,0", [node], dtype=node.dtype, is_pure=False, pack=PACK
        )
    else:
        return node


@triton.jit
def leaf_slice(
    lo,
    hi,
    length,
    LEAF: tl.constexpr,
    LEAVES: tl.constexpr,
    EDGES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """[lo, hi) of a leaf: told, a multiple of the common length, or halved down to it."""
    HALF: tl.constexpr = LEAVES // 2
    if len(EDGES):
        return tl.full((), EDGES[LEAF], tl.int32), tl.full((), EDGES[LEAF + 1], tl.int32)
    elif EVEN:
        return LEAF * length, LEAF * length + length
    elif LEAVES == 1:
        return lo, hi
    elif LEAF < HALF:
        return leaf_slice(lo, lo + (hi - lo) // 2, length, LEAF, HALF, EDGES, EVEN)
    else:
        return leaf_slice(lo + (hi - lo) // 2, hi, length, LEAF - HALF, HALF, EDGES, EVEN)


def default_config(m: int, n: int, k: int, tree: ReductionTree, hip: bool | None = None) -> Config:
    """What to launch where nothing was measured: by the size of C and the length of a leaf."""
    return candidates(m, n, k, tree, hip)[0]


def candidates(
    m: int, n: int, k: int, tree: ReductionTree, hip: bool | None = None
) -> tuple[Config, ...]:
    """Configurations worth timing for a shape, the default first. All give the same bits.

    `hip`: for ROCm; where None, as torch was built.
    """
    leaf = -(-k // tree.leaves)
    if leaf <= 32:  # few tokens, a whole weight to write: the store is all that counts
        step = 16 if leaf <= 16 else 32
        tiles = [(32, 64, 4), (64, 64, 4), (32, 128, 4), (128, 64, 8)]
        found = [Config(bm, bn, step, warps, 1) for bm, bn, warps in tiles]
    elif m <= 64 or n <= 64:
        narrow = [size for size in (16, 32, 64) if size >= min(m, n, 64)]
        found = [
            Config(size, 64, 128, 4, 3) if m <= n else Config(64, size, 128, 4, 3)
            for size in narrow
        ]
    else:
        found = [Config(128, 128, 64, 8, 3), Config(128, 128, 64, 8, 4), Config(128, 64, 64, 8, 4)]
        found += [Config(64, 64, 64, 8, 4), Config(64, 64, 64, 4, 4)]
        # Pending tiles stay in registers: FP32 ones are twice as large, 16 leaves have one more.
        heavy = (tree.leaves > 1 and tree.round_to == "fp32") + (tree.leaves == MOST_LEAVES)
        found = found[(0, 2, 3)[heavy] :]
    if (
        torch.version.hip if hip is None else hip
    ):  # 64 KB of shared memory, one stage of it prefetched in registers
        found = [Config(c.block_m, c.block_n, min(c.block_k, 64), c.warps, 2) for c in found]
    return tuple(dict.fromkeys(found))


def check(a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree) -> None:
    """TypeError or ValueError where a launch cannot be."""
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dtype != torch.bfloat16:
            raise TypeError(f"{name} is {tensor.dtype}: expected torch.bfloat16; cast it first")
    check_output(out)
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        if tensor.ndim != 2:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} has {tensor.ndim} axes: expected 2; flatten the rest"
            )
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"K differs: a {tuple(a.shape)} and b {tuple(b.shape)}; expected a [M, K], b [K, N]"
        )
    if out.shape != (a.shape[0], b.shape[1]):
        raise ValueError(
            f"out {tuple(out.shape)} does not take a @ b: expected {(a.shape[0], b.shape[1])}"
        )
    if tree.leaves > MOST_LEAVES:
        raise ValueError(f"{tree.name} has {tree.leaves} leaves: expected at most {MOST_LEAVES}")
    check_devices(a=a, b=b, out=out)


def _check_config(config: Config) -> None:
    for name in ("block_m", "block_n", "block_k"):
        size = getattr(config, name)
        if size < STEP.value or size & (size - 1):
            raise ValueError(f"{name}={size} is not supported: expected a power of two from 16 on")
