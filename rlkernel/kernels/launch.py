"""A launch that is prepared once and repeated: what an eager step of small kernels is bound by.

Triton looks at every argument of every call to find the binary that was compiled for such
arguments, which takes longer than a small kernel runs. Whoever calls the same kernel on tensors of
the same look (shape, strides, dtype, device, alignment) knows that it is the same binary.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor
from triton.runtime import driver

ALIGNED = 256  # bytes; what a library or a TMA descriptor may ask of an address, and more


def look(x: Tensor) -> Hashable:
    """All of a tensor that a launch depends on, but for its values and its place."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNED


class Launch:
    """A Triton kernel with its grid and its constants on a device, for arguments of one look.

    The first call compiles, or finds what was compiled; later ones pass their arguments on. The
    caller promises that integers and the looks of tensors and descriptors are those of the first
    call, and that the kernel's constants follow all its arguments.
    """

    def __init__(
        self, device: torch.device, kernel, grid: tuple[int, ...], constants: Mapping, **options
    ) -> None:
        self.device, self.kernel, self.grid = device, kernel, (*grid, 1, 1)[:3]
        self.constants, self.options = dict(constants), options
        self._again, self._last = None, tuple(self.constants.values())
        self._anywhere = device.type != "cuda" or torch.cuda.device_count() == 1

    def __call__(self, *args) -> None:
        if self._anywhere or torch.cuda.current_device() == self.device.index:
            self._run(*args)
        else:
            with torch.cuda.device(self.device):
                self._run(*args)

    def _run(self, *args) -> None:
        if self._again is not None:
            stream = driver.active.get_current_stream(self.device.index)
            self._again(*args, *self._last, stream=stream)
            return
        compiled = self.kernel[self.grid](*args, **self.constants, **self.options)
        if compiled is not None:  # else it was interpreted
            self._again = compiled[self.grid]


class Described:
    """A TMA descriptor for tensors of one look: checked once, then only moved to another base."""

    def __init__(self, template) -> None:
        self._kind = type(template)
        self._fixed = {**template.__dict__, "base": None}

    def __call__(self, x: Tensor):
        moved = object.__new__(self._kind)
        moved.__dict__.update(self._fixed, base=x)
        return moved
