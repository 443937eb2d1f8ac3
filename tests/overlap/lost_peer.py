"""One rank of an A2A-FFN, without an agent: the rank in the middle dies or is late behind dispatch.

Prints one JSON object: the error's class, its message, the suspects, the site, the seconds; who has
nothing to say within a minute says where it stands. Four ranks on a CPU. By hand on two GPUs:
sm-free, whose waits are streams', and kernel, whose waits are inside the GEMMs:

    for r in 0 1; do RANK=$r LOCAL_RANK=$r WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 \
        MASTER_PORT=29511 PYTHONPATH=. python tests/overlap/lost_peer.py killed kernel & done; wait
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time

import torch

from rlkernel.collectives.errors import PeerLost
from rlkernel.collectives.groups import World
from rlkernel.grid import Grid
from rlkernel.overlap import chunks, copy_engine
from rlkernel.overlap.layer import with_ep
from tests.overlap.inputs import drawn, layer

CUDA = torch.cuda.is_available()
LIMIT_S = 10.0 if CUDA else 3.0


def main(manner: str, overlap: str) -> None:
    world = World.join("nccl" if CUDA else "gloo", LIMIT_S)
    comm = with_ep(world.comm(Grid(dp=world.size)))
    ffn = layer(16, 16, 2, comm, dtype=torch.bfloat16 if CUDA else torch.float32).to(comm.device)
    x = drawn(world.rank, 2, 16, 16).to(comm.device, ffn.w1.dtype)
    assert ffn(x).equal(ffn(x, overlap))

    def fall(*_):
        if manner == "killed":
            time.sleep(1.0)  # what it dispatched has left it
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LIMIT_S * 5)
        os._exit(0)

    if world.rank == world.size // 2:
        chunks.Messages.send = copy_engine.Pushes.send = fall
        if CUDA:
            from rlkernel.overlap import fused_kernel  # Hopper's language

            fused_kernel.Fused.leaving = fall
    start = time.monotonic()
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        ffn(x, overlap)
        if CUDA:  # the call has returned, its streams hang until the watch lets them go
            torch.cuda.synchronize()
            ffn(x, overlap)
        said = {"error": None}
    except PeerLost as error:
        said = {"error": "PeerLost", "message": str(error), "ranks": error.ranks}
        said["site"] = error.site
    print(json.dumps({**said, "seconds": time.monotonic() - start}), flush=True)
    if world.rank == 0:
        time.sleep(LIMIT_S)  # it hosts the store that the others still ask
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
