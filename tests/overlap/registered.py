"""How a check of ranks.py is registered, and what the checks share."""

from __future__ import annotations

import torch

from rlkernel.grid import Grid
from rlkernel.overlap.layer import with_ep
from tests.overlap.inputs import drawn

BF16 = torch.bfloat16
SIZES = (2, 4, 8)
CHECKS = {}


def check(function):
    """Register a check that all eight ranks run; one outside its groups returns at once."""
    CHECKS[function.__name__] = function
    return function


def seam(world, ranks):
    """The EP seam of the first `ranks` ranks, None outside."""
    comm = world.comm(Grid(dp=ranks))
    return None if comm is None else with_ep(comm)


def pair(shape, dtype, rank):
    """A rank's input and upstream gradient."""
    return tuple(drawn(rank, *shape, dtype=dtype, seed=seed) for seed in (0, 1))
