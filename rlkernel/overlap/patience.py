"""A rank that compiles is not dead: where ranks may come minutes apart, they meet here first.

The bound of a collective is for peers that are ready. What a process does once in its life,
torch.compile and Triton's compiler above all, takes the slowest of many ranks on few cores longer.
So it is done inside a `meeting`, where nobody is waited for in a collective, and behind it all meet
through the store. Who is inside gives a sign of life there every second: one that is gone, and a
node that is, are missed as soon as in a collective.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

from rlkernel.collectives.comm import Comm
from rlkernel.collectives.errors import PeerLost

PATIENCE_S = 600.0  # the usual bound of a whole launch, which ends what takes longer
COMES_S, QUIET_S = 50.0, 20.0  # until the first sign of life, and from one to the next, at least
BEAT_S, LOOK_S = 1.0, 0.05


@contextlib.contextmanager
def meeting(comm: Comm, site: str) -> Iterator[None]:
    """Whatever is done inside may take its time; left once every rank of axis "ep" is there. Raises
    PeerLost with the first rank that is gone, or not ready in the end.
    """
    link = comm.links["ep"]
    if link.size == 1 or comm.roll_call is None:
        yield
        return
    store, group = comm.roll_call.store, "-".join(map(str, link.ranks))
    number = store.add(f"rlkernel/ready/{group}/{comm.rank}", 1)  # the how-manieth of this group
    at, left = f"rlkernel/ready/{group}/{number}", threading.Event()
    threading.Thread(target=_live, args=(store, f"{at}/{comm.rank}", left), daemon=True).start()
    try:
        yield
        try:
            store.set(f"{at}/{comm.rank}", site)
            _wait(store, at, site, link.ranks, comm.roll_call.timeout_s)
        except RuntimeError as error:
            if isinstance(error, PeerLost):
                raise
            message = f"{site}: a peer of group {list(link.ranks)} is gone, and the store with it"
            raise PeerLost(f"{message}: {error}", site=site) from error
    finally:
        left.set()


def _live(store: dist.Store, name: str, left: threading.Event) -> None:
    """A sign of life a second: name/1, name/2, ..."""
    count = 0
    with contextlib.suppress(RuntimeError):  # the store is gone; who waits through it says so
        while not left.wait(BEAT_S if count else 0.0):
            count += 1
            store.set(f"{name}/{count}", "alive")


def _wait(store: dist.Store, at: str, site: str, ranks: tuple[int, ...], quiet_s: float) -> None:
    began = time.monotonic()
    waited, signs = list(ranks), dict.fromkeys(ranks, (0, began))
    while waited and not store.check([f"{at}/{rank}" for rank in waited]):
        time.sleep(LOOK_S)
        waited = [rank for rank in waited if not store.check([f"{at}/{rank}"])]
        now = time.monotonic()
        for rank in waited:
            count, since = signs[rank]
            if store.check([f"{at}/{rank}/{count + 1}"]):
                signs[rank] = count + 1, now
                continue
            limit = max(quiet_s, QUIET_S) if count else COMES_S
            if now - since > limit or now - began > PATIENCE_S:
                how = f"no sign of life for {now - since:.0f} s"
                how = how if now - since > limit else f"not ready within {PATIENCE_S:g} s"
                raise PeerLost(f"rank {rank} at {site!r}: {how}", ranks=(rank,), site=site)
