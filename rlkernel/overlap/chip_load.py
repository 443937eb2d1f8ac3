"""What the layer's kernels load the chip with, and what a product pays for what runs beside it, by
hardware counters.

    side   | a bystander ..................................................................|
    main   | product, product, ... until the chip is hot |   lead  | product, ... product |
                                               counters on^        |<------ counted ----->|

A bystander takes something that an exchange would take: SMs and no bytes, bytes and no SM, or
both. It is there from the start, so that the power cap has settled on a clock for the two of them,
and outlasts the products, so that all of them run beside it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from rlkernel.kernels import bystander
from rlkernel.overlap import gemm_variants, preset_layer
from rlkernel.overlap.counters import Counters
from rlkernel.overlap.layout import Layout

Work = Callable[[], object]
ALONE, HOST_COPIES = "alone", "copies to and from the host"
HELD, COPYING = "SMs held", "SMs that copy"
SETTLE_S = 1e-3  # until the last interval is there
HEAT_S, LEAD = 0.3, 8  # seconds, then calls that cover the start of the counters
LONGER = 2.5  # a bystander outlasts its products, slowed down, by so much of their time alone
COPIED = 1 << 30  # bytes of the copy that the counters are checked against
TOTALS = ("dram_read", "dram_written", "l2")
SHARES = {"sm_cycles": 1, "tensor_cycles": 4}  # how much a cycle can count: 4 tensor cores an SM


@dataclass(frozen=True)
class Kernel:
    """read, written: the bytes that it cannot do without, each input read once."""

    work: Work
    read: int
    written: int


def kernels(at: Layout, device: torch.device, seed: int) -> Iterator[tuple[str, Kernel]]:
    """Every kernel of a step on one rank of P, with nothing sent: the library's products, those
    with the exchange inside (flags set, results kept here), the pass between them. One at a time,
    since each has operands of its own.
    """
    for name in ("gemm1", "gemm2", "dh", "dx"):
        bench = gemm_variants.Bench(name, at, device, seed)
        read = _bytes(bench.a, bench.weight, *[bench.bias] * bench.has_bias)
        (chosen, *_) = gemm_variants.variants(name, at, {}, gemm_variants.processors(device, 1))
        fused = bench.work(bench.gemm(chosen))
        written = _bytes(bench.product)
        yield f"{name}, library", Kernel(bench.library()[gemm_variants.LIBRARY], read, written)
        yield f"{name}, fused", Kernel(fused, read, written)
        del bench, fused
    between = preset_layer.Pass(at, device, seed)
    works = between.variants()
    yield "norm_gate forward", Kernel(works["forward"], _bytes(between.z), _bytes(between.h))
    yield (
        "norm_gate backward",
        Kernel(works["backward"], _bytes(between.z, between.dh), _bytes(between.dz)),
    )


def copied(device: torch.device, half: bool = False) -> Kernel:
    """A copy of COPIED bytes: what the counters must find; half: and must not."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target, size = torch.empty_like(source), COPIED // 2 if half else COPIED
    return Kernel(lambda: target[:size].copy_(source[:size]), COPIED, COPIED)


def products(at: Layout, device: torch.device, seed: int) -> dict[str, Work]:
    """The forward's two, by the library."""
    library = gemm_variants.LIBRARY
    return {
        name: gemm_variants.Bench(name, at, device, seed).library()[library]
        for name in ("gemm1", "gemm2")
    }


# -- beside a product ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bystander:
    """begin(n): put n of it behind the current stream, each `us` long and moving `moved` bytes."""

    begin: Callable[[int], object]
    us: float
    moved: int
    sms: int


def bystanders(at: Layout, sms: int, device: torch.device) -> dict[str, Bystander]:
    """What may run beside a product; sms: how many SMs of it those take that take any. Within one
    GPU all copies are kernels, whatever they are asked to be (LOG.md): by copy engine goes only
    what comes from the host or goes there.
    """
    made = {"device": device, "dtype": torch.bfloat16}
    x, came = (torch.ones(at.batch, at.local, at.dim, **made) for _ in range(2))
    flat, target = (torch.ones(1 << 26, **made) for _ in range(2))
    scratch = torch.empty(sms * bystander.BLOCK, device=device)
    host = tuple(torch.ones(x.shape, dtype=x.dtype, pin_memory=True) for _ in range(2))
    found = {
        HOST_COPIES: (partial(_both_ways, x, came, host, torch.cuda.Stream()), 8, _bytes(x), 0),
        HELD: (lambda n: bystander.hold(sms, n, scratch), 100_000, 0, sms),
        COPYING: (lambda n: bystander.copy(sms, n, flat, target), 8, _bytes(flat), sms),
    }
    return {
        name: Bystander(begin, _length_us(begin, some) / some, moved, taken)
        for name, (begin, some, moved, taken) in found.items()
    }


