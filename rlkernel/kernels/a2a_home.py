"""Device side, behind a program's last tile: say that the call is over; and bring what peers have
stored into mapped memory into the caller's tensor, within the GEMM that it belongs to.

Peers write where this process has mapped memory for them, which a later call writes again; what the
caller gets is its own. So they are copied, by programs that have no tile left: with 1280 tiles on
132 SMs forty stand idle for a whole tile's time at the end. A program's producer sees the flags, a
chunk after the other, and says so to its consumers by an mbarrier a chunk; these draw rows by a
common count, so that whoever is free first takes most.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from rlkernel.kernels.a2a_signal import CHUNKS, awaited, epoch_of, now, told

ROWS = gl.constexpr(4)  # of the batch, drawn at once
WIDTH = gl.constexpr(2048)  # elements of a row that are on their way at once: 64 bytes a thread


@gluon.jit
def close(landed, signals, sights, own, E: gl.constexpr):
    """Say which call comes next; of a leaving GEMM, once all others' results are here, chunk by
    chunk, of which every program's consumers are told.
    """
    PLACES: gl.constexpr = E.SIZE * CHUNKS
    bases, counters, words, limit_ns = signals
    epoch = epoch_of(signals, E)
    first = gl.program_id(0) == 0
    if E.ARRIVE:
        if first:
            gl.store(words + 1, epoch)
    else:
        for chunk in range(0, E.CHUNKS):
            for turn in range(1, E.SIZE):
                rank = (own + turn) % E.SIZE
                place = (E.SIZE + rank) * CHUNKS + chunk
                if E.TIMELINE:
                    if first:
                        gl.store(sights + place, now(sights))
                awaited(bases, rank, place, epoch, own, limit_ns, E.SIZE, 1)
                if E.TIMELINE:
                    if first:
                        gl.store(sights + PLACES + place, now(sights))
            mbarrier.arrive(landed.index(chunk))
        if first:
            told(bases, own, E.SIZE)
            gl.store(words, epoch + 1)


@gluon.jit
def bring_home(landed, signals, owners, out, at, pitch, E: gl.constexpr):
    """Both consumers of every program: all that peers have sent to `owners[own]` -> out."""
    tiles, batch, tokens, N, K, own = at
    bases, counters, words, limit_ns = signals
    EACH: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    PEERS: gl.constexpr = E.SIZE - 1
    groups = (batch + ROWS - 1) // ROWS
    shares = groups * (PEERS * E.CHUNKS)
    count = counters + own * CHUNKS  # of an own flag, which nobody else counts
    # A distance in elements, for the compiler to see that it is a multiple of 8.
    mapped = out + (gl.load(owners + own) - out.to(gl.int64)) // 16 * 8
    share = gl.atomic_add(count, 1, sem="relaxed", scope="gpu")
    while share < shares:
        chunk = share // (groups * PEERS)
        rank = (own + 1 + share // groups % PEERS) % E.SIZE
        mbarrier.wait(landed.index(chunk), 0)
        first = (chunk * tokens + E.CHUNKS - 1) // E.CHUNKS  # as chunk_slices cuts the tokens
        last = ((chunk + 1) * tokens + E.CHUNKS - 1) // E.CHUNKS
        length = (last - first) * N
        rows = share % groups * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, EACH))
        starts = gl.expand_dims(rows * pitch + (rank * tokens + first) * N, 1)
        here = gl.expand_dims(rows < batch, 1)
        for column in range(0, length, WIDTH):
            columns = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, EACH))
            places = starts + gl.expand_dims(columns, 0)
            keep = here & gl.expand_dims(columns < length, 0)
            gl.store(out + places, gl.load(mapped + places, mask=keep), mask=keep)
        share = gl.atomic_add(count, 1, sem="relaxed", scope="gpu")
    if share == shares + 2 * gl.num_programs(0) - 1:  # the last of all to come away with nothing
        gl.store(count, 0)
