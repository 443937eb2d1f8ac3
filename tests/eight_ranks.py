"""One launch of eight real ranks under torchrun, and the program that each of them runs."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
RANKS = 8


def launch(program: Path, out: Path) -> dict[int, dict[str, str | None]]:
    """What every rank says of every check: {rank: {check: traceback or None}}."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", str(program), str(out)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    found = {rank: out / f"rank{rank}.json" for rank in range(RANKS)}
    assert all(file.exists() for file in found.values()), done.stderr[-4000:]
    said = {rank: json.loads(file.read_text()) for rank, file in found.items()}
    assert done.returncode == 0 or any(any(s.values()) for s in said.values()), done.stderr[-4000:]
    return said


def run_checks(checks: Mapping[str, Callable], grids: Iterable) -> None:
    """On a rank: every check of `world`, what it said into rankN.json of the folder in sys.argv.

    The groups of all grids are made first, by everybody in one order; all ranks meet behind each
    check; the first failure ends the launch.
    """
    import torch

    from rlkernel.collectives.groups import World

    gc.freeze()  # torch stays: no rank looks through it for garbage, least of all when it ends
    torch.set_num_threads(1)
    world = World.join("gloo", 20)
    report = dict.fromkeys(checks, "not run: an earlier check failed on some rank")
    file = Path(sys.argv[1]) / f"rank{world.rank}.json"
    for grid in grids:
        world.comm(grid)
    for name, function in checks.items():
        try:
            function(world)
            report[name] = None
        except Exception:
            report[name] = traceback.format_exc()
            raise
        finally:
            file.write_text(json.dumps(report))
        world.meet(name, 60)
    world.leave()