def _both_ways(sent, came, host: tuple, other, count: int) -> None:
    """As an exchange does, each way at once: `sent` to the host, as much from there into `came`."""
    current = torch.cuda.current_stream(sent.device)
    other.wait_stream(current)
    for _ in range(count):
        host[0].copy_(sent, non_blocking=True)
        with torch.cuda.stream(other):
            came.copy_(host[1], non_blocking=True)
    current.wait_stream(other)


def _length_us(begin: Callable[[int], object], count: int) -> float:
    for _ in range(2):  # compiled, then timed
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        begin(count)
        last.record()
        last.synchronize()
    return 1e3 * first.elapsed_time(last)


# -- a window --------------------------------------------------------------------------------------


def window(
    counters: Counters | None, work: Work, calls: int, beside: Bystander | None = None,
    alone_us: float = 0.0,
) -> dict:  # fmt: skip
    """One of `calls` calls without a pause, hot: {"us" of a call, TOTALS: bytes of a call, SHARES:
    of all cycles, "mhz", "gap_ns": the longest interval}; beside one also {"gb_per_s": what it
    moves alone, read and written counted once, "lasted"}. Without counters "us" alone.
    """
    first, last, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda.synchronize()
    if beside is not None:
        with torch.cuda.stream(torch.cuda.Stream()):
            us = 1e6 * HEAT_S + LONGER * (LEAD + calls) * alone_us
            beside.begin(max(1, math.ceil(us / beside.us)))
            done.record()
    _heat(work)
    for _ in range(LEAD):
        work()
    if counters:
        counters.start()
    first.record()
    for _ in range(calls):
        work()
    last.record()
    last.synchronize()
    end, lasted = time.time_ns(), beside is not None and not done.query()
    took = first.elapsed_time(last)
    line = {"us": 1e3 * took / calls}
    if counters:
        time.sleep(SETTLE_S)
        seen = counters.stop().between(end - round(1e6 * took), end)
        line |= {name: seen.total(name) / calls for name in TOTALS}
        line |= {name: seen.share(name) / most for name, most in SHARES.items()}
        line |= {"mhz": seen.mhz(), "gap_ns": seen.longest_gap()}
    if beside is not None:
        line |= {"lasted": lasted, "gb_per_s": beside.moved / beside.us / 1e3}
    torch.cuda.synchronize()
    return line


def idle(counters: Counters, us: float) -> dict[str, float]:
    """TOTALS of a time in which nothing runs."""
    torch.cuda.synchronize()
    counters.start()
    begin = time.time_ns()
    time.sleep(us / 1e6)
    end = time.time_ns()
    seen = counters.stop().between(begin, end)
    return {name: seen.total(name) for name in TOTALS}


def cost(counters: Counters, work: Work, calls: int, rounds: int) -> float:
    """Time of a call while the counters are read over that while they are not: median of rounds."""
    ratios = []
    for number in range(rounds):
        each = (counters, None) if number % 2 else (None, counters)
        us = {reader is not None: window(reader, work, calls)["us"] for reader in each}
        ratios.append(us[True] / us[False])
    return statistics.median(ratios)


def _heat(work: Work) -> None:
    stream, until = torch.cuda.current_stream(), time.monotonic() + HEAT_S
    while time.monotonic() < until:
        for _ in range(LEAD):
            work()
        stream.synchronize()


# -- over time -------------------------------------------------------------------------------------


def timeline(counters: Counters, work: Work) -> dict[str, list[float]]:
    """One call: {"us": end of each interval, TOTALS: GB/s, SHARES, "mhz"}. The chip is hot, but for
    the pause in which the counters start: the clock is that of a call's first milliseconds.
    """
    _heat(work)
    counters.start()
    begin = time.time_ns()
    work()
    torch.cuda.synchronize()
    seen = counters.stop().between(begin, time.time_ns())
    found: dict[str, list[float]] = {"us": [], **{n: [] for n in (*TOTALS, *SHARES)}, "mhz": []}
    for n, (ahead, ns) in enumerate(zip(seen.ns, seen.ns[1:]), 1):  # whole intervals alone
        cycles = seen.values["cycles"][n]
        found["us"].append((ns - begin) / 1e3)
        for name in TOTALS:
            found[name].append(seen.values[name][n] / (ns - ahead))
        for name, most in SHARES.items():
            found[name].append(seen.values[name][n] / cycles / most if cycles else 0.0)
        found["mhz"].append(1e3 * cycles / (ns - ahead))
    return {name: [float(f"{v:.4g}") for v in values] for name, values in found.items()}


def forwards(at: Layout, comm, seed: int) -> Mapping[str, Work]:
    """The layer's forward with nothing sent, by `none`'s kernels and by the fused ones."""
    layers = preset_layer.Layers(at, comm, seed)
    ways = (preset_layer.NONE, preset_layer.SET)
    return {way: partial(layers.forward, way) for way in ways}


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
