"""How the root of a tile, or of a part of its leaves, gets to C."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rlkernel.kernels.hopper_pipeline import BLOCK_WORDS, block_barrier, joint, store_block


@gluon.jit
def store_tile(
    out_desc, staging, blocks, row, column, HALF: gl.constexpr, F: gl.constexpr, T: gl.constexpr
):
    """The blocks of a root -> C. Staging buffers are used in turn."""
    for i in gl.static_range(F.BLOCKS):
        buffer = staging.index((HALF * T.SLOTS + i % T.SLOTS) * F.SLOT_PITCH)
        store_block(
            out_desc, buffer, blocks[i], row, column + i * F.BLOCK_COLUMNS, T.SLOTS - 1, F.WIDE
        )


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
    scratch, partials, counters = memory
    half = tile * 2 + HALF
    words = gl.arange(0, BLOCK_WORDS, layout=blocks[0].type.layout)
    parts = partials + half.to(gl.int64) * (F.SPLIT * F.BLOCKS * BLOCK_WORDS) + words
    for i in gl.static_range(F.BLOCKS):
        gl.store(parts + (part * F.BLOCKS + i) * BLOCK_WORDS, blocks[i])
    block_barrier()
    if gl.atomic_add(counters + half, 1, sem="acq_rel", scope="gpu") == F.SPLIT - 1:
        gl.store(counters + half, 0)
        for i in gl.static_range(F.BLOCKS):
            root = fold_parts(parts + i * BLOCK_WORDS, 0, F.SPLIT, F)
            buffer = staging.index((HALF * T.SLOTS + i % T.SLOTS) * F.SLOT_PITCH)
            store_block(
                out_desc, buffer, root, row, column + i * F.BLOCK_COLUMNS, T.SLOTS - 1, F.WIDE
            )


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
        store_tile(out_desc, staging, blocks, row, column, HALF, F, T)
    else:
        publish(out_desc, memory, staging, blocks, tile, part, row, column, HALF, F, T)
