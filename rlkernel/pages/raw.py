"""Do the times that a record reports follow from its raw samples? Computed anew, from nothing else.

For a2a-ffn: a round counts with its slowest rank, what the protocol drops is left out, ratios and
differences are paired by round. So a number that somebody edited, in the summary or in the
samples, is named before it reaches a reader.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping

from rlkernel.records import Record

Rounds = dict[int, float]  # round -> us
OVER = " / it"  # behind the variant that stands over another


def apart(record: Record) -> list[str]:
    """`kernel/4, hot: ratio 1.3, the samples give 1.2` of each number that they do not give.

    [] also for a record without times or without samples: see `covers`.
    """
    if not record.samples:
        return []
    found = []
    for row in record.rows:
        states = row["result"].get("times") or {}
        if len(states) > 1 and record.run.get("device") == "cpu":
            continue  # its samples do not say which state they are of
        for state, times in states.items():
            rounds = _rounds(record, row, state)
            for name, what, told in _told(times):
                given = _given(rounds, name, what)
                if given is None or not math.isclose(told, given, rel_tol=1e-6, abs_tol=1e-9):
                    says = "lack rounds of it" if given is None else f"give {given:.6g}"
                    found.append(f"{name}, {state}: {what} {told:.6g}, the samples {says}")
    return found


def covers(record: Record) -> bool:
    """Whether the raw samples of everything that was timed are there."""
    timed = [row for row in record.rows if row["result"].get("times")]
    keys = {sample["key"] for sample in record.samples}
    return all(row["key"] in keys for row in timed)


def paired(record: Record, row: dict, state: str, top: str, bottom: str) -> dict | None:
    """{"median", "p10", "p90"} of one variant's time over another's, round by round; None where
    the samples lack rounds of either: publishing leaves out what is too large.
    """
    rounds = _whole(_rounds(record, row, state), (top, bottom))
    if rounds is None:
        return None
    above, below = map(_slowest, rounds)
    values = sorted(above[n] / below[n] for n in above)
    tenth = len(values) // 10
    return {"median": statistics.median(values), "p10": values[tenth], "p90": values[-1 - tenth]}


def _told(times: Mapping) -> Iterator[tuple[str, str, float]]:
    """(variant, which number, the number) of everything that one state of a row says."""
    for name, term in [*times.get("terms", {}).items(), *times.get("schedules", {}).items()]:
        yield name, "median us", term["slowest"]["median_us"]
        for rank, own in enumerate(term["ranks"]):
            yield name, f"mean us of rank {rank}", own["mean_us"]
    for name, line in times.get("schedules", {}).items():
        yield name, "ratio", line["ratio"]["median"]
        yield name, "hidden", line["hidden"]["median"]
        if "exposed_us" in line:
            yield name, "exposed us", line["exposed_us"]["median"]
    for how, other in times.get("others", {}).items():
        yield f"none {how}", "median us", other["slowest"]["median_us"]
        for name, ratio in other["ratio"].items():
            yield name, f"none {how}{OVER}", ratio["median"]


def _rounds(record: Record, row: dict, state: str) -> dict[str, dict[int, Rounds]]:
    """variant -> rank -> rounds of one row in one state; a CPU has but one, whatever was asked."""
    found: dict[str, dict[int, Rounds]] = {}
    for sample in record.samples:
        mine = sample["key"] == row["key"] and sample["state"] in (state, "cpu")
        if mine and not sample["dropped"]:
            ranks = found.setdefault(sample["variant"], {})
            ranks.setdefault(sample["rank"], {})[sample["round"]] = sample["us"]
    return found


def _given(rounds: Mapping[str, dict[int, Rounds]], name: str, what: str) -> float | None:
    """The same number from the samples; None where they lack a round that it needs."""
    needed = {"ratio": ("none",), "hidden": ("none", "comm"), "exposed us": (f"{name} preset",)}
    beside = (what.removesuffix(OVER),) if what.endswith(OVER) else needed.get(what, ())
    ranks = _whole(rounds, (name, *beside))
    if ranks is None:
        return None
    if what.startswith("mean us"):
        return statistics.fmean(ranks[0][int(what.split()[-1])].values())
    own, *others = map(_slowest, ranks)
    if what == "median us":
        return statistics.median(own.values())
    if what == "exposed us":
        return statistics.median(own[n] - others[0][n] for n in own)
    if what == "ratio" or what.endswith(OVER):
        return statistics.median(others[0][n] / own[n] for n in own)
    cost = statistics.median(others[1].values())
    return statistics.median((others[0][n] - own[n]) / cost for n in own)


def _whole(rounds: Mapping, names: Iterable[str]) -> list[dict[int, Rounds]] | None:
    """The ranks of each variant; None where one is missing or has not the rounds of the others."""
    ranks = [rounds.get(name, {}) for name in names]
    same = len({frozenset(own) for one in ranks for own in one.values()}) == 1
    return ranks if all(ranks) and same else None


def _slowest(ranks: Mapping[int, Rounds]) -> Rounds:
    every = list(ranks.values())
    return {number: max(rounds[number] for rounds in every) for number in every[0]}
