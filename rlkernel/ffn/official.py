"""The opponent: Hugging Face transformers' own Qwen3MLP, never a copy of ours."""

from __future__ import annotations

import importlib.metadata

import torch
from torch import Tensor


class NotInstalled(RuntimeError):
    """transformers is absent, so nothing is measured against the official layer."""


def official_mlp(gate: Tensor, up: Tensor, down: Tensor) -> torch.nn.Module:
    """An unsharded, bias-free Qwen3MLP that holds these very weights: x[..., H] -> [..., H].

    gate, up [I, H] and down [H, I], as the layer has them. Raises NotInstalled without
    transformers.
    """
    try:
        from transformers import Qwen3Config
        from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
    except ImportError as error:
        raise NotInstalled(
            "transformers is not installed: make setup, or pip install transformers==5.17.0"
        ) from error
    intermediate, hidden = gate.shape
    config = Qwen3Config(hidden_size=hidden, intermediate_size=intermediate, hidden_act="silu")
    with torch.device("meta"):  # no memory for weights that are replaced
        layer = Qwen3MLP(config)
    for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        getattr(layer, name).weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def official_version() -> str:
    """`transformers 5.17.0`: the opponent's times depend on it. Raises NotInstalled."""
    try:
        return f"transformers {importlib.metadata.version('transformers')}"
    except importlib.metadata.PackageNotFoundError as error:
        raise NotInstalled("transformers is not installed") from error
