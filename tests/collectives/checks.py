"""How a check of ranks.py is registered, and what the checks share."""

from __future__ import annotations

import torch

from rlkernel.grid import Grid

RANKS = 8
CHECKS = {}


def check(ranks=RANKS):
    """Register a check that the first `ranks` ranks run."""

    def register(function):
        CHECKS[function.__name__] = (ranks, function)
        return function

    return register


def noise(seed, *shape, dtype=torch.float32):
    """The same on every rank; values over many binades, so that another order of additions
    shows.
    """
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=g) * torch.exp2(torch.randn(*shape, generator=g) * 3)).to(
        dtype
    )


def on_grids(world, grids=(Grid(tp=2), Grid(tp=4), Grid(tp=8))):
    """This rank's Comm for each grid; every rank takes part in making the groups."""
    comms = [world.comm(grid) for grid in grids]
    return [comm for comm in comms if comm is not None]


def refused(error, words, action):
    """`action` raises `error`, with all of `words` in its message."""
    try:
        action()
    except error as raised:
        absent = [word for word in words if word not in str(raised)]
        assert not absent, f"{absent} not in: {raised}"
        return
    raise AssertionError(f"{error.__name__} was not raised")
