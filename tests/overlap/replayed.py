"""The fused layer in a CUDA graph: replayed on other inputs, between calls that are not; by hand.

    PYTHONPATH=. torchrun --nproc-per-node 2 tests/overlap/replayed.py 100

Flags and epochs live on the device, so a replay is a call like any other. Every output must have
the bits of `none`. Prints one line a rank.
"""

from __future__ import annotations

import random
import sys

import torch

from rlkernel.collectives.groups import World
from rlkernel.grid import Grid
from rlkernel.overlap import path
from rlkernel.overlap.layer import with_ep
from tests.overlap.inputs import layer


def main(replays: int) -> None:
    world = World.join("nccl", 60)
    comm = with_ep(world.comm(Grid(dp=world.size)))
    ffn = layer(64, 256, 3, comm, dtype=torch.bfloat16, chunks=4).to(comm.device)
    dice, wrong = random.Random(7), 0  # the same on all ranks: they agree on what comes next
    x = torch.randn(33, 64, 256, device=comm.device).to(torch.bfloat16)
    with torch.no_grad(), path.listening() as heard:
        ffn(x, "kernel")
        assert heard[-1].startswith("fused"), heard
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ffn(x, "kernel")
        for _ in range(replays):
            x.normal_()
            wanted = ffn(x)
            if dice.random() < 0.3:
                wrong += not torch.equal(ffn(x, "kernel"), wanted)
            graph.replay()
            wrong += not torch.equal(out, wanted)
    print(f"rank {world.rank}: {replays} replays, {wrong} wrong", flush=True)
    world.meet("all are through", 60)
    world.leave()
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(int(sys.argv[1]))
