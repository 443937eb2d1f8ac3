"""Plain-torch twin of a2a_gemm.py, on host memory that ranks share: the same tiles in the same
order, the same flags, counters and epochs, read and written at the same addresses.

    tile that arrives    wait for its source's flag, multiply, store
    tile that leaves     multiply, add the bias, store at its owner's address, count; the last one
                         of a rank and chunk raises that rank's flag
    behind them all      wait for every flag, and copy what has landed to the caller

Products are torch's own: FP32 of any order, rounded once to the output's dtype. What is exact is
the protocol, tile by tile as one program of the kernel would carry it out.
"""

from __future__ import annotations

import ctypes
import time

import torch
from torch import Tensor

from rlkernel.kernels.a2a_gemm import Schedule
from rlkernel.kernels.a2a_gemm_kernel import FIELDS, SIGHTS
from rlkernel.kernels.a2a_order import TILE_M, Cut, chunk_slices, halves, ordered
from rlkernel.kernels.a2a_signal import MOST_CHUNKS, Signals, back, flag_count, there


class A2AGemm:
    """Made and called as a2a_gemm.A2AGemm."""

    def __init__(
        self,
        weight: Tensor,
        batch: int,
        signals: Signals,
        *,
        arrive: bool,
        bias: bool = False,
        local: bool = False,
        schedule: Schedule,
    ) -> None:
        self.tokens, _, self.columns = weight.shape
        self.batch, self.signals, self.schedule = batch, signals, schedule
        self.arrive, self.bias, self.local = arrive, bias, local
        self.bn = schedule.bn if self.columns > 128 else 128
        cut = Cut(
            batch, self.tokens, self.columns, self.bn, signals.size, signals.rank, arrive,
            schedule.chunks, schedule.lead, schedule.raster,
        )  # fmt: skip
        self.places = ordered(cut)
        self.halves = halves(self.places, signals.size).tolist()
        self.times = torch.zeros(len(self.places), FIELDS, dtype=torch.int64)
        self.sights = torch.zeros(SIGHTS, signals.size, MOST_CHUNKS, dtype=torch.int64)

    def timeline(self) -> tuple[Tensor, Tensor]:
        """As a2a_gemm.A2AGemm.timeline, of one program on the host's clock."""
        return self.times, self.sights

    def __call__(
        self, own: Tensor, came: Tensor, weight: Tensor, out: Tensor, owners: Tensor, bias: Tensor
    ) -> None:
        s, K = self.signals, weight.shape[1]
        epoch = int(s.words[0 if self.arrive else 1])
        for tile, (token, rank, chunk, row, column) in enumerate(self.places.tolist()):
            times = self.times[tile]
            times[0], times[3:] = time.monotonic_ns(), 0
            rows = slice(row, min(row + TILE_M, self.batch))
            columns = slice(column, min(column + self.bn, self.columns))
            block = (token * s.size + rank) * self.batch
            if not self.arrive:
                a = came[block:][rows]
            elif rank == s.rank or self.local:
                at = ((rank if self.local else s.rank) * self.tokens + token) * K
                a = own[rows, at : at + K]
            else:
                times[3] = time.monotonic_ns()
                self._awaited(rank, there(rank, chunk), epoch, 0)
                times[4] = time.monotonic_ns()
                a = came[rank * self.batch :][rows, token * K : (token + 1) * K]
            product = (a.float() @ weight[token, :, columns].float()).to(out.dtype)
            if self.arrive:
                out[token, rank * self.batch :][rows, columns] = product
            else:
                product = product + bias[token, columns] if self.bias else product
                self._leaves(out, owners, product, token, rank, rows, columns)
            times[1] = time.monotonic_ns()
            if not self.arrive and rank != s.rank and not self.local:
                self._counted(rank, chunk, epoch)
        if not self.local:
            self._close(epoch, out, owners)

    def _leaves(self, out, owners, product, token, rank, rows, columns) -> None:
        s = self.signals
        position = (rank if self.local else s.rank) * self.tokens + token
        far = rank != s.rank and not self.local
        target = _seen(int(owners[rank]), out) if far else out
        target[rows, position, columns] = product

    def _counted(self, rank: int, chunk: int, epoch: int) -> None:
        s, owed = self.signals, rank * MOST_CHUNKS + chunk
        s.counters[owed] += 2  # both consumers of the tile
        if int(s.counters[owed]) == self.halves[owed]:
            s.counters[owed] = 0
            self.sights[0, rank, chunk] = time.monotonic_ns()
            _word(s.places[rank], back(s.rank, chunk, s.size)).value = epoch

    def _close(self, epoch: int, out: Tensor, owners: Tensor) -> None:
        s = self.signals
        if self.arrive:
            s.words[1] = epoch
            return
        landed = _seen(int(owners[s.rank]), out)
        for chunk, tokens in enumerate(chunk_slices(self.tokens, self.schedule.chunks)):
            for turn in range(1, s.size):
                rank = (s.rank + turn) % s.size
                self.sights[1, rank, chunk] = time.monotonic_ns()
                self._awaited(rank, back(rank, chunk, s.size), epoch, 1)
                self.sights[2, rank, chunk] = time.monotonic_ns()
                start = rank * self.tokens
                theirs = slice(start + tokens.start, start + tokens.stop)
                out[:, theirs] = landed[:, theirs]
        self._told()
        s.words[0] = epoch + 1

    def _awaited(self, rank: int, place: int, epoch: int, site: int) -> None:
        s, until = self.signals, time.monotonic_ns() + self.signals.limit_ns
        gone = flag_count(s.size) - 1
        flag, given_up = _word(s.places[s.rank], place), _word(s.places[s.rank], gone)
        while flag.value < epoch:
            if given_up.value or time.monotonic_ns() > until:
                for other in range(s.size):
                    word = _word(s.places[other], gone)
                    word.value = word.value or rank + 1 + 256 * site
                self._told()
                return
            time.sleep(1e-4)

    def _told(self) -> None:
        s = self.signals
        who = _word(s.places[s.rank], flag_count(s.size) - 1).value
        if who:
            _word(s.places[s.size], 0).value = who


def _word(base: int, place: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(base + 4 * place)


def _seen(address: int, like: Tensor) -> Tensor:
    """The tensor of `like`'s shape and dtype that lies at `address`."""
    count = like.numel() * like.element_size()
    raw = torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)
    return raw.view(like.dtype).view(like.shape)
