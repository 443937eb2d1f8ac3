"""What SMs do inside the fused GEMMs of a live call: recorded by a variant of the kernels that is
never timed with the others, held to the bits of `none`, and whose own cost is stated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from rlkernel.collectives.comm import Comm
from rlkernel.overlap import checks, path, terms
from rlkernel.overlap.clock import Clock, interleaved
from rlkernel.records import perfetto, tiles

PLUGIN = "rlkernel.plugin"
WARMUP, TESTS = 2, 9  # calls for the cost of recording
CALLS = 5  # that are recorded; the one in the middle is shown


def wanted(lines: Sequence[Mapping], times: Mapping, plugin: str) -> Mapping | None:
    """The line that is recorded: of those whose GEMMs are ours and fused, the fastest where they
    were timed, else the first.
    """
    fused = [one for one in lines if one["rung"] == path.FUSED] if plugin == PLUGIN else []
    for state in times.values():
        timed = state.get("schedules", {})
        return min(
            fused, key=lambda one: timed[one["variant"]]["slowest"]["median_us"], default=None
        )
    return fused[0] if fused else None


def inside(bench, line: Mapping, file: str, comm: Comm) -> tuple[dict, list]:
    """(what the row keeps, [the check of the bits]); SM tracks of the median call go into the
    chrome trace `file`, what each call hid under "calls". bench: measure.Bench; every rank calls it
    with the same line.
    """
    from rlkernel.overlap import fused_kernel, fused_rung  # Hopper's language, only where used

    bench.layer.chunks = line["chunks"]
    with torch.set_grad_enabled(bench.dy is not None):
        fused, why = fused_rung.fused_of(bench.layer, bench.x)
    assert fused is not None, why  # the line says that it is
    recorder = fused.recording()

    def recording() -> None:
        with replaced(bench.layer, lambda layer, x: fused_kernel.run(layer, x, recorder)):
            bench.through("kernel", line["chunks"])

    right = _same_bits(bench, lambda layer, x: fused_kernel.run(layer, x, recorder))
    plain = partial(bench.through, "kernel", line["chunks"])
    cost = _cost({"plain": plain, "recording": recording}, bench.at["flush"], bench.comm)
    calls = _calls(recording, recorder.timelines, bench.at["flush"], bench.comm)
    summed = [[tiles.summary(one) for one in gemms] for gemms in calls]
    hidden = comm.collect([tiles.together(mine)["hidden"] for mine in summed])
    number = median_call(hidden)
    gemms, mine = calls[number], summed[number]
    perfetto.append(file, comm.rank, [s for one in gemms for s in tiles.stretches(one)])
    first = min(one.start for one in gemms)
    mine = [
        told | {"start_us": round((one.start - first) / 1e3, 3)} for told, one in zip(mine, gemms)
    ]
    ranks = comm.collect({"rank": comm.rank, **tiles.together(mine), "gemms": mine})
    value = "the bits of none" if right else "other bits than none"
    kept = {"variant": line["variant"], "cost": cost, "ranks": ranks, "calls": hidden}
    return kept, [[f"{line['variant']}: the kernels that record", right, value, "torch.equal"]]


def _calls(recording: Callable, timelines: Callable, flush: bool, comm: Comm) -> list[list]:
    """Timelines of some calls, the chip hot and the host ahead, as where times are read."""
    found: list[list] = []

    def recorded() -> None:
        recording()
        found.append(timelines())

    interleaved({"recorded": recorded}, Clock(1, CALLS, 0.0, flush, "hot"), comm)
    return found[-CALLS:]


def median_call(hidden: Sequence[Sequence[float | None]]) -> int:
    """The call in the middle, by what its least rank hid. hidden: [rank][call]."""
    least = [min((x for x in one if x is not None), default=0.0) for one in zip(*hidden)]
    return sorted(range(len(least)), key=least.__getitem__)[len(least) // 2]


def _same_bits(bench, run: Callable[..., Tensor]) -> bool:
    """Output, and gradients where they are asked for, of every row: are they those of `none`?"""

    def found(overlap: str) -> list[Tensor]:
        with torch.no_grad():
            values = [bench.block(bench.x, overlap)]
        if bench.dy is not None:
            values += checks.gradients(bench.block, bench.x, bench.dy, overlap).values()
        return values

    right = found("none")
    with replaced(bench.layer, run):
        return all(map(torch.equal, found("kernel"), right))


def _cost(variants: Mapping[str, Callable], flush: bool, comm: Comm) -> dict:
    """{"plain_us", "recording_us", "ratio"}: medians of the slowest rank of each round, paired."""
    samples = interleaved(variants, Clock(WARMUP, TESTS, 0.0, flush), comm)
    times = terms.by_rank(comm.collect(samples))
    slowest = {name: terms.slowest(ranks) for name, ranks in times.items()}
    found = {f"{name}_us": terms.spread(one)["median_us"] for name, one in slowest.items()}
    return found | {
        "ratio": terms.paired(slowest["recording"], slowest["plain"], lambda a, b: a / b)
    }


class replaced:
    """While it lasts, the layer's forward is another schedule's, whatever is asked for."""

    def __init__(self, layer, forward: Callable[..., Tensor]) -> None:
        self.layer, self.other = layer, forward

    def __enter__(self) -> None:
        self.layer.forward = lambda x, overlap, comp_only=False: self.other(self.layer, x)

    def __exit__(self, *_: object) -> None:
        del self.layer.forward
