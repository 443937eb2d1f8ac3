"""`fused`: dispatch inside GEMM1, combine inside GEMM2, and the same two in backward.

    side    push x to peers, flags          push dY to peers, flags
    main    GEMM1 (waits inside)            dH = dY @ wout^T (waits inside)
            bias, norms, gate               their gradients; dwout, dbout
            GEMM2 + bias (stores to ranks)  dX = dZ @ w1^T (stores to ranks); dw1

Nothing is packed: copy engines read the strided slice and TMA reads the own one in place; results
land in [B, T, D]. What the caller gets is private memory: the own tokens are stored there at once,
those of the peers GEMM2 itself fetches from the mapped buffer, which a later call writes again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlkernel.collectives.comm import Comm
from rlkernel.kernels.a2a_gemm import SEEN, A2AGemm, Schedule
from rlkernel.kernels.a2a_signal import MOST_CHUNKS
from rlkernel.overlap import stage as stages
from rlkernel.overlap.fused_memory import FusedMemory, signals
from rlkernel.overlap.layout import Layout
from rlkernel.overlap.timeline import span
from rlkernel.records import tiles

GEMMS = ("gemm1", "gemm2", "dh", "dx")
LINK_BYTES, FLOPS, START = 350e3, 600e6, 20.0  # a microsecond of the wire, of an SM90, before both


@dataclass(frozen=True)
class Choice:
    """The four GEMMs' schedules and how the wire is used; none of it changes a bit."""

    gemm1: Schedule
    gemm2: Schedule
    dh: Schedule
    dx: Schedule
    flag_by: str = "copy"
    push_first: bool = True

    @classmethod
    def of(cls, at: Layout, flags: int = 1) -> Choice:
        """As many tokens of own rows ahead as take about as long as the exchange; a wave of own
        tiles behind the last results. flags: a rank, direction and call, at most `most_flags`.

        With flags set ahead (experiment a2a-gemm) any lead costs next to nothing, so it is set by
        the wire; more flags cost a little and let far tiles begin sooner, so that many are for the
        caller to ask; all SMs, tiles 256 wide and bands of 16 rows lose to nothing else.
        """
        flags = min(flags, most_flags(at))
        bytes_sent = 2 * at.batch * at.tokens * at.dim * (at.ranks - 1) / at.ranks
        wire = START + bytes_sent / LINK_BYTES

        def ahead(width: int) -> Schedule:
            token = 2 * at.batch * at.dim * width / FLOPS
            return Schedule(chunks=flags, lead=min(at.local, math.ceil(wire / token)))

        wave = math.ceil(132 / (math.ceil(at.batch / 128) * math.ceil(at.dim / 256)))
        behind = Schedule(chunks=flags, lead=min(at.local, wave))
        return cls(ahead(2 * at.hidden), behind, ahead(at.hidden), behind)

    def recorded(self) -> Choice:
        """The same, with timelines."""
        return replace(self, **{n: replace(getattr(self, n), timeline=True) for n in GEMMS})


