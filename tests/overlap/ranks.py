"""What every rank of the A2A-FFN's tests runs, over gloo: the checks of its neighbours.

    torchrun --nproc-per-node 8 ranks.py FOLDER

A check is a function of `world` that asserts on every rank. Groups are made by everybody in the
same order; a rank outside a group waits at the end of the check.
"""

from __future__ import annotations

from rlkernel.grid import Grid
from tests.eight_ranks import run_checks

# Imported for what they register.
from tests.overlap import chunked, levels, values  # noqa: F401
from tests.overlap.registered import CHECKS, SIZES

if __name__ == "__main__":
    run_checks(CHECKS, [Grid(dp=ranks) for ranks in SIZES])
