"""Rounds: how programs of several ranks meet in memory that all of them can write.

    a round    push    what a peer needs -> the slot that it keeps for me
               post    the lane's next epoch -> the flag that it keeps for me
               await   my flags of all peers >= that epoch
               read    my slots

A program is a *lane*: it owns a fixed share of the arena of every rank (flags, and four slots for
each peer), and its n-th round on one rank meets its n-th round on the others, whatever the sizes of
the calls. A rank may push for round n + 1 before it reads round n, so that the link never rests.
Four slots are enough: whoever pushes for n + 1 has seen everybody's epoch n - 1, which a rank posts
only behind its reading of n - 3. So no call ends in a barrier, and nothing is ever set back. Epochs
live in device memory: a CUDA graph replays without the host.

All ranks must make the same calls in the same order, and calls of one rank must not overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.signal import abandon, arrived, post, read, release, tell

GONE = 0  # where an arena says who did not come: int32, a position in the group + 1
FLAGS = 128
SLOTS = 4  # see above; two where each word carries its epoch, for there nobody pushes ahead


@dataclass(frozen=True)
class Arena:
    """Where what lies in a rank's share of the memory, in bytes; the same on every rank.

    size: ranks. lanes: programs of a call at most. chunk: bytes that a lane pushes to one peer in a
    round at most. words: the same where each word carries its epoch, half of them data.
    """

    size: int
    lanes: int = 264  # two programs a multiprocessor of Hopper
    chunk: int = 16384
    words: int = 8192

    @property
    def slots(self) -> int:
        """Behind the flags, int32 [lanes, size]: the last epoch that each peer has posted."""
        return FLAGS + -(-4 * self.lanes * self.size // 1024) * 1024

    @property
    def word_slots(self) -> int:
        return self.slots + SLOTS * self.lanes * self.size * self.chunk

    @property
    def bytes(self) -> int:
        return self.word_slots + 2 * self.lanes * self.size * self.words


@dataclass(frozen=True)
class Peers:
    """One rank's end of the arenas of its group.

    bases: int64 [size + 1] on the device: the address of every rank's arena in this process, and of
    an int32 in host memory that takes over GONE when this rank notices. epochs: int32 [lanes], zero
    at the start, of this rank alone. limit_ns: the bound of every wait.
    """

    arena: Arena
    rank: int
    bases: Tensor
    epochs: Tensor
    limit_ns: int

    def constants(self, words: bool = False) -> dict[str, int]:
        """What the kernels need to know of the arena."""
        arena = self.arena
        names = ("DEPTH", "SLOTS", "CHUNK")
        place = (2, arena.word_slots, arena.words) if words else (SLOTS, arena.slots, arena.chunk)
        return {"RANK": self.rank, "SIZE": arena.size, **dict(zip(names, place))}


@triton.jit
def gone(bases, rank):
    """Where a rank's arena says who did not come."""
    return tl.load(bases + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def slot(
    bases, rank, lane, epoch, source,
    KIND: tl.constexpr, SIZE: tl.constexpr, DEPTH: tl.constexpr, SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Where `rank` keeps what `source` pushes to this lane in this epoch, as elements of KIND."""
    offset = SLOTS + ((lane.to(tl.int64) * DEPTH + epoch % DEPTH) * SIZE + source) * CHUNK
    place = (tl.load(bases + rank) + offset).to(tl.pointer_type(KIND))
    return tl.multiple_of(place, 16)


@triton.jit
def flag(bases, rank, lane, source, SIZE: tl.constexpr):
    """Where `rank` keeps the last epoch that `source` has posted to this lane."""
    place = tl.load(bases + rank) + 128 + (lane * SIZE + source) * 4  # FLAGS
    return place.to(tl.pointer_type(tl.int32))


@triton.jit
def begun(bases, RANK: tl.constexpr):
    """1, or 0 if the others have given up already: whoever comes too late must learn it."""
    return (tl.load(gone(bases, RANK), volatile=True) == 0).to(tl.int32)


@triton.jit
def meet(bases, lane, epoch, limit_ns, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Post this epoch to all peers and await theirs -> 1, or 0 if somebody did not come."""
    announce(bases, lane, epoch, RANK, SIZE)
    return gather(bases, lane, epoch, limit_ns, RANK, SIZE)


@triton.jit
def announce(bases, lane, epoch, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Post this epoch to all peers: what this program pushed is there."""
    release(bases)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            post(flag(bases, peer, lane, RANK, SIZE), epoch)


@triton.jit
def gather(bases, lane, epoch, limit_ns, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Await this epoch of all peers -> 1, or 0 if somebody did not come; a thread's own opinion."""
    came = 1
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = flag(bases, RANK, lane, peer, SIZE)
            here = arrived(theirs, epoch, gone(bases, RANK), limit_ns)
            if here == 0:
                give_up(bases, peer, SIZE)
            came = came & here
    return came


@triton.jit
def give_up(bases, suspect, SIZE: tl.constexpr):
    """Tell every rank who is missing."""
    for rank in tl.static_range(SIZE):
        abandon(gone(bases, rank), suspect)


@triton.jit
def ended(bases, epochs, lane, epoch, came, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Keep the lane's epoch; tell the host if somebody was missing."""
    tl.store(epochs + lane, epoch)
    if came == 0:
        host = tl.load(bases + SIZE).to(tl.pointer_type(tl.int32))
        tell(host, read(gone(bases, RANK)))


@triton.jit
def spoiled(x, came):
    """x, or all bits set where a peer did not come, a NaN in every floating type: nobody takes an
    unfinished sum for a result.
    """
    if x.dtype.primitive_bitwidth == 8:
        return x | (came - 1).to(tl.int8)
    elif x.dtype.primitive_bitwidth == 16:
        return (x.to(tl.int16, bitcast=True) | (came - 1).to(tl.int16)).to(x.dtype, bitcast=True)
    else:
        return (x.to(tl.int32, bitcast=True) | (came - 1)).to(x.dtype, bitcast=True)
