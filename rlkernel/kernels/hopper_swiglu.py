"""hidden = silu(X @ Wg^T) * (X @ Wu^T) for Hopper prefill: one GEMM, SwiGLU in its shadow.

    columns of a 128 x 256 tile     [ 128 gate rows of Wg | the same 128 rows of Wu ]
    a consumer's accumulator        [ gate 64 x 128       | up 64 x 128             ]

Two TMA copies fill the halves of one B stage, so that one wgmma makes gate and up, and column c of
both lands in the same thread. Both reduce over H, which is never split: they are chains. A finished
tile is rounded to BF16 (where eager rounds its two projections) and stashed in shared memory as
words; its SwiGLU is computed, 64 columns at a time, between the wgmma of the *next* tile's first
steps, where the tensor cores never wait for it.
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
from rlkernel.kernels.hopper_pipeline import (
    BLOCK_WORDS,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    REGISTERS,
    blocks_of,
    first_step,
    multiply,
    next_stage,
    produce,
    round_leaf,
    store_block,
    tile_of,
)
from rlkernel.kernels.hopper_plan import Config, Tiling, cost, multiprocessors
from rlkernel.kernels.hopper_tma import k_major, operand, operand_box, out_box, output


@gluon.jit
def one_plus_exp_minus(x):
    """1 + exp(-x), FP32, in the instructions of CUDA's expf (2 ulp) with the sum fused in, as nvcc
    compiles torch's eager silu. `ex2.approx(x * log2 e)` alone is another function.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 minus, scaled, whole, n, rest, power, scale;
        .reg .b32 bits;
        neg.f32 minus, $1;
        fma.rn.sat.f32 scaled, minus, 0f3BBB989D, 0f3F000000;
        fma.rm.f32 whole, scaled, 0f437C0000, 0f4B400001;
        add.f32 n, whole, 0fCB40007F;
        neg.f32 n, n;
        fma.rn.f32 rest, minus, 0f3FB8AA3B, n;
        fma.rn.f32 rest, minus, 0f32A57060, rest;
        mov.b32 bits, whole;
        shl.b32 bits, bits, 23;
        mov.b32 scale, bits;
        ex2.approx.ftz.f32 power, rest;
        fma.rn.f32 $0, power, scale, 0f3F800000;
        }""",
        "=f,f",
        [x],
        gl.float32,
        True,
        1,
    )


@gluon.jit
def silu(x):
    return gl.div_rn(x, one_plus_exp_minus(x))


@gluon.jit
def halves_of(words):
    """Packed pairs -> their two BF16 numbers as FP32."""
    low = (words << 16).to(gl.float32, bitcast=True)
    high = (words & -65536).to(gl.float32, bitcast=True)
    return low, high


@gluon.jit
def pair_of(low, high):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, True, 1
    )


@gluon.jit
def swiglu(gate, up):
    """Packed gate and up -> packed hidden, with eager's BF16 boundaries."""
    gate_low, gate_high = halves_of(gate)
    up_low, up_high = halves_of(up)
    low, high = halves_of(pair_of(silu(gate_low), silu(gate_high)))
    return pair_of(low * up_low, high * up_high)


