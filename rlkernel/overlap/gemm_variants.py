"""One of the four GEMMs of the fused layer under every schedule, beside the library's product.

    gemm1   arriving   Xlocal @ w1       K = D,  N = 2H       gemm2   leaving   h @ wout + bout
    dh      arriving   dY @ wout^T       K = D,  N = H        dx      leaving   dZ @ w1^T

Outputs are poisoned ahead of every look at their bits. On a CPU the twin plays the tiles, on
integers so small that no order of additions rounds: there the bits are those of any library.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rlkernel.compare import bit_report
from rlkernel.kernels import a2a_gemm, a2a_reference
from rlkernel.kernels.a2a_gemm import Schedule
from rlkernel.kernels.hopper_plan import multiprocessors
from rlkernel.overlap.fused_kernel import Choice
from rlkernel.overlap.layout import Layout
from rlkernel.overlap.preset import OWN, Preset, rows_of

ARRIVING, FORWARD = ("gemm1", "dh"), ("gemm1", "gemm2")
LIBRARY, WITH_BIAS, CHOSEN, LOCAL = "bmm", "bmm + bias", "chosen", "local"
Work = Callable[[], object]


@dataclass(frozen=True)
class Variant:
    """sweep, value: the parameter that differs from the chosen schedule; None: nothing does.
    local: nothing is sent or awaited, as without communication.
    """

    name: str
    schedule: Schedule
    sweep: str | None = None
    value: int | None = None
    local: bool = False


def variants(name: str, at: Layout, sweeps: Mapping[str, Sequence[int]], sms: int) -> list[Variant]:
    """The chosen schedule, the same without communication, then one parameter after the other.
    sweeps: parameter -> values; what is beyond the tokens or the SMs is cut to them.
    """
    base = getattr(Choice.of(at), name)
    found = [Variant(CHOSEN, base), Variant(LOCAL, base, local=True)]
    most = {"lead": at.local, "programs": sms}
    for sweep, given in sweeps.items():
        values = sorted({min(n, most.get(sweep, n)) for n in given})
        for value in (n for n in values if n != chosen(base, sms)[sweep]):
            schedule = replace(base, **{sweep: value})
            found.append(Variant(f"{sweep} {value}", schedule, sweep, value))
    return found


def chosen(base: Schedule, sms: int) -> dict[str, int]:
    """Each parameter's value; one program an SM unless it says otherwise."""
    found = {**asdict(base), "programs": base.programs or sms}
    return {name: found[name] for name in ("lead", "chunks", "programs", "raster", "bn")}


def processors(device: torch.device, most: int) -> int:
    """SMs of a GPU; a CPU plays one program and takes what is asked for."""
    return multiprocessors(device) if device.type == "cuda" else most


