"""What the Hopper kernels share: a ring of TMA stages between one producer warp and two consumers.

    producer: 1 warp            one stage                   consumers: 4 warps each
                           A rows  0..63   [64, BK] ------> 0: rows  0..63  of the tile
    runs ahead over        A rows 64..127  [64, BK] ------> 1: rows 64..127 of the tile
    leaves and tiles       B columns       [BN, BK] ------> both

A stage goes round under two mbarriers. `full` counts TMA bytes: once it flips, what the copies
wrote to shared memory is visible to both consumers. `empty` counts two arrivals, one a consumer,
each made behind the wait that ends the consumer's last wgmma on that stage: once it flips, nobody
reads the stage and the producer may overwrite it. Consumers never wait for each other, so one
multiplies while the other rounds, folds or stores; they can drift apart by at most the ring.

A finished 64 x BN half tile becomes 32-bit *words*: pairs of BF16, or single FP32 numbers (WIDE). A
thread keeps its words in an order of its own (`in_word_order`): four words of a thread are
neighbours, so spilling them anywhere costs 16-byte accesses without bank conflicts, and moving
between accumulator, pending sums and C is register renaming. A *block* is 2048 words: 64 x 64 of C
in BF16 pairs, 64 x 32 in FP32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BLOCK_WORDS = gl.constexpr(2048)

REGISTERS = 168  # a thread at launch: 3 warp groups x 128 threads fill the register file
CONSUMER_REGISTERS = gl.constexpr(240)  # after setmaxnreg; 2 x 240 + 24 <= 3 x 168
PRODUCER_REGISTERS = gl.constexpr(24)

block_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 / 3.6


# -- which tile, which stage -----------------------------------------------------------------------


@gluon.jit
def tile_of(index, tiles_m, tiles_n, group):
    """Tile number -> (tile row, tile column): columns of `group` tiles, so that the tiles in flight
    at one time share few rows of A and few columns of B in the L2 cache.
    """
    band = index // (group * tiles_n)
    height = min(tiles_m - band * group, group)
    inside = index % (group * tiles_n)
    return band * group + inside % height, inside // height


@gluon.jit
def next_stage(stage, phase, T: gl.constexpr):
    """The ring's next stage, and the parity that its barriers show once it is ready."""
    stage += 1
    if stage == T.STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


# -- producer --------------------------------------------------------------------------------------


@gluon.jit
def load_box(desc, row, k, barrier, buffer, K_MAJOR: gl.constexpr):
    if K_MAJOR:
        tma.async_copy_global_to_shared(desc, [row, k], barrier, buffer)
    else:
        tma.async_copy_global_to_shared(desc, [k, row], barrier, buffer)


@gluon.jit
def load_stage(operands, ring, stage, phase, row, column, k, T: gl.constexpr):
    """Fill one stage as soon as both consumers have left it. TMA writes zeros beyond the matrix."""
    a_desc, b_desc = operands
    a_boxes, b_boxes, full, empty = ring
    BYTES: gl.constexpr = (128 + T.BN) * T.BK * 2
    ready = full.index(stage)
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(ready, BYTES)
    load_box(a_desc, row, k, ready, a_boxes.index(2 * stage), T.A_K_MAJOR)
    load_box(a_desc, row + 64, k, ready, a_boxes.index(2 * stage + 1), T.A_K_MAJOR)
    load_box(b_desc, column, k, ready, b_boxes.index(stage), T.B_K_MAJOR)


@gluon.jit
def produce(operands, ring, M, N, K, group, SPLIT: gl.constexpr, T: gl.constexpr):
    """Load the stages of this program's work items one after the other, with no pause between
    leaves or tiles.
    """
    tiles_m = gl.cdiv(M, 128)
    tiles_n = gl.cdiv(N, T.BN)
    tiles = tiles_m * tiles_n
    length = K // SPLIT
    stage = 0
    phase = 1  # a fresh barrier looks as if it had just flipped: every stage is free
    for item in range(gl.program_id(0), tiles * SPLIT, gl.num_programs(0)):
        tile_m, tile_n = tile_of(item % tiles, tiles_m, tiles_n, group)
        start = item // tiles * length
        for k in range(start, start + length, T.BK):
            load_stage(operands, ring, stage, phase, tile_m * 128, tile_n * T.BN, k, T)
            stage, phase = next_stage(stage, phase, T)
    # Consumers start a leaf before they know whether there is one: feed them one more stage, whose
    # product is dropped.
    load_stage(operands, ring, stage, phase, 0, 0, 0, T)


# -- consumer: one leaf ----------------------------------------------------------------------------


