"""Ranks that are threads of one process, CUDA's streams that do nothing, and the layer by hand."""

from __future__ import annotations

import ctypes
import threading
import time
import types
from dataclasses import replace

import torch

from rlkernel.collectives.comm import Link
from rlkernel.collectives.groups import alone
from rlkernel.kernels.a2a_gemm import Schedule
from rlkernel.overlap import fused_kernel
from rlkernel.overlap.fused_kernel import Choice, Fused
from rlkernel.overlap.fused_memory import FusedMemory
from rlkernel.overlap.layout import layout_of
from rlkernel.overlap.stage import stage_of
from tests.overlap.inputs import drawn, layer


class Stream:
    cuda_stream = 0

    def wait_event(self, event): ...

    def wait_stream(self, stream): ...

    def record_event(self):
        return object()


def rank_of(size, me):
    comm = alone()
    comm.links = {"ep": Link(tuple(range(size)), me, types.SimpleNamespace(name="played"), None)}
    return comm


def together(ranks, work):
    """[rank] -> what work(rank) gave; errors of any thread are raised here."""
    given, errors = [None] * len(ranks), []

    def run(i):
        try:
            given[i] = work(ranks[i])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return given


def slow_down(rank):
    """Each chunk that it computes is taken out of the buffers late."""
    real = rank.open

    def slowly(direction, slices):
        route = real(direction, slices)
        keep = route.keep
        route.keep = lambda parts: (time.sleep(0.05), keep(parts))[1]
        return route

    rank.open = slowly


def by_hand(ranks):
    """What every rank must get: all token slices computed by their owner, gradients by autograd."""
    size, batch = len(ranks), ranks[0].at.batch
    xs = [rank.x.detach().clone().requires_grad_() for rank in ranks]
    outs = []
    for me, rank in enumerate(ranks):
        rank_x = torch.cat([x.chunk(size, 1)[me] for x in xs])
        silent = rank.ffn
        z = torch.bmm(rank_x.transpose(0, 1), silent.w1).transpose(0, 1) + silent.b1
        u, g = z.chunk(2, -1)
        h = silent.norm_x(u) * torch.nn.functional.silu(silent.norm_gate(g))
        y = torch.bmm(h.transpose(0, 1), silent.wout).transpose(0, 1) + silent.bout
        outs.append(y.split(batch))
    whole = [torch.cat([outs[owner][p] for owner in range(size)], 1) for p in range(size)]
    named = [dict(rank.ffn.named_parameters()) for rank in ranks]
    flat = [*xs, *(p for each in named for p in each.values())]
    grads = torch.autograd.grad(whole, flat, [rank.dy for rank in ranks])
    found, rest = [], list(grads[size:])
    for p in range(size):
        mine = dict(zip(named[p], rest[: len(named[p])]))
        rest = rest[len(named[p]) :]
        found.append({"output": whole[p].detach(), "input": grads[p], **mine})
    return found


class Memory:
    """PeerMemory of one of P ranks in one process; `shared` is seen by all of them."""

    def __init__(self, comm, sizes, dtype, flags, shared):
        link = comm.links["ep"]
        self.sizes, self.index, self.size = sizes, link.index, link.size
        self.shared, self.kinds = shared, dict.fromkeys(sizes, dtype) | {"flags": torch.int32}
        self.counts = {name: 2 * count for name, count in sizes.items()}
        self.counts["flags"] = self.size * flags

    def table(self, name, peer):
        kind = self.kinds[name]
        empty = 0 if kind == torch.int32 else float("nan")
        made = torch.full((self.counts[name],), empty, dtype=kind)
        return self.shared.setdefault((name, peer), made)

    def buffer(self, name, which, peer):
        size = self.sizes[name]
        return self.table(name, peer)[which * size : (which + 1) * size]


class Driver:
    """The runtime's two copies, on host memory."""

    cudaMemcpyKind = types.SimpleNamespace(cudaMemcpyDeviceToDevice=3)

    def __init__(self):
        self.copied = []

    def cudaMemcpy2DAsync(self, to, to_pitch, of, pitch, width, rows, kind, stream):
        assert width <= to_pitch and width <= pitch
        self.copied.append(width * rows)
        for row in range(rows):
            ctypes.memmove(to + row * to_pitch, of + row * pitch, width)
        return (0,)

    def cudaMemcpyAsync(self, to, of, count, kind, stream):
        ctypes.memmove(to, of, count)
        return (0,)


class Rank:
    def __init__(self, me, size, flags=1, batch=3, tokens=24, dim=8, limit_s=20.0, **more):
        comm = rank_of(size, me)
        self.ffn = layer(tokens, dim, 2, comm, seed=9)
        self.x, self.dy = drawn(me, batch, tokens, dim), drawn(me, batch, tokens, dim, seed=1)
        self.at = layout_of(self.ffn, self.x)
        one = Schedule(chunks=flags, lead=1, bn=128, raster=2)
        choice = Choice.of(self.at) if flags == 1 else Choice(one, one, one, one)
        self.memory = FusedMemory(comm, self.at, self.x.dtype)
        limited = replace(self.memory.signals, limit_ns=int(limit_s * 1e9))
        self.memory.signals = limited
        made = {"memory": self.memory, "choice": choice, **more}
        self.fused = Fused(comm, self.at, stage_of(self.ffn), self.x.dtype, **made)

    def forward(self, x):
        return fused_kernel.run(self.ffn, x, self.fused)


def close(got, wanted):
    for name, right in wanted.items():
        torch.testing.assert_close(got[name], right, rtol=2e-5, atol=2e-5, msg=name)
