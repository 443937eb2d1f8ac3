"""Sums over ranks by one kernel that writes into its peers' memory and folds what they wrote.

    once       everybody pushes everything and folds everything: one round, (P-1) N bytes out
    twice      the owner of each P-th folds it and pushes the sum: two rounds, 2 (P-1)/P N bytes out
    words      once, in words that carry their epoch: twice the bytes and no flag (peer_words.py)

The fold is the contract's: ranks in order, FP32 additions, each joint rounded. So the bits are
those of any other transport, and a form only decides how long they take.

Floors: the bytes out at the link's rate; N read and N written in the rank's own memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract import ReductionTree
from rlkernel.kernels.bf16 import to_bf16, to_fp32
from rlkernel.kernels.fold import joint, narrowed
from rlkernel.kernels.peer_memory import Peers, announce, begun, ended, gather, meet, slot, spoiled
from rlkernel.kernels.peer_shot import KINDS, Shot, check, launch, shot, stream

BF16, FP32 = torch.bfloat16, torch.float32


def wire(x: Tensor, tree: ReductionTree) -> torch.dtype:
    """What travels: the narrower of the input and the tree's nodes; widening it loses nothing."""
    return BF16 if BF16 in (x.dtype, tree.dtype) else FP32


def all_reduce(
    x: Tensor,
    out: Tensor,
    tree: ReductionTree,
    peers: Peers,
    span: int | None = None,
    chosen: Shot | None = None,
) -> Tensor:
    """out = the tree over the ranks' x, or over aligned runs of `span` of them. Both contiguous,
    BF16 or FP32, of one shape and dtype, at any address; out may be x.

    Raises TypeError or ValueError before anything is launched.
    """
    kind, count, size = wire(x, tree), x.numel(), peers.arena.size
    span = span or size
    cut = chosen or shot(count * kind.itemsize, size)
    if span < size and cut.form != "once":
        cut = stream(count * kind.itemsize, size)
    check(x, out, (count, count), (BF16, FP32))
    meta = {"WIRE": KINDS[kind], "NODE_BF16": tree.dtype == BF16}
    if cut.form == "words":
        from rlkernel.kernels.peer_words import all_reduce_words

        return all_reduce_words(x, out, peers, cut, meta)
    if cut.form == "once":
        meta |= {"FIRST": peers.rank // span * span, "SPAN": span, "ROWS": False}
        launch(_once, x, out, count, peers, cut, kind.itemsize, **meta)
    else:
        launch(_twice, x, out, count, peers, cut, kind.itemsize, size, **meta)
    return out


def reduce_scatter(x: Tensor, out: Tensor, tree: ReductionTree, peers: Peers) -> Tensor:
    """out = this rank's row of the tree over the ranks' x [size, *out.shape]; as all_reduce."""
    kind, count, size = wire(x, tree), out.numel(), peers.arena.size
    check(x, out, (count * size, count), (BF16, FP32))
    meta = {"WIRE": KINDS[kind], "NODE_BF16": tree.dtype == BF16}
    meta |= {"FIRST": 0, "SPAN": size, "ROWS": True}
    cut = stream(count * kind.itemsize, size)
    launch(_once, x, out, count, peers, cut, kind.itemsize, **meta)
    return out


@triton.jit
def to_wire(x, BF16: tl.constexpr):
    if BF16 and x.dtype == tl.float32:
        return to_bf16(x)
    else:
        return x


@triton.jit
def to_node(x, BF16: tl.constexpr):
    if x.dtype == tl.bfloat16 and not BF16:
        return to_fp32(x)
    else:
        return x


@triton.jit
def _subtree(
    mine, slots, stride, at,
    RANK: tl.constexpr, NODE_BF16: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The joints over ranks [FIRST, FIRST + COUNT): `mine` and what their slots hold."""
    if COUNT == 1:
        if FIRST == RANK:
            return to_node(mine, NODE_BF16)
        else:
            # Volatile: never from a line that was read before the flag came.
            return to_node(tl.load(slots + FIRST * stride + at, volatile=True), NODE_BF16)
    else:
        HALF: tl.constexpr = COUNT // 2
        left = _subtree(mine, slots, stride, at, RANK, NODE_BF16, FIRST, HALF)
        right = _subtree(mine, slots, stride, at, RANK, NODE_BF16, FIRST + HALF, HALF)
        return joint(left, right)


@triton.jit
def pushed(
    x, start, count, bases, lane, epoch,
    RANK: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, WIRE: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """x[start : start + BLOCK] as it travels, pushed to ranks [FIRST, FIRST + SPAN) and posted.

    ROWS: each of them gets its own row of x [SIZE, count]; what is returned is this rank's.
    """
    at = start + tl.arange(0, BLOCK)
    NARROW: tl.constexpr = WIRE == tl.bfloat16
    own = x + RANK * count if ROWS else x
    mine = to_wire(tl.load(own + at, mask=at < count), NARROW)
    for peer in tl.static_range(FIRST, FIRST + SPAN):
        if peer != RANK:
            theirs = slot(bases, peer, lane, epoch, RANK, WIRE, SIZE, DEPTH, SLOTS, CHUNK)
            if ROWS:
                part = to_wire(tl.load(x + peer * count + at, mask=at < count), NARROW)
                tl.store(theirs + tl.arange(0, BLOCK), part)
            else:
                tl.store(theirs + tl.arange(0, BLOCK), mine)
    announce(bases, lane, epoch, RANK, SIZE)
    return mine


@triton.jit
def _once(
    x, out, count, bases, epochs, limit_ns,
    RANK: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, SPAN: tl.constexpr,
    ROWS: tl.constexpr, WIRE: tl.constexpr, NODE_BF16: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """out [count] = the tree over x of ranks [FIRST, FIRST + SPAN), or over this rank's ROWS of it;
    ranks outside only meet. A block is pushed before the one ahead of it is awaited.
    """
    lane = tl.program_id(0)
    epoch = tl.load(epochs + lane)
    came = begun(bases, RANK)
    at = tl.arange(0, BLOCK)
    stride = CHUNK // (WIRE.primitive_bitwidth // 8)
    start, far = lane * BLOCK, tl.num_programs(0) * BLOCK
    mine = pushed(
        x, start, count, bases, lane, epoch + 1,
        RANK, SIZE, FIRST, SPAN, ROWS, WIRE, BLOCK, DEPTH, SLOTS, CHUNK,
    )  # fmt: skip
    while start < count:
        epoch += 1
        ahead = mine
        if start + far < count:
            ahead = pushed(
                x, start + far, count, bases, lane, epoch + 1,
                RANK, SIZE, FIRST, SPAN, ROWS, WIRE, BLOCK, DEPTH, SLOTS, CHUNK,
            )  # fmt: skip
        came = came & gather(bases, lane, epoch, limit_ns, RANK, SIZE)
        slots = slot(bases, RANK, lane, epoch, 0, WIRE, SIZE, DEPTH, SLOTS, CHUNK)
        root = _subtree(mine, slots, stride, at, RANK, NODE_BF16, FIRST, SPAN)
        root = spoiled(narrowed(root, out.dtype.element_ty == tl.bfloat16), came)
        tl.store(out + start + at, root, mask=start + at < count)
        mine = ahead
        start += far
    ended(bases, epochs, lane, epoch, came, RANK, SIZE)


@triton.jit
def _twice(
    x, out, count, bases, epochs, limit_ns,
    RANK: tl.constexpr, SIZE: tl.constexpr,
    WIRE: tl.constexpr, NODE_BF16: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """out [count] = the tree over all ranks' x: a rank folds its part of every piece, then pushes
    the sum.
    """
    lane = tl.program_id(0)
    epoch = tl.load(epochs + lane)
    came = begun(bases, RANK)
    at = tl.arange(0, BLOCK)
    stride = CHUNK // (WIRE.primitive_bitwidth // 8)
    NARROW: tl.constexpr = WIRE == tl.bfloat16
    OUT_BF16: tl.constexpr = out.dtype.element_ty == tl.bfloat16
    PIECE: tl.constexpr = BLOCK * SIZE
    for start in range(lane * PIECE, count, tl.num_programs(0) * PIECE):
        epoch += 1
        own = start + RANK * BLOCK + at
        mine = to_wire(tl.load(x + own, mask=own < count), NARROW)
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                here = start + peer * BLOCK + at
                theirs = slot(bases, peer, lane, epoch, RANK, WIRE, SIZE, DEPTH, SLOTS, CHUNK)
                tl.store(theirs + at, to_wire(tl.load(x + here, mask=here < count), NARROW))
        came = came & meet(bases, lane, epoch, limit_ns, RANK, SIZE)
        slots = slot(bases, RANK, lane, epoch, 0, WIRE, SIZE, DEPTH, SLOTS, CHUNK)
        root = _subtree(mine, slots, stride, at, RANK, NODE_BF16, 0, SIZE)
        root = narrowed(root, NARROW)  # what travels is never wider than the result
        epoch += 1
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                theirs = slot(bases, peer, lane, epoch, RANK, WIRE, SIZE, DEPTH, SLOTS, CHUNK)
                tl.store(theirs + at, root)
        came = came & meet(bases, lane, epoch, limit_ns, RANK, SIZE)
        tl.store(out + own, spoiled(to_node(root, OUT_BF16), came), mask=own < count)
        slots = slot(bases, RANK, lane, epoch, 0, WIRE, SIZE, DEPTH, SLOTS, CHUNK)
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                here = start + peer * BLOCK + at
                part = to_node(tl.load(slots + peer * stride + at, volatile=True), OUT_BF16)
                tl.store(out + here, spoiled(part, came), mask=here < count)
    ended(bases, epochs, lane, epoch, came, RANK, SIZE)
