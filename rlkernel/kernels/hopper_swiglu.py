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

from rlkernel.kernels.hopper_pipeline import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    REGISTERS,
    blocks_of,
    first_step,
    load_box,
    multiply,
    next_stage,
    other_steps,
    round_leaf,
    store_block,
    tile_of,
)
from rlkernel.kernels.hopper_plan import Tiling, multiprocessors
from rlkernel.kernels.hopper_silu import SWIGLU
from rlkernel.kernels.hopper_tma import k_major, operand, operand_box, out_box, output

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
def produce_tiles(descs, ring, stage, phase, first, last, M, width, K, group, T: gl.constexpr):
    for tile in range(first + gl.program_id(0), last, gl.num_programs(0)):
        row, column = place_of(tile, M, width, group, T)
        for k in range(0, K, 64):
            load_stage(descs, ring, stage, phase, row, column, k, T)
            stage, phase = next_stage(stage, phase, T)
    # Consumers start a tile before they know whether there is one.
    load_stage(descs, ring, stage, phase, 0, 0, 0, T)
    return next_stage(stage, phase, T)


@gluon.jit
def produce(descs, ring, wide, M, width, K, group, W: gl.constexpr, N: gl.constexpr):
    tiles = gl.cdiv(M, 128) * gl.cdiv(width, 128)
    zero = gl.to_tensor(0)
    stage, phase = produce_tiles(descs, ring, zero, zero + 1, 0, wide, M, width, K, group, W)
    if wide < tiles:
        produce_tiles(descs, ring, stage, phase, 2 * wide, 2 * tiles, M, width, K, group, N)


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
    M,
    width,
    K,
    group,
    HALF: gl.constexpr,
    KEEP: gl.constexpr,
    TEXT: gl.constexpr,
    T: gl.constexpr,
):
    """This consumer's rows of its program's tiles -> stage and phase of what comes next."""
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
    for tile in range(first + gl.program_id(0), last, gl.num_programs(0)):
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
    M,
    width,
    K,
    group,
    HALF: gl.constexpr,
    KEEP: gl.constexpr,
    TEXT: gl.constexpr,
    W: gl.constexpr,
    N: gl.constexpr,
):
    tiles = gl.cdiv(M, 128) * gl.cdiv(width, 128)
    zero = gl.to_tensor(0)
    stage, phase = consume_tiles(
        descs, ring, staging, zero, zero, 0, wide, M, width, K, group, HALF, KEEP, TEXT, W
    )
    if wide < tiles:
        consume_tiles(
            descs,
            ring,
            staging,
            stage,
            phase,
            2 * wide,
            2 * tiles,
            M,
            width,
            K,
            group,
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
    gl.warp_specialize(
        [
            (consume, (outs, ring, staging, wide, M, width, K, group, 0, KEEP, TEXT, W, N)),
            (consume, (outs, ring, staging, wide, M, width, K, group, 1, KEEP, TEXT, W, N)),
            (produce, (loads, ring, wide, M, width, K, group, W, N)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def wide_tiles(M: int, I: int, sms: int = 132) -> int:  # noqa: E741
    """How many tiles stay wide: all whole waves; the last, partial one is cut in half where its
    halves make one wave, for then it takes half the time.
    """
    tiles = -(-M // 128) * -(-I // 128)
    rest = tiles % sms
    return tiles - rest if 2 * rest <= sms else tiles


def hopper_gate_up(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    hidden: Tensor,
    gate: Tensor | None = None,
    up: Tensor | None = None,
    wide: int | None = None,
    arithmetic: str = SWIGLU,
) -> Tensor:
    """silu(x @ w_gate.t()) * (x @ w_up.t()) -> hidden[M, I], rounded where eager rounds.

    x[M, H], w_gate[I, H], w_up[I, H] (two weights, or the halves of one packed tensor): BF16,
    memory along H. hidden, and gate and up [M, I] if both are given (the training forward keeps
    them): BF16, row-major. wide: how many tiles are wide (None: the likely fastest).

    Raises ValueError for shapes, dtypes, strides or addresses that TMA does not allow, and for H
    below 320 or no multiple of 64.
    """
    for name, t in (("x", x), ("w_gate", w_gate), ("w_up", w_up)):
        if not k_major(name, t, 1):
            raise ValueError(
                f"{name} has strides {t.stride()}: its memory must run along H, axis 1"
            )
    (M, H), width = x.shape, w_gate.shape[0]
    if w_gate.shape != (width, H) or w_up.shape != (width, H) or H % 64 or H < 320:
        raise ValueError(
            f"x{tuple(x.shape)}, w_gate{tuple(w_gate.shape)}, w_up{tuple(w_up.shape)}: x[M, H] and "
            "two weights [I, H] expected, H a multiple of 64, at least 320; use a portable kernel"
        )
    if (gate is None) != (up is None):
        raise ValueError("gate and up are kept both or not at all: give two tensors or none")
    keep = gate is not None
    outs = [("hidden", hidden), ("gate", gate if keep else hidden), ("up", up if keep else hidden)]
    descs = [
        output(name, t, (M, width), (torch.bfloat16,), out_box(False, 16, 32)) for name, t in outs
    ]
    sms = multiprocessors(x.device)
    tiles = -(-M // 128) * -(-width // 128)
    if wide is None:
        wide = wide_tiles(M, width, sms)
    if not 0 <= wide <= tiles:
        raise ValueError(f"wide is {wide}: there are {tiles} tiles, so 0 to {tiles} can be wide")
    box = operand_box(64, 64, True)
    with torch.cuda.device(x.device):
        gate_up_kernel[(min(sms, max(wide, 2 * (tiles - wide))),)](
            *(operand(t, 1, True, box) for t in (x, w_gate, w_up)),
            *descs,
            wide,
            M,
            width,
            H,
            min(16, -(-M // 128)),
            keep,
            arithmetic,
            WIDE,
            NARROW,
            num_warps=4,
            maxnreg=REGISTERS,
        )
    return hidden
