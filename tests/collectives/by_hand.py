"""The checks of shared memory on any device, a line each; shared.py starts it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

import sharing
import torch
from checks import CHECKS, RANKS

LIMIT_S = {"cpu": 20.0, "cuda": 60.0}  # of a wait: a GPU's kernels are compiled in between
PATIENCE_S = 600.0  # for the other ranks to end a check


def main() -> None:
    """Exits 1 if a check failed on some rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", default="", help="names of checks, with commas")
    parser.add_argument("--out", default="results/shared-memory.json")
    asked = parser.parse_args()
    if asked.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when the first kernel is imported
    for module in ("shared", "on_gpus"):  # registers its checks
        import_module(module)
    only = [name for name in asked.only.split(",") if name]
    unknown = set(only) - set(CHECKS)
    if unknown:
        sys.exit(f"no check is called {', '.join(sorted(unknown))}: there are {', '.join(CHECKS)}")
    world = sharing.join(asked.device, LIMIT_S[asked.device])
    if world.rank == 0:
        world.store.set("name of the launch", str(os.getpid()))
    report = described(world, asked.device)
    for name, one in CHECKS.items():
        if (only and name not in only) or asked.device not in one.devices:
            continue
        if world.size < one.ranks < RANKS:
            told(world, name, f"not run: needs {one.ranks} ranks", asked.out, report)
            continue
        began = time.monotonic()
        failures = on_every_rank(world, name, one)
        passed = not any(failures)
        report["checks"][name] = {"passed": passed, "seconds": round(time.monotonic() - began, 1),
                                  "ranks": failures}  # fmt: skip
        report["expandable segments"] = expandable(asked.device)
        line = "ok" if passed else f"FAILED\n{next(filter(None, failures))}"
        told(world, name, line, asked.out, report)
        if not passed:
            sharing.sharing.cache_clear()  # what a failed check leaves behind is nobody's measure
    failed = [name for name, said in report["checks"].items() if not said["passed"]]
    world.meet("the end", PATIENCE_S)
    sys.stdout.flush()
    os._exit(1 if failed else 0)  # no farewell: after a failure it may wait for ever


def on_every_rank(world, name: str, one) -> list[str | None]:
    """What every rank says of a check: its traceback, or None."""
    said = ""
    if world.rank < one.ranks:
        try:
            one.run(world)
        except Exception:
            said = traceback.format_exc()
    world.store.set(f"{name}/{world.rank}", said)
    world.meet(name, PATIENCE_S)
    everybody = range(world.size)
    return [world.store.get(f"{name}/{rank}").decode() or None for rank in everybody]


def told(world, name: str, line: str, out: str, report: dict) -> None:
    """Rank 0 prints the line and writes the file anew."""
    if world.rank == 0:
        seconds = report["checks"].get(name, {}).get("seconds", 0.0)
        print(f"{name}: {line} ({seconds} s)", flush=True)
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(report, indent=1))


def described(world, device: str) -> dict:
    """Where the checks run."""
    import triton

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    return {
        "device": torch.cuda.get_device_name() if gpus else "cpu",
        "ranks": world.size,
        "gpus": min(gpus, world.size),
        "process groups": world.moves_by,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "expandable segments": False,
        "checks": {},
    }


def expandable(device: str) -> bool:
    """Whether all of this process' memory is in segments that expand."""
    found = torch.cuda.memory_snapshot() if device == "cuda" else []
    return bool(found) and all(segment.get("is_expandable") for segment in found)
