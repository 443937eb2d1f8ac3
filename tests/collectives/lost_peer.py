"""One of four ranks that run without an agent: rank 2 dies, comes too late or never posts. Of two
ranks, for example on GPUs, it is rank 1.

    lost_peer.py MANNER [cpu | cuda]

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
from sharing import join, sharing

from rlkernel.collectives.agreement import StoreAgreement
from rlkernel.collectives.comm import Link
from rlkernel.collectives.errors import PeerLost
from rlkernel.grid import Grid

LIMITS_S = {"cpu": 2.0, "cuda": 10.0}  # a GPU's kernels are compiled in between


def main(manner: str, device: str = "cpu") -> None:
    shared, limit_s = manner.startswith("shared"), LIMITS_S[device]
    world = join(device, limit_s)
    comm = (sharing(world) if shared else world).comm(Grid(tp=world.size))
    lost, ones = world.size // 2, torch.ones(1, device=comm.device)
    world.meet("kernels are imported", 60)
    assert comm.all_reduce(ones, "warm").item() == world.size
    if shared:
        assert comm.all_reduce(ones, "down.forward").item() == world.size  # nothing left to agree
    if manner == "unposted":
        link = comm.links["tp"]
        agreement = StoreAgreement(world.store, link.ranks, comm.rank, limit_s)
        comm.links = {"tp": Link(link.ranks, link.index, link.transport, agreement)}
    if world.rank == lost:
        if manner.endswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(limit_s * 5)
        return
    start = time.monotonic()
    try:
        if manner == "collect":
            comm.collect("here")
        else:
            comm.all_reduce(ones, "down.forward")
            getattr(comm.links["tp"].transport, "settle", lambda: None)()  # a GPU's say it here
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
        time.sleep(limit_s)  # it hosts the store that the others still ask
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
