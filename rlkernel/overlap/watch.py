"""Host-side bound of stream waits (peer_memory.py): who did not come is named, and the waits end.

A wait that nobody answers hangs its stream, and with it whoever synchronises. What ends it must not
need anything that such a stream may hold up:

    kernels, memory   At its first launch CUDA loads a kernel, for which it may wait until the
                      device is idle; an allocation may, too. So flags are read and overwritten by
                      plain copies, to and from pinned memory that is there from the start.
    streams           torch deals its streams out of a pool, where one comes round twice. And all of
                      a process share CUDA_DEVICE_MAX_CONNECTIONS hardware queues (8 by default):
                      what stands in a queue behind a hung wait stands, whatever its stream. So
                      there are some of our own, of the highest priority, and one that answers will
                      do.
    locks             The thread that minds the time calls no CUDA. Another one does, which may hang
                      for it where a call of the main thread holds the driver; cuda-bindings lets go
                      of the interpreter meanwhile, as torch's own query of an event does not.

Where nothing answers, no wait can be ended from within the process: it says so and aborts, as a
process does whose NCCL has lost a peer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass

import torch

from rlkernel.collectives.errors import PeerLost
from rlkernel.collectives.peer_memory import RELEASED, PeerMemory, driver

TICK_S = 0.05
STREAMS, ANSWER_S = 4, 2.0  # tried one after the other, so long each
LAST_S = 10.0  # for all that is to be done about a late rank
GRACE_S = 2.0  # for a main thread that does not hang to raise what was found, ahead of an abort


@dataclass(eq=False)
class Wait:
    """One stage's waits for `flags`; `end` once all of them have been put on a stream."""

    until: float
    epoch: int
    stage: str
    flags: range
    event: torch.cuda.Event | None = None

    def end(self, stream: torch.cuda.Stream) -> None:
        self.event = stream.record_event()

    def through(self) -> bool:
        """Whether the stream has got behind them, or hangs no more since its device has failed."""
        if self.event is None:
            return False
        runtime, _ = driver()
        code = runtime.cudaEventQuery(self.event.cuda_event)[0]
        return code != runtime.cudaError_t.cudaErrorNotReady


class Watch:
    """Of all waits for the flags of one memory. One thread, for as long as the process lives."""

    def __init__(self, memory: PeerMemory, timeout_s: float) -> None:
        self.memory, self.timeout_s = memory, timeout_s
        self.lost: PeerLost | None = None
        self._flags = _Flags(memory)
        self._waits: deque[Wait] = deque()
        self._lock = threading.Lock()
        threading.Thread(target=self._mind, daemon=True).start()

    def before(self, epoch: int, stage: str, flags: range) -> Wait:
        """Called ahead of the first wait: with one that hangs even what is given behind it may hang
        the caller, in a full queue or in the driver.
        """
        wait = Wait(time.monotonic() + self.timeout_s, epoch, stage, flags)
        with self._lock:
            while self._waits and self._waits[0].through():
                self._waits.popleft()
            self._waits.append(wait)
        return wait

    def check(self) -> None:
        """Raise PeerLost if a wait of an earlier call had to be released."""
        if self.lost is not None:
            raise self.lost

    # -- the thread that minds the time ------------------------------------------------------------

    def _mind(self) -> None:
        while self.lost is None:
            time.sleep(TICK_S)
            late = self._late()
            if late is None:
                continue
            asking = threading.Thread(target=self._asking, args=(late,), daemon=True)
            asking.start()
            asking.join(LAST_S)
            if self._late() is late:
                self._give_up(late)

    def _late(self) -> Wait | None:
        with self._lock:
            first = self._waits[0] if self._waits else None
        return first if first is not None and first.until < time.monotonic() else None

    def _give_up(self, late: Wait) -> None:
        self.lost = self.lost or PeerLost(
            f"{late.stage}: its waits were not through within {self.timeout_s:g} s; which rank did "
            "not send cannot be read", site=late.stage,
        )  # fmt: skip
        time.sleep(GRACE_S)
        print(
            f"PeerLost: {self.lost}. The GPU answers no copy, so that its streams' waits cannot be "
            "ended: the process aborts", file=sys.stderr, flush=True,
        )  # fmt: skip
        os.abort()

    # -- the thread that calls CUDA ----------------------------------------------------------------

    def _asking(self, late: Wait) -> None:
        with contextlib.suppress(TimeoutError):  # then `late` stays
            self._ask(late)

    def _ask(self, late: Wait) -> None:
        self._flags.enter()
        ranks = [] if late.through() else self._behind(late)
        if ranks:
            names = ", ".join(f"rank {rank}" for rank in ranks)
            self.lost = PeerLost(
                f"{late.stage}: {names} did not send within {self.timeout_s:g} s; the waits were "
                "released and their results are void", ranks=tuple(ranks), site=late.stage,
            )  # fmt: skip
            self._flags.release()
        with self._lock:  # it is through, released, or held up by nobody
            if self._waits and self._waits[0] is late:
                self._waits.popleft()

    def _behind(self, late: Wait) -> list[int]:
        """Global ranks one of whose flags here has not reached the epoch."""
        memory, flags = self.memory, slice(late.flags.start, late.flags.stop)
        rows = self._flags.read().tolist()
        ranks = memory.comm.links[memory.axis].ranks
        return [
            ranks[peer] for peer in range(memory.size)
            if peer != memory.index and min(rows[peer][flags]) < late.epoch
        ]  # fmt: skip


