"""What can this machine measure? Ranks that meet, sums that are right, errors that have a name,
what a message costs; with a target, the public checks of the A2A-FFN (public.py).

The sums are of small integers, so the right answer is exact whatever the order of additions.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rlkernel.experiments import public
from rlkernel.experiments.case import TARGETS, Case, UsageError, param
from rlkernel.grid import Grid, is_power_of_two

NAME = "preflight"
SUMMARY = "what this machine can measure: ranks, backends, exact sums, named errors, message costs"
QUESTION = "What can this machine measure?"

WARMUP = 2
COVERED = (
    "real ranks meet, sum exactly and give the same bits on every rank",
    "ranks that come with different shapes get an error that names what each of them gave",
    "wall time of the tree all-reduce against message size, every rank and iteration",
)
NOT_COVERED = (
    "kernels: none is launched here",
    "bandwidth of a real network, unless the record's topology shows several hosts",
)


@dataclass(frozen=True)
class Params:
    target: str = param("auto", "where the ranks compute", choices=TARGETS)
    nproc: tuple[int, ...] = param((1, 2), "group sizes to try", unit="ranks")
    message: tuple[int, ...] = param(
        (8_192, 262_144, 8_388_608), "message sizes of the all-reduce", unit="bytes"
    )
    iterations: int = param(10, "timed all-reduces for each message size, after two that warm up")
    what: str = param(
        "all", "messages, or the A2A-FFN's public checks: those of target cpu or of target cuda",
        choices=("all", "messages", "public"),
    )  # fmt: skip


def cases(params: Params) -> list[Case]:
    for tp in params.nproc:
        if not is_power_of_two(tp):
            raise UsageError(
                f"nproc={tp} is not possible: expected a power of two, "
                f"because sums over ranks follow a balanced binary tree"
            )
    if params.iterations < 1 or any(size < 4 or size % 4 for size in params.message):
        raise UsageError(
            "iterations must be at least 1 and each message a positive multiple of 4 bytes (FP32)"
        )
    if params.what == "public" and params.target == "auto":
        raise UsageError("what=public needs target=cpu or target=cuda: their checks differ")
    at = {"iterations": params.iterations, "target": params.target}
    messages = [
        Case(NAME, Grid(tp=tp), parameters={"message": size, **at})
        for tp in params.nproc
        for size in params.message
    ]
    checks = public.cases(NAME, params.target)
    return {"all": messages + checks, "messages": messages, "public": checks}[params.what]


def run(case: Case, comm) -> dict:
    """One message size on one group: exact sum, equal bits, a named disagreement, raw wall times.
    Or one public check.
    """
    if "what" in case.parameters:
        return public.run(case, comm)
    import torch

    from rlkernel import compare
    from rlkernel.collectives.errors import Disagreement
    from rlkernel.collectives.observers import Timer
    from rlkernel.contract import ReductionTree

    comm = comm.using(contract=ReductionTree(comm.grid.tp, "fp32"))
    ranks, me = comm.grid.tp, comm.rank
    pattern = torch.arange(case.parameters["message"] // 4, device=comm.device) % 97
    x = (pattern + me).float()
    total = comm.all_reduce(x, "sum")
    exact = (pattern * ranks + ranks * (ranks - 1) // 2).float()
    right = compare.bit_report(total, exact)

    named = False
    try:
        comm.all_reduce(torch.zeros(4 + me, device=comm.device), "disagreement")
    except Disagreement as error:
        named = all(f"rank {rank}" in str(error) for rank in range(ranks))

    timer = Timer()
    timed = comm.using(observers=[timer])
    for _ in range(WARMUP + case.parameters["iterations"]):
        timed.all_reduce(x, "timed")
    samples = timer.samples[WARMUP:]

    seen = comm.collect(
        {
            "right": bool(right),
            "named": named,
            "digest": compare.digest(total)[:16],
            "seconds": [s["seconds"] for s in samples],
        }
    )
    slowest = [max(times) for times in zip(*(rank["seconds"] for rank in seen), strict=True)]
    checks = {
        "exact sum": all(rank["right"] for rank in seen),
        "same bits on every rank": len({rank["digest"] for rank in seen}) == 1,
    }
    if ranks > 1:  # a lone rank has nobody to disagree with
        checks["a disagreement names every rank"] = all(rank["named"] for rank in seen)
    return {
        "passed": all(checks.values()),
        "checks": checks,
        "mismatches": str(right),
        "median_seconds": statistics.median(slowest),
        "fastest_seconds": min(slowest),
        "slowest_seconds": max(slowest),
        "threads": torch.get_num_threads(),
        "device": str(comm.device),
        "samples": samples,
    }


def verdict(params: Params, rows: Sequence[dict]) -> dict:
    """One check a group size and property, over all message sizes."""
    checks = [check for row in rows if not _message(row) for check in public.checks(row)]
    rows = [row for row in rows if _message(row)]
    for tp in params.nproc:
        mine = [row for row in rows if row["case"]["grid"]["tp"] == tp]
        for name in mine[0]["result"]["checks"] if mine else ():
            held = sum(row["result"]["checks"][name] for row in mine)
            checks.append(
                {
                    "name": f"P={tp}: {name}",
                    "passed": held == len(mine),
                    "value": f"{held} of {len(mine)}",
                    "limit": "all",
                }
            )
    return {"passed": bool(checks) and all(check["passed"] for check in checks), "checks": checks}


def summary(params: Params, rows: Sequence[dict]) -> dict:
    keep = ("passed", "median_seconds", "fastest_seconds", "slowest_seconds", "threads", "device")
    return {
        "target": params.target,
        "passed": verdict(params, rows)["passed"],
        "cases": [
            {
                "world_size": row["case"]["grid"]["tp"],
                "message_bytes": row["case"]["parameters"]["message"],
                "backend": row.get("backend"),
                **{name: row["result"][name] for name in keep},
            }
            for row in rows
            if _message(row)
        ],
    }


def table(params: Params, rows: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Wall time of the tree all-reduce: median, fastest and slowest of the slowest rank's
    samples.
    """
    header = ["ranks", "message", "backend", "median us", "fastest us", "slowest us", "exact sum"]
    body = []
    for row in filter(_message, rows):
        result = row["result"]
        times = [
            f"{result[name] * 1e6:.0f}"
            for name in ("median_seconds", "fastest_seconds", "slowest_seconds")
        ]
        size = f"{row['case']['parameters']['message'] / 1024:g} KiB"
        body.append(
            [
                str(row["case"]["grid"]["tp"]),
                size,
                row.get("backend") or "-",
                *times,
                result["mismatches"] + " differ",
            ]
        )
    return header, body


def _message(row: dict) -> bool:
    return "message" in row["case"]["parameters"]


def protocol(params: Params) -> dict:
    return {
        "clock": "perf_counter around one tree all-reduce, the GPU synchronised on both sides",
        "warmup": WARMUP,
        "iterations": params.iterations,
        "of each iteration": "the slowest rank",
    }
