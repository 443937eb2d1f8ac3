"""Small layers with weights as Hugging Face keeps them, and what eager torch makes of them."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.inputs import matrix

H, WIDE, M = 64, 128, 32


def weights(seed: int = 1, hidden: int = H, intermediate: int = WIDE) -> tuple[Tensor, ...]:
    """gate, up [I, H] and down [H, I], scaled to an output RMS near 0.6."""
    g, h, i = seed * 10, hidden, intermediate
    return (
        (matrix(i, h, g).float() * h**-0.5).bfloat16(),
        (matrix(i, h, g + 1).float() * h**-0.5).bfloat16(),
        (matrix(h, i, g + 2).float() * i**-0.5).bfloat16(),
    )


def eager(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def trained(layer: torch.nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Output, dX and the gradients in Hugging Face's names of one forward and backward."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, **layer.gradients()}


def refused(error, words, action):
    with contextlib.suppress(error):
        try:
            action()
        except error as raised:
            assert words in str(raised), f"{words!r} not in: {raised}"
            raise
        raise AssertionError(f"{error.__name__} was not raised")
