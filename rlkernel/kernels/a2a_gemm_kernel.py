"""Device side of a2a_gemm.py: a persistent GEMM whose rows arrive from ranks, or leave to them.

One program an SM, 128 x BN tiles in the order of a table; hopper_pipeline.py has producer ring and
consumer, a2a_signal.py who sees what, a2a_home.py what follows the last tile. A tile has the rows
of one rank and one token.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from rlkernel.kernels.a2a_home import bring_home, close
from rlkernel.kernels.a2a_signal import CHUNKS, awaited, epoch_of, flag_of, multiprocessor, now
from rlkernel.kernels.hopper_finish import store_block
from rlkernel.kernels.hopper_pipeline import (
    block_barrier,
    blocks_of,
    columns_of,
    first_step,
    load_box,
    next_stage,
    subtree,
)
from rlkernel.kernels.hopper_plan import CompileTime

# A thread after setmaxnreg: the producer also waits and finds places; 2 x 232 + 40 <= 3 x 168.
CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)
# Of a tile in a timeline: begin, end (ns), SM, when its loads turned to a flag (0: they knew that
# it was set) and when they saw it. Behind the tiles, for each rank and chunk: when its flag was
# raised from here, when the end of the kernel turned to that rank's, and when it saw it.
FIELDS, SIGHTS = 5, 3
TILE_FIELDS = gl.constexpr(FIELDS)


@dataclass(frozen=True)
class Exchange(CompileTime):
    """arrive: rows arrive (else they leave). chunks: flags a rank, one a run of tokens. bias: added
    behind the rounding. boxes: out is stored by TMA. local: nothing is sent or awaited, all slices
    are the own ones. timeline: tiles are recorded. scale: results cross the wire so many times.
    """

    size: int
    arrive: bool
    chunks: int = 1
    bias: bool = False
    boxes: bool = True
    local: bool = False
    timeline: bool = False
    scale: int = 1


@gluon.jit
def place_of(order, tile):
    """What `ordered` has packed: (token, rank, chunk, first row of the rank's batch, column)."""
    packed = gl.load(order + tile)
    low = packed.to(gl.int32)
    high = (packed >> 32).to(gl.int32)
    rank = (low >> 24) & 0x7F
    chunk = (low >> 16) & 0xFF
    return high & 0xFFFF, rank, chunk, ((high >> 16) & 0x7FFF) * 64, (low & 0xFFFF) * 64


# -- producer --------------------------------------------------------------------------------------


@gluon.jit
def load_stage(
    descs, ring, stage, phase, own, row, k_a, column, k_b, E: gl.constexpr, T: gl.constexpr
):
    """Fill one stage as soon as both consumers have left it. own: are these the caller's rows?"""
    own_desc, came_desc, b_desc = descs
    a_boxes, b_boxes, full, empty = ring
    ready = full.index(stage)
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(ready, (128 + T.BN) * T.BK * 2)
    if E.ARRIVE:
        if own:
            load_box(own_desc, row, k_a, ready, a_boxes.index(2 * stage), True)
            load_box(own_desc, row + 64, k_a, ready, a_boxes.index(2 * stage + 1), True)
        else:
            load_box(came_desc, row, k_a, ready, a_boxes.index(2 * stage), True)
            load_box(came_desc, row + 64, k_a, ready, a_boxes.index(2 * stage + 1), True)
    else:
        load_box(came_desc, row, k_a, ready, a_boxes.index(2 * stage), True)
        load_box(came_desc, row + 64, k_a, ready, a_boxes.index(2 * stage + 1), True)
    load_box(b_desc, column, k_b, ready, b_boxes.index(stage), T.B_K_MAJOR)


@gluon.jit
def produce(descs, ring, landed, signals, order, times, at, E: gl.constexpr, T: gl.constexpr):
    """Load this program's tiles one behind the other; wait for what is not here yet."""
    tiles, batch, tokens, N, K, own = at
    bases, counters, words, limit_ns = signals
    if E.ARRIVE:
        epoch = epoch_of(signals, E)
    seen = gl.to_tensor(0)  # chunks that are known to be here, a bit for each and rank
    stage = 0
    phase = 1  # a fresh barrier looks as if it had just flipped: every stage is free
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        token, rank, chunk, row, column = place_of(order, tile)
        mine = rank == own
        if E.LOCAL:
            mine = rank >= 0
            from_a = (rank * tokens + token) * K if E.ARRIVE else token * 0
            if not E.ARRIVE:
                row += (token * E.SIZE + rank) * batch
        elif E.ARRIVE:
            bit = gl.to_tensor(1) << (rank * E.CHUNKS + chunk)
            if (rank != own) & (seen & bit == 0):
                if E.TIMELINE:
                    gl.store(times + tile * TILE_FIELDS + 3, now(times))
                awaited(bases, rank, rank * CHUNKS + chunk, epoch, own, limit_ns, E.SIZE, 0)
                seen |= bit
                if E.TIMELINE:
                    gl.store(times + tile * TILE_FIELDS + 4, now(times))
            if mine:
                from_a = (own * tokens + token) * K
            else:
                from_a = token * K
                row += rank * batch
        else:
            from_a = token * 0
            row += (token * E.SIZE + rank) * batch
        from_b = token * 0
        if T.B_K_MAJOR:
            column += token * N
        else:
            from_b = token * K
        for k in range(0, K, T.BK):
            load_stage(descs, ring, stage, phase, mine, row, from_a + k, column, from_b + k, E, T)
            stage, phase = next_stage(stage, phase, T)
    # Consumers start a tile before they know whether there is one.
    load_stage(descs, ring, stage, phase, False, 0, 0, 0, 0, E, T)
    if not E.LOCAL:
        close(landed, signals, times + tiles * TILE_FIELDS, own, E)


# -- consumer --------------------------------------------------------------------------------------


@gluon.jit
def send_block(staging, block, base, bias, row, column, far, batch, N, pitch, E: gl.constexpr):
    """One block of words + bias -> memory of any rank, whole lines of 128 bytes at a time."""
    x = columns_of(block, False)
    low = x.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (x >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    x = gl.join(low, high).reshape((64, 2 * low.shape[1]))
    WGMMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, x.shape[1], 16])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    staging.store(gl.convert_layout(x, WGMMA, assert_trivial=True))
    y = staging.load(ROWS)
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    columns = column + gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))
    if E.BIAS:
        b = gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)
        y = (y.to(gl.float32) + gl.expand_dims(b, 0)).to(gl.bfloat16)
    keep = gl.expand_dims(rows < batch, 1) & gl.expand_dims(columns < N, 0)
    places = gl.expand_dims(rows * pitch, 1) + gl.expand_dims(columns, 0)
    gl.store(base + places, y, mask=keep)
    if E.SCALE > 1:
        if far:
            for _ in range(1, E.SCALE):
                gl.store(base + places, y, mask=keep)


