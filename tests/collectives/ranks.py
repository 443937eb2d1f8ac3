"""What every rank of the tests runs: the checks of sums.py, refusals.py, blocks.py and shared.py.

    torchrun --nproc-per-node 8 ranks.py FOLDER

Each check is a function of (world); it asserts on every rank. A rank writes {check: traceback or
null} to rankN.json, and test_ranks.py shows one test a check; the first failure ends the launch.
The smaller groups are the first ranks of the same world.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # for shared.py; read when the first kernel is imported

# Imported for what they register: a script's own folder is on sys.path.
import blocks  # noqa: F401
import refusals  # noqa: F401
import shared  # noqa: F401
import sums  # noqa: F401
from checks import CHECKS

from rlkernel.grid import Grid
from tests.eight_ranks import run_checks

SHAPES = [(1, 1, 2), (1, 1, 4), (1, 1, 8), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 4, 1), (1, 2, 4)]


def among(ranks: int, function):
    """The check on the first `ranks` ranks of the world; the others wait behind it."""
    return lambda world: function(world) if world.rank < ranks else None


if __name__ == "__main__":
    grids = (Grid(), *(Grid(d, c, t) for d, c, t in SHAPES))
    run_checks({name: among(c.ranks, c.run) for name, c in CHECKS.items()}, grids)
