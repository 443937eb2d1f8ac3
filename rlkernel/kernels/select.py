"""Which schedule computes which shape. A choice changes the time, never the bits.

    twin     plain torch on the CPU: the contract itself
    tile     Triton, a program a tile of C, pointer loads; any strides, any backend
    decode   Triton, M <= 128: the leaves spread over programs; bound by reading b once
    tokens   Triton, K <= 64: a strip of C a program, all leaves of a tile; bound by writing C
    hopper   Gluon on SM90: persistent, warp-specialised, TMA and wgmma; bound by the tensor cores
    library  torch.mm: chains only, on shapes where this device has proven it equal

The census (census.py) compares all of them on the device that it runs on. What fails is refused
there by name (`refuse`) and not chosen again in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.contract import ReductionTree
from rlkernel.kernels import (
    bf16,
    gemm_decode,
    gemm_tokens,
    gemm_tree,
    reference,
    stream,
    swiglu,
    swiglu_decode,
)
from rlkernel.kernels.launch import look

CHAIN = ReductionTree(1, "fp32")
FEW_ROWS = 64  # up to here the weights are read once and nothing else counts
NARROW_SHARD = 6144  # columns of gate and up
LIBRARY_ROWS = 512  # below, the library may split K
MOST_KNOWN = 4096  # looks of tensors that are remembered

Run = Callable[..., object]


@dataclass(frozen=True)
class Choice:
    """A schedule by name and how it is cut; config None lets the kernel choose."""

    schedule: str
    config: object = None

    def __str__(self) -> str:
        return self.schedule if self.config is None else f"{self.schedule} {self.config}"


class Known(NamedTuple):
    """What was chosen for tensors of one look, and the call that does it."""

    choice: Choice | None
    run: Run


_refused: dict[tuple[str, str], str] = {}
_proven: dict[tuple, bool] = {}
_known: dict[tuple, Known] = {}


def refuse(schedule: str, contract: str, reason: str) -> None:
    """Never choose that schedule for that contract again in this process."""
    _refused[schedule, contract] = reason
    _known.clear()


def refused() -> dict[str, str]:
    """`decode under tree8.bf16` -> why."""
    return {f"{schedule} under {contract}": why for (schedule, contract), why in _refused.items()}


# -- GEMM ------------------------------------------------------------------------------------------


def gemm(
    a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree, choice: Choice | None = None
) -> Choice:
    """out[M, N] = a[M, K] @ b[K, N] under `tree`; a and b BF16, out BF16 or FP32, any strides.

    Returns the choice that ran. Raises ValueError or TypeError before anything is launched.
    """
    if choice is not None:
        _prepared(choice, a, b, out, tree)(a, b, out)
        return choice
    key = (tree, look(a), look(b), look(out))
    known = _known.get(key)
    if known is None:
        choice = choose(a, b, out, tree)
        known = _remember(key, choice, _prepared(choice, a, b, out, tree), a.device)
    known.run(a, b, out)
    return known.choice


def _prepared(choice: Choice, a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree) -> Run:
    """The chosen schedule, checked and decided, for operands that look like these."""
    if choice.schedule == "twin":
        return lambda a, b, out: out.copy_(reference.gemm(a, b, tree, out.dtype))
    if choice.schedule == "library":
        return lambda a, b, out: torch.mm(a, b, out=out)
    if choice.schedule == "hopper":
        from rlkernel.kernels import hopper_gemm  # needs Gluon

        return hopper_gemm.prepared(a, b, out, tree, choice.config)
    kernel = {"tile": gemm_tree, "decode": gemm_decode, "tokens": gemm_tokens}[choice.schedule]
    return kernel.prepared(a, b, out, tree, choice.config)


def _remember(key: tuple, choice: Choice | None, run: Run, device: torch.device) -> Known:
    """For the next call with tensors of this look.

    Not while a graph is captured: nothing can be tried there, and the choice may be second best.
    """
    known = Known(choice, run)
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = known
    return known


def choose(a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree) -> Choice:
    """The schedule for these operands on their device."""
    if a.device.type == "cpu":
        return Choice("tile" if bf16.INTERPRETED else "twin")
    few = min(a.shape[0], b.shape[1]) <= FEW_ROWS
    for schedule in ("decode",) if few else ("tokens", "library", "hopper", "decode"):
        if _legal(schedule, a, b, out, tree):
            return Choice(schedule)
    return Choice("tile")


def choices(a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree) -> list[Choice]:
    """Every schedule and configuration that is legal for these operands: what a census compares."""
    (m, k), n = a.shape, b.shape[1]
    if a.device.type == "cpu" and not bf16.INTERPRETED:
        return [Choice("twin")]
    found = [Choice("tile", config) for config in gemm_tree.candidates(m, n, k, tree)]
    if _legal("decode", a, b, out, tree):
        along_k = b.stride(0) == 1
        found += [
            Choice("decode", config) for config in gemm_decode.candidates(m, n, k, tree, along_k)
        ]
    if _legal("tokens", a, b, out, tree):
        found += [Choice("tokens", config) for config in gemm_tokens.candidates(m, n, k, tree)]
    if _legal("hopper", a, b, out, tree):
        from rlkernel.kernels import hopper_plan

        bits = out.element_size() * 8
        found += [
            Choice("hopper", config) for config in hopper_plan.candidates(m, n, k, tree, bits)
        ]
    return found


def _legal(schedule: str, a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree) -> bool:
    if (schedule, tree.name) in _refused:
        return False
    if schedule == "decode":
        return gemm_decode.refuses(a, b, out, tree) is None
    if schedule == "tokens":
        return gemm_tokens.refuses(a, b, out, tree) is None
    if schedule == "hopper":
        return _hopper_allows(a, b, out, tree)
    return _library_is_the_chain(a, b, out, tree)


def _hopper_allows(a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree) -> bool:
    if not stream.is_hopper(a.device):
        return False
    from rlkernel.kernels import hopper_gemm  # needs Gluon

    return hopper_gemm.refuses(a, b, out, tree) is None


def _library_is_the_chain(a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree) -> bool:
    """Whether torch.mm gives the chain's bits on this shape and device; tried once a shape.

    The library picks its kernel by shape and layout, not by value, so one comparison on data whose
    order of additions shows decides for the process. Nothing is tried while a graph is captured.
    """
    if tree.leaves > 1 or out.dtype != torch.bfloat16 or not _hopper_allows(a, b, out, tree):
        return False
    if min(a.shape[0], b.shape[1]) < LIBRARY_ROWS:
        return False
    key = (a.device, a.shape, a.stride(), b.shape, b.stride(), out.stride())
    key += tuple(x.data_ptr() % 256 == 0 for x in (a, b, out))
    if key not in _proven:
        if torch.cuda.is_current_stream_capturing():
            return False
        left, right = (torch.empty_like(x).normal_() for x in (a, b))
        ours, theirs = (torch.empty_like(out) for _ in range(2))
        gemm(left, right, ours, tree, Choice("hopper"))
        torch.mm(left, right, out=theirs)
        _proven[key] = torch.equal(ours, theirs)
    return _proven[key]


# -- SwiGLU ----------------------------------------------------------------------------------------


def gate_up(
    x: Tensor, w_gate: Tensor, w_up: Tensor, *, save: bool = False, choice: Choice | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """silu(x @ w_gate.T) * (x @ w_up.T) for x[M, H], weights [I, H] -> (hidden, gate, up), [M, I].

    gate and up are kept with `save` only. Two chains, rounded where the eager layer rounds.
    """
    if x.device.type == "cpu" and not bf16.INTERPRETED:
        gate, up, hidden = reference.gate_up(x, w_gate, w_up)
        return (hidden, gate, up) if save else (hidden, None, None)
    outs = [x.new_empty(x.shape[0], w_gate.shape[0]) for _ in range(3 if save else 1)]
    if choice is not None:
        prepared_gate_up(choice, x, w_gate, w_up, *outs)(x, w_gate, w_up, *outs)
    else:
        key = (save, look(x), look(w_gate), look(w_up))
        known = _known.get(key)
        if known is None:
            choice = choose_gate_up(x, w_gate, w_up)
            run = prepared_gate_up(choice, x, w_gate, w_up, *outs)
            known = _remember(key, choice, run, x.device)
        known.run(x, w_gate, w_up, *outs)
    return tuple(outs) if save else (outs[0], None, None)


def prepared_gate_up(choice: Choice, x: Tensor, w_gate: Tensor, w_up: Tensor, *outs) -> Run:
    """The chosen schedule for operands that look like these, and for outputs (hidden) or (hidden,
    gate, up): a call with all of them.
    """
    if choice.schedule == "twin":

        def twin(x, w_gate, w_up, *outs) -> None:
            gate, up, hidden = reference.gate_up(x, w_gate, w_up)
            for out, value in zip(outs, (hidden, gate, up)):
                out.copy_(value)

        return twin
    if choice.schedule == "decode":
        kept = outs[1:] or (None, None)
        return swiglu_decode.prepared(x, w_gate, w_up, outs[0], *kept, choice.config)
    if choice.schedule == "hopper":
        from rlkernel.kernels import hopper_swiglu

        kept = outs[1:] or (None, None)
        return hopper_swiglu.prepared(x, w_gate, w_up, outs[0], *kept, choice.config)

    def apart(x, w_gate, w_up, hidden, *kept) -> None:
        gate, up = kept or (torch.empty_like(hidden), torch.empty_like(hidden))
        for weight, product in ((w_gate, gate), (w_up, up)):
            gemm(x, weight.t(), product, CHAIN)
        swiglu.swiglu_forward(gate, up, hidden)

    return apart


def choose_gate_up(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Choice:
    """The schedule for these operands; `tile` is two GEMMs and an element-wise pass."""
    # Up to 128 rows hopper has a tile a program: a narrow shard would leave most SMs idle.
    narrow = w_gate.shape[0] <= NARROW_SHARD and x.shape[0] <= stream.MOST_ROWS
    few = x.shape[0] <= FEW_ROWS or narrow
    for schedule in ("decode", "hopper") if few else ("hopper", "decode"):
        if gate_up_allows(schedule, x, w_gate, w_up):
            return Choice(schedule)
    return Choice("tile")


def gate_up_allows(schedule: str, x: Tensor, w_gate: Tensor, w_up: Tensor) -> bool:
    if (schedule, "gate_up") in _refused:
        return False
    if schedule == "decode":
        return swiglu_decode.refuses(x, w_gate, w_up, None, None, None) is None
    if not stream.is_hopper(x.device):
        return False
    from rlkernel.kernels import hopper_swiglu

    return hopper_swiglu.refuses(x, w_gate, w_up) is None


def gate_up_choices(x: Tensor, w_gate: Tensor, w_up: Tensor) -> list[Choice]:
    """Every schedule and configuration that is legal for these operands."""
    if x.device.type == "cpu" and not bf16.INTERPRETED:
        return [Choice("twin")]
    found = [Choice("tile")]
    if gate_up_allows("decode", x, w_gate, w_up):
        configs = swiglu_decode.gate_up_candidates(x.shape[0], w_gate.shape[0])
        found += [Choice("decode", config) for config in configs]
    if gate_up_allows("hopper", x, w_gate, w_up):
        from rlkernel.kernels import hopper_swiglu

        kinds = hopper_swiglu.candidates(x.shape[0], w_gate.shape[0], x.device)
        found += [Choice("hopper", wide) for wide in kinds]
    return found


def swiglu_backward(d_hidden: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """-> (d_gate and d_up side by side, [M, 2 I]; hidden, [M, I]): one pass, rounded where eager
    autograd rounds.
    """
    both, hidden = gate.new_empty(gate.shape[0], 2 * gate.shape[1]), torch.empty_like(gate)
    d_gate, d_up = both.chunk(2, 1)
    if gate.device.type == "cpu" and not bf16.INTERPRETED:
        for out, value in zip((d_gate, d_up), reference.swiglu_backward(d_hidden, gate, up)):
            out.copy_(value)
        return both, hidden.copy_(reference.swiglu_forward(gate, up))
    key = ("swiglu", look(d_hidden), look(gate), look(up))
    known = _known.get(key)
    if known is None:
        run = swiglu.prepared_backward(d_hidden, gate, up, d_gate, d_up, hidden)
        known = _remember(key, None, run, gate.device)
    known.run(d_hidden, gate, up, d_gate, d_up, hidden)
    return both, hidden


def path(x: Tensor, w_gate: Tensor, w_down: Tensor, tree: ReductionTree) -> str:
    """`hopper + decode`: the schedules of gate/up and of down in a forward of these operands."""
    if x.device.type == "cpu" and not bf16.INTERPRETED:
        return "twin"
    hidden = x.new_empty(x.shape[0], w_gate.shape[0])
    out = x.new_empty(x.shape[0], w_down.shape[0])
    first = choose_gate_up(x, w_gate, w_gate).schedule
    return f"{first} + {choose(hidden, w_down.t(), out, tree).schedule}"
