"""What every rank of the tests runs: the checks of sums.py, refusals.py, blocks.py and shared.py.

    torchrun --nproc-per-node 8 ranks.py FOLDER

Each check is a function of (world); it asserts on every rank. A rank writes {check: traceback or
null} to rankN.json, and test_ranks.py shows one test a check; the first failure ends the launch.
The smaller groups are the first ranks of the same world.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # for shared.py; read when the first kernel is imported

# Imported for what they register: a script's own folder is on sys.path.
import blocks  # noqa: F401
import refusals  # noqa: F401
import shared  # noqa: F401
import sums  # noqa: F401
import torch
from checks import CHECKS

from rlkernel.collectives.groups import World
from rlkernel.grid import Grid


def main(out: Path) -> None:
    torch.set_num_threads(1)
    world = World.join("gloo", 20)
    report = dict.fromkeys(CHECKS, "not run: an earlier check failed on some rank")
    file = out / f"rank{world.rank}.json"
    for name, (ranks, function) in CHECKS.items():
        # Groups are made by everybody, in the same order, before a smaller set of ranks goes on.
        for grid in (Grid(), *(Grid(d, c, t) for d, c, t in SHAPES)):
            world.comm(grid)
        try:
            if world.rank < ranks:
                function(world)
            report[name] = None
        except Exception:
            report[name] = traceback.format_exc()
            raise
        finally:
            file.write_text(json.dumps(report))
        world.meet(name, 60)
    world.leave()


SHAPES = [(1, 1, 2), (1, 1, 4), (1, 1, 8), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 4, 1), (1, 2, 4)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
