"""Observers that only look: what went in and came out of each collective, and how long it took.

Faults, which look and change, stand in faults.py. Attach either with `comm.using(observers=[...])`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlkernel.collectives.comm import Call, Proceed


@dataclass(frozen=True)
class Captured:
    """Both sides of one call; tensors are copies, or what `keep` made of them."""

    site: str
    kind: str
    pre_reduce: object
    post_reduce: object


@dataclass
class Capture:
    """Keep both sides of every call, in order. keep: what of a tensor, by default a copy."""

    keep: Callable[[Tensor], object] = lambda x: x.detach().clone()
    calls: list[Captured] = field(default_factory=list)

    def __call__(self, call: Call, x: Tensor, proceed: Proceed) -> Tensor:
        before = self.keep(x)
        result = proceed(x)
        self.calls.append(Captured(call.site, call.kind, before, self.keep(result)))
        return result

    def behind(self) -> dict[str, list[object]]:
        """site -> what was kept behind each of its calls."""
        found: dict[str, list[object]] = {}
        for captured in self.calls:
            found.setdefault(captured.site, []).append(captured.post_reduce)
        return found


@dataclass
class Timer:
    """Wall time of every call in seconds, agreement included; GPUs synchronised on both sides."""

    samples: list[dict[str, object]] = field(default_factory=list)

    def __call__(self, call: Call, x: Tensor, proceed: Proceed) -> Tensor:
        _synchronize(x.device)
        start = time.perf_counter()
        result = proceed(x)
        _synchronize(x.device)
        seconds = time.perf_counter() - start
        size = x.numel() * x.element_size()
        self.samples.append(
            {"site": call.site, "kind": call.kind, "bytes": size, "seconds": seconds}
        )
        return result


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
