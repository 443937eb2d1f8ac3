"""SwiGLU of two projections for Hopper: what the kernels refuse, and their launches.

hopper_swiglu_kernel.py is for prefill; hopper_swiglu_few.py for at most 128 rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlkernel.kernels import hopper_tma
from rlkernel.kernels.hopper_pipeline import REGISTERS
from rlkernel.kernels.hopper_plan import multiprocessors
from rlkernel.kernels.hopper_silu import SWIGLU
from rlkernel.kernels.hopper_swiglu_few import COLUMNS, LEFT, RIGHT, gate_up_few_kernel
from rlkernel.kernels.hopper_swiglu_kernel import NARROW, WIDE, gate_up_kernel
from rlkernel.kernels.hopper_tma import operand, operand_box, out_box
from rlkernel.kernels.launch import Described, Launch


def wide_tiles(M: int, I: int, sms: int = 132) -> int:  # noqa: E741
    """How many tiles stay wide: all whole waves; the last, partial one is cut in half where its
    halves make one wave, for then it takes half the time.
    """
    tiles = -(-M // 128) * -(-I // 128)
    rest = tiles % sms
    return tiles - rest if 2 * rest <= sms else tiles


def fits_few(M: int, I: int, sms: int = 132) -> bool:  # noqa: E741
    """Does the kernel for at most 128 rows take these: one tile a program, all at once?"""
    return M <= 128 and -(-I // COLUMNS.value) <= sms


def candidates(M: int, I: int, device: torch.device) -> list[int | None]:  # noqa: E741
    """What `wide` may be: the default, no tile, all of them, and the whole waves."""
    tiles = -(-M // 128) * -(-I // 128)
    return [None, *dict.fromkeys((0, tiles, wide_tiles(M, I, multiprocessors(device))))]


def refuses(x: Tensor, w_gate: Tensor, w_up: Tensor) -> str | None:
    """Why these operands cannot run on this schedule, or None: they can."""
    for name, t in (("x", x), ("w_gate", w_gate), ("w_up", w_up)):
        reason = hopper_tma.operand_refused(name, t)
        if reason:
            return reason
        if not hopper_tma.aligned(t, 1):
            return f"{name} has strides {t.stride()}: its memory must run along H, axis 1"
    H, width = x.shape[1], w_gate.shape[0]
    if w_gate.shape != (width, H) or w_up.shape != (width, H):
        return (
            f"x{tuple(x.shape)}, w_gate{tuple(w_gate.shape)}, w_up{tuple(w_up.shape)}: "
            "x[M, H] and two weights [I, H] expected"
        )
    if H % 64 or H < 320 or width % 8:
        return (
            f"H={H}, I={width}: H must be a multiple of 64, at least 320, and I a multiple of 8; "
            "use a portable kernel"
        )
    return None


def outputs(
    x: Tensor, width: int, hidden: Tensor, gate: Tensor | None, up: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, gate, up) to write; hidden stands in for what is not kept. Raises ValueError."""
    if (gate is None) != (up is None):
        raise ValueError("gate and up are kept both or not at all: give two tensors or none")
    outs = (hidden, hidden, hidden) if gate is None else (hidden, gate, up)
    for name, out in zip(("hidden", "gate", "up"), outs, strict=True):
        reason = hopper_tma.output_refused(name, out, (x.shape[0], width), (torch.bfloat16,))
        if reason:
            raise ValueError(reason)
    return outs


def hopper_gate_up(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    hidden: Tensor,
    gate: Tensor | None = None,
    up: Tensor | None = None,
    wide: int | None = None,
    arithmetic: str = SWIGLU,
) -> Tensor:
    """silu(x @ w_gate.t()) * (x @ w_up.t()) -> hidden[M, I], rounded where eager rounds.

    x[M, H], w_gate[I, H], w_up[I, H] (two weights, or the halves of one packed tensor): BF16,
    memory along H. hidden, and gate and up [M, I] if both are given (the training forward keeps
    them): BF16, row-major. wide: how many tiles of the prefill kernel are wide (None: the likely
    fastest kernel and number).

    Raises ValueError with what `refuses` says, and where an output cannot be written by TMA.
    """
    run = prepared(x, w_gate, w_up, hidden, gate, up, wide, arithmetic)
    run(x, w_gate, w_up, hidden, gate, up)
    return hidden


def prepared(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    hidden: Tensor,
    gate: Tensor | None = None,
    up: Tensor | None = None,
    wide: int | None = None,
    arithmetic: str = SWIGLU,
) -> Callable[..., None]:
    """hopper_gate_up, checked and decided: a call for tensors that look like these (launch.py)."""
    reason = refuses(x, w_gate, w_up)
    if reason:
        raise ValueError(reason)
    (M, H), width = x.shape, w_gate.shape[0]
    outs = outputs(x, width, hidden, gate, up)
    sms = multiprocessors(x.device)
    few = wide is None and fits_few(M, width, sms)
    tiles = -(-M // 128) * -(-width // 128)
    if wide is None:
        wide = wide_tiles(M, width, sms)
    if not 0 <= wide <= tiles:
        raise ValueError(f"wide is {wide}: there are {tiles} tiles, so 0 to {tiles} can be wide")
    of_rows = Described(operand(x, 1, True, operand_box(64, 64, True)))
    box = operand_box(32 if few else 64, 64, True)
    of_gate, of_up = (Described(operand(t, 1, True, box)) for t in (w_gate, w_up))
    of_outs = [Described(hopper_tma.descriptor(t, 1, out_box(False, 16, 32))) for t in outs]
    save = gate is not None
    options = {"num_warps": 4, "maxnreg": REGISTERS}
    constants = {"KEEP": save, "TEXT": arithmetic}
    if few:
        constants |= {"L": LEFT, "R": RIGHT}
        programs, numbers = -(-width // COLUMNS.value), (H,)
        launch = Launch(x.device, gate_up_few_kernel, (programs,), constants, **options)
    else:
        constants |= {"W": WIDE, "N": NARROW}
        programs, numbers = min(sms, 2 * tiles - wide), (wide, M, width, H, min(16, -(-M // 128)))
        launch = Launch(x.device, gate_up_kernel, (programs,), constants, **options)

    def run(x, w_gate, w_up, hidden, gate=None, up=None) -> None:
        outs = (hidden, gate, up) if save else (hidden, hidden, hidden)
        described = (of(t) for of, t in zip(of_outs, outs))
        launch(of_rows(x), of_gate(w_gate), of_up(w_up), *described, *numbers)

    return run
