"""Shapes of one call and the rules they keep; which seam an ffn talks through.

B batch of a rank   T tokens   D width   P ranks   L = T / P tokens of a rank   H = D * k
N = P * B rows that a rank computes for each of its L tokens, ordered by source rank
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel.collectives.comm import Comm
from rlkernel.collectives.groups import comm_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FWD_MODES, BWD_MODES, GEMM_BACKENDS = ("dense_v2",), ("dense_v2",), ("bmm",)
NORMS = ("norm_x", "norm_gate")


@dataclass(frozen=True)
class Layout:
    batch: int
    tokens: int
    dim: int
    hidden: int
    ranks: int

    @property
    def local(self) -> int:
        return self.tokens // self.ranks

    @property
    def rows(self) -> int:
        return self.ranks * self.batch

    def slices(self, chunks: int, unit: int = 1) -> tuple[slice, ...]:
        """The L tokens in at most `chunks` contiguous runs of whole units, the longer ones first;
        what is left over is in the last one.
        """
        units = -(-self.local // unit)
        chunks = max(1, min(chunks, units))
        short, longer = divmod(units, chunks)
        ends = [min(self.local, unit * (short * (i + 1) + min(i + 1, longer)))
                for i in range(chunks)]  # fmt: skip
        return tuple(slice(a, b) for a, b in zip([0, *ends], ends))


def layout_of(ffn, inputs: Tensor) -> Layout:
    """The layout of inputs [B, T, D] under an ffn. Raises ValueError for anything that cannot run,
    before anything is launched or sent.
    """
    for name, allowed in (
        ("fwd_mode", FWD_MODES), ("bwd_mode", BWD_MODES), ("gemm_backend", GEMM_BACKENDS)
    ):  # fmt: skip
        check_available(name, getattr(ffn, name), allowed)
    if inputs.dim() != 3 or not inputs.numel():
        raise ValueError(
            f"inputs of shape {tuple(inputs.shape)} are not possible: expected [B, T, D], "
            "none of them 0"
        )
    batch, tokens, dim = inputs.shape
    ranks, hidden = ffn.ep_group_size, ffn.w1.shape[-1] // 2
    if inputs.dtype not in DTYPES or inputs.dtype != ffn.w1.dtype:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ValueError(
            f"inputs of {inputs.dtype} with weights of {ffn.w1.dtype} are not possible: "
            f"expected one dtype of {names} for both"
        )
    if inputs.device != ffn.w1.device:
        raise ValueError(
            f"inputs are on {inputs.device}, the weights on {ffn.w1.device}: move one of them"
        )
    if tokens % ranks:
        raise ValueError(f"T={tokens} does not divide over P={ranks} ranks: T % P must be 0")
    local = tokens // ranks
    wanted = {
        "w1": (local, dim, 2 * hidden), "b1": (local, 2 * hidden),
        "wout": (local, hidden, dim), "bout": (local, dim),
    }  # fmt: skip
    wanted |= {f"{norm}.{name}": (hidden,) for norm in NORMS for name in ("weight", "bias")}
    for name, shape in wanted.items():
        owner, _, own = name.rpartition(".")
        given = getattr(getattr(ffn, owner) if owner else ffn, own, None)
        _check_parameter(name, given, shape, ranks, inputs)
    return Layout(batch, tokens, dim, hidden, ranks)


def _check_parameter(
    name: str, given: Tensor | None, shape: tuple[int, ...], ranks: int, inputs: Tensor
) -> None:
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} is {given!r}: expected a tensor {shape}, norms are affine here")
    if tuple(given.shape) != shape:
        raise ValueError(
            f"{name} of shape {tuple(given.shape)} does not fit inputs "
            f"[B, T, D] = {tuple(inputs.shape)} on P={ranks}: expected {shape}"
        )
    if given.dtype != inputs.dtype or given.device != inputs.device:
        raise ValueError(
            f"{name} is {given.dtype} on {given.device}, the inputs are {inputs.dtype} on "
            f"{inputs.device}: expected one dtype and one device for all"
        )


def check_available(name: str, given: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError for an optional backend or mode: none of them is built in here."""
    if given not in allowed:
        raise ValueError(f"{name}={given} is not available here: expected {' or '.join(allowed)}")


def seam_of(ffn, faulty: bool = False) -> Comm:
    """The ffn's own Comm (`comm`), or one over its `ep_group`; axis "ep" in either. faulty: the one
    that an overlapping schedule is broken by, where there is one (`faulty`).
    """
    comm = (getattr(ffn, "faulty", None) if faulty else None) or getattr(ffn, "comm", None)
    if not isinstance(comm, Comm):
        group = ffn.ep_group
        if group is None and ffn.ep_group_size > 1:
            group = dist.group.WORLD
        comm = _seam(group, str(ffn.w1.device))
    if comm.links["ep"].size != ffn.ep_group_size:
        raise ValueError(
            f"ep_group has {comm.links['ep'].size} rank(s), ep_group_size says {ffn.ep_group_size}"
        )
    return comm


@functools.cache
def _seam(group: dist.ProcessGroup | None, device: str) -> Comm:
    return comm_of(group, "ep")
