"""One launch of eight real ranks, and the program that each of them runs."""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tests import forked

RANKS = 8


def launch(program: Path, out: Path) -> dict[int, dict[str, str | None]]:
    """What every rank says of every check: {rank: {check: traceback or None}}."""
    ranks = [
        forked.start(program, str(out), said=out / f"rank{own['RANK']}", **own)
        for own in forked.world(RANKS)
    ]
    well = forked.wait(ranks, 280)
    printed = "".join(file.read_text()[-2000:] for file in sorted(out.glob("*.err")))
    found = {rank: out / f"rank{rank}.json" for rank in range(RANKS)}
    assert all(file.exists() for file in found.values()), printed
    said = {rank: json.loads(file.read_text()) for rank, file in found.items()}
    assert well or any(any(s.values()) for s in said.values()), printed
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
