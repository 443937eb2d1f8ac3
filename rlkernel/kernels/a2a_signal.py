"""Flags between ranks for Hopper kernels that load by TMA: epochs that only grow, bounded waits.

    a rank's flags, int32    [ there: rank x chunk | back: rank x chunk | gone ]

`there`: the newest call whose slice that rank has sent here. `back`: the same of results. `gone`:
0, or who did not come and to what (`missing`); whoever waits looks at it, too.

Which writes become visible to whom:

- A slice is pushed by copy engine (or by a kernel's stores) and its flag written behind it on the
  same stream. `arrived` acquires the flag at system scope: everything before the flag's write is
  visible to generic loads of that thread. TMA loads go through another proxy, past L1, straight to
  the L2 of the memory's owner; the fence in `by_all` behind it orders them as well. No stale line
  is possible: nothing of the buffer was ever brought into L1.
- A result is stored by the 128 threads of a consumer; a barrier and one acq_rel atomic at system
  scope order these stores before the count; whoever brings the count to its end has synchronised
  with all who counted, and releases the flag at system scope. Causality is cumulative, so the
  reader's acquire of that one flag shows it the stores of all.
- Results are read by other threads of the program whose warp has acquired the flag, behind an
  mbarrier; nothing of them was in that SM's L1 before, either. Later kernels start with it empty.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MOST_CHUNKS = 8
CHUNKS = gl.constexpr(MOST_CHUNKS)  # places for flags; a kernel uses as many as it is told


def flag_count(size: int) -> int:
    """int32 numbers that each rank of a group of `size` keeps."""
    return 2 * size * MOST_CHUNKS + 1


def there(rank: int, chunk: int) -> int:
    """Position of the flag that `rank` sets when its slice has been sent."""
    return rank * MOST_CHUNKS + chunk


def back(rank: int, chunk: int, size: int) -> int:
    """Position of the flag that `rank` sets when its results have been sent."""
    return (size + rank) * MOST_CHUNKS + chunk


def missing(word: int) -> tuple[int, str]:
    """(position in the group, "dispatch" or "combine") from what `gone` holds."""
    return word % 256 - 1, "combine" if word // 256 else "dispatch"


@dataclass(frozen=True)
class Signals:
    """One rank's end of the flags of its group.

    places: where every rank's flags lie in this process, and where the host is told who did not
    come (int32 in pinned memory); bases: the same on the device, int64 [size + 1]. counters: int32
    [size * MOST_CHUNKS], zero at rest. words: int32 [2], the number of this call as the two kernels
    of a call read it: each writes only what the other reads, so no program sees it change.
    limit_ns bounds a wait.
    """

    rank: int
    size: int
    places: tuple[int, ...]
    bases: Tensor
    counters: Tensor
    words: Tensor
    limit_ns: int


@gluon.jit
def read(flag):
    """*flag, ordered before whatever is read next."""
    return gl.inline_asm_elementwise(
        "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [flag], gl.int32, False, 1
    )


@gluon.jit
def now(pointer):
    """Nanoseconds of a clock that only runs forward. Inline text needs some argument."""
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,l", [pointer], gl.int64, False, 1
    )


@gluon.jit
def multiprocessor(pointer):
    """The number of the SM that asks."""
    return gl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r,l", [pointer], gl.int32, False, 1)


@gluon.jit
def by_all(came):
    """1 if all threads of the warp that asks have seen it come; the clocks of two may differ. And
    orders what they have seen before the TMA loads that they issue next.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred seen;
        setp.ne.s32 seen, $1, 0;
        vote.sync.all.pred seen, seen, 0xffffffff;
        fence.proxy.async;
        selp.b32 $0, 1, 0, seen;
        }""",
        "=r,r",
        [came],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def flag_of(bases, rank, place):
    """The flag at `place` in a rank's memory."""
    return (gl.load(bases + rank) + place * 4).to(gl.pointer_type(gl.int32))


@gluon.jit
def arrived(flag, epoch, gone, limit_ns):
    """Wait until *flag >= epoch -> 1; 0 behind limit_ns, or once *gone is not 0."""
    late = read(flag) - epoch < 0
    if late:
        until = now(flag) + limit_ns
        patient = True
        while late & patient:
            late = read(flag) - epoch < 0
            patient = (read(gone) == 0) & (now(flag) < until)
    return (late == 0).to(gl.int32)


@gluon.jit
def awaited(bases, rank, place, epoch, own, limit_ns, SIZE: gl.constexpr, SITE: gl.constexpr):
    """A warp waits for the flag of `rank` at `place`; if it does not come, it tells everybody and
    this host.
    """
    suspect = rank + 1 + 256 * SITE
    GONE: gl.constexpr = 2 * SIZE * CHUNKS
    gone = flag_of(bases, own, GONE)
    came = by_all(arrived(flag_of(bases, own, place), epoch, gone, limit_ns))
    if came == 0:
        for other in gl.static_range(SIZE):
            gl.atomic_cas(flag_of(bases, other, GONE), 0, suspect, sem="acq_rel", scope="sys")
        told(bases, own, SIZE)
    return came


@gluon.jit
def told(bases, own, SIZE: gl.constexpr):
    """Tell this host who did not come, if anybody has said so: a rank that is late itself finds
    every flag set, and behind some of them nothing that is right.
    """
    GONE: gl.constexpr = 2 * SIZE * CHUNKS
    who = read(flag_of(bases, own, GONE))
    if who != 0:
        gl.store(gl.load(bases + SIZE).to(gl.pointer_type(gl.int32)), who)


@gluon.jit
def epoch_of(signals, E: gl.constexpr):
    """The number of this call. Nobody writes this kernel's word before the next kernel."""
    bases, counters, words, limit_ns = signals
    return gl.load(words + (0 if E.ARRIVE else 1))
