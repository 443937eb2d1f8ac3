"""What a GEMM pays for an exchange beside it: the library's two products of `none`, each alone,
beside the copy engine (sm-free's pushes) and beside NCCL (with-sm's all-to-all).

    main    heat | ranks aligned | flush L2 | product, timed |
    side                         | an exchange as long as two products ......|

The flush is the lead of the exchange: behind the blocks of a product that has begun, NCCL's kernel
would wait for an SM until the last of them. For the same reason NCCL gets one message of so many
times the bytes; the copy engine repeats its pushes. Events tell for how much of the product the
exchange lasted and at which rate.

Calls that are interleaved share one power state, so clock and power are read where the same call is
held for a while. L2 and memory traffic need hardware counters, which nothing here reads.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from rlkernel.collectives import exchange
from rlkernel.collectives.comm import Comm
from rlkernel.collectives.transport import Transport
from rlkernel.overlap import copy_engine, terms
from rlkernel.overlap.clock import L2_BYTES, Clock, Meter, Work, interleaved
from rlkernel.overlap.stage import stage_of

ALONE, PUSHES, NCCL = "alone", "copy engine", "NCCL"
CLOCK = Clock(warmup=3, tests=16, sleep_ms=0.0, flush=False, state="hot")  # `_Beside` flushes
LENGTHS = Clock(warmup=2, tests=4, sleep_ms=0.0, flush=False)
SEVERAL = 4  # exchanges whose length is taken: of one alone the launch is much
PRODUCTS, LEAD_US = 2, 100.0  # an exchange lasts for so many, and for the flush ahead of them
HELD_US, FEWEST, MOST = 4e5, 20, 600  # the same call without a pause: so long, in so many calls
READ_EVERY, WARM_S = 10, 0.5


def measurable(topology: Mapping, device: torch.device, transport: Transport | None) -> bool:
    """Whether there is an NCCL exchange between GPUs of one host, a GPU a rank. topology: as
    nodes.described gives it; a lone rank has no transport.
    """
    ranks = len(topology["ranks"])
    whole = topology["hosts"] == topology["nodes"] == 1 and topology["gpus"] == ranks > 1
    return whole and device.type == "cuda" and transport.name == "process-group/nccl"


def sharing(bench, comm: Comm) -> tuple[list[dict], list[dict]]:
    """(lines of the row, raw samples of this rank), about five seconds at the default shape. Every
    rank calls it; bench: measure.Bench. Beside the copy engine only where sm-free is a schedule.
    """
    from rlkernel.run.timing import heat

    scratch = torch.empty(L2_BYTES, dtype=torch.uint8, device=comm.device)
    with torch.no_grad():
        products, exchanges = _products(bench), _exchanges(bench)
        torch.cuda.synchronize(comm.device)
        bench.comm.all_gather(torch.zeros(1, device=comm.device), "align", "ep")
        torch.cuda.synchronize(comm.device)  # nobody reads any more what pushes overwrite
        counts = _counts(bench.comm, products, exchanges)
        work, ahead, sent = {}, {}, {}
        for gemm, product in products.items():
            for name in (ALONE, *exchanges):
                variant, count = f"{gemm}, {name}", counts.get((gemm, name), 0)
                start = exchanges[name](count) if count else None
                work[variant], ahead[variant] = product, _Beside(start, scratch)
                sent[variant] = count * _bytes_sent(bench)
        samples = interleaved(work, CLOCK, bench.comm, ahead)
        for name, beside in ahead.items():
            beside.describe([one for one in samples if one["variant"] == name])
        found = lines(comm.collect(samples), sent)
        held = {}
        with Meter(comm.device) as meter:
            heat(WARM_S)  # meanwhile the meter begins to speak
            for one in found:
                name = f"{one['gemm']}, {one['beside']}"
                calls = max(FEWEST, min(MOST, math.ceil(HELD_US / one["median_us"])))
                held[name] = _held(work[name], ahead[name], calls, meter)
        sms = _sms(ahead[f"gemm1, {NCCL}"].start, comm.device)
        torch.cuda.synchronize(comm.device)
        told = comm.collect({"held": held, "sms": sms})  # nobody's push is under way any more
    for one in found:
        clocks = [rank["held"][f"{one['gemm']}, {one['beside']}"] for rank in told]
        one |= {name: _median(clock[name] for clock in clocks) for name in Meter.UNKNOWN}
        if one["beside"] == NCCL:
            one["sms"] = max((rank["sms"] for rank in told if rank["sms"]), default=None)
    return found, samples


def lines(samples: terms.Samples, sent: Mapping[str, int]) -> list[dict]:
    """{"gemm", "beside", "median_us", "ratio" to alone}, of the slowest rank of each round; beside
    an exchange also what a rank sent during the product ("sent_bytes"), its rate ("gb_per_s"), and
    the least part of any product for which the exchange lasted ("lasted", at most 1). samples:
    [rank][sample]; sent: variant -> bytes to peers of one whole exchange, in the order of lines.
    """
    times = {name: terms.slowest(ranks) for name, ranks in terms.by_rank(samples).items()}
    found = []
    for name in sent:
        own, (gemm, beside) = times[name], name.split(", ")
        ratio = terms.paired(own, times[f"{gemm}, {ALONE}"], lambda a, b: a / b)
        line = {"gemm": gemm, "beside": beside, **terms.spread(own), "ratio": ratio}
        if beside != ALONE:
            kept = [s for rank in samples for s in rank
                    if s["variant"] == name and not s["dropped"]]  # fmt: skip
            parts = [min(1.0, max(0.0, s["left_us"] / s["us"])) for s in kept]
            rates = [sent[name] / s["exchange_us"] for s in kept]  # bytes a us
            during = [rate * part * s["us"] for rate, part, s in zip(rates, parts, kept)]
            line |= {"lasted": min(parts), "gb_per_s": statistics.median(rates) / 1e3,
                     "sent_bytes": round(statistics.median(during))}  # fmt: skip
        found.append(line)
    return found


# -- what is called --------------------------------------------------------------------------------


def _products(bench) -> dict[str, Work]:
    """The GEMMs of `none`, its shapes and strides, on the rank's own slices."""
    at, ffn = bench.layout, bench.layer
    x = bench.x.view(at.batch, at.ranks, at.local, at.dim).transpose(0, 1)
    x = x.reshape(at.rows, at.local, at.dim).transpose(0, 1)  # [L, N, D]
    norms = (ffn.norm_x.weight, ffn.norm_x.bias, ffn.norm_gate.weight, ffn.norm_gate.bias)
    w1, wout = ffn.w1.detach(), ffn.wout.detach()
    z = torch.bmm(x, w1)
    h, _ = stage_of(ffn).forward(z, ffn.b1, norms, False)
    y = torch.bmm(h, wout)
    return {"gemm1": partial(torch.bmm, x, w1, out=z), "gemm2": partial(torch.bmm, h, wout, out=y)}


