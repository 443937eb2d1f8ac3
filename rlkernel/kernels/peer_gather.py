"""All-gather by one kernel that writes into its peers' memory: bits of any kind, in rank order.

Floor: (P-1) N bytes out at the link's rate; P N bytes written in the rank's own memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.peer_memory import Peers, begun, ended, gather, slot, spoiled
from rlkernel.kernels.peer_reduce import pushed
from rlkernel.kernels.peer_shot import KINDS, check, launch, stream

INTEGERS = (torch.int32, torch.int16, torch.int8)  # the widest first


def all_gather(x: Tensor, out: Tensor, peers: Peers) -> Tensor:
    """out [size, *x.shape] = every rank's x, an integer of INTEGERS: bits, not values.

    Ranks may read the same bytes as different integers. Raises TypeError or ValueError before
    anything is launched.
    """
    count, size = x.numel(), peers.arena.size
    check(x, out, (count, count * size), INTEGERS)
    cut = stream(count * x.itemsize, size)
    launch(_all_gather, x, out, count, peers, cut, x.itemsize, WIRE=KINDS[x.dtype])
    return out


@triton.jit
def _all_gather(
    x, out, count, bases, epochs, limit_ns,
    RANK: tl.constexpr, SIZE: tl.constexpr, WIRE: tl.constexpr, BLOCK: tl.constexpr,
    DEPTH: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """out [SIZE, count] = every rank's x [count]; pushed ahead as in peer_reduce."""
    lane = tl.program_id(0)
    epoch = tl.load(epochs + lane)
    came = begun(bases, RANK)
    at = tl.arange(0, BLOCK)
    stride = CHUNK // (WIRE.primitive_bitwidth // 8)
    start, far = lane * BLOCK, tl.num_programs(0) * BLOCK
    mine = pushed(
        x, start, count, bases, lane, epoch + 1,
        RANK, SIZE, 0, SIZE, False, WIRE, BLOCK, DEPTH, SLOTS, CHUNK,
    )  # fmt: skip
    while start < count:
        epoch += 1
        ahead = mine
        if start + far < count:
            ahead = pushed(
                x, start + far, count, bases, lane, epoch + 1,
                RANK, SIZE, 0, SIZE, False, WIRE, BLOCK, DEPTH, SLOTS, CHUNK,
            )  # fmt: skip
        keep = start + at < count
        tl.store(out + RANK * count + start + at, mine, mask=keep)
        came = came & gather(bases, lane, epoch, limit_ns, RANK, SIZE)
        slots = slot(bases, RANK, lane, epoch, 0, WIRE, SIZE, DEPTH, SLOTS, CHUNK)
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                part = tl.load(slots + peer * stride + at, volatile=True)
                tl.store(out + peer * count + start + at, spoiled(part, came), mask=keep)
        mine = ahead
        start += far
    ended(bases, epochs, lane, epoch, came, RANK, SIZE)
