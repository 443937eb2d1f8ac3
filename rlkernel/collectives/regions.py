"""The four autograd regions of tensor parallelism: what forward moves, and what backward moves.

    region    forward          backward         where it stands
    copy      identity         all-reduce       replicated input of a column-parallel layer
    reduce    all-reduce       identity         partial output of a row-parallel layer
    gather    all-gather       reduce-scatter   sequence shards -> replicated input
    scatter   reduce-scatter   all-gather       partial output -> sequence shards

copy and reduce are conjugates, gather and scatter as well: the backward of one is the forward of
the other. Megatron calls them copy-to, reduce-from, gather-from and reduce-scatter-to regions. The
site of an identity is never called.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.collectives.comm import Comm


def copy(x: Tensor, comm: Comm, site: str, axis: str = "tp", span: int | None = None) -> Tensor:
    """x replicated on the group -> x. Backward: tree sum of the ranks' gradients at `site`.

    span: x is replicated on runs of that many neighbours only, and summed over those.
    """
    return _Copy.apply(x, comm, site, axis, span)


def reduce(x: Tensor, comm: Comm, site: str, axis: str = "tp") -> Tensor:
    """A partial sum on each rank -> its tree sum on all of them, at `site`. Backward: identity."""
    return _Reduce.apply(x, comm, site, axis)


def gather(
    x: Tensor, comm: Comm, site: str, backward_site: str, axis: str = "tp", dim: int = 0
) -> Tensor:
    """A shard of `dim` on each rank -> the whole. Backward: reduce-scatter at `backward_site`."""
    return _Gather.apply(x, comm, site, backward_site, axis, dim)


def scatter(
    x: Tensor, comm: Comm, site: str, backward_site: str, axis: str = "tp", dim: int = 0
) -> Tensor:
    """A partial sum on each rank -> a shard of `dim` of the tree sum. Backward: all-gather at
    `backward_site`.
    """
    return _Scatter.apply(x, comm, site, backward_site, axis, dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, site, axis, span):
        ctx.route = (comm, site, axis, span)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        comm, site, axis, span = ctx.route
        return comm.all_reduce(grad, site, axis, span=span), None, None, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, site, axis):
        return comm.all_reduce(x, site, axis)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, site, backward_site, axis, dim):
        ctx.route = (comm, backward_site, axis, dim)
        return comm.all_gather(x, site, axis, dim=dim)

    @staticmethod
    def backward(ctx, grad):
        comm, site, axis, dim = ctx.route
        return comm.reduce_scatter(grad, site, axis, dim=dim), None, None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm, site, backward_site, axis, dim):
        ctx.route = (comm, backward_site, axis, dim)
        return comm.reduce_scatter(x, site, axis, dim=dim)

    @staticmethod
    def backward(ctx, grad):
        comm, site, axis, dim = ctx.route
        return comm.all_gather(grad, site, axis, dim=dim), None, None, None, None, None