def _exchanges(bench) -> dict[str, Callable[[int], Work]]:
    """Name -> (how many -> what puts so many exchanges of x behind the current stream)."""
    at, comm, x = bench.layout, bench.comm, bench.x
    found = {}
    if "sm-free" in bench.overlapped():
        memory, _ = copy_engine.memory_of(comm, at, x.dtype)
        streams = [torch.cuda.Stream(comm.device, priority=-1) for _ in range(at.ranks)]
        found[PUSHES] = lambda count: partial(_push, at, x, memory, streams, count)

    def by_nccl(count: int) -> Work:
        parts = torch.stack(x.chunk(at.ranks, 1)).repeat(1, count, 1, 1)
        return lambda: exchange.start(comm, parts, "beside a product", "ep").take()

    return found | {NCCL: by_nccl}


def _push(at, x: Tensor, memory, streams: Sequence, count: int) -> None:
    """Each peer's slice of x into its Xlocal `count` times, as sm-free does with one chunk."""
    current, width = torch.cuda.current_stream(x.device), at.local * at.dim
    for step in range(1, at.ranks):
        peer = (memory.index + step) % at.ranks
        streams[peer].wait_stream(current)
        source = x.view(-1)[peer * width :]
        target = memory.buffer("x", 0, peer)[memory.index * at.batch * width :]
        for _ in range(count):
            memory.copy_2d(target, width, source, at.tokens * at.dim, width, at.batch,
                           streams[peer])  # fmt: skip
    for stream in streams:
        current.wait_stream(stream)


