"""hidden = silu(X @ Wg^T) * (X @ Wu^T) for Hopper and at most 128 rows: one tile a program.

    B of one stage        [ 64 gate rows | 64 up rows ]   [ 32 gate rows | 32 up rows ]
    two accumulators      [ 64 x 64      | 64 x 64    ]   [ 64 x 32      | 64 x 32    ]

With so few rows the weights have to come as fast as memory delivers them, and no SM may have more
to multiply than its share: tiles of 96 columns of hidden keep 128 SMs busy at I = 12288, where
tiles of 128 keep 96. TMA and wgmma know no 192, so a tile is 128 and 64 wide, side by side.

Floor: the weights' bytes, 4 H I at 4.2 TB/s: 48 us at (H, I) = (4096, 12288) (measured 59); a
program multiplies for 49,000 clocks, 28 to 38 us.
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
    round_leaf,
)
from rlkernel.kernels.hopper_plan import Tiling
from rlkernel.kernels.hopper_swiglu_kernel import swiglu

COLUMNS = gl.constexpr(96)  # of hidden, a program
LEFT = Tiling(128, 64, 5, 3)  # 40 KB a stage
RIGHT = Tiling(64, 64, 5, 3)


@gluon.jit
def load_stage(descs, ring, stage, phase, column, k):
    """Fill one stage as soon as both consumers have left it."""
    x_desc, gate_desc, up_desc = descs
    a_boxes, left, right, full, empty = ring
    ready = full.index(stage)
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(ready, (128 + 192) * 64 * 2)
    for i in gl.static_range(2):
        load_box(gate_desc, column + i * 32, k, ready, left.index(4 * stage + i), True)
        load_box(up_desc, column + i * 32, k, ready, left.index(4 * stage + 2 + i), True)
    load_box(gate_desc, column + 64, k, ready, right.index(2 * stage), True)
    load_box(up_desc, column + 64, k, ready, right.index(2 * stage + 1), True)
    for i in gl.static_range(2):
        load_box(x_desc, i * 64, k, ready, a_boxes.index(2 * stage + i), True)


@gluon.jit
def produce(descs, ring, K, T: gl.constexpr):
    column = gl.program_id(0) * COLUMNS
    stage = 0
    phase = 1
    for k in range(0, K, 64):
        load_stage(descs, ring, stage, phase, column, k)
        stage, phase = next_stage(stage, phase, T)


@gluon.jit
def consume(
    outs,
    ring,
    staging,
    K,
    HALF: gl.constexpr,
    KEEP: gl.constexpr,
    TEXT: gl.constexpr,
    L: gl.constexpr,
    R: gl.constexpr,
):
    a_boxes, left, right, full, empty = ring
    SHAPE_L: gl.constexpr = [L.STAGES, 128, 64]
    SHAPE_R: gl.constexpr = [R.STAGES, 64, 64]
    left = (a_boxes, left._reinterpret(gl.bfloat16, SHAPE_L, left.type.layout), full, empty)
    right = (a_boxes, right._reinterpret(gl.bfloat16, SHAPE_R, right.type.layout), full, empty)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    acc = first_step(left, stage, phase, HALF, L)
    bcc = first_step(right, stage, phase, HALF, R)
    acc, bcc = warpgroup_mma_wait(2, deps=[acc, bcc])
    for _ in range(64, K, 64):
        previous = stage
        stage, phase = next_stage(stage, phase, L)
        mbarrier.wait(full.index(stage), phase)
        acc = multiply(left, acc, stage, HALF, False, L)
        bcc = multiply(right, bcc, stage, HALF, False, R)
        acc, bcc = warpgroup_mma_wait(2, deps=[acc, bcc])
        mbarrier.arrive(empty.index(previous))
    acc, bcc = warpgroup_mma_wait(0, deps=[acc, bcc])
    hidden_desc, gate_desc, up_desc = outs
    both = blocks_of(round_leaf(acc, False), 4)
    rest = blocks_of(round_leaf(bcc, False), 2)
    gates = (both[0], both[1], rest[0])
    ups = (both[2], both[3], rest[1])
    row = HALF * 64
    column = gl.program_id(0) * COLUMNS
    for i in gl.static_range(3):
        at = column + i * 32
        if KEEP:
            gate_buffer = staging.index(HALF * 3 + (3 * i + 1) % 3)
            up_buffer = staging.index(HALF * 3 + (3 * i + 2) % 3)
            store_block(gate_desc, gate_buffer, gates[i], row, at, 2, False)
            store_block(up_desc, up_buffer, ups[i], row, at, 2, False)
            buffer = staging.index(HALF * 3)
        else:
            buffer = staging.index(HALF * 3 + i)
        store_block(hidden_desc, buffer, swiglu(gates[i], ups[i], TEXT), row, at, 2, False)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["K"])
def gate_up_few_kernel(
    x_desc,
    gate_weight_desc,
    up_weight_desc,
    hidden_desc,
    gate_desc,
    up_desc,
    K,
    KEEP: gl.constexpr,
    TEXT: gl.constexpr,
    L: gl.constexpr,
    R: gl.constexpr,
):
    boxes: gl.constexpr = gate_weight_desc.layout
    a_boxes = gl.allocate_shared_memory(gl.bfloat16, [2 * L.STAGES, 64, 64], x_desc.layout)
    left = gl.allocate_shared_memory(gl.bfloat16, [4 * L.STAGES, 32, 64], boxes)
    right = gl.allocate_shared_memory(gl.bfloat16, [2 * L.STAGES, 32, 64], boxes)
    staging = gl.allocate_shared_memory(gl.bfloat16, [6, 64, 32], hidden_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [L.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [L.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(L.STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    ring = (a_boxes, left, right, full, empty)
    loads = (x_desc, gate_weight_desc, up_weight_desc)
    outs = (hidden_desc, gate_desc, up_desc)
    gl.warp_specialize(
        [
            (consume, (outs, ring, staging, K, 0, KEEP, TEXT, L, R)),
            (consume, (outs, ring, staging, K, 1, KEEP, TEXT, L, R)),
            (produce, (loads, ring, K, L)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