class Bench:
    """Operands, outputs and the library's product of one GEMM on rank 0 of P."""

    def __init__(
        self, name: str, at: Layout, device: torch.device, seed: int, swapped: bool = False
    ) -> None:
        self.name, self.at, self.device = name, at, device
        self.arrive, self.has_bias = name in ARRIVING, name == "gemm2"
        random = torch.Generator(device).manual_seed(seed)
        draw = partial(_drawn, random)
        wide = 2 * at.hidden if name in ("gemm1", "dx") else at.hidden
        shape = (at.dim, wide) if name in ("gemm1", "dx") else (wide, at.dim)
        weight = draw(at.local, *shape)
        self.weight = weight if name in FORWARD else weight.transpose(1, 2)
        self.memory = Preset(at, weight.dtype, device)
        if self.arrive:
            self.x = draw(at.batch, at.tokens, at.dim)
            self.a = rows_of(self.x, at).transpose(0, 1)  # [L, P*B, D], as it lies in Xlocal
            self.memory.fill(0, self.a.transpose(0, 1), swapped)
            self.out = weight.new_empty(at.local, at.rows, wide)
            self.given = self.a
        else:
            self.a = draw(at.local, at.rows, wide)
            self.given = self.a.roll(at.batch, 1) if swapped else self.a
            self.out = weight.new_empty(at.batch, at.tokens, at.dim)
        self.bias = draw(at.local, at.dim) if self.has_bias else self.out
        self.product = weight.new_empty(at.local, at.rows, wide if self.arrive else at.dim)
        self.flat = weight.new_empty(at.rows, at.local, at.dim)
        self.wanted = self._library().clone()

    # -- the library -------------------------------------------------------------------------------

    def library(self) -> dict[str, Work]:
        """Its calls as `none` makes them; the output bias is a pass of its own there."""
        calls: dict[str, Work] = {LIBRARY: self._library}
        if self.has_bias:
            calls = {LIBRARY: self._product, WITH_BIAS: self._library}
        return calls

    def _product(self) -> Tensor:
        return torch.bmm(self.a, self.weight, out=self.product)

    def _library(self) -> Tensor:
        """[L, P*B, N] of what arrives; [P*B, L, D] of what leaves."""
        if self.arrive:
            return self._product()
        if self.has_bias:
            return torch.add(self._product().transpose(0, 1), self.bias, out=self.flat)
        torch.bmm(self.a, self.weight, out=self.flat.transpose(0, 1))
        return self.flat

    # -- the kernel --------------------------------------------------------------------------------

    def gemm(self, variant: Variant):
        """The kernel of a variant, prepared; on a CPU its twin."""
        made = a2a_gemm.A2AGemm if self.device.type == "cuda" else a2a_reference.A2AGemm
        return made(
            self.weight, self.at.batch, self.memory.signals, arrive=self.arrive,
            bias=self.has_bias, local=variant.local, schedule=variant.schedule,
        )  # fmt: skip

    def work(self, gemm) -> Work:
        at, memory = self.at, self.memory
        if self.arrive:
            own, came = self.x.view(at.batch, -1), memory.came(0).view(at.rows, -1)
        else:
            own = came = self.given.reshape(at.local * at.rows, -1)
        return partial(gemm, own, came, self.weight, self.out, memory.owners[0], self.bias)

    def differ(self, gemm, local: bool) -> int:
        """Elements whose bits are not the library's after one call, and those that were stored
        where nothing belongs.
        """
        at, memory = self.at, self.memory
        self.out.fill_(math.nan)
        memory.outs.fill_(math.nan)
        self.work(gemm)()
        if self.arrive:
            return bit_report(self.out, self.wanted).mismatches
        if local:
            return bit_report(rows_of(self.out, at), self.wanted).mismatches
        outs = memory.outs.clone()
        outs[OWN] = self.out
        mine = slice(OWN * at.local, (OWN + 1) * at.local)
        found = outs[:, :, mine].reshape(self.wanted.shape).clone()
        outs[:, :, mine] = math.nan
        stray = int((~outs.isnan()).sum()) + int((~memory.outs[OWN].isnan()).sum())
        return bit_report(found, self.wanted).mismatches + stray

    @property
    def flops(self) -> int:
        return 2 * self.product.numel() * self.weight.shape[1]


def _drawn(random: torch.Generator, *shape: int) -> Tensor:
    """BF16 over many binades, so that the order of a sum shows; on a CPU FP32 integers, whose sums
    are exact in any order.
    """
    if random.device.type == "cpu":
        return torch.randint(-2, 3, shape, generator=random).float()
    normal = partial(torch.randn, shape, generator=random, device=random.device)
    return (normal() * torch.exp2(normal())).to(torch.bfloat16)


def resources(gemm) -> dict[str, int | None]:
    """{"registers", "spills"} a thread of what a gemm was compiled to; None where nothing tells."""
    launch = getattr(gemm, "launch", None)
    again = getattr(launch, "_again", None)
    compiled = inspect.getclosurevars(again).nonlocals.get("self") if again else None
    return {
        "registers": getattr(compiled, "n_regs", None),
        "spills": getattr(compiled, "n_spills", None),
    }
