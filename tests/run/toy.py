"""An experiment that misbehaves on request: what can go wrong in a launch, as cases.

It takes the same way as a real one, through real processes. `--fault` names what the ranks do.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rlkernel.experiments.case import Case, UsageError, param
from rlkernel.grid import Grid

NAME = "toy"
SUMMARY = "cases that sleep, raise, hang, kill and fill the disk"
QUESTION = "Does the runner tell what happened, whatever happens?"
COVERED = ("what a rank can do to its launch",)
NOT_COVERED = ("arithmetic",)
BAD = 1  # the rank that misbehaves where there is more than one


@dataclass(frozen=True)
class Params:
    nproc: tuple[int, ...] = param((2,), "sizes of the grids", unit="ranks")
    fault: str = param("none", "what goes wrong", choices=())
    at: int = param(0, "seed of the case in which it goes wrong")
    seed: tuple[int, ...] = param((0, 1), "one case each")
    wait_s: float = param(0.0, "how long a case takes", unit="s")
    note: str | None = param(None, "any text")


def cases(params: Params) -> list[Case]:
    if 3 in params.nproc:
        raise UsageError("nproc=3 is not possible: 1, 2, 4")
    return [
        Case(
            NAME,
            Grid(tp=tp),
            seed=seed,
            fault=params.fault if seed == params.at else "none",
            parameters={"wait_s": params.wait_s},
        )
        for tp in params.nproc
        for seed in params.seed
    ]


def run(case: Case, comm) -> dict:
    print(f"rank {comm.rank} is at seed {case.seed}", flush=True)
    time.sleep(case.parameters["wait_s"])
    if comm.rank == min(BAD, case.grid.size - 1):
        misbehave(case.fault)
    if case.fault.startswith("root "):
        misbehave(case.fault.removeprefix("root "), comm.rank)
    ranks = comm.collect(comm.rank)  # where the others notice
    if case.fault == "late" and comm.rank == BAD:
        time.sleep(4.0)
    return {
        "passed": case.fault != "wrong",
        "ranks": ranks,
        "world": int(os.environ["WORLD_SIZE"]),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "samples": [{"value": comm.rank * 10 + i} for i in range(2)],
    }


def misbehave(fault: str, rank: int = 0) -> None:
    if rank:
        return
    if fault == "raise":
        raise ArithmeticError("seven is not eight")
    if fault == "refuse":
        raise UsageError("eight is not possible: seven or nine")
    if fault == "exit":
        os._exit(7)
    if fault == "hang":
        hang_here()
    if fault == "SIGABRT":
        os.abort()
    if fault in ("SIGKILL", "SIGSTOP", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, fault))
        time.sleep(60)
    if fault == "agent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if fault == "full disk":
        rows = Path(sys.argv[-1]).parent / "cases.jsonl"
        rows.rename(rows.with_suffix(".kept"))
        rows.symlink_to("/dev/full")


def hang_here() -> None:
    time.sleep(600)


def verdict(params: Params, rows: list[dict]) -> dict:
    wrong = sum(not row["passed"] for row in rows)
    check = {"name": "wrong cases", "passed": wrong == 0, "value": wrong, "limit": 0}
    return {"passed": wrong == 0, "checks": [check]}


def summary(params: Params, rows: list[dict]) -> dict:
    return {"passed": verdict(params, rows)["passed"], "cases": len(rows)}


def table(params: Params, rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    body = [
        [str(row["result"]["ranks"]), str(row["case"]["seed"]), str(row["passed"])] for row in rows
    ]
    return ["ranks", "seed", "passed"], body


def protocol(params: Params) -> dict:
    return {"clock": "wall"}
