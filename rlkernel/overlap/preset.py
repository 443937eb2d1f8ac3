"""One rank of P that is alone: all flags are set ahead, nothing is sent, all results stay here.

What a peer would push lies there from the start: its slice is the own one of the same number. So
the result is that of `none` without communication, computed by the very kernels of a live call.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlkernel.collectives.comm import Comm, Link
from rlkernel.kernels.a2a_signal import flag_count
from rlkernel.overlap.fused_memory import signals
from rlkernel.overlap.layout import Layout

AHEAD = 1 << 30  # a call that will not be reached
LIMIT_NS = 2_000_000_000
OWN = 0


class Nobody:
    """Of a group that only counts its ranks; an attempt to move something fails."""

    name = "nobody"


def lone(comm: Comm, ranks: int) -> Comm:
    """A seam whose axis "ep" says `ranks`, of which this is the first; it can move nothing."""
    other = comm.using()
    other.links = {**comm.links, "ep": Link(tuple(range(ranks)), OWN, Nobody(), None)}
    return other


class Preset:
    """FusedMemory of such a rank. outs [P, B, T, D]: what it stores for each rank; NaN before."""

    def __init__(self, at: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.at, self.index, self.calls = at, OWN, 0
        empty = {"device": device, "dtype": dtype}
        self._came = [torch.full((at.rows, at.local, at.dim), math.nan, **empty) for _ in range(2)]
        self.outs = torch.full((at.ranks, at.batch, at.tokens, at.dim), math.nan, **empty)
        self._flags = torch.full(
            (at.ranks, flag_count(at.ranks)), AHEAD, dtype=torch.int32, device=device
        )
        self._flags[:, -1] = 0  # nobody has given up
        host = torch.zeros(1, dtype=torch.int32)
        self.host = host.pin_memory() if device.type == "cuda" else host
        bases = [flags.data_ptr() for flags in self._flags]
        self.signals = signals(device, OWN, [*bases, self.host.data_ptr()], LIMIT_NS)
        places = torch.tensor([out.data_ptr() for out in self.outs], device=device)
        self.owners = [places, places]

    def fill(self, which: int, rows: Tensor, swapped: bool = False) -> None:
        """What has come to [P*B, L, D]; the own rows are left out, for they are read elsewhere.
        swapped: every slice where that of the next rank belongs, for the checks to find.
        """
        came = self._came[which].copy_(rows)
        came[OWN * self.at.batch : (OWN + 1) * self.at.batch] = math.nan
        if swapped:
            came.copy_(came.roll(self.at.batch, 0))

    def missed(self) -> int:
        """0, unless a wait has ended without its flag."""
        return int(self.host[0])

    # -- what the fused layer asks of its memory ---------------------------------------------------

    def begin(self) -> int:
        self.calls += 1
        return self.calls % 2

    def end(self) -> None: ...

    def came(self, which: int) -> Tensor:
        return self._came[which]

    def push(self, *_) -> None: ...

    def own_rows(self, x: Tensor, target: Tensor, ready: torch.cuda.Event) -> torch.cuda.Event:
        at = self.at
        rows = slice(OWN * at.batch, (OWN + 1) * at.batch)
        target[rows] = x.view(at.batch, at.ranks, at.local, at.dim)[:, OWN]
        return torch.cuda.current_stream(x.device).record_event()


def rows_of(x: Tensor, at: Layout) -> Tensor:
    """x [B, T, D] -> [P*B, L, D]: the own slices, as if each had come from the rank it goes to."""
    parts = x.view(at.batch, at.ranks, at.local, -1).transpose(0, 1)
    return parts.reshape(at.rows, at.local, -1)
