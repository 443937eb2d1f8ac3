"""The documented timing protocol, for calls in which ranks wait for each other.

For each call: overwrite L2, align the ranks, record the start, call, record the end, synchronise,
read. The first measurement is dropped where there are several; seconds are reported as mean,
minimum and maximum. Beyond the documented one, and written down with every sample: variants are
interleaved call by call, and `hot` puts a matrix product ahead of the start event, so that the chip
stands under its power cap and the host is ahead of the device, as it is within a training step.

A call leaves the chip to the next one as it is: cooler, hence faster, behind one that waits for its
host. In one order for all rounds a variant would have that from the same neighbour every time, and
no number of rounds would average it out; so the order is drawn anew for each round.

On a CPU there is no L2 to flush and no event: perf_counter between two alignments.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

import torch

from rlkernel.collectives.comm import Comm

Work = Callable[[], object]
L2_BYTES = 256 << 20  # more than any L2
HEAT = 8192  # of the matrix product ahead of a start event


@dataclass(frozen=True)
class Clock:
    """warmup, tests: calls of each variant. sleep_ms: ahead of the first. flush: L2. state: see
    above.
    """

    warmup: int = 50
    tests: int = 50
    sleep_ms: float = 10.0
    flush: bool = True
    state: str = "documented"

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def interleaved(
    variants: Mapping[str, Work], clock: Clock, comm: Comm, ahead: Mapping[str, Work] | None = None
) -> list[dict]:
    """One sample a round and variant, as they were taken: {"variant", "round", "position" in it,
    "behind" (the variant that was called before), "us", "dropped", "state", "sm_mhz", "power_w"};
    clock and power as the round begins, None where nobody tells. Every rank calls it with the same
    variants. ahead: variant -> what is called between the alignment and the start.
    """
    cuda = comm.device.type == "cuda"
    works = {name: (work, (ahead or {}).get(name, _nothing)) for name, work in variants.items()}
    for work, before in works.values():
        for _ in range(clock.warmup):
            before()
            work()
    if cuda:
        torch.cuda.synchronize(comm.device)
    time.sleep(clock.sleep_ms / 1e3)
    one = _Device(clock, comm) if cuda else _Host(comm)
    with Meter(comm.device) as meter:
        return _rounds(works, clock, one, meter, clock.state if cuda else "cpu")


def _nothing() -> None: ...


def order(variants: Iterable[str], number: int) -> list[str]:
    """The order of a round: drawn with its number for a seed, so that all ranks draw the same."""
    names = list(variants)
    return random.Random(number).sample(names, len(names))


def _rounds(
    works: Mapping[str, tuple[Work, Work]], clock: Clock, one: _Device | _Host, meter: Meter,
    state: str,
) -> list[dict]:  # fmt: skip
    samples, behind = [], list(works)[-1] if works and clock.warmup else None
    for number in range(clock.tests):
        power = meter.read()
        for position, name in enumerate(order(works, number)):
            samples.append({
                "variant": name,
                "round": number,
                "position": position,
                "behind": behind,
                "us": round(one.sample(*works[name]), 3),
                "dropped": number == 0 and clock.tests > 1,
                "state": state,
                **power,
            })  # fmt: skip
            behind = name
    return samples


class _Device:
    def __init__(self, clock: Clock, comm: Comm) -> None:
        self.clock, self.comm = clock, comm
        self.scratch = torch.empty(L2_BYTES, dtype=torch.uint8, device=comm.device)
        self.one = torch.zeros(1, device=comm.device)
        if clock.state == "hot":
            from rlkernel.run.timing import heat

            self.hot = torch.randn(HEAT, HEAT, device=comm.device, dtype=torch.bfloat16)
            self.product = torch.empty_like(self.hot)
            heat(1.0)

    def sample(self, work: Work, before: Work) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self.clock.state == "hot":
            torch.mm(self.hot, self.hot, out=self.product)
        if self.clock.flush:
            self.scratch.zero_()
        self.comm.all_gather(self.one, "align", "ep")
        before()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize(self.comm.device)
        return begin.elapsed_time(end) * 1e3


class _Host:
    def __init__(self, comm: Comm) -> None:
        self.comm, self.one = comm, torch.zeros(1)

    def sample(self, work: Work, before: Work) -> float:
        self.comm.all_gather(self.one, "align", "ep")
        before()
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1e6


class Meter:
    """SM clock and power beside the samples: the driver's library where torch finds it, else one
    nvidia-smi that speaks ten times a second; asked anew for each round it would cool the chip.
    Both are None on a CPU, and where nobody tells.
    """

    UNKNOWN: dict[str, float | None] = {"sm_mhz": None, "power_w": None}

    def __init__(self, device: torch.device) -> None:
        self.device, self.said, self.process = device, dict(self.UNKNOWN), None

    def __enter__(self) -> Meter:
        if self.device.type == "cuda" and self._library()["sm_mhz"] is None:
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.listener.join()

    def read(self) -> dict[str, float | None]:
        if self.device.type != "cuda":
            return dict(self.UNKNOWN)
        return dict(self.said) if self.process is not None else self._library()

    def _library(self) -> dict[str, float | None]:
        from rlkernel.run import timing

        return timing.power_state()

    def _start(self) -> None:
        which = f"--id=GPU-{torch.cuda.get_device_properties(self.device).uuid}"
        query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
        command = ["nvidia-smi", which, *query, "--loop-ms=100"]
        try:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        with self.process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError):
                    mhz, watts = (float(word) for word in line.split(","))
                    self.said = {"sm_mhz": mhz, "power_w": watts}