class _Flags:
    """The flags on this rank, by copies that need neither a kernel nor memory. All of it is made,
    and used once, before anything hangs.
    """

    def __init__(self, memory: PeerMemory) -> None:
        table = memory.table("flags", memory.index)
        self.at, self.bytes = table.data_ptr(), table.numel() * table.element_size()
        self.device, self.shape = table.device.index, (memory.size, -1)
        self.seen = torch.zeros(table.numel(), dtype=table.dtype).pin_memory()
        self.released = torch.full(self.seen.shape, RELEASED, dtype=table.dtype).pin_memory()
        self.runtime, _ = driver()
        self.streams = list(_streams(self.device))
        spare = torch.empty_like(table)  # peers may write flags by now
        for stream in self.streams:
            self._copy(self.seen.data_ptr(), self.at, "DeviceToHost", stream)
            self._copy(spare.data_ptr(), self.released.data_ptr(), "HostToDevice", stream)
            _checked(self.runtime.cudaStreamSynchronize(stream))

    def enter(self) -> None:
        """What a thread does ahead of `read` and `release`, so that it breaks no graph capture."""
        relaxed = self.runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        _checked(self.runtime.cudaSetDevice(self.device))
        _checked(self.runtime.cudaThreadExchangeStreamCaptureMode(relaxed))

    def read(self) -> torch.Tensor:
        """[P, flags of each sender], int32."""
        self._answered(self.seen.data_ptr(), self.at, "DeviceToHost")
        return self.seen.view(self.shape)

    def release(self) -> None:
        """Let every stream go that waits for a flag here. What they compute then is void."""
        self._answered(self.at, self.released.data_ptr(), "HostToDevice")

    def _answered(self, to: int, of: int, kind: str) -> None:
        """Copy by the first stream that does; one that does not is not asked again."""
        while self.streams:
            self._copy(to, of, kind, self.streams[0])
            until = time.monotonic() + ANSWER_S
            while time.monotonic() < until:
                code = self.runtime.cudaStreamQuery(self.streams[0])
                if code[0] != self.runtime.cudaError_t.cudaErrorNotReady:
                    _checked(code)
                    return
                time.sleep(1e-3)
            self.streams.pop(0)
        raise TimeoutError(f"no copy was done by any of {STREAMS} streams in {ANSWER_S:g} s each")

    def _copy(self, to: int, of: int, kind: str, stream) -> None:
        which = getattr(self.runtime.cudaMemcpyKind, f"cudaMemcpy{kind}")
        _checked(self.runtime.cudaMemcpyAsync(to, of, self.bytes, which, stream))


@functools.cache
def _streams(device: int) -> tuple:
    """The same for all memories of a device: idle streams take their share of the queues, too."""
    runtime, _ = driver()
    _checked(runtime.cudaSetDevice(device))
    high = _checked(runtime.cudaDeviceGetStreamPriorityRange())[-1]
    made = runtime.cudaStreamNonBlocking, high
    return tuple(_checked(runtime.cudaStreamCreateWithPriority(*made))[0] for _ in range(STREAMS))


def _checked(result: tuple) -> tuple:
    """What CUDA returns besides its code."""
    code, *rest = result
    if int(code):
        raise RuntimeError(f"CUDA says {code!r}")
    return tuple(rest)
