"""Flags between ranks: a number that only grows, written by one rank, awaited by another.

    rank 0   data -> slot of rank 1,  release, post(flag of rank 1, epoch)
    rank 1                                     arrived(own flag, epoch) >= epoch -> reads the slot

`release`, then `post`: whoever sees the epoch sees everything that the whole program wrote before
it, to whatever memory; one release serves the flags of all peers. `arrived` acquires: what is read
behind it is not older. Waiting for "at least this epoch" needs no reset, so a CUDA graph replays
without the host. Every wait is bounded, and ends early once any rank has given up (`abandon`), so
that nobody spins for a peer that is gone.

The compiled forms are PTX for sm_70 and later. Interpreted, the same words act on host memory that
the ranks' processes share.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np
import triton
import triton.language as tl

from rlkernel.kernels.bf16 import INTERPRETED

if INTERPRETED:
    from triton.runtime.interpreter import TensorHandle

    def release(_pointer):
        """What this program wrote comes before what it posts next."""

    def post(flag, epoch):
        """*flag = epoch, behind the last release."""
        _word(flag).value = _number(epoch)

    def read(flag):
        """*flag, ordered before whatever is read next."""
        return _scalar(_word(flag).value)

    def now(_pointer):
        """Nanoseconds of a clock that only runs forward."""
        return _scalar(time.monotonic_ns(), tl.int64)

    def impatient(gone, until):
        """1 behind that time, or once *gone is not 0."""
        time.sleep(1e-4)  # more ranks than cores: let the others run
        return _scalar(int(_word(gone).value != 0 or time.monotonic_ns() > _number(until)))

    def arrived(flag, epoch, gone, limit_ns):
        """Wait until *flag >= epoch -> 1; 0 after limit_ns, or once *gone is not 0."""
        mine, wanted = _word(flag), _number(epoch)
        until = time.monotonic_ns() + _number(limit_ns)
        while (mine.value - wanted) % 2**32 >= 2**31:  # the distance of numbers that may wrap
            if _number(impatient(gone, until)):
                return _scalar(0)
        return _scalar(1)

    def abandon(gone, suspect):
        """*gone = suspect + 1, a position in a group, unless somebody has named one before."""
        if not _word(gone).value:
            tell(gone, _number(suspect) + 1)

    def tell(word, value):
        """*word = value, for a host to read."""
        _word(word).value = _number(value)

    def _word(pointer) -> ctypes.c_int32:
        return ctypes.c_int32.from_address(_number(pointer))

    def _number(value) -> int:
        return int(np.asarray(value.handle.data).item()) if hasattr(value, "handle") else int(value)

    def _scalar(value: int, kind=tl.int32):
        data = np.array([value], np.int64 if kind == tl.int64 else np.int32)
        return tl.tensor(TensorHandle(data, kind), kind)

else:

    @triton.jit
    def release(pointer):
        """What this program wrote comes before what it posts next."""
        tl.debug_barrier()  # what the other threads wrote comes before the fence of the first
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first fence.acq_rel.sys;
            mov.b32 $0, 0;
            }""",
            "=r,l",
            [pointer],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def post(flag, epoch):
        """*flag = epoch, behind the last release."""
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.relaxed.sys.global.b32 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,r",
            [flag, epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def read(flag):
        """*flag, ordered before whatever is read next."""
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];",
            "=r,l",
            [flag],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def now(pointer):
        """Nanoseconds of a clock that only runs forward. Inline text needs some argument."""
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,l", [pointer], dtype=tl.int64, is_pure=False, pack=1
        )

    @triton.jit
    def impatient(gone, until):
        """1 behind that time, or once *gone is not 0. Threads may think differently."""
        return ((read(gone) != 0) | (now(gone) > until)).to(tl.int32)

    @triton.jit
    def arrived(flag, epoch, gone, limit_ns):
        """Wait until *flag >= epoch -> 1; 0 after limit_ns, or once *gone is not 0."""
        # Threads may leave the loop one by one: nothing in it may need them together.
        late = read(flag) - epoch < 0
        if late:
            until = now(flag) + limit_ns
            patient = True
            while late & patient:
                late = read(flag) - epoch < 0
                patient = impatient(gone, until) == 0
        return (late == 0).to(tl.int32)

    @triton.jit
    def abandon(gone, suspect):
        """*gone = suspect + 1, a position in a group, unless somebody has named one before."""
        tl.inline_asm_elementwise(  # by each thread that has lost its patience
            "atom.acq_rel.sys.global.cas.b32 $0, [$1], 0, $2;",
            "=r,l,r",
            [gone, suspect + 1],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def tell(word, value):
        """*word = value, for a host to read."""
        tl.inline_asm_elementwise(
            "st.relaxed.sys.global.b32 [$1], $2; mov.b32 $0, 0;",
            "=r,l,r",
            [word, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
