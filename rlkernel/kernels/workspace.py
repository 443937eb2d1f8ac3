"""Device memory that outlives a launch: arrival counters, zero whenever no kernel is using them.

Kernels that split a tile over programs count arrivals; the last part to come sets its counter back
to zero, so the next launch finds zeros however many parts either of them has. (A count modulo the
parts would leave a residue for a launch with other parts.) Two launches that run at the same time
must not share a counter: eager launches take the counters of their stream, and each launch
captured into a CUDA graph gets counters of its own, because two graphs may be replayed side by
side.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.runtime import driver

_POOL = 1 << 20  # counters a device: 4 MB, some thousands of captured launches

_pools: dict[torch.device, Tensor] = {}
_taken: dict[torch.device, int] = {}
_of_stream: dict[tuple[torch.device, int], Tensor] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """`count` int32 counters on `device`, all zero for a launch on the current stream.

    A captured launch that finds no prepared counters zeroes its own inside the graph.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return _take(device, count)
    key = (device, driver.active.get_current_stream(device.index))
    held = _of_stream.get(key)
    if held is None or held.numel() < count:
        held = _of_stream[key] = _take(device, max(count, 4096))
    return held[:count]


def _take(device: torch.device, count: int) -> Tensor:
    """The next counters of the device's pool, which is made outside of any capture."""
    pool = _pools.get(device)
    if pool is None and not torch.cuda.is_current_stream_capturing():
        pool = _pools[device] = torch.zeros(_POOL, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # any stream may use it from here on
    first = _taken.get(device, 0)
    if pool is None or first + count > pool.numel():
        return torch.zeros(count, dtype=torch.int32, device=device)
    _taken[device] = first + -(-count // 32) * 32  # whole cache lines
    return pool[first : first + count]
