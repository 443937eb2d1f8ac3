"""C[M, N] = a[M, K] @ b[K, N] for at most 128 rows, under any tree: the weights are read once.

    tile of N  \\  leaves   l0 l1   l2 l3   l4 l5   l6 l7
    columns 0..127          [ p0 ]  [ p1 ]  [ p2 ]  [ p3 ]   a program takes one leaf or an exact
    columns 128..255        [ p4 ]  [ p5 ]  [ p6 ]  [ p7 ]   subtree of them (here two)

A program reduces its leaves, each by a chain, folds them in registers and leaves the rounded root
of its subtree in a workspace [parts, M, N] that stays in L2. The program that arrives last at a
column tile loads all the parts, its own included, and folds them in tree order: who comes last
decides who adds, never what is added to what.

Which writes become visible to whom: all threads of a program store their part; the barrier puts
these stores before the arrival, an atomic add (acquire and release, device scope) by one thread;
whoever sees the last count has therefore acquired the stores of every program that counted before
it, and the broadcast of that count is a barrier too. The parts are loaded past L1, where lines of
an earlier launch may lie. The last to arrive sets the counter back to zero, when nobody will touch
it any more: the next launch on the same stream, or the next replay, finds zeros whatever number of
parts it has itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract import ReductionTree
from rlkernel.kernels import stream, workspace
from rlkernel.kernels.bf16 import INTERPRETED, dot, rounded, to_bf16, to_fp32
from rlkernel.kernels.launch import Described, Launch
from rlkernel.kernels.stream import (
    POINTERS,
    PORTABLE,
    DecodeConfig,
    rows_tile,
    weight_tile,
)


@triton.jit
def carry(node, index, one, two, four, LEAVES: tl.constexpr, BF16: tl.constexpr):
    """Fold leaf number `index` into the pending roots of `one`, `two` and `four` leaves, the way a
    binary counter carries; the root of all LEAVES ends in the last one that is needed (`root_in`).
    """
    if index % 2 == 0:
        one = node
    else:
        node = rounded(one + node, BF16)
        if LEAVES == 2:
            one = node
        elif index % 4 == 1:
            two = node
        else:
            node = rounded(two + node, BF16)
            if LEAVES == 4:
                two = node
            elif index % 8 == 3:
                four = node
            else:
                four = rounded(four + node, BF16)
    return one, two, four


@triton.jit
def root_in(one, two, four, LEAVES: tl.constexpr):
    """The root that `carry` left behind."""
    if LEAVES == 2:
        root = one
    elif LEAVES == 4:
        root = two
    else:
        root = four
    return root


@triton.jit
def root_of(parts, offsets, mask, size, PARTS: tl.constexpr, BF16: tl.constexpr):
    """Root over PARTS neighbouring nodes, `size` elements apart in memory -> FP32."""
    if PARTS == 1:
        node = to_fp32(tl.load(parts + offsets, mask=mask, other=0.0, cache_modifier=".cg"))
    else:
        left = root_of(parts, offsets, mask, size, PARTS // 2, BF16)
        right = root_of(parts + PARTS // 2 * size, offsets, mask, size, PARTS // 2, BF16)
        node = rounded(left + right, BF16)
    return node


@triton.jit
def store_node(at, node, mask):
    """FP32 -> the element type behind `at`, BF16 to nearest even."""
    if at.dtype.element_ty == tl.bfloat16:
        tl.store(at, to_bf16(node), mask=mask)
    else:
        tl.store(at, node, mask=mask)


@triton.jit(do_not_specialize=["M"])
def gemm_decode_kernel(
    rows, weight, out, parts, arrivals,
    M, N, leaf, stride_m, stride_n, stride_k, stride_out,
    LEAVES: tl.constexpr, BF16: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, K_INNER: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """One program: GROUP neighbouring leaves of `leaf` elements, BLOCK_N columns, all rows."""
    tl.static_assert(GROUP <= 8)
    PARTS: tl.constexpr = LEAVES // GROUP
    tile = tl.program_id(0)
    part = tl.program_id(1)
    n0 = tile * BLOCK_N
    start = part * GROUP * leaf
    end = start + GROUP * leaf

    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    one = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    two = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    four = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, GROUP * leaf, BLOCK_K):
        w = weight_tile(
            weight, n0, start + k, N, end, stride_n, stride_k,
            BLOCK_N, BLOCK_K, TMA, K_INNER, EVEN_K,
        )  # fmt: skip
        x = rows_tile(rows, start + k, M, end, stride_m, BLOCK_M, BLOCK_K, TMA, EVEN_K)
        acc = dot(w, x, acc)
        if GROUP > 1:
            if (k + BLOCK_K) % leaf == 0:
                one, two, four = carry(rounded(acc, BF16), k // leaf, one, two, four, GROUP, BF16)
                acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if GROUP == 1:
        root = rounded(acc, BF16)
    else:
        root = root_in(one, two, four, GROUP)

    n = n0 + tl.arange(0, BLOCK_N)[:, None]
    m = tl.arange(0, BLOCK_M)[None, :]
    mask = (n < N) & (m < M)
    if PARTS == 1:
        store_node(out + m.to(tl.int64) * stride_out + n, root, mask)
    else:
        offsets = m * N + n
        store_node(parts + part * M * N + offsets, root, mask)
        tl.debug_barrier()
        before = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if before == PARTS - 1:
            tl.store(arrivals + tile, 0)
            root = root_of(parts, offsets, mask, M * N, PARTS, BF16)
            store_node(out + m.to(tl.int64) * stride_out + n, root, mask)


def gemm_decode(
    a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree, config: DecodeConfig | None = None
) -> Tensor:
    """a[M, K] @ b[K, N] under `tree` -> `out`[M, N] (BF16 or FP32), for M <= 128.

    a and b are BF16. Rows of a and of out are contiguous; b is contiguous along K (a weight
    [N, K].t()) or along N, and is never copied. A config that does not fit (TMA and a misaligned
    base, a block that does not divide a leaf) falls back to one that does; the bits are the same.
    Raises ValueError with what `refuses` says of these operands.
    """
    prepared(a, b, out, tree, config)(a, b, out)
    return out


def prepared(
    a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree, config: DecodeConfig | None = None
) -> Callable[[Tensor, Tensor, Tensor], object]:
    """gemm_decode, checked and decided: a call for operands that look like these (launch.py)."""
    reason = refuses(a, b, out, tree)
    if reason:
        raise ValueError(reason)
    (m, k), n = a.shape, b.shape[1]
    if n == 0 or k == 0:
        return lambda a, b, out: out.zero_()
    k_inner = b.stride(0) == 1
    config = fitting(config or default_config(m, n, tree, k_inner), a, b, tree)
    block_m, tiles = stream.padded_rows(m), triton.cdiv(n, config.block_n)
    leaf, split = k // tree.leaves, tree.leaves // config.leaves
    if config.tma:
        block = (config.block_n, config.block_k)
        of_rows = Described(stream.descriptor(a, (block_m, config.block_k)))
        # Memory along k is that of b.t(), whose base is b's.
        lying = (b.t(), block) if k_inner else (b, block[::-1])
        of_weight = Described(stream.descriptor(*lying))
    numbers = (m, n, leaf, a.stride(0), b.stride(1), b.stride(0), out.stride(0))
    constants = {
        "LEAVES": tree.leaves, "BF16": tree.round_to == "bf16", "GROUP": config.leaves,
        "BLOCK_M": block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "TMA": config.tma, "K_INNER": k_inner, "EVEN_K": leaf % config.block_k == 0,
    }  # fmt: skip
    warps = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launch = Launch(a.device, gemm_decode_kernel, (tiles, split), constants, **warps)

    def run(a: Tensor, b: Tensor, out: Tensor) -> None:
        rows, weight = (of_rows(a), of_weight(b)) if config.tma else (a, b)
        parts, arrivals = out, out  # unused by a program that holds the whole tree
        if split > 1:
            parts = a.new_empty(split, m, n, dtype=tree.dtype)
            arrivals = workspace.counters(a.device, tiles)
        launch(rows, weight, out, parts, arrivals, *numbers)

    return run


# The fastest of the sweep on an H200 at (K, N) = (12288, 4096), chains (4096, 12288), by padded M.
TREE_K_INNER = {
    16: DecodeConfig(64, 256, num_stages=4, leaves=4),
    32: DecodeConfig(64, 256, num_stages=4, leaves=4),
    64: DecodeConfig(64, 256, num_stages=4, leaves=4),
    128: DecodeConfig(128, 64, num_warps=8, num_stages=6, leaves=2),
}
TREE_N_INNER = {
    16: DecodeConfig(128, 128, num_warps=8),
    32: DecodeConfig(128, 128, num_warps=8, num_stages=5, leaves=2),
    64: DecodeConfig(128, 128, num_warps=8, num_stages=5, leaves=2),
    128: DecodeConfig(128, 64, num_warps=8, num_stages=6, leaves=2),
}
CHAIN = {
    16: DecodeConfig(128, 128, num_warps=8, num_stages=4),
    32: DecodeConfig(128, 128, num_warps=8, num_stages=4),
    64: DecodeConfig(128, 128, num_warps=8, num_stages=4),
    128: DecodeConfig(128, 64, num_warps=8, num_stages=6),
}


def default_config(m: int, n: int, tree: ReductionTree, k_inner: bool) -> DecodeConfig:
    """What was fastest for these rows, cut finer where N is small."""
    if stream.portable():
        return PORTABLE
    table = CHAIN if tree.leaves == 1 else TREE_K_INNER if k_inner else TREE_N_INNER
    return stream.spread(table[stream.padded_rows(m)], n, tree.leaves)


def candidates(
    m: int, n: int, k: int, tree: ReductionTree, k_inner: bool
) -> tuple[DecodeConfig, ...]:
    """Configs of different shape, the default first, whose bits a census compares for a[m, k] @
    b[k, n]: other tiles and steps, pointers, several leaves a program where there are several.
    """
    found = [
        default_config(m, n, tree, k_inner),
        PORTABLE,
        DecodeConfig(32, 64, num_stages=4, tma=not stream.portable()),
    ]
    if tree.leaves > 1:
        step = max(16, math.gcd(k // tree.leaves, 128))  # a program with several takes whole steps
        most = 4 if m <= 64 else 2  # the pending sums of 128 rows fill the registers
        found.append(replace(PORTABLE, block_k=step, leaves=min(most, tree.leaves)))
    if not stream.portable():
        found.append(DecodeConfig(128, 64, num_warps=8, num_stages=3))
    return tuple(dict.fromkeys(found))


def fitting(config: DecodeConfig, a: Tensor, b: Tensor, tree: ReductionTree) -> DecodeConfig:
    """`config`, or the nearest one that these tensors allow."""
    leaf = b.shape[0] // tree.leaves
    # A tile that ran over the end of its leaf would read the next one: only a chain may do that.
    whole = tree.leaves == 1 or leaf % config.block_k == 0
    if config.tma and not (whole and stream.fits_tma(a) and stream.fits_tma(b)):
        config = POINTERS
    leaves = min(config.leaves, tree.leaves, 8) if leaf % config.block_k == 0 else 1
    stages = stream.stages_that_fit(config, a.shape[0], weights=1)
    return replace(config, leaves=leaves, num_stages=stages)


def refuses(a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree) -> str | None:
    """Why these operands cannot run on this schedule, or None: they can."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        return f"gemm_decode needs a[M, K] and b[K, N]: got {list(a.shape)} and {list(b.shape)}"
    (m, k), n = a.shape, b.shape[1]
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        return f"gemm_decode multiplies bf16: got {a.dtype} and {b.dtype}"
    if out.shape != (m, n) or out.dtype not in (torch.bfloat16, torch.float32):
        return f"out must be bf16 or fp32 [{m}, {n}]: got {out.dtype} {list(out.shape)}"
    if len({a.device, b.device, out.device}) > 1:
        return f"a, b and out must be on one device: got {a.device}, {b.device}, {out.device}"
    if not INTERPRETED and a.device.type != "cuda":
        return f"a compiled kernel runs on a GPU: got tensors on {a.device}"
    if k > 1 and a.stride(1) != 1 or n > 1 and out.stride(1) != 1:
        return "the rows of a and out must be contiguous"
    if k and n and 1 not in b.stride():
        return f"b must be contiguous along K or N: its strides are {b.stride()}"
    try:
        stream.padded_rows(m)
        tree.check_axis("K", k, 1, kind="weight")
    except ValueError as error:
        return str(error)
    return None
