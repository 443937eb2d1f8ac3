"""From raw samples of every rank to the terms of the question. Pure arithmetic, no torch.

    T_serial    `none`                              T_comp   the same without communication
    T_comm      none's pack + exchange + unpack     T_wire   the exchange alone, packed before
    hidden      (T_serial - T_overlap) / T_comm     an estimate, with its sign
    exposed     T_overlap - the same kernels with nothing sent and nothing waited for
    ceiling     1 + T_comm / T_comp                 what a ratio to `none` could be at most
    reached     hidden / min(1, T_comp / T_comm)    of what could be hidden, how much was

A sample of a round is that of its slowest rank; differences and ratios are paired by round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

TERMS = ("none", "comp", "comm", "wire")
FAIR = (0.5, 2.0)  # T_comp / T_comm of a shape on which `reached` says something
WIDEST = 0.05  # of its 95 % interval, either way
FEWEST = 5  # samples that an interval needs
PRESET = " preset"
OTHER = "none "  # and how torch's operators ran between its GEMMs
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


def other(times: Mapping, how: str, variants: Sequence[str]) -> dict:
    """`none` under other settings: its time, and over each schedule's, which is no like for like.
    {..., "ratio": {variant: paired}}
    """
    own = times[OTHER + how]
    ratios = {v: paired(slowest(own), slowest(times[v]), lambda a, b: a / b) for v in variants}
    return {**term(own), "ratio": ratios}


def hidden(times: Mapping, variant: str) -> dict:
    """The signed estimate: of the slowest rank of each round, with its spread, and of each rank."""
    serial, own, comm = (slowest(times[name]) for name in ("none", variant, "comm"))
    cost = statistics.median(comm.values())
    each = []
    for a, b, c in zip(times["none"], times[variant], times["comm"]):
        each.append(paired(a, b, lambda x, y: x - y)["median"] / statistics.median(c.values()))
    return {**paired(serial, own, lambda a, b: (a - b) / cost), "ranks": each}


# -- across nodes ----------------------------------------------------------------------------------


def reached(times: Mapping, variant: str) -> dict:
    """hidden / min(1, T_comp / T_comm) = (T_serial - T_overlap) / min(T_comm, T_comp), of each
    round's slowest rank: a ratio of means with the 95 % interval of such a ratio, in which the
    denominator varies as well. {"comp_over_comm", "mean", "ci95" (half its width), "why"}; why it
    counts as not measured, "" where it does not.
    """
    serial, own, comm, comp = (slowest(times[n]) for n in ("none", variant, "comm", "comp"))
    ratio = statistics.fmean(comp.values()) / statistics.fmean(comm.values())
    saved = [serial[n] - own[n] for n in own]
    could = [(comm if ratio > 1 else comp)[n] for n in own]
    whole = statistics.fmean(could)
    mean = statistics.fmean(saved) / whole
    return _judged(ratio, mean, [(a - mean * b) / whole for a, b in zip(saved, could)])


def reached_in_trace(seen: Sequence[Mapping], comp_over_comm: float) -> dict:
    """The same by traces: |comm and comp| / |comm| / min(1, T_comp / T_comm), of the rank that hid
    least in each repetition. seen: what records/trace.py says of each rank.
    """
    if any(rank["hidden"] is None for rank in seen):
        why = next(rank["why"] for rank in seen if rank["hidden"] is None)
        return {"comp_over_comm": comp_over_comm, "mean": None, "ci95": None, "why": why}
    could = min(1.0, comp_over_comm)
    each = [min(one) / could for one in zip(*(rank["each"] for rank in seen))]
    mean = statistics.fmean(each)
    return _judged(comp_over_comm, mean, [x - mean for x in each])


def _judged(ratio: float, mean: float, errors: Sequence[float]) -> dict:
    count, ci95 = len(errors), None
    if count >= FEWEST:
        ci95 = _student(count - 1) * math.sqrt(sum(e * e for e in errors) / (count - 1) / count)
    why = ""
    if not FAIR[0] <= ratio <= FAIR[1]:
        why = f"T_comp / T_comm is {ratio:.2f}, not from {FAIR[0]} to {FAIR[1]}"
    elif count < FEWEST:
        why = f"{count} samples, an interval needs {FEWEST}"
    elif ci95 > WIDEST:
        why = f"{mean:+.2f} ± {ci95:.2f}, wider than {WIDEST}"
    return {"comp_over_comm": ratio, "mean": mean, "ci95": ci95, "why": why}


def _student(freedom: int) -> float:
    """97.5 % point of Student's t, by Fisher's expansion: within 0.3 % from four degrees on."""
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


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
