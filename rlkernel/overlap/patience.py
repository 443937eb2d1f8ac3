"""A rank that compiles is not dead: where ranks may come minutes apart, they meet here first.

The bound of a collective is for peers that are ready. What a process does once in its life,
torch.compile and Triton's compiler above all, takes the slowest of many ranks on few cores longer.
So it is done where nobody is waited for in a collective, and behind it all meet through the store.
A rank that dies meanwhile is noticed by whoever started it.
"""

from __future__ import annotations

import datetime

from rlkernel.collectives.comm import Comm
from rlkernel.collectives.errors import PeerLost

PATIENCE_S = 600.0  # the usual bound of a whole launch, which ends what takes longer


def wait_for_all(comm: Comm, site: str) -> None:
    """Return once every rank of axis "ep" is here. Raises PeerLost with the first that is not."""
    link = comm.links["ep"]
    if link.size == 1 or comm.roll_call is None:
        return
    store, group = comm.roll_call.store, "-".join(map(str, link.ranks))
    number = store.add(f"rlkernel/ready/{group}/{comm.rank}", 1)  # the how-manieth of this group
    store.set(f"rlkernel/ready/{group}/{number}/{comm.rank}", site)
    for peer in link.ranks:
        key = f"rlkernel/ready/{group}/{number}/{peer}"
        try:
            store.wait([key], datetime.timedelta(seconds=PATIENCE_S))
        except RuntimeError as error:
            message = f"rank {peer} was not ready for {site!r} within {PATIENCE_S:g} s"
            raise PeerLost(message, ranks=(peer,), site=site) from error
