"""Ranks that are threads of one process, CUDA's streams that do nothing, and the layer by hand."""

from __future__ import annotations

import threading
import types

import torch

from rlkernel.collectives.comm import Link
from rlkernel.collectives.groups import alone


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