def most_flags(at: Layout) -> int:
    """Flags that a rank may have a call: what a program remembers, and one token each at least."""
    return max(1, min(MOST_CHUNKS, SEEN // at.ranks, at.local))


class Fused:
    """The layer on one rank, for one layout; local: no communication, the own slices only. scale:
    payloads cross the wire so many times. fault: of faults.py.
    """

    def __init__(
        self,
        comm: Comm,
        at: Layout,
        stage: stages.Stage,
        dtype: torch.dtype,
        *,
        local: bool = False,
        memory: FusedMemory | None = None,
        choice: Choice | None = None,
        scale: int = 1,
        fault: str = "none",
    ) -> None:
        self.comm, self.dtype = comm, dtype
        self.at, self.stage, self.choice = at, stage, choice or Choice.of(at)
        self.scale, self.fault = scale, fault
        self.local = local or at.ranks == 1
        self.memory = None if self.local else memory or FusedMemory(comm, at, dtype)
        index = comm.links["ep"].index
        nothing = signals(comm.device, index, [0] * (at.ranks + 1), 0)
        self.signals = nothing if self.local else self.memory.signals
        self._gemms: dict[str, A2AGemm] = {}

    @property
    def says(self) -> str:
        """For the record."""
        if self.local:
            return "GEMMs of the fused kernels, no communication"
        flags = max(self.choice.gemm1.chunks, self.choice.gemm2.chunks)
        return (
            "dispatch by copy engine awaited inside GEMM1, results stored to ranks inside GEMM2, "
            f"{flags} flag(s) a rank"
        )

    # -- timelines ---------------------------------------------------------------------------------

    def recording(self) -> Fused:
        """The same on the same memory, whose kernels record what every SM does."""
        return Fused(
            self.comm, self.at, self.stage, self.dtype, local=self.local, memory=self.memory,
            choice=self.choice.recorded(), scale=self.scale, fault=self.fault,
        )  # fmt: skip

    def timelines(self) -> list[tiles.Gemm]:
        """Of the newest call, in the order in which the GEMMs ran; waits for them."""
        found = []
        for name in (name for name in GEMMS if name in self._gemms):
            gemm = self._gemms[name]
            times, flags = (t.tolist() for t in gemm.timeline())
            own, places = self.signals.rank, gemm.places.tolist()
            found.append(tiles.gemm(name, gemm.arrive, own, times, places, flags))
        return found

    # -- the two halves of a pass ------------------------------------------------------------------

    def arriving(self, name: str, x: Tensor, weight: Tensor, out: Tensor, which: int) -> None:
        """x [B, T, D] of this rank, pushed by all -> out [L, P*B, N] = Xlocal @ weight."""
        at, schedule = self.at, getattr(self.choice, name)
        own = x.view(at.batch, at.tokens * at.dim)
        came = own if self.local else self.memory.came(which).view(at.rows, -1)
        gemm = self._gemm(name, weight, schedule, arrive=True)
        with span(f"comp/{name} fused"):
            gemm(own, came, weight, out, self.signals.bases, out)

    def leaving(
        self, name: str, a: Tensor, weight: Tensor, bias: Tensor | None, which: int
    ) -> Tensor:
        """a [L, P*B, K] -> [B, T, D] of this rank, from all."""
        at, schedule = self.at, replace(getattr(self.choice, name), scale=self.scale)
        out = a.new_empty(at.batch, at.tokens, at.dim)
        owners = self.signals.bases if self.local else self.memory.owners[which]
        gemm = self._gemm(name, weight, schedule, arrive=False, bias=bias is not None)
        rows = placed(a).view(at.local * at.rows, -1)
        with span(f"comp/{name} fused"):
            gemm(rows, rows, weight, out, owners, out if bias is None else bias)
        return out

    def _gemm(self, name: str, weight: Tensor, schedule: Schedule, **kind) -> A2AGemm:
        if name not in self._gemms:
            self._gemms[name] = A2AGemm(
                weight, self.at.batch, self.signals, local=self.local, schedule=schedule, **kind
            )
        return self._gemms[name]

    # -- passes ------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Which buffers this call uses."""
        return 0 if self.local else self.memory.begin()

    def arrive(self, name: str, x: Tensor, weight: Tensor, out: Tensor, which: int, own=None):
        """Push x [B, T, D] and multiply what comes -> out [L, P*B, N]. own: [P*B, L, D] that gets
        the own slice. Returns the event of that.

        The GEMM is launched ahead of the pushes where they take no SM: it has own rows to begin
        with, and the host is not done sooner.
        """
        memory, choice, done = self.memory, self.choice, None
        ready = torch.cuda.current_stream(x.device).record_event()
        if self.fault == "early-chunk" and not self.local:
            memory.came(which).fill_(math.nan)
        if choice.push_first:
            self._push(name, x, which, ready)
        self.arriving(name, x, weight, out, which)
        if not choice.push_first:
            self._push(name, x, which, ready)
        if own is not None and not self.local:
            done = memory.own_rows(x, own, ready)
        return done

    def _push(self, name: str, x: Tensor, which: int, ready: torch.cuda.Event) -> None:
        if not self.local:
            with span(f"comm/push {name}"):
                chunks = getattr(self.choice, name).chunks
                by = self.choice.flag_by
                self.memory.push(x, which, chunks, ready, by, self.scale, self.fault)

    def end(self) -> None:
        if not self.local:
            self.memory.end()

    def rows_of(self, x: Tensor) -> Tensor:
        """Under `local`: what arrives, [P*B, L, D], are the own slices."""
        at = self.at
        parts = x.view(at.batch, at.ranks, at.local, at.dim).transpose(0, 1)
        return parts.reshape(at.rows, at.local, at.dim)

    def forward(self, x, w1, b1, wout, bout, norms, training: bool):
        """-> (y, z, h, stats, Xlocal or None)."""
        at = self.at
        which, xlocal = self.begin(), None
        if training and not self.local:
            xlocal = x.new_empty(at.rows, at.local, at.dim)
        z = x.new_empty(at.local, at.rows, 2 * at.hidden)
        self.arrive("gemm1", x, w1, z, which, xlocal)
        if training:
            xlocal = self.rows_of(x) if self.local else self._keep(xlocal, which)
        with span("comp/stage"):
            h, stats = self.stage.forward(z, b1, norms, training)
        y = self.leaving("gemm2", h, wout, bout, which)
        self.end()
        return y, z, h, stats, xlocal

    def _keep(self, xlocal: Tensor, which: int) -> Tensor:
        """The rows of peers, out of the mapped buffer."""
        came, start = self.memory.came(which), self.memory.index * self.at.batch
        for rows in (slice(0, start), slice(start + self.at.batch, None)):
            if xlocal[rows].numel():
                xlocal[rows].copy_(came[rows])
        return xlocal

    def backward(self, dy, z, h, stats, xlocal, w1, b1, wout, norms):
        """-> (dx, dw1, db1, dwout, dbout, and the four gradients of the norms)."""
        at, stage = self.at, self.stage
        which = self.begin()
        dys = self.rows_of(dy) if self.local else self.memory.came(which)
        dh = z.new_empty(at.local, at.rows, at.hidden)
        own = self.arrive("dh", dy, wout.transpose(1, 2), dh, which, dys)
        if stage.by_chunk:
            dz, sums = torch.empty_like(z), stage.sums(at.local, at.hidden, z.device)
            with span("comp/stage backward"):
                stage.backward(dh, z, b1, norms, stats, dz, sums)
            db1, *dnorms = stage.finish(sums, z.dtype)
        else:
            dz, db1, *dnorms = stage.backward_whole(dh, z, b1, norms)
        if own is not None:
            torch.cuda.current_stream(z.device).wait_event(own)
        dys = dys.transpose(0, 1)  # read before the last result leaves: peers may write it then
        with span("comp/gemm dW"):
            dwout, dw1 = torch.empty_like(wout), torch.empty_like(w1)
            torch.bmm(h.transpose(1, 2), dys, out=dwout)
            dbout = torch.sum(dys, 1)
        dx = self.leaving("dx", dz, w1.transpose(1, 2), None, which)
        with span("comp/gemm dW"):
            torch.bmm(xlocal.permute(1, 2, 0), dz, out=dw1)
        self.end()
        return dx, dw1, db1, dwout, dbout, *dnorms


class Layer(torch.autograd.Function):
    """Fused as one differentiable operation."""

    @staticmethod
    def forward(ctx, x, w1, b1, wout, bout, *rest):
        *norms, fused, training = rest
        y, z, h, stats, xlocal = fused.forward(x, w1, b1, wout, bout, norms, training)
        if training:
            ctx.fused, ctx.h, ctx.stats, ctx.xlocal = fused, h, stats, xlocal
            ctx.save_for_backward(z, w1, b1, wout, *norms)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        z, w1, b1, wout, *norms = ctx.saved_tensors
        found = ctx.fused.backward(placed(dy), z, ctx.h, ctx.stats, ctx.xlocal, w1, b1, wout, norms)
        return *found, None, None


def placed(x: Tensor) -> Tensor:
    """x contiguous, at an address that TMA takes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def run(ffn, inputs: Tensor, fused: Fused) -> Tensor:
    """inputs [B, T, D] -> [B, T, D]; autograd reaches the inputs and all parameters."""
    norms = (ffn.norm_x.weight, ffn.norm_x.bias, ffn.norm_gate.weight, ffn.norm_gate.bias)
    tensors = [placed(x) for x in (inputs, ffn.w1, ffn.b1, ffn.wout, ffn.bout)] + [*norms]
    training = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return Layer.apply(*tensors, fused, training)
