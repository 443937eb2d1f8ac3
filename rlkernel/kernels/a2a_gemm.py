"""The two GEMMs of the A2A-FFN with the exchange inside, for Hopper: BF16 in and out, FP32 chains.

    arriving   out[l, p*B + b] = came[p*B + b, l] @ weight[l]     what rank p has pushed here; own
               rows are read where they lie, in the caller's [B, T, D]
    leaving    rank p's out[b, own*L + l] = a[l, p*B + b] @ weight[l] (+ bias[l], behind rounding)

One launch each, one program an SM. `arriving`: the producer warp of a program waits for the flag
of a tile's source ahead of the tile's first load, so that the tensor cores go on with what is in
the ring. `leaving`: a finished tile is stored where it belongs in its owner's output, on whatever
rank; the last tile for a rank (and a chunk of tokens) raises that rank's flag. Programs without a
tile left bring what others have stored here into the caller's out, and the kernel ends once all of
it is there. Nothing is packed or unpacked.

No order, tile or chunk changes a bit: every element is one chain over ascending k, which is what
torch.bmm gives on SM90 (a census proves it where it is used), and the bias is added to the rounded
product as `torch.bmm(...) + bias` does.

Floor, forward at B=512, T=64, D=1280, H=7680, P=2: 1.29 and 0.64 TFLOP, 1.96 and 0.97 ms at the
665 TFLOP/s that the power cap leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlkernel.kernels import hopper_tma
from rlkernel.kernels.a2a_gemm_kernel import FIELDS, SIGHTS, Exchange, a2a_gemm_kernel
from rlkernel.kernels.a2a_order import Cut, halves, ordered, packed
from rlkernel.kernels.a2a_signal import MOST_CHUNKS, Signals
from rlkernel.kernels.hopper_pipeline import REGISTERS
from rlkernel.kernels.hopper_plan import Tiling, multiprocessors
from rlkernel.kernels.hopper_tma import operand_box, out_box
from rlkernel.kernels.launch import Described, Launch

SEEN = 32  # flags that a program remembers to have seen


@dataclass(frozen=True)
class Schedule:
    """What may be chosen without changing a bit. programs: None = one an SM. timeline: record."""

    chunks: int = 1
    lead: int = 4
    bn: int = 256
    raster: int = 16
    programs: int | None = None
    timeline: bool = False
    scale: int = 1  # payloads of results, padded by repetition


def refuses(batch: int, tokens: int, dim: int, wide: int, size: int, chunks: int) -> str | None:
    """Why these numbers cannot run here, or None. dim, wide: the widths of input and product."""
    if dim % 16 or wide % 16:
        return f"D={dim}, width {wide}: TMA and the instruction's k need multiples of 16"
    if not 1 <= chunks <= min(MOST_CHUNKS, SEEN // size, max(tokens, 1)):
        return (
            f"{chunks} chunks of {tokens} tokens on {size} ranks: at most {MOST_CHUNKS}, and "
            f"{SEEN} in all"
        )
    if batch * size * tokens * max(dim, wide) >= 2**40 or batch * size * tokens * dim >= 2**31:
        return (
            f"B={batch}, L={tokens}, D={dim} on {size} ranks: an output must have < 2^31 elements"
        )
    return None


class A2AGemm:
    """One of the two, prepared for one shape on one device; called again and again.

    weight [L, K, N], memory along N or along K. `__call__` takes what changes from call to call.
    """

    def __init__(
        self,
        weight: Tensor,
        batch: int,
        signals: Signals,
        *,
        arrive: bool,
        bias: bool = False,
        local: bool = False,
        schedule: Schedule = Schedule(),
    ) -> None:
        tokens, K, N = weight.shape
        self.signals, self.arrive, self.device = signals, arrive, weight.device
        self.batch, self.tokens, self.K, self.N = batch, tokens, K, N
        along_k = weight.stride(1) == 1 and weight.stride(2) != 1
        bn = schedule.bn if N > 128 else 128
        bk = next(n for n in (64, 32, 16) if K % n == 0)
        stages = (4 if bn == 256 else 6) * (64 // bk)
        self.tiling = Tiling(bn, bk, stages, 2, True, along_k)
        boxes = arrive and batch % 128 == 0  # a box would write over the next rank's rows
        self.exchange = Exchange(
            signals.size,
            arrive,
            schedule.chunks,
            bias,
            boxes,
            local,
            schedule.timeline,
            schedule.scale,
        )
        cut = Cut(
            batch, tokens, N, bn, signals.size, signals.rank, arrive, schedule.chunks,
            schedule.lead, schedule.raster,
        )  # fmt: skip
        order = ordered(cut)
        self.tiles = len(order)
        self.places = order  # on the CPU, for whoever reads a timeline
        self.order = packed(order).to(self.device)
        self.halves = halves(order, signals.size).to(self.device)
        self.spots = SIGHTS * signals.size * MOST_CHUNKS
        count = self.tiles * FIELDS + self.spots if schedule.timeline else 1
        self.times = torch.zeros(count, dtype=torch.int64, device=self.device)
        programs = min(schedule.programs or multiprocessors(self.device), self.tiles)
        self.launch = Launch(
            self.device, a2a_gemm_kernel, (programs,),
            {"E": self.exchange, "T": self.tiling}, num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip
        self._describe: dict[str, Callable] = {}

    def __call__(
        self, own: Tensor, came: Tensor, weight: Tensor, out: Tensor, owners: Tensor, bias: Tensor
    ) -> None:
        """arriving: own [B, T*D], came [P*B, L*D], out [L, P*B, N]; owners and bias unused.
        leaving: came = a [L*P*B, K] (own unused), out [B, T, N] the own one, owners int64 [P]: the
        address of every rank's output; bias [L, N].
        """
        size, t = self.signals.size, self.tiling
        rows = (
            out.view(self.tokens * size * self.batch, self.N)
            if self.arrive
            else out.view(self.batch, -1)
        )
        b = weight.transpose(1, 2) if t.b_k_major else weight
        b = b.reshape(-1, b.shape[2])
        a_box, b_box = operand_box(64, t.bk, True), operand_box(t.bn, t.bk, t.b_k_major)
        self.launch(
            self._described("own", own, a_box), self._described("came", came, a_box),
            self._described("b", b, b_box), self._described("out", rows, out_box(False, 16)),
            out, owners, bias, self.order, self.halves, self.signals.bases, self.signals.counters,
            self.signals.words, self.times, self.signals.limit_ns,
            self.N if self.arrive else rows.shape[1], self.N, self.K, self.tiles, self.batch,
            self.tokens, self.signals.rank,
        )  # fmt: skip

    def timeline(self) -> tuple[Tensor, Tensor]:
        """Of the newest call, int64 on the CPU: tiles [tiles, 5], flags [3, P, MOST_CHUNKS], as
        a2a_gemm_kernel.FIELDS says; nanoseconds of this GPU's clock.
        """
        tiles, flags = self.times.cpu().split([self.tiles * FIELDS, self.spots])
        return tiles.view(-1, FIELDS), flags.view(SIGHTS, self.signals.size, MOST_CHUNKS)

    def _described(self, name: str, x: Tensor, box):
        if name not in self._describe:
            if not hopper_tma.aligned(x, 1):
                raise ValueError(
                    f"{name} {tuple(x.shape)} strides {x.stride()} at address 16 n + "
                    f"{x.data_ptr() % 16}: TMA needs rows and base in multiples of 16 bytes"
                )
            self._describe[name] = Described(hopper_tma.descriptor(x, 1, box))
        return self._describe[name](x)
