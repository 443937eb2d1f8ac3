"""The four schedules by name, and the plugin that `kernel` means.

A2A_FFN_KERNEL_PLUGIN names an importable module with forward_ffn(ffn, inputs, *, comp_only=False);
without it, it is rlkernel.plugin.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable

from torch import Tensor

NAMES = ("none", "with-sm", "sm-free", "kernel")
VARIABLE, DEFAULT = "A2A_FFN_KERNEL_PLUGIN", "rlkernel.plugin"
Forward = Callable[..., Tensor]


class PluginError(ImportError):
    """The plugin is not there, fails as it is imported, or has no forward_ffn."""


def forward(ffn, inputs: Tensor, overlap: str = "none", comp_only: bool = False) -> Tensor:
    """inputs [B, T, D] -> [B, T, D]. Raises ValueError for an unknown schedule, PluginError."""
    return load(overlap)(ffn, inputs, comp_only=comp_only)


def load(overlap: str) -> Forward:
    if overlap not in NAMES:
        raise ValueError(f"overlap={overlap!r} is unknown: expected one of {', '.join(NAMES)}")
    if overlap == "kernel":
        return plugin()
    from rlkernel.overlap import copy_engine, nccl_chunks, sequential

    modules = {"none": sequential, "with-sm": nccl_chunks, "sm-free": copy_engine}
    return modules[overlap].forward_ffn


def plugin(name: str | None = None) -> Forward:
    """forward_ffn of the named module, or of the one that the environment names."""
    name = name or os.environ.get(VARIABLE) or DEFAULT
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise PluginError(
            f"{VARIABLE}={name} cannot be imported: {error}. It must name a module on the path"
        ) from error
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}"
        raise PluginError(f"{VARIABLE}={name} cannot be imported: {said}") from error
    found = getattr(module, "forward_ffn", None)
    if not callable(found):
        raise PluginError(f"{VARIABLE}={name} has no forward_ffn(ffn, inputs, *, comp_only=False)")
    return found