@gluon.jit
def store_slice(
    descs,
    stash,
    staging,
    i,
    row,
    column,
    WORDS: gl.constexpr,
    HALF: gl.constexpr,
    KEEP: gl.constexpr,
    T: gl.constexpr,
):
    hidden_desc, gate_desc, up_desc = descs
    BLOCKS: gl.constexpr = T.BN // 64  # gate's, then up's
    first = HALF * BLOCKS + i
    gate = stash.index(first).load(WORDS)
    up = stash.index(first + BLOCKS // 2).load(WORDS)
    store_block(hidden_desc, staging.index(HALF), swiglu(gate, up), row, column, 0, False)
    if KEEP:
        # Read once more: no registers to keep them.
        slot = stash._reinterpret(gl.bfloat16, [2 * BLOCKS, 64, 64], hidden_desc.layout)
        store_block(
            gate_desc, slot.index(first), stash.index(first).load(WORDS), row, column, 2, False
        )
        first += BLOCKS // 2
        store_block(
            up_desc, slot.index(first), stash.index(first).load(WORDS), row, column, 2, False
        )


@gluon.jit
def consume(
    descs, ring, memory, M, N, K, group, HALF: gl.constexpr, KEEP: gl.constexpr, T: gl.constexpr
):
    a_boxes, b_boxes, full, empty = ring
    stash_boxes, staging = memory
    BLOCKS: gl.constexpr = T.BN // 64
    SLICES: gl.constexpr = BLOCKS // 2
    stash = stash_boxes._reinterpret(
        gl.int32, [2 * BLOCKS, BLOCK_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.BN, 16])
    none = blocks_of(round_leaf(gl.zeros([64, T.BN], gl.float32, LAYOUT), False), BLOCKS)
    WORDS: gl.constexpr = none[0].type.layout
    tiles_m = gl.cdiv(M, 128)
    tiles_n = gl.cdiv(N, T.BN)
    tiles = tiles_m * tiles_n
    steps = K // T.BK
    stage = 0
    phase = 0
    row = 0
    column = -1
    acc = first_step(ring, stage, phase, HALF, T)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = warpgroup_mma_wait(1, deps=[acc])
        for k in range(1, steps):
            previous = stage
            stage, phase = next_stage(stage, phase, T)
            mbarrier.wait(full.index(stage), phase)
            acc = multiply(ring, acc, stage, HALF, False, T)
            if (k <= SLICES) & (column >= 0):
                store_slice(
                    descs, stash, staging, k - 1, row, column + (k - 1) * 64, WORDS, HALF, KEEP, T
                )
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index(previous))
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage))
        stage, phase = next_stage(stage, phase, T)
        blocks = blocks_of(round_leaf(acc, False), BLOCKS)
        acc = first_step(ring, stage, phase, HALF, T)
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, group)
        row = tile_m * 128 + HALF * 64
        column = tile_n * (T.BN // 2)
        if KEEP:
            tma.store_wait(0)
        for i in gl.static_range(BLOCKS):
            stash.index(HALF * BLOCKS + i).store(blocks[i])
    warpgroup_mma_wait(0, deps=[acc])
    if column >= 0:
        for i in range(SLICES):
            store_slice(descs, stash, staging, i, row, column + i * 64, WORDS, HALF, KEEP, T)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K", "group"])
def gate_up_kernel(
    x_desc,
    gate_weight_desc,
    up_weight_desc,
    hidden_desc,
    gate_desc,
    up_desc,
    M,
    N,
    K,
    group,
    KEEP: gl.constexpr,
    T: gl.constexpr,
):
    a_boxes = gl.allocate_shared_memory(
        gl.bfloat16, [2 * T.STAGES] + x_desc.block_type.shape, x_desc.layout
    )
    b_parts = gl.allocate_shared_memory(
        gl.bfloat16, [T.STAGES * 2] + gate_weight_desc.block_type.shape, gate_weight_desc.layout
    )
    b_boxes = b_parts._reinterpret(gl.bfloat16, [T.STAGES, T.BN, T.BK], gate_weight_desc.layout)
    stash = gl.allocate_shared_memory(gl.bfloat16, [T.BN // 32, 64, 64], hidden_desc.layout)
    staging = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], hidden_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(T.STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    descs = (hidden_desc, gate_desc, up_desc)
    memory = (stash, staging)
    gl.warp_specialize(
        [
            (consume, (descs, (a_boxes, b_boxes, full, empty), memory, M, N, K, group, 0, KEEP, T)),
            (consume, (descs, (a_boxes, b_boxes, full, empty), memory, M, N, K, group, 1, KEEP, T)),
            (
                produce,
                (
                    (x_desc, (gate_weight_desc, up_weight_desc)),
                    (a_boxes, b_parts, full, empty),
                    M,
                    N,
                    K,
                    group,
                    1,
                    T,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def gate_up_tiling(config: Config) -> Tiling:
    """What the kernel is compiled for: the stash takes bn / 32 blocks of 8 KB, staging two more."""
    if config.bn not in (128, 256) or config.split != 1:
        raise ValueError(f"{config} is not supported: gate/up takes bn 128 or 256 and split 1")
    return Tiling(config.bn, 64, 3 if config.bn == 256 else 5, 1, parts=2)


def choose_gate_up(M: int, H: int, I: int, sms: int = 132) -> Config:  # noqa: E741
    """The configuration of the least estimated cost."""
    raster = min(16, -(-M // 128))
    chain = ReductionTree(1, "fp32")
    legal = [Config(256, 1, raster), Config(128, 1, raster)]
    return min(legal, key=lambda config: cost(M, 2 * I, H, chain, 16, config, sms))


def hopper_gate_up(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    hidden: Tensor,
    gate: Tensor | None = None,
    up: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """silu(x @ w_gate.t()) * (x @ w_up.t()) -> hidden[M, I], rounded where eager rounds.

    x[M, H], w_gate[I, H], w_up[I, H] (two weights, or the halves of one packed tensor): BF16,
    memory along H. hidden, and gate and up [M, I] if both are given (the training forward keeps
    them): BF16, row-major.

    Raises ValueError for shapes, dtypes, strides or addresses that TMA does not allow, H % 64 != 0.
    """
    for name, t in (("x", x), ("w_gate", w_gate), ("w_up", w_up)):
        if not k_major(name, t, 1):
            raise ValueError(
                f"{name} has strides {t.stride()}: its memory must run along H, axis 1"
            )
    (M, H), width = x.shape, w_gate.shape[0]
    config = config or choose_gate_up(M, H, width, multiprocessors(x.device))
    tiling = gate_up_tiling(config)
    if w_gate.shape != (width, H) or w_up.shape != (width, H) or H % 64 or H < 256:
        raise ValueError(
            f"x{tuple(x.shape)}, w_gate{tuple(w_gate.shape)}, w_up{tuple(w_up.shape)}: x[M, H] and "
            "two weights [I, H] expected, H a multiple of 64, at least 256; use a portable kernel"
        )
    if (gate is None) != (up is None):
        raise ValueError("gate and up are kept both or not at all: give two tensors or none")
    keep = gate is not None
    outs = [("hidden", hidden), ("gate", gate if keep else hidden), ("up", up if keep else hidden)]
    descs = [output(name, t, (M, width), (torch.bfloat16,), out_box(False, 16)) for name, t in outs]
    weight_box = operand_box(tiling.bn // 2, tiling.bk, True)
    tiles = -(-M // 128) * -(-2 * width // tiling.bn)
    with torch.cuda.device(x.device):
        gate_up_kernel[(min(multiprocessors(x.device), tiles),)](
            operand(x, 1, True, operand_box(64, tiling.bk, True)),
            operand(w_gate, 1, True, weight_box),
            operand(w_up, 1, True, weight_box),
            *descs,
            M,
            2 * width,
            H,
            config.raster,
            keep,
            tiling,
            num_warps=4,
            maxnreg=REGISTERS,
        )
    return hidden
