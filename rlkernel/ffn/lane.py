"""A second stream for what ranks say to each other while the GEMMs go on.

    main   GEMM gate ──●── GEMM up ────●── GEMM dW ...           ●── add
                       │ event         │ event                   │ event
    lane               └─ sum gate.dx ─└─ sum up.dx ─────────────┘

A call on the lane starts behind everything that the main stream was given before it, and the calls
of a lane run one after the other, so every rank's collectives have one order. When they run changes
no bit. On the CPU a call runs at once. The host waits for nothing; a CUDA graph captures the fork
and the join as they stand, provided each result is taken.

Memory: what a call reads lives until its result is taken. Results are written into tensors of the
main stream; one that a call allocates itself is handed over (`own`), or the lane could give its
memory away while the main stream still reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Pending(Generic[T]):
    """A value that is being made on a lane. `result` orders the current stream behind it."""

    def __init__(self, value: T, stream: torch.cuda.Stream | None = None, keep: object = ()):
        self._value, self._keep, self._device = value, keep, getattr(stream, "device", None)
        self._event = None if stream is None else stream.record_event()

    def result(self) -> T:
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        self._event, self._keep = None, ()
        return self._value


class Lane:
    """The lane of a device; `side` false: every call stays in the current stream."""

    def __init__(self, device: torch.device, side: bool = True) -> None:
        self.stream = _stream(device) if side and device.type == "cuda" else None

    def start(self, call: Callable[..., T], *inputs) -> Pending[T]:
        """call(*inputs), beside the current stream. Its result must be taken."""
        if self.stream is None:
            return Pending(call(*inputs))
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            return Pending(call(*inputs), self.stream, (call, inputs))

    def own(self, x: Tensor) -> Tensor:
        """x, allocated by a call whose result was taken, for the current stream to keep."""
        if self.stream is not None:
            x.record_stream(torch.cuda.current_stream(self.stream.device))
        return x


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One a device, whatever the layer: two could order collectives differently on two ranks."""
    return torch.cuda.Stream(device)
