"""How long work takes that ranks do together: one start for all of them, the slowest one counts.

    rank 0   product, sync │ meet ·· wait for the instant │ call, sync ───┤
    rank 1   product, sync │ meet ·· wait for the instant │ call, sync ───────┤  this one counts

Traps that once led to wrong conclusions, and what is done about each:

- Ranks leave a barrier one after the other, further apart than a decode step is long. Ranks of one
  host agree on an instant of their common clock and wait for it; who comes late has his lateness
  counted, and told (`late_us`). Hosts have no common clock: there the barrier is the start.
- The slowest rank is another one each time. The maximum is taken sample by sample; a maximum of
  medians is too small.
- A GPU that waits for its peers raises its clock. A matrix product runs ahead of each meeting.
- What one rank does alone (the opponent) runs on every rank at once, under the same start.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from rlkernel.run.timing import Protocol, Work, heat, power_state, prepare

LEAD_S = 2e-3  # from the meeting to the start: longer than ranks leave a meeting apart
Collect = Callable[[object], list]  # every rank's value, in rank order, on every rank


def aligned(
    variants: Mapping[str, Work], protocol: Protocol, collect: Collect, device: torch.device
) -> list[dict]:
    """Time every variant once a round on every rank -> this rank's samples; all ranks must call it.

    A sample: {"variant", "round", "us", "late_us", "graph", "sm_mhz", "power_w"}; us is the wall
    time of one call up to the moment when this rank's device is idle again.
    """
    ready = {name: prepare(work, protocol) for name, work in variants.items()}
    common, warm = one_host(collect), _product(device)
    if device.type == "cuda":
        heat(protocol.warm_s)
    samples = []
    for number in range(protocol.samples):
        state = power_state()
        for name, call in ready.items():
            warm()
            _finish(device)
            due = max(collect(time.monotonic())) + LEAD_S
            while common and time.monotonic() < due:
                pass
            begin = time.monotonic()
            call()
            _finish(device)
            end = time.monotonic()
            us = (end - (due if common else begin)) * 1e6 / protocol.repeats
            late = round((begin - due) * 1e6, 1) if common else None
            sample = {"variant": name, "round": number, "us": round(us, 3), "late_us": late}
            samples.append({**sample, "graph": protocol.graph, **state})
    return samples


def slowest(ranks: Sequence[Sequence[Mapping]]) -> list[dict]:
    """Every rank's samples -> for each sample that of the rank that took longest, with `rank`."""
    found = []
    for together in zip(*ranks, strict=True):
        rank = max(range(len(together)), key=lambda n: together[n]["us"])
        found.append({**together[rank], "rank": rank})
    return found


def told(protocol: Protocol, common: bool) -> dict[str, object]:
    """How it was measured, for the record. common: whether the ranks had one clock."""
    start = "an instant of the host's clock that all ranks wait for"
    return {
        **asdict(protocol),
        "clock": "host clock behind a device synchronize, microseconds a call",
        "start": start if common else "a barrier",
        "order": "variants interleaved call by call in one process a rank",
        "of": "the slowest rank of each sample",
    }


def one_host(collect: Collect) -> bool:
    """Whether all ranks run in one boot of one machine, whose monotonic clock they share."""
    try:
        here = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        here = platform.node()
    return len(set(collect(here))) == 1


def _product(device: torch.device, size: int = 8192) -> Work:
    """A millisecond or two of matrix work for a GPU, nothing elsewhere."""
    if device.type != "cuda":
        return lambda: None
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
