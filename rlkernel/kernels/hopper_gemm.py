"""C[M, N] = A[M, K] @ B[K, N] under a reduction tree, for Hopper: BF16 operands, FP32 leaves.

    leaf 0    leaf 1    leaf 2    leaf 3    leaf 4 ...       where pending sums wait,
       \\      /            \\      /                           in BF16    in FP32
        joint              joint                              registers  registers
             \\            /                                   registers  shared memory (of C)
                 joint                joint                   registers  scratch, in the L2
                       ...                                    C, through shared memory

Persistent programs walk tiles of 128 x 128 (a chain's may be 256 wide); hopper_pipeline.py has the
producer, the leaf and the subtree. `split` spreads the leaves of a tile over that many work items,
for small M: each publishes the root of its subtree, and whoever comes last folds them in tree
order. Neither tile, split nor raster changes a bit.

Floor: the larger of bytes, 2 (M K + N K + M N) at 4.2 TB/s, and operations, 2 M N K at 665 TFLOP/s
(786 until the power cap lowers the clock). Down, (M, 4096, 12288): 24 us of bytes at M = 128
(measured 35), 620 us of operations at M = 4096 (617; cuBLAS 611).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from rlkernel.contract import ReductionTree
from rlkernel.kernels import hopper_tma, workspace
from rlkernel.kernels.hopper_finish import finish
from rlkernel.kernels.hopper_pipeline import (
    BLOCK_WORDS,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    REGISTERS,
    blocks_of,
    first_step,
    produce,
    subtree,
    tile_of,
)
from rlkernel.kernels.hopper_plan import Config, choose, multiprocessors, shapes
from rlkernel.kernels.hopper_tma import operand, operand_box, out_box
from rlkernel.kernels.launch import Described, Launch


@gluon.jit
def consume(
    out_desc,
    memory,
    ring,
    staging,
    M,
    N,
    K,
    group,
    HALF: gl.constexpr,
    F: gl.constexpr,
    T: gl.constexpr,
):
    """One consumer: rows 64 * HALF .. + 63 of every tile of this program."""
    tiles_m = gl.cdiv(M, 128)
    tiles_n = gl.cdiv(N, T.BN)
    tiles = tiles_m * tiles_n
    steps = K // F.LEAVES // T.BK
    HALF_WORDS: gl.constexpr = F.BLOCKS * BLOCK_WORDS
    if F.WIDE:
        partials, counters = memory
        SHAPE: gl.constexpr = [2, HALF_WORDS]
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        shared = staging._reinterpret(gl.float32, SHAPE, FLAT).index(HALF)
        parking = (shared, partials + (gl.program_id(0) * 2 + HALF) * HALF_WORDS)
    else:
        parking = (staging, staging)
    stage = 0
    phase = 0
    acc = first_step(ring, stage, phase, HALF, T)
    for item in range(gl.program_id(0), tiles * F.SPLIT, gl.num_programs(0)):
        tile = item % tiles
        part = item // tiles
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, group)
        row = tile_m * 128 + HALF * 64
        column = tile_n * T.BN
        words, acc, stage, phase = subtree(
            ring, acc, stage, phase, steps, parking, F.ITEM_LEAVES, HALF, F.WIDE, T
        )
        blocks = blocks_of(words, F.BLOCKS)
        finish(out_desc, memory, staging, blocks, tile, part, row, column, HALF, F, T)
    warpgroup_mma_wait(0, deps=[acc])
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K", "group"])
def gemm_kernel(
    a_desc,
    b_desc,
    out_desc,
    partials,
    counters,
    M,
    N,
    K,
    group,
    F: gl.constexpr,
    T: gl.constexpr,
):
    a_boxes = gl.allocate_shared_memory(
        gl.bfloat16, [2 * T.STAGES] + a_desc.block_type.shape, a_desc.layout
    )
    b_boxes = gl.allocate_shared_memory(
        gl.bfloat16, [T.STAGES] + b_desc.block_type.shape, b_desc.layout
    )
    staging = gl.allocate_shared_memory(
        out_desc.dtype, [2 * T.SLOTS * F.SLOT_PITCH] + out_desc.block_type.shape, out_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(T.STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    ring = (a_boxes, b_boxes, full, empty)
    memory = (partials, counters)
    gl.warp_specialize(
        [
            (consume, (out_desc, memory, ring, staging, M, N, K, group, 0, F, T)),
            (consume, (out_desc, memory, ring, staging, M, N, K, group, 1, F, T)),
            (produce, ((a_desc, b_desc), ring, M, N, K, group, F.SPLIT, T)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def refuses(a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree) -> str | None:
    """Why these operands cannot run on this schedule, or None: they can."""
    reason = hopper_tma.operand_refused("a", a) or hopper_tma.operand_refused("b", b)
    if reason:
        return reason
    if b.shape[0] != a.shape[1]:
        return f"a is {tuple(a.shape)} and b {tuple(b.shape)}: a[M, K] @ b[K, N] expected"
    dtypes = (torch.bfloat16, torch.float32)
    if tree.leaves > 1 and tree.round_to == "bf16":
        dtypes = dtypes[:1]
    reason = hopper_tma.output_refused("out", out, (a.shape[0], b.shape[1]), dtypes)
    if reason:
        return reason
    try:
        shapes(a.shape[1], tree, out.element_size() * 8, Config(128))
    except ValueError as error:
        return str(error)
    return None


def hopper_gemm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    tree: ReductionTree,
    config: Config | None = None,
) -> Tensor:
    """a[M, K] @ b[K, N] -> out[M, N], all leaves and joints under `tree`. Returns `out`.

    a, b: BF16, memory running along either axis (a weight [N, K] is passed as its .t()). out: BF16,
    or FP32 where the tree keeps FP32 (or is a chain).

    Raises ValueError with what `refuses` says of these operands.
    """
    prepared(a, b, out, tree, config)(a, b, out)
    return out


def prepared(
    a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree, config: Config | None = None
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """hopper_gemm, checked and decided: a call for operands that look like these (launch.py)."""
    reason = refuses(a, b, out, tree)
    if reason:
        raise ValueError(reason)
    (M, K), N = a.shape, b.shape[1]
    along = hopper_tma.aligned(a, 1), hopper_tma.aligned(b, 0)
    bits = out.element_size() * 8
    sms = multiprocessors(a.device)
    config = config or choose(M, N, K, tree, sms, bits)
    fold, tiling = shapes(K, tree, bits, config, *along)
    items = -(-M // 128) * -(-N // tiling.bn) * fold.split
    programs = min(sms, items)
    # Halves of tiles that leave the SM: the roots of a split, or parked by a tree of 8 FP32 leaves.
    halves = 2 * items if fold.split > 1 else 2 * programs if fold.wide else 0
    words = max(1, halves * fold.blocks * BLOCK_WORDS.value)
    kind = torch.float32 if fold.wide else torch.int32
    arrivals = 2 * -(-M // 128) * -(-N // 128) if fold.split > 1 else 0
    # A descriptor is that of the matrix as its memory lies, whose base is the operand's.
    of_a = Described(operand(a, 1, along[0], operand_box(64, tiling.bk, along[0])))
    of_b = Described(operand(b, 0, along[1], operand_box(tiling.bn, tiling.bk, along[1])))
    of_out = Described(hopper_tma.descriptor(out, 1, out_box(fold.wide, bits)))
    numbers = (M, N, K, config.raster)
    launch = Launch(
        a.device, gemm_kernel, (programs,), {"F": fold, "T": tiling}, num_warps=4, maxnreg=REGISTERS
    )

    def run(a: Tensor, b: Tensor, out: Tensor) -> None:
        partials = a.new_empty(words, dtype=kind)
        counters = (
            workspace.counters(a.device, arrivals) if arrivals else partials.view(torch.int32)
        )
        launch(of_a(a), of_b(b), of_out(out), partials, counters, *numbers)

    return run
