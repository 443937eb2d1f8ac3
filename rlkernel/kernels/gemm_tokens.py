"""C = a @ b under a reduction tree where K is a few tokens: the gradient of a weight, dC.T @ X.

    a strip of C, one program           leaf    tokens of K = 19    k-slots of its product
    [ tile ][ tile ][ tile ] ...         0       0  1                0  1  .  .  ...  .
                                         1       2  3                2  3  .  .  ...  .
    each: all leaves, their joints,      2       4  5                4  5  .  .  ...  .
    one store; a's leaves stay,          3       6  7  8             6  7  8  .  ...  .
    b's come a tile or two ahead         ...

The store of C is the floor; everything else has to hide behind it. A leaf begins at k-slot 0 of a
product of its own, with zeros behind its last token: the matrix unit adds up 16 slots in one step,
in its own way, so tokens that lay across two steps would have other bits. The borders of the leaves
are computed in the kernel, which is not compiled anew for another number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract import ReductionTree
from rlkernel.kernels.bf16 import INTERPRETED, dot, to_bf16
from rlkernel.kernels.fold import joint, narrowed
from rlkernel.kernels.gemm_tree import JOINT, STEP, check, kept, leaf_slice, order
from rlkernel.kernels.launch import Launch

MOST_TOKENS = 64
PROGRAMS = 1536  # strips that fill a large GPU several times over


@dataclass(frozen=True)
class Config:
    """How one launch is cut: a tile of C, tiles a strip, warps a program, stages of the pipeline,
    registers a thread at most (0: the compiler decides; CUDA only).
    """

    block_m: int
    block_n: int
    span: int
    warps: int
    stages: int
    registers: int = 0


def gemm_tokens(
    a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree, config: Config | None = None
) -> Tensor:
    """a[M, K] @ b[K, N] under `tree` (1 to 16 leaves), K <= 64 -> out[M, N], also returned.

    For a weight [N_out, H] a is dC.t(), b is X and K the number of tokens. a, b: BF16; out: BF16 or
    FP32; all with any strides and any alignment. An empty leaf (K < leaves) is absent; K = 0 gives
    +0.0. The root is rounded once more to out's dtype where that differs from the tree's. `out`
    must not share memory with a or b.

    Floor: M N times out's element size written. Raises TypeError for a wrong dtype, ValueError for
    shapes, tile, device or too many tokens, before any launch.
    """
    prepared(a, b, out, tree, config)(a, b, out)
    return out


def prepared(
    a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree, config: Config | None = None
) -> Callable[[Tensor, Tensor, Tensor], object]:
    """gemm_tokens, checked and decided: a call for operands that look like these (launch.py)."""
    check(a, b, out, tree)
    (m, k), n = a.shape, b.shape[1]
    if k > MOST_TOKENS:
        raise ValueError(f"K={k} is not supported: expected at most {MOST_TOKENS} tokens")
    if not m or not n or not k:
        return lambda a, b, out: out.zero_()
    config = config or default_config(m, n, k, tree)
    _check_config(config)
    strips = triton.cdiv(triton.cdiv(n, config.block_n), config.span)
    programs = triton.cdiv(m, config.block_m) * strips
    numbers = (m, n, k, config.span, *a.stride(), *b.stride(), *out.stride())
    meta, options = constants((m, n, k), tree, config, out.dtype)
    launch = Launch(a.device, _gemm_tokens, (programs,), meta, **options)
    return lambda a, b, out: launch(a, b, out, *numbers)


def constants(
    shape: tuple[int, int, int], tree: ReductionTree, config: Config, out_dtype: torch.dtype
) -> tuple[dict[str, object], dict[str, object]]:
    """What the compiler knows of a launch for (M, N, K): the kernel's constants, and options."""
    m, n, k = shape
    leaves = leaves_needed(tree, k)
    meta = {
        "LEAVES": leaves,
        "ORDER": order(((0, 1),) * leaves),
        "SPARSE": k < leaves,
        "NODE_BF16": tree.dtype == torch.bfloat16,
        "OUT_BF16": out_dtype == torch.bfloat16,
        "MASK_M": m % config.block_m != 0,
        "MASK_N": n % config.block_n != 0,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": max(STEP.value, triton.next_power_of_2(triton.cdiv(k, leaves))),
        "STAGES": config.stages,
        "ARCH": "" if INTERPRETED else "hip" if torch.version.hip else "cuda",
    }
    options = {"num_warps": config.warps, "num_stages": config.stages}
    if config.registers and meta["ARCH"] == "cuda":
        options["maxnreg"] = config.registers
    return meta, options


def leaves_needed(tree: ReductionTree, k: int) -> int:
    """How many leaves give the same bits: below a node of one token there is one leaf, that token.

    All nodes of the level that has the next power of two of k of them hold one token or none.
    """
    return min(tree.leaves, triton.next_power_of_2(k))