@gluon.jit
def multiply(ring, acc, stage, HALF: gl.constexpr, FIRST: gl.constexpr, T: gl.constexpr):
    """Issue acc (+)= A[64, BK] @ B[BK, BN] of one stage; the result is there after a wait."""
    a_boxes, b_boxes, full, empty = ring
    a = a_boxes.index(2 * stage + HALF)
    b = b_boxes.index(stage * T.B_PITCH)
    if not T.A_K_MAJOR:
        a = a.permute((1, 0))
    if T.B_K_MAJOR:
        b = b.permute((1, 0))
    return warpgroup_mma(a, b, acc, use_acc=not FIRST, is_async=True)


@gluon.jit
def first_step(ring, stage, phase, HALF: gl.constexpr, T: gl.constexpr):
    """Issue the first k step of a leaf and return at once.

    The step overwrites the accumulator instead of adding to +0.0. Both give the same bits, signed
    zeros included: the tensor core adds the products of a step to the accumulator in one sum whose
    empty or cancelled value is +0.0, and cuBLAS starts its chains in the same way. The probe
    checks it with operands of -0.0 on the device.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.BN, 16])
    a_boxes, b_boxes, full, empty = ring
    mbarrier.wait(full.index(stage), phase)
    acc = gl.zeros([64, T.BN], gl.float32, LAYOUT)
    return multiply(ring, acc, stage, HALF, True, T)


@gluon.jit
def other_steps(ring, acc, stage, phase, steps, HALF: gl.constexpr, T: gl.constexpr):
    """The leaf's remaining k steps -> (FP32 leaf, stage and phase of the next leaf's first step).

    One step stays in flight while the next is issued; a stage is given back one step later, when
    the wait has proved that its wgmma has read it. The first step was issued by `first_step`: a
    loop that might make no trip would keep the zeros of its accumulator alive (7.8 KB of spills and
    serialised wgmma).
    """
    a_boxes, b_boxes, full, empty = ring
    acc = warpgroup_mma_wait(1, deps=[acc])
    for _ in range(1, steps):
        previous = stage
        stage, phase = next_stage(stage, phase, T)
        mbarrier.wait(full.index(stage), phase)
        acc = multiply(ring, acc, stage, HALF, False, T)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(previous))
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(stage))
    stage, phase = next_stage(stage, phase, T)
    return acc, stage, phase


# -- words -----------------------------------------------------------------------------------------


@gluon.jit
def in_word_order(x, WIDE: gl.constexpr):
    """[64, C] in wgmma layout -> the same numbers in 1-D, in an order that keeps every thread's
    runs of four together. wgmma gives lane l of warp w the rows 16w + l//4 and + 8, and of each 8
    columns the pair 2 * (l % 4); a packed pair counts as one column. No data moves: registers are
    renamed.
    """
    GROUPS: gl.constexpr = x.shape[1] // 8
    if WIDE:  # warp, row + 8, lane // 4, column group, lane % 4, column of the pair
        y = x.reshape((4, 2, 8, GROUPS, 4, 2)).permute((3, 0, 2, 4, 1, 5))
    else:  # warp, row + 8, lane // 4, two column groups: which two, which of them, lane % 4
        y = x.reshape((4, 2, 8, GROUPS, 2, 4)).permute((3, 0, 2, 5, 4, 1))
    return y.reshape((64 * x.shape[1],))


@gluon.jit
def columns_of(block, WIDE: gl.constexpr):
    """One block of words -> [64, 32] words in wgmma layout (or half a block -> [64, 16]): undoes
    `in_word_order`.
    """
    GROUPS: gl.constexpr = block.shape[0] // 512
    if WIDE:
        y = block.reshape((GROUPS, 4, 8, 4, 2, 2)).permute((1, 4, 2, 0, 3, 5))
    else:
        y = block.reshape((GROUPS, 4, 8, 4, 2, 2)).permute((1, 5, 2, 0, 4, 3))
    return y.reshape((64, GROUPS * 8))


@gluon.jit
def round_leaf(acc, WIDE: gl.constexpr):
    """FP32 leaf [64, BN] -> words. Rounds to nearest even; NaN becomes 0x7fff, subnormals stay.

    Not `is_pure`: the compiler must not sink the rounding below the next leaf's first step, which
    needs the accumulator's registers.
    """
    if WIDE:
        words = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], gl.float32, False, 1)
        return in_word_order(words, WIDE)
    else:
        low, high = acc.reshape((64, acc.shape[1] // 2, 2)).split()
        words = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, False, 1
        )
        return in_word_order(words, WIDE)


@gluon.jit
def joint(x, y, WIDE: gl.constexpr):
    """Words of two children -> words of their joint.

    The contract says: add in FP32, round to nearest even. `add.rn.bf16x2` rounds the exact sum
    once, and that is the same: the FP32 sum of two BF16 numbers, rounded to 24 bits and then to 8,
    equals the sum rounded to 8 at once because 24 >= 2 * 8 + 2 (Figueroa); BF16 has FP32's
    exponents, so subnormals and overflow behave alike. PTX: subnormals are supported, there is no
    ftz for BF16, NaN results are the canonical 0x7fff, which is also what cvt.rn.bf16x2.f32 makes
    of a NaN. Checked on the device over pairs that hold every BF16 number.
    """
    if WIDE:
        return gl.inline_asm_elementwise(
            "add.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], gl.float32, False, 1
        )
    else:
        return gl.inline_asm_elementwise(
            "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.int32, False, 1
        )


@gluon.jit
def joint_with_leaf(words, acc, WIDE: gl.constexpr):
    """Words of the left leaf + FP32 right leaf [64, BN] -> words of their joint. In place, one word
    at a time: at BN = 256 there are no registers for a second set of words beside the accumulator.
    """
    if WIDE:
        return joint(words, in_word_order(acc, WIDE), WIDE)
    else:
        low, high = acc.reshape((64, acc.shape[1] // 2, 2)).split()
        return gl.inline_asm_elementwise(
            "{ .reg .b32 leaf; cvt.rn.bf16x2.f32 leaf, $3, $2; add.rn.bf16x2 $0, $1, leaf; }",
            "=r,r,f,f",
            [words, in_word_order(low, WIDE), in_word_order(high, WIDE)],
            gl.int32,
            False,
            1,
        )


@gluon.jit
def blocks_of(words, COUNT: gl.constexpr):
    """Words of a half tile -> tuple of COUNT blocks, left to right (registers are renamed)."""
    if COUNT == 1:
        return (words,)
    else:
        HALF: gl.constexpr = words.shape[0] // 2
        left, right = words.reshape((2, HALF)).permute((1, 0)).split()
        return blocks_of(left, COUNT // 2) + blocks_of(right, COUNT // 2)


@gluon.jit
def subtree(
    ring,
    acc,
    stage,
    phase,
    steps,
    parking,
    LEAVES: gl.constexpr,
    HALF: gl.constexpr,
    WIDE: gl.constexpr,
    T: gl.constexpr,
):
    """The next LEAVES leaves -> (words of their root, `acc` with the first step of the leaf behind
    them in flight, its stage and phase): joints are made behind that first step. Pending sums stay
    in registers; of FP32 sums only those of single leaves do, the others are parked.
    """
    if LEAVES <= 2:
        leaf, stage, phase = other_steps(ring, acc, stage, phase, steps, HALF, T)
        words = round_leaf(leaf, WIDE)
        if LEAVES == 2:
            acc = first_step(ring, stage, phase, HALF, T)
            leaf, stage, phase = other_steps(ring, acc, stage, phase, steps, HALF, T)
            words = joint_with_leaf(words, leaf, WIDE)
        return words, first_step(ring, stage, phase, HALF, T), stage, phase
    else:
        left, acc, stage, phase = subtree(
            ring, acc, stage, phase, steps, parking, LEAVES // 2, HALF, WIDE, T
        )
        if WIDE:
            park(parking, left, LEAVES)
        right, acc, stage, phase = subtree(
            ring, acc, stage, phase, steps, parking, LEAVES // 2, HALF, WIDE, T
        )
        if WIDE:
            WORDS: gl.constexpr = right.type.layout
            left = parked(parking, WORDS, LEAVES)
        return joint(left, right, WIDE), acc, stage, phase


@gluon.jit
def park(parking, words, LEAVES: gl.constexpr):
    """Left half of a subtree of FP32 words: of 4 leaves in shared memory (where C is staged), of 8
    in global memory that stays in the L2. Every thread fetches what it stored itself.
    """
    shared, scratch = parking
    if LEAVES == 4:
        tma.store_wait(0)  # the last tile of C may still be leaving through the same memory
        shared.store(words)
    else:
        gl.store(scratch + gl.arange(0, words.shape[0], layout=words.type.layout), words)


@gluon.jit
def parked(parking, LAYOUT: gl.constexpr, LEAVES: gl.constexpr):
    shared, scratch = parking
    if LEAVES == 4:
        words = shared.load(LAYOUT)
    else:
        words = gl.load(scratch + gl.arange(0, shared.shape[0], layout=LAYOUT))
    return words
