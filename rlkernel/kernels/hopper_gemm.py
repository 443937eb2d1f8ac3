"""C[M, N] = A[M, K] @ B[K, N] under a reduction tree, for Hopper: BF16 operands, FP32 leaves.

    leaf 0    leaf 1    leaf 2    leaf 3    leaf 4 ...       where a consumer keeps what is pending
       \\      /            \\      /                           level 0  registers
        joint              joint                              level 1  shared memory (C's staging)
             \\            /                                   level 2  scratch that stays in the L2
                 joint                joint                   root     C, through the same staging

Tiles of 128 x 128 with BF16 joints have registers for all of it; levels 1 and 2 leave them where
the tile is 256 wide or sums stay in FP32.

Persistent programs walk 128 x BN tiles; hopper_pipeline.py has the producer and the leaf. `split`
spreads the leaves of a tile over that many work items, for small M: each publishes the root of its
subtree, and whoever comes last folds them in tree order. Neither tile, split nor raster changes a
bit.
"""

from __future__ import annotations

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
from rlkernel.kernels.hopper_finish import finish
from rlkernel.kernels.hopper_pipeline import (
    BLOCK_WORDS,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    REGISTERS,
    blocks_of,
    first_step,
    joint,
    joint_with_leaf,
    other_steps,
    produce,
    round_leaf,
    subtree,
    tile_of,
)
from rlkernel.kernels.hopper_plan import Config, choose, is_wide, multiprocessors, shapes
from rlkernel.kernels.hopper_tma import k_major, operand, operand_box, out_box, output


