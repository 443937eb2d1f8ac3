"""From raw samples of every rank to the terms of the question. Pure arithmetic, no torch.

    T_serial    `none`                              T_comp   the same without communication
    T_comm      none's pack + exchange + unpack     T_wire   the exchange alone, packed before
    hidden      (T_serial - T_overlap) / T_comm     an estimate, with its sign
    exposed     T_overlap - the same kernels with nothing sent and nothing waited for
    ceiling     1 + T_comm / T_comp                 what a ratio to `none` could be at most

A sample of a round is that of its slowest rank; differences and ratios are paired by round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

TERMS = ("none", "comp", "comm", "wire")
PRESET = " preset"
Samples = Sequence[Sequence[Mapping]]  # [rank][sample]


def by_rank(samples: Samples) -> dict[str, list[dict[int, float]]]:
    """variant -> [rank] -> {round: us}, without what the protocol drops."""
    found: dict[str, list[dict[int, float]]] = {}
    for rank, mine in enumerate(samples):
        for sample in mine:
            ranks = found.setdefault(sample["variant"], [{} for _ in samples])
            if not sample["dropped"]:
                ranks[rank][sample["round"]] = sample["us"]
    return found


def slowest(ranks: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {number: max(rank[number] for rank in ranks) for number in ranks[0]}


def spread(times: Mapping[int, float]) -> dict[str, float]:
    """{"median_us", "mean_us", "min_us", "max_us"}."""
    values = list(times.values())
    return {
        "median_us": statistics.median(values),
        "mean_us": statistics.fmean(values),
        "min_us": min(values),
        "max_us": max(values),
    }


def term(ranks: Sequence[Mapping[int, float]]) -> dict:
    """{"slowest": spread, "ranks": [spread of each rank], "seconds": rank 0's mean, min and max as
    the documented utility returns them}.
    """
    each = [spread(rank) for rank in ranks]
    seconds = {name: each[0][f"{name}_us"] / 1e6 for name in ("mean", "min", "max")}
    return {"slowest": spread(slowest(ranks)), "ranks": each, "seconds": seconds}


def paired(left: Mapping[int, float], right: Mapping[int, float], how) -> dict[str, float]:
    """{"median", "p10", "p90", "mean", "ci95"} of how(left, right) over the rounds. ci95: half the
    width of the mean's 95 % interval, by the normal distribution; infinite for one round.
    """
    values = sorted(how(left[n], right[n]) for n in left)
    spread = 1.96 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.inf
    return {
        "median": statistics.median(values),
        "p10": values[len(values) // 10],
        "p90": values[-1 - len(values) // 10],
        "mean": statistics.fmean(values),
        "ci95": spread,
    }


def schedule(times: Mapping, variant: str, layer: Mapping[str, int], backward: bool) -> dict:
    """One overlapped schedule beside `none` of the same rounds. layer: {"ranks", "batch", "tokens",
    "dim", "hidden"}.
    """
    own, serial = slowest(times[variant]), slowest(times["none"])
    comm, comp = slowest(times["comm"]), slowest(times["comp"])
    line = {**term(times[variant]), **throughput(own, layer, backward)}
    line["ratio"] = paired(serial, own, lambda a, b: a / b)
    line["ceiling"] = 1 + statistics.median(comm.values()) / statistics.median(comp.values())
    line["hidden"] = hidden(times, variant)
    preset = times.get(variant + PRESET)
    if preset:
        gap = paired(own, slowest(preset), lambda a, b: a - b)
        line["exposed_us"] = gap
        line["exposed"] = gap["median"] / statistics.median(comm.values())
    return line


def hidden(times: Mapping, variant: str) -> dict:
    """The signed estimate: of the slowest rank of each round, with its spread, and of each rank."""
    serial, own, comm = (slowest(times[name]) for name in ("none", variant, "comm"))
    cost = statistics.median(comm.values())
    each = []
    for a, b, c in zip(times["none"], times[variant], times["comm"]):
        each.append(paired(a, b, lambda x, y: x - y)["median"] / statistics.median(c.values()))
    return {**paired(serial, own, lambda a, b: (a - b) / cost), "ranks": each}


def throughput(times: Mapping[int, float], layer: Mapping[str, int], backward: bool) -> dict:
    """tokens/s of the whole group, and TFLOP/s of a rank: 6 P B L D H forward, three times that
    with backward.
    """
    median = statistics.median(times.values())
    rows, tokens = layer["ranks"] * layer["batch"], layer["tokens"]
    local = tokens // layer["ranks"]
    flops = 6 * rows * local * layer["dim"] * layer["hidden"] * (3 if backward else 1)
    return {"tokens_per_s": rows * tokens / median * 1e6, "flops": flops,
            "tflops": flops / median / 1e6}  # fmt: skip
