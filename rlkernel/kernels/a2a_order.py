"""In which order the A2A GEMMs work on their tiles: plain tables, so that any order can be tried.

Tokens x ranks, own rank first (leaving: last); `lead` = how many tokens come apart, to give the
wire a start (leaving: an end) behind which it hides:

    tokens        0 .. lead-1   lead .. L-1    0 .. lead-1
    arriving      own rows      all rows       other ranks' rows
    leaving       other ranks'  all rows       own rows

In the middle all rows of a token come together, so its weights are fetched once; lead = L is own
rows first and nothing else. Within a token tiles run down bands of `raster` tile rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel.kernels.a2a_signal import MOST_CHUNKS

TILE_M = 128
MOST_ROWS, MOST_COLUMNS, MOST_TOKENS = 0x7FFF * 64, 0xFFFF * 64, 0xFFFF


@dataclass(frozen=True)
class Cut:
    """One GEMM's rows: `batch` of each of `size` ranks for each of `tokens` tokens; `columns` of
    out, `bn` a tile; seen from rank `own`.
    """

    batch: int
    tokens: int
    columns: int
    bn: int
    size: int
    own: int
    arrive: bool
    chunks: int = 1
    lead: int = 4
    raster: int = 16

    @property
    def tiles_m(self) -> int:
        return -(-self.batch // TILE_M)

    @property
    def tiles_n(self) -> int:
        return -(-self.columns // self.bn)

    @property
    def tiles(self) -> int:
        return self.tokens * self.size * self.tiles_m * self.tiles_n


def chunk_slices(tokens: int, chunks: int) -> list[slice]:
    """Runs of tokens that share a flag: token t is in run t * chunks // tokens."""
    ends = [-(-i * tokens // chunks) for i in range(chunks + 1)]
    return [slice(a, b) for a, b in zip(ends, ends[1:])]


def phases(cut: Cut) -> list[tuple[range, range]]:
    """(tokens, turns); turn i is rank own + i (leaving: own + 1 + i) modulo the group."""
    head = 1 if cut.arrive else cut.size - 1
    lead = min(cut.lead, cut.tokens) if 0 < head < cut.size else 0
    apart, rest = range(lead), range(lead, cut.tokens)
    return [(apart, range(head)), (rest, range(cut.size)), (apart, range(head, cut.size))]


def ordered(cut: Cut) -> Tensor:
    """int64 [tiles, 5]: token, rank, chunk, row of the rank's batch, column; row by row as they are
    worked on.
    """
    shift = 0 if cut.arrive else 1
    found = [torch.empty(0, 5, dtype=torch.int64)]
    for tokens, turns in phases(cut):
        place = _rastered(len(turns) * cut.tiles_m, cut.tiles_n, cut.raster)
        turn, m = place[:, 0] // cut.tiles_m, place[:, 0] % cut.tiles_m
        rank = (cut.own + shift + turns.start + turn) % cut.size
        for token in tokens:
            chunk = token * cut.chunks // cut.tokens
            both = torch.full_like(rank, token), torch.full_like(rank, chunk)
            columns = place[:, 1] * cut.bn
            found.append(torch.stack([both[0], rank, both[1], m * TILE_M, columns], 1))
    return torch.cat(found)


def packed(order: Tensor) -> Tensor:
    """One int64 a tile, as `a2a_gemm_kernel.place_of` reads it."""
    token, rank, chunk, row, column = order.unbind(1)
    return token << 32 | row // 64 << 48 | rank << 24 | chunk << 16 | column // 64


def halves(order: Tensor, size: int) -> Tensor:
    """int32 [size * MOST_CHUNKS]: half tiles (a consumer's share) of each rank and chunk."""
    key = order[:, 1] * MOST_CHUNKS + order[:, 2]
    return (2 * torch.bincount(key, minlength=size * MOST_CHUNKS)).to(torch.int32)


def _rastered(rows: int, columns: int, raster: int) -> Tensor:
    """int64 [rows * columns, 2]: bands of `raster` rows, within a band column by column."""
    bands = [
        torch.cartesian_prod(torch.arange(columns), torch.arange(top, min(top + raster, rows)))
        for top in range(0, rows, raster)
    ]
    return torch.cat(bands).flip(1) if rows else torch.empty(0, 2, dtype=torch.int64)
