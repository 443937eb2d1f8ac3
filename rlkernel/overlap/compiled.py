"""torch.compile for one shape at a time.

torch keeps a handful of variants of a function and runs what comes after them uncompiled, with
other bits. So each shape gets a function of its own, and a shape that was proven stays what it was.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import torch
from torch import Tensor


def compiled(function: Callable[..., Tensor], like: Tensor) -> Callable[..., Tensor]:
    """`function`, compiled for tensors as `like` and the gradient mode of this moment."""
    key = (like.shape, like.stride(), like.dtype, like.device)
    return _for(function, key, torch.is_grad_enabled() and like.requires_grad)


@functools.cache
def _for(function: types.FunctionType, key: tuple, learns: bool) -> Callable[..., Tensor]:
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, dynamic=False)