@triton.jit(do_not_specialize=["k_size", "span"])
def _gemm_tokens(
    a_ptr,
    b_ptr,
    out_ptr,
    m_size,
    n_size,
    k_size,
    span,
    a_m,
    a_k,
    b_k,
    b_n,
    out_m,
    out_n,
    LEAVES: tl.constexpr,
    ORDER: tl.constexpr,
    SPARSE: tl.constexpr,  # some leaves are absent
    NODE_BF16: tl.constexpr,
    OUT_BF16: tl.constexpr,
    MASK_M: tl.constexpr,
    MASK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ARCH: tl.constexpr,
):
    tiles = tl.cdiv(n_size, BLOCK_N)
    strips = tl.cdiv(tiles, span)
    first = tl.program_id(0) % strips * span
    # 64 bits: M * K, K * N and M * N may pass 2^31.
    rows = (tl.program_id(0) // strips).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    keep_m = (rows < m_size) | (not MASK_M)
    a_rows = a_ptr + rows[:, None] * a_m
    left = ()
    for i in tl.static_range(LEAVES):
        left = left + (_load(a_rows, ks[None, :], a_k, keep_m[:, None], k_size, i, LEAVES),)

    for tile in tl.range(first, tl.minimum(first + span, tiles), num_stages=STAGES):
        cols = tl.cast(tile, tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        keep_n = (cols < n_size) | (not MASK_N)
        b_cols = b_ptr + cols[None, :] * b_n
        right = ()
        for i in tl.static_range(LEAVES):
            right = right + (_load(b_cols, ks[:, None], b_k, keep_n[None, :], k_size, i, LEAVES),)

        pending = ()
        for step in tl.static_range(len(ORDER)):
            if ORDER[step] == JOINT:
                pending = (joint(pending[1][0], pending[0]), pending[1][1])
            else:
                # A zero that the compiler knows costs nothing. It would turn x + dot(a, b, 0) into
                # dot(a, b, x), another order of additions, but does not see through `kept`.
                zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                node = dot(left[ORDER[step]], right[ORDER[step]], zeros)
                if NODE_BF16:
                    node = to_bf16(node)
                if SPARSE:
                    node = _or_nothing(node, k_size, ORDER[step], LEAVES)
                pending = (kept(node, ARCH), pending)
        at = out_ptr + rows[:, None] * out_m + cols[None, :] * out_n
        tl.store(at, narrowed(pending[0], OUT_BF16), mask=keep_m[:, None] & keep_n[None, :])


@triton.jit
def _load(at, ks, stride, keep, k_size, LEAF: tl.constexpr, LEAVES: tl.constexpr):
    """A leaf's tokens of one operand, zeros behind them. Both are masked: NaN * 0 would be NaN."""
    lo, hi = leaf_slice(0, k_size, 0, LEAF, LEAVES, (), False)
    return tl.load(at + (ks + lo).to(tl.int64) * stride, mask=keep & (ks < hi - lo), other=0.0)


@triton.jit
def _or_nothing(node, k_size, LEAF: tl.constexpr, LEAVES: tl.constexpr):
    """A leaf; where it is absent, -0.0 in place of +0.0: x + -0.0 is x, whatever x is."""
    lo, hi = leaf_slice(0, k_size, 0, LEAF, LEAVES, (), False)
    if node.dtype == tl.bfloat16:
        sign = tl.where(hi == lo, -0x8000, 0).to(tl.int16)
        return (node.to(tl.int16, bitcast=True) | sign).to(tl.bfloat16, bitcast=True)
    else:
        sign = tl.where(hi == lo, -0x80000000, 0).to(tl.int32)
        return (node.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


def default_config(m: int, n: int, k: int, tree: ReductionTree, hip: bool | None = None) -> Config:
    """What to launch where nothing was measured."""
    return candidates(m, n, k, tree, hip)[0]


def candidates(
    m: int, n: int, k: int, tree: ReductionTree, hip: bool | None = None
) -> tuple[Config, ...]:
    """Configurations worth timing for a shape, the default first. All give the same bits.

    `hip`: for ROCm; where None, as torch was built.
    """
    # Pending tiles stay in registers: 16 leaves have one more, FP32 ones are twice as large.
    if leaves_needed(tree, max(k, 1)) == 16:
        wide = 16 if tree.round_to == "fp32" else 32
        found = [(64, wide, 4, 2, 0), (64, wide, 4, 3, 0)]
    else:
        found = [(64, 64, 4, 3, 0), (64, 32, 4, 3, 0), (64, 32, 4, 2, 0)]
        even = 64 if tree.round_to == "fp32" else 16
        if m % even or n % even:  # masks, single elements and 64 columns: too many registers
            found = found[1:]
        elif tree.round_to == "bf16":  # a few spilled addresses, one program more at a time
            found += [(64, 64, 4, 2, 128), (128, 64, 8, 3, 128)]
    if torch.version.hip if hip is None else hip:  # no inline assembly in a pipelined loop there
        found = [(bm, bn, warps, 1, 0) for bm, bn, warps, _, _ in found]
    return tuple(
        Config(bm, bn, _span(m, n, bm, bn), *more) for bm, bn, *more in dict.fromkeys(found)
    )


def _span(m: int, n: int, block_m: int, block_n: int) -> int:
    """Tiles a strip, at most 8: a is fetched once a strip, yet strips must outnumber the cores."""
    strips = triton.cdiv(m, block_m) * triton.cdiv(n, block_n) // PROGRAMS
    return max(1, min(8, triton.next_power_of_2(strips + 1) // 2))


def refuses(a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree) -> str | None:
    """Why these operands cannot run on this schedule, or None: they can."""
    try:
        check(a, b, out, tree)
    except (TypeError, ValueError) as error:
        return str(error)
    if a.shape[1] > MOST_TOKENS:
        return f"K={a.shape[1]} is more than {MOST_TOKENS} tokens"
    return None


def _check_config(config: Config) -> None:
    for name in ("block_m", "block_n"):
        size = getattr(config, name)
        if size < STEP.value or size & (size - 1):
            raise ValueError(f"{name}={size} is not supported: expected a power of two from 16 on")
    if config.span < 1:
        raise ValueError(f"span={config.span} is not supported: expected at least one tile")