def _bytes_sent(bench) -> int:
    """To peers, by one exchange."""
    at = bench.layout
    return (at.ranks - 1) * at.batch * at.local * at.dim * bench.x.element_size()


def _counts(
    comm: Comm, products: Mapping[str, Work], exchanges: Mapping[str, Callable[[int], Work]]
) -> dict[tuple[str, str], int]:
    """(product, exchange) -> how many last for PRODUCTS of it. The same on all ranks."""
    several = {name: made(SEVERAL) for name, made in exchanges.items()}
    times = terms.by_rank(comm.collect(interleaved({**products, **several}, LENGTHS, comm)))
    us = {name: terms.spread(terms.slowest(ranks))["median_us"] for name, ranks in times.items()}
    return {
        (gemm, name): math.ceil((PRODUCTS * us[gemm] + LEAD_US) * SEVERAL / us[name])
        for gemm, name in itertools.product(products, exchanges)
    }


class _Beside:
    """Called ahead of a product: begins an exchange on a stream of its own, then flushes L2."""

    def __init__(self, start: Work | None, scratch: Tensor) -> None:
        self.start, self.scratch, self.side = start, scratch, torch.cuda.Stream(scratch.device)
        self.marks: list[tuple[torch.cuda.Event, ...]] = []

    def __call__(self) -> None:
        main = torch.cuda.current_stream(self.scratch.device)
        begin, lead, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        if self.start is not None:
            if len(self.marks) > 1:  # few at once: each has memory of its own
                self.marks[-2][2].synchronize()
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                begin.record()
                self.start()
                end.record()
        self.scratch.zero_()
        lead.record()
        self.marks.append((begin, lead, end))

    def describe(self, samples: Sequence[dict]) -> None:
        """How long the exchange of each sample took, and for how long from the product's start."""
        if self.start is None:
            return
        for sample, (begin, lead, end) in zip(samples, self.marks[-len(samples) :], strict=True):
            sample["exchange_us"] = round(begin.elapsed_time(end) * 1e3, 3)
            sample["left_us"] = round(lead.elapsed_time(end) * 1e3, 3)


# -- clock, power, SMs -----------------------------------------------------------------------------


def _held(work: Work, ahead: Work, calls: int, meter: Meter) -> dict[str, float | None]:
    """SM clock and power, medians over the second half of `calls` without a pause. Every rank gives
    the same number of calls.
    """
    ends, said = [], []
    for number in range(calls):
        if number % PRODUCTS == 0:
            ahead()
        work()
        ends.append(torch.cuda.current_stream(meter.device).record_event())
        if number >= 2:  # a reading is of what runs, not of what waits in a queue
            ends[number - 2].synchronize()
        if number >= calls // 2 and number % READ_EVERY == 0:
            said.append(meter.read())
    torch.cuda.synchronize(meter.device)
    return {name: _median(one[name] for one in said) for name in Meter.UNKNOWN}


def _sms(start: Work, device: torch.device) -> int | None:
    """Blocks of NCCL's kernel in a trace of the exchange, an SM each; None where it shows none."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        start()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        found.export_chrome_trace(name := os.path.join(folder, "trace.json"))
        with open(name, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    return blocks(events)


def blocks(events: Sequence[Mapping]) -> int | None:
    """The largest grid of NCCL's kernels among the events of a chrome trace."""
    kernels = [e.get("args", {}) for e in events
               if e.get("cat") == "kernel" and "nccl" in e["name"].lower()]  # fmt: skip
    return max((math.prod(one["grid"]) for one in kernels if "grid" in one), default=None)


def _median(values) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
