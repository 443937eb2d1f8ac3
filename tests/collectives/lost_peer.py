"""One of four ranks that run without an agent: rank 2 dies, comes too late or never posts.

`collect` waits in a collective that takes its bound from the process group alone. `shared ...`: the
ranks have agreed, their sum goes through shared memory, and its kernels wait.

Without an agent nobody ends the survivors, so each of them must find its own words. Prints one JSON
object: the error's class, its message, the suspects, and how long it took.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch

from rlkernel.collectives.agreement import StoreAgreement
from rlkernel.collectives.comm import Link
from rlkernel.collectives.errors import PeerLost
from rlkernel.collectives.groups import World
from rlkernel.grid import Grid

LOST, LIMIT_S = 2, 2.0


def main(manner: str) -> None:
    shared = manner.startswith("shared")
    world = World.join(*(("symmetric", LIMIT_S, "cpu") if shared else ("gloo", LIMIT_S)))
    comm = world.comm(Grid(tp=4))
    world.meet("kernels are imported", 60)
    assert comm.all_reduce(torch.ones(1), "warm").item() == 4
    if shared:
        assert comm.all_reduce(torch.ones(1), "down.forward").item() == 4  # nothing left to agree
    if manner == "unposted":
        link = comm.links["tp"]
        agreement = StoreAgreement(world.store, link.ranks, comm.rank, LIMIT_S)
        comm.links = {"tp": Link(link.ranks, link.index, link.transport, agreement)}
    if world.rank == LOST:
        if manner.endswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LIMIT_S * 5)
        return
    start = time.monotonic()
    try:
        if manner == "collect":
            comm.collect("here")
        else:
            comm.all_reduce(torch.ones(1), "down.forward")
        said = {"error": None}
    except PeerLost as error:
        said = {
            "error": "PeerLost",
            "message": str(error),
            "ranks": error.ranks,
            "site": error.site,
        }
    print(json.dumps({**said, "seconds": time.monotonic() - start}), flush=True)
    if world.rank == 0:
        time.sleep(LIMIT_S)  # it hosts the store that the others still ask
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
