"""How the root of a tile, or of a part of its leaves, gets to C."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from rlkernel.kernels.hopper_pipeline import BLOCK_WORDS, block_barrier, columns_of, joint


@gluon.jit
def store_block(out_desc, staging, block, row, column, PENDING: gl.constexpr, WIDE: gl.constexpr):
    """One block of words -> C, through swizzled shared memory and TMA, which clips to the matrix.

    PENDING: how many later stores may still be reading *other* staging buffers; this one's reader
    must be done before it is overwritten.
    """
    x = columns_of(block, WIDE)
    if WIDE:
        x = x.to(out_desc.dtype)  # FP32 as it is, or the root rounded once more, to nearest even
    else:
        low = x.to(gl.int16).to(gl.bfloat16, bitcast=True)
        high = (x >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
        x = gl.join(low, high).reshape((64, 2 * low.shape[1]))
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, x.shape[1], 16])
    tma.store_wait(PENDING)
    staging.store(gl.convert_layout(x, LAYOUT, assert_trivial=True))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], staging)


@gluon.jit
def store_blocks(
    out_desc,
    staging,
    blocks,
    row,
    column,
    FIRST: gl.constexpr,
    HALF: gl.constexpr,
    F: gl.constexpr,
    T: gl.constexpr,
):
    """Blocks FIRST, FIRST + 1, ... of a root -> C. Staging buffers are used in turn."""
    for i in gl.static_range(len(blocks)):
        at = column + (FIRST + i) * F.BLOCK_COLUMNS
        buffer = staging.index((HALF * T.SLOTS + (FIRST + i) % T.SLOTS) * F.SLOT_PITCH)
        store_block(out_desc, buffer, blocks[i], row, at, T.SLOTS - 1, F.WIDE)


@gluon.jit
def fold_parts(pointers, FIRST: gl.constexpr, COUNT: gl.constexpr, F: gl.constexpr):
    """Balanced fold of the published subtree roots FIRST .. FIRST + COUNT - 1 of one block.

    .cg: other programs wrote them, and L1 is not coherent.
    """
    if COUNT == 1:
        return gl.load(pointers + FIRST * F.BLOCKS * BLOCK_WORDS, cache_modifier=".cg")
    else:
        left = fold_parts(pointers, FIRST, COUNT // 2, F)
        right = fold_parts(pointers, FIRST + COUNT // 2, COUNT // 2, F)
        return joint(left, right, F.WIDE)


@gluon.jit
def publish(
    out_desc,
    memory,
    staging,
    blocks,
    tile,
    part,
    row,
    column,
    HALF: gl.constexpr,
    F: gl.constexpr,
    T: gl.constexpr,
):
    """Publish the subtree root `part` of a half tile; the last arriver folds all parts into C.

    Visibility: every thread stores, the barrier orders the 128 stores before the one acq_rel atomic
    of the group, and the atomic publishes them to whoever sees its count. The last arriver sets
    the counter back to zero, so the next launch may use any split.
    """
    partials, counters = memory
    half = tile * 2 + HALF
    words = gl.arange(0, BLOCK_WORDS, layout=blocks[0].type.layout)
    parts = partials + half.to(gl.int64) * (F.SPLIT * F.BLOCKS * BLOCK_WORDS) + words
    for i in gl.static_range(F.BLOCKS):
        gl.store(parts + (part * F.BLOCKS + i) * BLOCK_WORDS, blocks[i])
    block_barrier()
    if gl.atomic_add(counters + half, 1, sem="acq_rel", scope="gpu") == F.SPLIT - 1:
        gl.store(counters + half, 0)
        TOGETHER: gl.constexpr = 1 if F.WIDE else 2  # blocks whose loads registers have room for
        for i in gl.static_range(0, F.BLOCKS, TOGETHER):
            roots = ()
            for j in gl.static_range(TOGETHER):
                roots += (fold_parts(parts + (i + j) * BLOCK_WORDS, 0, F.SPLIT, F),)
            store_blocks(out_desc, staging, roots, row, column, i, HALF, F, T)


@gluon.jit
def finish(
    out_desc,
    memory,
    staging,
    blocks,
    tile,
    part,
    row,
    column,
    HALF: gl.constexpr,
    F: gl.constexpr,
    T: gl.constexpr,
):
    if F.SPLIT == 1:
        store_blocks(out_desc, staging, blocks, row, column, 0, HALF, F, T)
    else:
        publish(out_desc, memory, staging, blocks, tile, part, row, column, HALF, F, T)
