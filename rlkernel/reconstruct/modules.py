"""The reconstructed blocks as nn.Modules: one class for the dense block and both kinds of twin.

    x -> norm -> enter -> column layers -> ... -> row layer -> leave -> + bias -> + x

In the dense module `enter` and `leave` do nothing. Our twin puts the copy and reduce regions there
and holds shards in plain Linear layers; torch's twin leaves them alone and splits the layers. Every
submodule's output and its gradient is a boundary that can be watched from outside by hooks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlkernel.collectives.comm import Comm
from rlkernel.reconstruct.gqa import GQA, attend
from rlkernel.reconstruct.swiglu import SwiGLU
from rlkernel.reconstruct.twin import Block, Weights, enter, leave, rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


class Region(nn.Module):
    """twin.enter or twin.leave as a module, in the dtype of its input."""

    def __init__(self, region: Callable, comm: Comm, layer: str, split: bool) -> None:
        super().__init__()
        self.region, self.route = region, (comm, layer, split)

    def forward(self, x: Tensor) -> Tensor:
        return self.region(x, *self.route).to(x.dtype)


class SwiGLUModule(nn.Module):
    """x [S, B, H] -> [S, B, H]; weights as in swiglu.SwiGLU, whole or one rank's shards."""

    COLUMNS, ROWS = ("gate", "up"), ("down",)

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.norm, self.enter = RMSNorm(weights["norm"]), nn.Identity()
        self.gate, self.up = (linear(w) for w in weights["gate_up"])
        self.down, self.leave = linear(weights["down"]), nn.Identity()
        self.bias = nn.Parameter(weights["down_bias"].clone())

    def forward(self, x: Tensor) -> Tensor:
        n = self.enter(self.norm(x))
        return x + (self.leave(self.down(F.silu(self.gate(n)) * self.up(n))) + self.bias)

    def collect(self, read) -> Weights:
        """The block's own names for what `read` takes of each parameter: data or gradient."""
        return {
            "norm": read(self.norm.weight),
            "gate_up": torch.stack([read(self.gate.weight), read(self.up.weight)]),
            "down": read(self.down.weight),
            "down_bias": read(self.bias),
        }


class GQAModule(nn.Module):
    """x [S, B, H] -> [S, B, H]; weights as in gqa.GQA, whole or one rank's shards."""

    COLUMNS, ROWS = ("wq", "wk", "wv"), ("wo",)

    def __init__(self, weights: Weights, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm, self.enter = RMSNorm(weights["norm"]), nn.Identity()
        self.wq, self.wk, self.wv = (linear(weights[n]) for n in self.COLUMNS)
        self.wo, self.leave = linear(weights["wo"]), nn.Identity()
        bias = weights.get("out_bias")
        self.bias = None if bias is None else nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        n = self.enter(self.norm(x))
        heads = (w(n).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        y = self.leave(self.wo(attend(*heads)))
        return x + (y if self.bias is None else y + self.bias)

    def collect(self, read) -> Weights:
        names = (*self.COLUMNS, *self.ROWS)
        return {
            "norm": read(self.norm.weight),
            **{n: read(getattr(self, n).weight) for n in names},
            **({} if self.bias is None else {"out_bias": read(self.bias)}),
        }


def dense_module(block: Block, weights: Weights) -> nn.Module:
    """The block over these weights as a module. Raises ValueError for a block that has none."""
    if isinstance(block, SwiGLU):
        return SwiGLUModule(weights)
    if isinstance(block, GQA):
        return GQAModule(weights, block.head_dim)
    raise ValueError(f"no module for {type(block).__name__}: expected SwiGLU or GQA")


def twin_module(block: Block, local: Weights, comm: Comm) -> nn.Module:
    """Our twin over this rank's shards: the same module with the two regions put in."""
    module = dense_module(block, local)
    column, row = ("gate_up", "down") if isinstance(block, SwiGLU) else ("qkv", "out")
    split = block.sequence_parallel
    module.enter = Region(enter, comm, column, split)
    module.leave = Region(leave, comm, row, split)
    if split:
        _sum_gradient(module.norm.weight, comm, "norm.dw")
    if split and module.bias is not None:
        _sum_gradient(module.bias, comm, f"{row}.db")
    if isinstance(block, GQA) and block.replicas(comm.grid.tp) > 1:
        for layer in (module.wk, module.wv):
            _sum_gradient(layer.weight, comm, "kv.dw", block.replicas(comm.grid.tp))
    return module


def torch_module(
    block: Block, weights: Weights, comm: Comm, *, skip: tuple[str, ...] = ()
) -> nn.Module:
    """The dense module split by torch's parallelize_module with its column and row styles.

    `skip` leaves out the styles of these layers, to see what that breaks: a row layer then gets its
    own shard of the weight without the sum behind it, a column layer without the gradient sum.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    module = dense_module(block, weights)
    styles = {name: ColwiseParallel() for name in module.COLUMNS}
    styles |= {name: RowwiseParallel() for name in module.ROWS}
    for name in skip:
        layer, at = getattr(module, name), comm.links["tp"].index
        dim = 0 if name in module.COLUMNS else 1
        layer.weight = nn.Parameter(layer.weight.detach().chunk(comm.grid.tp, dim)[at].clone())
        del styles[name]
    mesh = DeviceMesh.from_group(comm.links["tp"].transport.group, comm.device.type)
    return parallelize_module(module, mesh, styles)


def linear(weight: Tensor) -> nn.Linear:
    """A Linear layer without bias that holds a copy of weight [out, in]."""
    out_features, in_features = weight.shape
    layer = nn.Linear(in_features, out_features, False, weight.device, weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, and a plain tensor as it is."""
    return x.to_local() if hasattr(x, "to_local") else x


def _sum_gradient(weight: Tensor, comm: Comm, site: str, span: int | None = None) -> None:
    """Sum the gradient of a replicated parameter over the ranks that see other parts of it."""

    def reduce(weight: Tensor) -> None:
        comm.all_reduce(weight.grad, site, span=span, out=weight.grad)

    weight.register_post_accumulate_grad_hook(reduce)
