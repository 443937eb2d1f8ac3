"""Sums of short messages: words of which one half is data and the other says when it was sent.

    word   [ 4 bytes of data | epoch ]        written and read whole: 8 aligned bytes never tear

The reader takes its slot again and again until every word carries the epoch. No flag has to follow
the data, so nobody waits for a write to arrive before he writes the next: the price is twice the
bytes. The rest is as in peer_memory.py: two slots, for a rank sends epoch n once it has read n - 1.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.bf16 import INTERPRETED
from rlkernel.kernels.fold import joint, narrowed
from rlkernel.kernels.peer_memory import Peers, begun, ended, give_up, gone, slot, spoiled
from rlkernel.kernels.peer_reduce import to_node, to_wire
from rlkernel.kernels.signal import impatient, now

LOOKS = tl.constexpr(1 if INTERPRETED else 256)  # between two looks at the clock


def all_reduce_words(x: Tensor, out: Tensor, peers: Peers, cut, meta: dict) -> Tensor:
    """out = the tree over all ranks' x; peer_reduce.all_reduce calls it."""
    count, kind = x.numel(), meta["WIRE"].primitive_bitwidth // 8
    block = min(cut.block, peers.arena.words // 2) // kind
    lanes = min(cut.lanes, peers.arena.lanes, -(-count // block))
    if count:
        _all_reduce_words[(lanes,)](
            x, out, count, peers.bases, peers.epochs, peers.limit_ns,
            BLOCK=block, num_warps=cut.warps, **peers.constants(words=True), **meta,
        )  # fmt: skip
    return out


@triton.jit
def _packed(x, epoch):
    """[BLOCK] of 2 or 4 bytes each -> int64: 4 bytes of data below, the epoch above."""
    if x.dtype == tl.bfloat16:
        low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), (x.shape[0] // 2, 2)))
        data = (low.to(tl.int64) & 0xFFFF) | ((high.to(tl.int64) & 0xFFFF) << 16)
    else:
        data = x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return data | (epoch.to(tl.int64) << 32)


@triton.jit
def _unpacked(words, WIRE: tl.constexpr):
    data = words.to(tl.int32)
    if WIRE == tl.bfloat16:
        low, high = data.to(tl.int16), (data >> 16).to(tl.int16)
        both = tl.reshape(tl.join(low, high), (2 * words.shape[0],))
        return both.to(tl.bfloat16, bitcast=True)
    else:
        return data.to(tl.float32, bitcast=True)


@triton.jit
def _late(words, epoch, tired):
    """0 once all words carry this epoch; else 1, or 2 if any thread is tired of waiting."""
    stale = ((words >> 32).to(tl.int32) != epoch).to(tl.int32)
    return tl.max(stale * (1 + tired), axis=0)


@triton.jit
def _received(place, gone, epoch, limit_ns, LOOKS: tl.constexpr, COUNT: tl.constexpr):
    """(the words at `place` once all carry this epoch, 1), or (whatever is there, 0).

    All threads must leave the loop together, for they take the maximum together: each says whether
    it is tired, and the maximum decides.
    """
    at = tl.arange(0, COUNT)
    words = tl.load(place + at, volatile=True)
    late = _late(words, epoch, 0)
    if late != 0:
        until = now(gone) + limit_ns
        looks = 0
        tired = 0
        while late == 1:
            looks += 1
            if looks % LOOKS == 0:
                tired = impatient(gone, until)
            words = tl.load(place + at, volatile=True)
            late = _late(words, epoch, tired)
    return words, (late == 0).to(tl.int32)


@triton.jit
def _subtree(
    mine, slots, bases, epoch, limit_ns,
    RANK: tl.constexpr, SIZE: tl.constexpr, WIRE: tl.constexpr, NODE_BF16: tl.constexpr,
    STRIDE: tl.constexpr, WORDS: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The joints over ranks [FIRST, FIRST + COUNT), and whether all of them came."""
    if COUNT == 1:
        if FIRST == RANK:
            return to_node(mine, NODE_BF16), 1
        else:
            place = slots + FIRST * STRIDE
            words, came = _received(place, gone(bases, RANK), epoch, limit_ns, LOOKS, WORDS)
            if came == 0:
                give_up(bases, FIRST, SIZE)
            return to_node(_unpacked(words, WIRE), NODE_BF16), came
    else:
        HALF: tl.constexpr = COUNT // 2
        left, here = _subtree(
            mine, slots, bases, epoch, limit_ns,
            RANK, SIZE, WIRE, NODE_BF16, STRIDE, WORDS, FIRST, HALF,
        )  # fmt: skip
        right, there = _subtree(
            mine, slots, bases, epoch, limit_ns,
            RANK, SIZE, WIRE, NODE_BF16, STRIDE, WORDS, FIRST + HALF, HALF,
        )  # fmt: skip
        return joint(left, right), here & there


@triton.jit
def _all_reduce_words(
    x, out, count, bases, epochs, limit_ns,
    RANK: tl.constexpr, SIZE: tl.constexpr,
    WIRE: tl.constexpr, NODE_BF16: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """out [count] = the tree over all ranks' x."""
    lane = tl.program_id(0)
    epoch = tl.load(epochs + lane)
    came = begun(bases, RANK)
    at = tl.arange(0, BLOCK)
    WORDS: tl.constexpr = BLOCK * WIRE.primitive_bitwidth // 32
    for start in range(lane * BLOCK, count, tl.num_programs(0) * BLOCK):
        epoch += 1
        keep = start + at < count
        mine = to_wire(tl.load(x + start + at, mask=keep), WIRE == tl.bfloat16)
        words = _packed(mine, epoch)
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                theirs = slot(bases, peer, lane, epoch, RANK, tl.int64, SIZE, DEPTH, SLOTS, CHUNK)
                tl.store(theirs + tl.arange(0, WORDS), words)
        slots = slot(bases, RANK, lane, epoch, 0, tl.int64, SIZE, DEPTH, SLOTS, CHUNK)
        root, here = _subtree(
            mine, slots, bases, epoch, limit_ns,
            RANK, SIZE, WIRE, NODE_BF16, CHUNK // 8, WORDS, 0, SIZE,
        )  # fmt: skip
        came = came & here
        root = spoiled(narrowed(root, out.dtype.element_ty == tl.bfloat16), came)
        tl.store(out + start + at, root, mask=keep)
    ended(bases, epochs, lane, epoch, came, RANK, SIZE)
