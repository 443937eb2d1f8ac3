"""hidden = silu(X @ Wg^T) * (X @ Wu^T) for Hopper prefill: one GEMM, SwiGLU in its shadow.

    columns of a 128 x 256 tile     [ 128 gate rows of Wg | the same 128 rows of Wu ]
    a consumer's accumulator        [ gate 64 x 128       | up 64 x 128             ]

TMA copies both weights into one B stage, so that one wgmma makes gate and up, and column c of both
lands in the same thread. Both reduce over H, which is never split: they are chains. A finished tile
is rounded to BF16 words (where eager rounds its two projections) that stay in registers beside the
accumulator of the *next* tile; its SwiGLU is computed behind the wgmma of that tile's first steps,
32 columns behind each, so that the tensor cores never wait for it.

Tiles of 128 x 256 leave most of the device idle in a last, partial wave of them. `wide` says how
many there are; what is left is cut into tiles of half the width. No cut changes a bit.

Floor: the larger of the weights' bytes, 4 H I at 4.2 TB/s, and operations, 4 M H I at 665 TFLOP/s
(786 until the power cap lowers the clock). (H, I) = (4096, 12288): 1240 us of operations at
M = 4096 (measured 1185; cuBLAS's GEMM alone 1241).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from rlkernel.kernels.hopper_finish import store_block
from rlkernel.kernels.hopper_pipeline import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    blocks_of,
    first_step,
    load_box,
    multiply,
    next_stage,
    other_steps,
    round_leaf,
    tile_of,
)
from rlkernel.kernels.hopper_plan import Tiling

STAGES = 4  # 48 KB each
WIDE = Tiling(256, 64, STAGES, 2)
NARROW = Tiling(128, 64, STAGES, 2, b_pitch=2)


@gluon.jit
def place_of(tile, M, width, group, T: gl.constexpr):
    """Tile number -> first row, first column of hidden. Two narrow tiles make a wide one."""
    PER_WIDE: gl.constexpr = 256 // T.BN
    tile_m, tile_n = tile_of(tile // PER_WIDE, gl.cdiv(M, 128), gl.cdiv(width, 128), group)
    return tile_m * 128, tile_n * 128 + tile % PER_WIDE * 64


@gluon.jit
def first_narrow(wide):
    """This program's first narrow tile: those that got no tile in the last wave of wide ones come
    first.
    """
    programs = gl.num_programs(0)
    return 2 * wide + (gl.program_id(0) + programs - wide % programs) % programs


@gluon.jit
def load_stage(descs, ring, stage, phase, row, column, k, T: gl.constexpr):
    """Fill one stage with boxes of 64 x 64 as soon as both consumers have left it."""
    x_desc, gate_desc, up_desc = descs
    a_boxes, b_boxes, full, empty = ring
    PER_WEIGHT: gl.constexpr = T.BN // 128
    ready = full.index(stage)
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(ready, (128 + T.BN) * 64 * 2)
    for i in gl.static_range(2):
        load_box(x_desc, row + i * 64, k, ready, a_boxes.index(2 * stage + i), True)
    for i in gl.static_range(PER_WEIGHT):
        at = column + i * 64
        load_box(gate_desc, at, k, ready, b_boxes.index(4 * stage + i), True)
        load_box(up_desc, at, k, ready, b_boxes.index(4 * stage + PER_WEIGHT + i), True)


@gluon.jit
def produce_tiles(descs, ring, stage, phase, first, last, size, T: gl.constexpr):
    M, width, K, group = size
    for tile in range(first, last, gl.num_programs(0)):
        row, column = place_of(tile, M, width, group, T)
        for k in range(0, K, 64):
            load_stage(descs, ring, stage, phase, row, column, k, T)
            stage, phase = next_stage(stage, phase, T)
    # Consumers start a tile before they know whether there is one.
    load_stage(descs, ring, stage, phase, 0, 0, 0, T)
    return next_stage(stage, phase, T)


@gluon.jit
def produce(descs, ring, wide, size, W: gl.constexpr, N: gl.constexpr):
    M, width, K, group = size
    tiles = gl.cdiv(M, 128) * gl.cdiv(width, 128)
    zero = gl.to_tensor(0)
    stage, phase = produce_tiles(descs, ring, zero, zero + 1, gl.program_id(0), wide, size, W)
    if wide < tiles:
        produce_tiles(descs, ring, stage, phase, first_narrow(wide), 2 * tiles, size, N)


@gluon.jit
def swiglu(gate, up, TEXT: gl.constexpr):
    """Packed gate and up -> packed hidden, with eager's BF16 boundaries.

    Not `is_pure`: the compiler must not sink it behind the wgmma in whose shadow it belongs.
    """
    return gl.inline_asm_elementwise(TEXT, "=r,r,r", [gate, up], gl.int32, False, 1)


@gluon.jit
def store_chunk(
    descs,
    staging,
    chunks,
    row,
    column,
    CHUNK: gl.constexpr,
    HALF: gl.constexpr,
    KEEP: gl.constexpr,
    TEXT: gl.constexpr,
    T: gl.constexpr,
):
    """SwiGLU of 32 columns of a tile, and their way to memory."""
    hidden_desc, gate_desc, up_desc = descs
    gate = chunks[CHUNK]
    up = chunks[T.BN // 64 + CHUNK]
    at = column + CHUNK * 32
    PENDING: gl.constexpr = 3 if T.BN == 256 else 1  # how soon a tile comes back to a slot
    FIRST: gl.constexpr = CHUNK * 3 if KEEP else CHUNK
    if KEEP:
        store_block(gate_desc, staging.index(HALF * 4 + FIRST % 4), gate, row, at, PENDING, False)
        store_block(up_desc, staging.index(HALF * 4 + (FIRST + 1) % 4), up, row, at, PENDING, False)
    slot = staging.index(HALF * 4 + (FIRST + (2 if KEEP else 0)) % 4)
    store_block(hidden_desc, slot, swiglu(gate, up, TEXT), row, at, PENDING, False)


@gluon.jit
def consume_tiles(
    descs,
    ring,
    staging,
    stage,
    phase,
    first,
    last,
    size,
    HALF: gl.constexpr,
    KEEP: gl.constexpr,
    TEXT: gl.constexpr,
    T: gl.constexpr,
):
    """This consumer's rows of its program's tiles -> stage and phase of what comes next."""
    M, width, K, group = size
    a_boxes, boxes, full, empty = ring
    SHAPE: gl.constexpr = [T.STAGES * 256 // T.BN, T.BN, 64]
    ring = (a_boxes, boxes._reinterpret(gl.bfloat16, SHAPE, boxes.type.layout), full, empty)
    CHUNKS: gl.constexpr = T.BN // 64
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.BN, 16])
    acc = first_step(ring, stage, phase, HALF, T)
    # Before the first tile: words of nothing, at a row where TMA clips them all.
    beyond = gl.cdiv(M, 128) * 128
    row = beyond
    column = 0
    words = round_leaf(gl.zeros([64, T.BN], gl.float32, LAYOUT), False)
    for tile in range(first, last, gl.num_programs(0)):
        acc = warpgroup_mma_wait(1, deps=[acc])
        chunks = blocks_of(words, 2 * CHUNKS)
        for i in gl.static_range(CHUNKS):
            previous = stage
            stage, phase = next_stage(stage, phase, T)
            mbarrier.wait(full.index(stage), phase)
            acc = multiply(ring, acc, stage, HALF, False, T)
            store_chunk(descs, staging, chunks, row, column, i, HALF, KEEP, TEXT, T)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index(previous))
        acc, stage, phase = other_steps(ring, acc, stage, phase, K // 64 - CHUNKS, HALF, T)
        words = round_leaf(acc, False)
        acc = first_step(ring, stage, phase, HALF, T)
        row, column = place_of(tile, M, width, group, T)
        row += HALF * 64
    warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(stage))
    if row < beyond:
        chunks = blocks_of(words, 2 * CHUNKS)
        for i in gl.static_range(CHUNKS):
            store_chunk(descs, staging, chunks, row, column, i, HALF, KEEP, TEXT, T)
    return next_stage(stage, phase, T)


@gluon.jit
def consume(
    descs,
    ring,
    staging,
    wide,
    size,
    HALF: gl.constexpr,
    KEEP: gl.constexpr,
    TEXT: gl.constexpr,
    W: gl.constexpr,
    N: gl.constexpr,
):
    M, width, K, group = size
    tiles = gl.cdiv(M, 128) * gl.cdiv(width, 128)
    zero = gl.to_tensor(0)
    stage, phase = consume_tiles(
        descs,
        ring,
        staging,
        zero,
        zero,
        gl.program_id(0),
        wide,
        size,
        HALF,
        KEEP,
        TEXT,
        W,
    )
    if wide < tiles:
        consume_tiles(
            descs,
            ring,
            staging,
            stage,
            phase,
            first_narrow(wide),
            2 * tiles,
            size,
            HALF,
            KEEP,
            TEXT,
            N,
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["wide", "M", "width", "K", "group"])
def gate_up_kernel(
    x_desc,
    gate_weight_desc,
    up_weight_desc,
    hidden_desc,
    gate_desc,
    up_desc,
    wide,
    M,
    width,
    K,
    group,
    KEEP: gl.constexpr,
    TEXT: gl.constexpr,
    W: gl.constexpr,
    N: gl.constexpr,
):
    a_boxes = gl.allocate_shared_memory(gl.bfloat16, [2 * W.STAGES, 64, 64], x_desc.layout)
    b_boxes = gl.allocate_shared_memory(gl.bfloat16, [4 * W.STAGES, 64, 64], x_desc.layout)
    staging = gl.allocate_shared_memory(gl.bfloat16, [8, 64, 32], hidden_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [W.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [W.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(W.STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    ring = (a_boxes, b_boxes, full, empty)
    loads = (x_desc, gate_weight_desc, up_weight_desc)
    outs = (hidden_desc, gate_desc, up_desc)
    size = (M, width, K, group)
    gl.warp_specialize(
        [
            (consume, (outs, ring, staging, wide, size, 0, KEEP, TEXT, W, N)),
            (consume, (outs, ring, staging, wide, size, 1, KEEP, TEXT, W, N)),
            (produce, (loads, ring, wide, size, W, N)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
