"""How long a piece of GPU work takes, measured so that the answer is about the work.

Traps that once led to wrong conclusions, and what is done about each:

- Sustained matrix work lowers the SM clock within a second (the power cap). Variants measured block
  after block measure the power state, so they are interleaved call by call; the chip is kept hot by
  matrix products ahead of the first sample; clock and power stand beside every sample.
- An eager call of a few microseconds measures Python. A variant is captured into a CUDA graph of
  `repeats` calls (or timed as a plain call where that is the question), alike for all variants.
- Launches must not run dry between two samples: a round is enqueued while the one before it still
  runs, and events are read at the end.
- Where the working set fits into L2 a repeated call reads no memory. Callers choose larger sizes,
  or `flush` overwrites L2 ahead of each sample.

Compare variants by the ratio of samples of one round, never by medians of two runs.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

Work = Callable[[], object]
L2_BYTES = 256 << 20  # more than any L2


@dataclass(frozen=True)
class Protocol:
    """What must be equal before two timings may be compared.

    samples: rounds; each takes every variant once. warm_s: seconds of matrix products in front.
    graph: CUDA graphs on all sides, or on none. repeats: calls a sample, inside one graph. flush:
    overwrite L2 ahead of each sample.
    """

    samples: int = 40
    warm_s: float = 1.0
    graph: bool = True
    repeats: int = 1
    flush: bool = False

    def to_dict(self) -> dict[str, object]:
        return {
            **asdict(self),
            "clock": "CUDA events around each sample, microseconds a call",
            "order": "variants interleaved call by call in one process",
            "state": "hot: matrix products in front, no pause between samples",
        }


def interleaved(variants: Mapping[str, Work], protocol: Protocol) -> list[dict]:
    """Time every variant once a round -> one sample a round and variant.

    A sample: {"variant", "round", "us", "graph", "sm_mhz", "power_w"}; us is the time of one call.
    Clock and power are read as the round is enqueued, None where the driver does not tell.
    """
    ready = {name: prepare(work, protocol) for name, work in variants.items()}
    scratch = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda") if protocol.flush else None
    heat(protocol.warm_s)
    pending, rounds = [], []
    for number in range(protocol.samples):
        state = power_state()
        for name, call in ready.items():
            if scratch is not None:
                scratch.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            pending.append((name, number, begin, end, state))
        rounds.append(end)
        if number >= 2:  # two rounds ahead: the queue never runs dry, nor grows without bound
            rounds[number - 2].synchronize()
    torch.cuda.synchronize()
    return [
        {
            "variant": name,
            "round": number,
            "us": round(begin.elapsed_time(end) * 1e3 / protocol.repeats, 3),
            "graph": protocol.graph,
            **state,
        }
        for name, number, begin, end, state in pending
    ]


def medians(samples: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """variant -> {"median_us", "p10_us", "p90_us"}."""
    found = {}
    for name in dict.fromkeys(sample["variant"] for sample in samples):
        times = sorted(sample["us"] for sample in samples if sample["variant"] == name)
        found[name] = {
            "median_us": statistics.median(times),
            "p10_us": times[len(times) // 10],
            "p90_us": times[-1 - len(times) // 10],
        }
    return found


def ratio(samples: Sequence[Mapping], ours: str, theirs: str) -> dict[str, float]:
    """Paired by round: {"median", "p10", "p90"} of time(ours) / time(theirs); below 1 is faster."""
    times = {(sample["variant"], sample["round"]): sample["us"] for sample in samples}
    rounds = [number for name, number in times if name == ours]
    paired = sorted(times[ours, n] / times[theirs, n] for n in rounds)
    return {
        "median": statistics.median(paired),
        "p10": paired[len(paired) // 10],
        "p90": paired[-1 - len(paired) // 10],
    }


@functools.cache
def ceilings(size: int = 8192, copied: int = 4 << 30) -> Mapping[str, float]:
    """What this device can do at most, measured hot, once: {"bytes_per_us", "flops_per_us"}.

    A device copy (bytes read + bytes written) and a BF16 product of `size` cubed.
    """
    source = torch.empty(copied // 2, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    work = {"copy": lambda: target.copy_(source), "gemm": lambda: torch.mm(a, b, out=out)}
    found = medians(interleaved(work, Protocol(samples=10, warm_s=0.5, graph=False)))
    return {
        "bytes_per_us": copied / found["copy"]["median_us"],
        "flops_per_us": 2 * size**3 / found["gemm"]["median_us"],
    }


def heat(seconds: float, size: int = 8192) -> None:
    """Run matrix products until the clock has settled under the power cap."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(10):
            torch.mm(a, a, out=out)
        torch.cuda.synchronize()


def power_state() -> dict[str, float | None]:
    """{"sm_mhz", "power_w"} of the current device, None without the driver's library."""
    try:
        return {
            "sm_mhz": float(torch.cuda.clock_rate()),
            "power_w": torch.cuda.power_draw() / 1e3,
        }
    except Exception:  # the library's errors are its own; a missing clock is a fact, not a failure
        return {"sm_mhz": None, "power_w": None}


def prepare(work: Work, protocol: Protocol) -> Work:
    """Compile and warm up; then the call itself, or a graph of `repeats` of them."""
    if not protocol.graph:
        for _ in range(3):
            work()

        def calls() -> None:
            for _ in range(protocol.repeats):
                work()

        return calls
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events in a thread of its own, which must not end the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(protocol.repeats):
            work()
    graph.replay()
    return graph.replay
