"""How a check of ranks.py is registered, and what the checks share."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rlkernel.grid import Grid

RANKS = 8
CHECKS = {}


class Check(NamedTuple):
    """ranks: the first ones of the world that run it, RANKS: all there are. devices: of which."""

    ranks: int
    run: object
    devices: tuple[str, ...]


def check(ranks=RANKS, devices=("cpu",)):
    """Register a check that the first `ranks` ranks run."""

    def register(function):
        CHECKS[function.__name__] = Check(ranks, function, devices)
        return function

    return register


def noise(seed, *shape, dtype=torch.float32, device="cpu"):
    """The same on every rank; values over many binades, so that another order of additions
    shows.
    """
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=g) * torch.exp2(torch.randn(*shape, generator=g) * 3)
    return values.to(dtype).to(device)


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
