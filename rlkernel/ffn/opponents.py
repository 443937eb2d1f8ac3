"""Whom a training step is timed against: the official layer, plain and under torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rlkernel.ffn.official import NotInstalled, official_mlp, official_version

PLAIN, COMPILED = "official", "official compiled"


def opponents(
    weights: tuple[Tensor, Tensor, Tensor],
    probe: Callable[[nn.Module], object],
    collect: Callable[[object], list] = lambda value: [value],
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """({name: layer}, {name: its version, or why it is not there}) for whole gate, up and down.

    The compiled one stands on GPUs only, and only where `probe`, which uses a layer as it will be
    timed, ends well on every rank: `collect` brings every rank's word.
    """
    try:
        layers = {PLAIN: official_mlp(*weights).requires_grad_()}
    except NotInstalled as error:
        return {}, {PLAIN: str(error)}
    said = {PLAIN: official_version()}
    if not weights[0].is_cuda:
        return layers, {**said, COMPILED: "on GPUs only"}
    compiled = torch.compile(layers[PLAIN], dynamic=False)
    failed = next(filter(None, collect(_failure(probe, compiled))), "")
    if not failed:
        layers[COMPILED] = compiled
    return layers, {**said, COMPILED: failed or f"torch {torch.__version__}"}


def _failure(probe: Callable[[nn.Module], object], layer: nn.Module) -> str:
    """What went wrong, in a line; "" where nothing did."""
    try:
        probe(layer)
    except Exception as error:  # a compiler's errors are its own: it is no opponent here
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    return ""
