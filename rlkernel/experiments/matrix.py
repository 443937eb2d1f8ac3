"""The 32 configurations of the regression matrix of a2a-ffn, and what of them a CPU can do.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Configuration:
    ranks: int
    batch: int
    tokens: int
    dim: int
    k: int
    block: bool = True


def _all() -> tuple[Configuration, ...]:
    shapes = [(16, 144, p) for p in (2, 4, 8)] + [(64, 1280, p) for p in (2, 4, 8)]
    shapes += [(20, 140, 2), (20, 140, 4), (22, 132, 2)]
    batches = (1, 2, 3, 7, 16, 33, 64, 129, 512)  # in turn, so that every size meets odd ones
    found = []
    for number, (tokens, dim, ranks) in enumerate(shapes):
        for k in (2, 3, 6):
            batch = batches[(number + len(found)) % len(batches)]
            found.append(Configuration(ranks, batch, tokens, dim, k))
    # D = 132 does not divide into 16 heads: the layer without its block
    alone = [(2, 2, 5), (2, 3, 257), (2, 6, 1), (4, 2, 3), (8, 3, 8)]
    return (*found, *(Configuration(p, b, 16, 132, k, False) for p, k, b in alone))


FULL = _all()
SMALL = tuple(
    c for c in FULL if c.batch <= 16 and c.dim < 1280 and c.k < 6
)  # some seconds on two cores, all numbers of ranks among them
SETS = {"full": FULL, "small": SMALL}