@gluon.jit
def fold_pair(
    out_desc,
    memory,
    staging,
    level1,
    blocks,
    pair,
    tile,
    part,
    row,
    column,
    HALF: gl.constexpr,
    F: gl.constexpr,
    T: gl.constexpr,
):
    """What becomes of the joint of leaves 2 * pair and 2 * pair + 1 of a work item."""
    WORDS: gl.constexpr = blocks[0].type.layout
    if F.ITEM_LEAVES <= 2:
        finish(out_desc, memory, staging, blocks, tile, part, row, column, HALF, F, T)
    elif pair % 2 == 0:
        if pair == 0:
            tma.store_wait(0)  # the last tile of C may still be leaving through the same memory
        for i in gl.static_range(F.BLOCKS):
            level1.index(HALF * F.BLOCKS + i).store(blocks[i])
    else:
        folded = ()
        for i in gl.static_range(F.BLOCKS):
            left = level1.index(HALF * F.BLOCKS + i).load(WORDS)
            folded += (joint(left, blocks[i], F.WIDE),)
        if F.ITEM_LEAVES == 4:
            finish(out_desc, memory, staging, folded, tile, part, row, column, HALF, F, T)
        else:
            scratch, partials, counters = memory
            place = (gl.program_id(0) * 2 + HALF).to(gl.int64) * (F.BLOCKS * BLOCK_WORDS)
            level2 = scratch + place + gl.arange(0, BLOCK_WORDS, layout=WORDS)
            if pair == 1:
                for i in gl.static_range(F.BLOCKS):
                    gl.store(level2 + i * BLOCK_WORDS, folded[i])
            else:
                roots = ()
                for i in gl.static_range(F.BLOCKS):
                    roots += (joint(gl.load(level2 + i * BLOCK_WORDS), folded[i], F.WIDE),)
                finish(out_desc, memory, staging, roots, tile, part, row, column, HALF, F, T)


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
    WORD: gl.constexpr = gl.float32 if F.WIDE else gl.int32
    level1 = staging._reinterpret(
        WORD, [2 * T.SLOTS, BLOCK_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    stage = 0
    phase = 0
    acc = first_step(ring, stage, phase, HALF, T)
    for item in range(gl.program_id(0), tiles * F.SPLIT, gl.num_programs(0)):
        tile = item % tiles
        part = item // tiles
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, group)
        row = tile_m * 128 + HALF * 64
        column = tile_n * T.BN
        if F.IN_REGISTERS:
            words, acc, stage, phase = subtree(
                ring, acc, stage, phase, steps, F.ITEM_LEAVES, HALF, F.WIDE, T
            )
            blocks = blocks_of(words, F.BLOCKS)
            finish(out_desc, memory, staging, blocks, tile, part, row, column, HALF, F, T)
        else:
            for pair in range(F.ITEM_PAIRS):
                leaf, stage, phase = other_steps(ring, acc, stage, phase, steps, HALF, T)
                words = round_leaf(leaf, F.WIDE)
                if F.ITEM_LEAVES > 1:
                    acc = first_step(ring, stage, phase, HALF, T)
                    leaf, stage, phase = other_steps(ring, acc, stage, phase, steps, HALF, T)
                    words = joint_with_leaf(words, leaf, F.WIDE)
                blocks = blocks_of(words, F.BLOCKS)
                if F.EARLY:
                    acc = first_step(ring, stage, phase, HALF, T)
                fold_pair(
                    out_desc,
                    memory,
                    staging,
                    level1,
                    blocks,
                    pair,
                    tile,
                    part,
                    row,
                    column,
                    HALF,
                    F,
                    T,
                )
                if not F.EARLY:
                    acc = first_step(ring, stage, phase, HALF, T)
    warpgroup_mma_wait(0, deps=[acc])
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K", "group"])
def gemm_kernel(
    a_desc,
    b_desc,
    out_desc,
    scratch,
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
    memory = (scratch, partials, counters)
    operands = (a_desc, b_desc)
    gl.warp_specialize(
        [
            (consume, (out_desc, memory, ring, staging, M, N, K, group, 0, F, T)),
            (consume, (out_desc, memory, ring, staging, M, N, K, group, 1, F, T)),
            (produce, (operands, ring, M, N, K, group, F.SPLIT, T)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def counters_needed(M: int, N: int) -> int:
    """How many int32 counters a split GEMM of an [M, N] output may use."""
    return 2 * -(-M // 128) * -(-N // 128)


def hopper_gemm(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    tree: ReductionTree,
    config: Config | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """a[M, K] @ b[K, N] -> out[M, N], all leaves and joints under `tree`. Returns `out`.

    a, b: BF16, memory running along either axis (a weight [N, K] is passed as its .t()). out: BF16,
    or FP32 where the tree keeps FP32 (or is a chain). counters: at least `counters_needed(M, N)`
    int32 zeros on the device, used by a split only and zero again afterwards; two launches that may
    run at the same time need two of them. None allocates them.

    Raises ValueError for a shape, dtype, stride or address that TMA or the tree does not allow.
    """
    along = k_major("a", a, 1), k_major("b", b, 0)
    (M, K), N = a.shape, b.shape[1]
    if b.shape[0] != K:
        raise ValueError(
            f"a is {tuple(a.shape)} and b {tuple(b.shape)}: a[M, K] @ b[K, N] expected"
        )
    dtypes = (torch.bfloat16, torch.float32)
    if tree.leaves > 1 and tree.round_to == "bf16":
        dtypes = dtypes[:1]
    bits = out.element_size() * 8
    wide = is_wide(tree, bits)
    out_desc = output("out", out, (M, N), dtypes, out_box(wide, bits))
    sms = multiprocessors(a.device)
    config = config or choose(M, N, K, tree, sms, bits)
    fold, tiling = shapes(K, tree, bits, config, *along)
    items = -(-M // 128) * -(-N // tiling.bn) * fold.split
    programs = min(sms, items)
    word = torch.float32 if wide else torch.int32
    half = fold.blocks * BLOCK_WORDS.value
    scratch = a.new_empty(
        programs * 2 * half if fold.item_leaves == 8 and not fold.in_registers else 4, dtype=word
    )
    partials = a.new_empty(items * 2 * half if fold.split > 1 else 4, dtype=word)
    if fold.split == 1:
        counters = scratch.view(torch.int32)
    elif counters is None:
        counters = a.new_zeros(counters_needed(M, N), dtype=torch.int32)
    elif counters.dtype != torch.int32 or counters.numel() < counters_needed(M, N):
        raise ValueError(
            f"counters is {counters.dtype} [{counters.numel()}]: "
            f"at least {counters_needed(M, N)} int32 zeros expected"
        )
    with torch.cuda.device(a.device):
        gemm_kernel[(programs,)](
            operand(a, 1, along[0], operand_box(64, tiling.bk, along[0])),
            operand(b, 0, along[1], operand_box(tiling.bn, tiling.bk, along[1])),
            out_desc,
            scratch,
            partials,
            counters,
            M,
            N,
            K,
            config.raster,
            fold,
            tiling,
            num_warps=4,
            maxnreg=REGISTERS,
        )
    return out
