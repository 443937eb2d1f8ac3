"""Many calls in a row with a rank delayed at random and memory freed in between; by hand, on GPUs.

    torchrun --nproc-per-node 2 tests/overlap/stress.py sm-free 1000

Every call has other inputs and must have the bits of `none`; every tenth goes backward as well. On
the host one rank sleeps, on its GPU it multiplies matrices ahead of a call. Prints one line a rank.
"""

from __future__ import annotations

import random
import sys
import time

import torch

from rlkernel.collectives.groups import World
from rlkernel.grid import Grid
from rlkernel.overlap.layer import with_ep
from tests.overlap.inputs import differing, layer, trained

SHAPES = ((4, 16, 128, 2, 4), (33, 64, 256, 3, 8), (1, 22, 132, 2, 3))  # B, T, D, k, chunks


def main(overlap: str, calls: int) -> None:
    cuda = torch.cuda.is_available()
    world = World.join("nccl" if cuda else "gloo", 60)
    comm = with_ep(world.comm(Grid(dp=world.size)))
    dice, heavy, begin = random.Random(world.rank), None, time.monotonic()
    ffns = [layer_on(comm, *shape) for shape in SHAPES]
    wrong = 0
    for number in range(calls):
        batch, tokens, dim, _, _ = SHAPES[number % len(SHAPES)]
        ffn = ffns[number % len(SHAPES)]
        x = torch.randn(batch, tokens, dim, device=comm.device).to(ffn.w1.dtype)
        if dice.random() < 0.2:
            time.sleep(dice.random() * 0.01)
        if cuda and dice.random() < 0.3:
            heavy = torch.randn(4096, 4096, device=comm.device)
            heavy = heavy @ heavy
        if number % 7 == 0:
            heavy = None
            torch.cuda.empty_cache()
        if number % 10 == 0:
            results = [trained(way(ffn, o), ffn, x, x) for o in (overlap, "none")]
            wrong += bool(differing(*results))
        else:
            with torch.no_grad():
                wrong += not torch.equal(ffn(x, overlap), ffn(x))
    took = time.monotonic() - begin
    print(f"rank {world.rank}: {overlap}, {calls} calls, {wrong} wrong, {took:.1f} s", flush=True)
    world.meet("all are through", 60)
    world.leave()
    sys.exit(bool(wrong))


def layer_on(comm, batch, tokens, dim, k, chunks):
    dtype = torch.bfloat16 if comm.device.type == "cuda" else torch.float32
    made = layer(tokens, dim, k, comm, dtype=dtype, chunks=chunks)
    return made.to(comm.device)


def way(ffn, overlap):
    return lambda x: ffn(x, overlap)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