@gluon.jit
def hand_over(signals, halves, sights, owed, epoch, own, E: gl.constexpr):
    """Count one half tile for a rank and chunk, all of whose stores this consumer has issued; the
    last one raises the rank's flag.
    """
    bases, counters, words, limit_ns = signals
    count = counters + owed
    block_barrier()
    if gl.atomic_add(count, 1, sem="acq_rel", scope="sys") == gl.load(halves + owed) - 1:
        gl.store(count, 0)
        if E.TIMELINE:
            gl.store(sights + owed, now(sights))
        flag = flag_of(bases, owed // CHUNKS, (E.SIZE + own) * CHUNKS + owed % CHUNKS)
        gl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@gluon.jit
def consume(
    outs,
    ring,
    staging,
    landed,
    signals,
    order,
    times,
    at,
    HALF: gl.constexpr,
    E: gl.constexpr,
    T: gl.constexpr,
):
    """One consumer: rows 64 * HALF .. + 63 of every tile of this program."""
    tiles, batch, tokens, N, K, own = at
    out_desc, out, owners, bias, halves, pitch = outs
    BLOCKS: gl.constexpr = T.BN // 64
    sights = times + tiles * TILE_FIELDS
    stage = 0
    phase = 0
    owed = own * 0 - 1  # the flag for whose rank a half tile is stored and not yet counted
    acc = first_step(ring, stage, phase, HALF, T)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        if E.TIMELINE:
            if HALF == 0:
                gl.store(times + tile * TILE_FIELDS, now(times))
        none = (staging, staging)
        w, acc, stage, phase = subtree(ring, acc, stage, phase, K // T.BK, none, 1, HALF, False, T)
        blocks = blocks_of(w, BLOCKS)
        token, rank, chunk, row, column = place_of(order, tile)
        row += HALF * 64
        if E.BOXES:
            row += (token * E.SIZE + rank) * batch
            for i in gl.static_range(BLOCKS):
                slot = staging.index(HALF * T.SLOTS + i % T.SLOTS)
                store_block(out_desc, slot, blocks[i], row, column + i * 64, T.SLOTS - 1, False)
        else:
            if E.ARRIVE:
                base = out + ((token * E.SIZE + rank) * batch).to(gl.int64) * pitch
            elif E.LOCAL:
                base = out + (rank * tokens + token).to(gl.int64) * N
            else:
                if owed >= 0:  # its stores were issued a tile ago: the fence finds them done
                    hand_over(signals, halves, sights, owed, epoch_of(signals, E), own, E)
                owed = gl.where(rank == own, -1, rank * CHUNKS + chunk)
                # A distance in elements, for the compiler to see that it is a multiple of 8.
                far = (gl.load(owners + rank) - out.to(gl.int64)) // 16 * 8
                base = out + gl.where(rank == own, 0, far)
                base += (own * tokens + token).to(gl.int64) * N
            for i in gl.static_range(BLOCKS):
                slot = staging.index(HALF * T.SLOTS + i % T.SLOTS)
                at_bias = bias + token.to(gl.int64) * N
                at_column = column + i * 64
                send_block(
                    slot, blocks[i], base, at_bias, row, at_column, rank != own, batch, N, pitch, E
                )
        if E.TIMELINE:
            if HALF == 0:
                gl.store(times + tile * TILE_FIELDS + 1, now(times))
                gl.store(times + tile * TILE_FIELDS + 2, multiprocessor(times).to(gl.int64))
    warpgroup_mma_wait(0, deps=[acc])
    if owed >= 0:
        hand_over(signals, halves, sights, owed, epoch_of(signals, E), own, E)
    if not (E.ARRIVE or E.LOCAL):
        bring_home(landed, signals, owners, out, at, pitch, E)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["limit_ns", "tiles", "batch", "tokens", "own"])
def a2a_gemm_kernel(
    own_desc,
    came_desc,
    b_desc,
    out_desc,
    out,
    owners,
    bias,
    order,
    halves,
    bases,
    counters,
    words,
    times,
    limit_ns,
    pitch,
    N,
    K,
    tiles,
    batch,
    tokens,
    own,
    E: gl.constexpr,
    T: gl.constexpr,
):
    a_boxes = gl.allocate_shared_memory(
        gl.bfloat16, [2 * T.STAGES] + came_desc.block_type.shape, came_desc.layout
    )
    b_boxes = gl.allocate_shared_memory(
        gl.bfloat16, [T.STAGES] + b_desc.block_type.shape, b_desc.layout
    )
    staging = gl.allocate_shared_memory(
        gl.bfloat16, [2 * T.SLOTS] + out_desc.block_type.shape, out_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [T.STAGES, 1], mbarrier.MBarrierLayout())
    landed = gl.allocate_shared_memory(gl.int64, [E.CHUNKS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(E.CHUNKS):
        mbarrier.init(landed.index(i), count=1)
    for i in gl.static_range(T.STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    ring = (a_boxes, b_boxes, full, empty)
    signals = (bases, counters, words, limit_ns)
    at = (tiles, batch, tokens, N, K, own)
    descs = (own_desc, came_desc, b_desc)
    outs = (out_desc, out, owners, bias, halves, pitch)
    gl.warp_specialize(
        [
            (consume, (outs, ring, staging, landed, signals, order, times, at, 0, E, T)),
            (consume, (outs, ring, staging, landed, signals, order, times, at, 1, E, T)),
            (produce, (descs, ring, landed, signals, order, times, at, E, T)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
