"""Who is missing? Held through the rendezvous store once a collective has failed.

A backend says that something timed out, not who was late. Every rank that notices posts its name
and waits a moment for the others; whoever has not posted by then is the suspect. Costs nothing
until something is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from rlkernel.collectives.errors import PeerLost


class RollCall:
    """store: shared by all ranks. timeout_s: the bound of one collective; grace_s: how long names
    are collected.
    """

    def __init__(
        self, store: dist.Store, rank: int, timeout_s: float, grace_s: float | None = None
    ) -> None:
        self.store, self.rank, self.timeout_s = store, rank, timeout_s
        # A closed connection is noticed at once, a silent peer only after a full timeout.
        self.grace_s = timeout_s + 1.0 if grace_s is None else grace_s

    def hold(self, site: str, ranks: Sequence[int], error: Exception) -> PeerLost:
        """Post this rank, wait for the group's other names, and return the error to raise."""
        missing = [r for r in ranks if r != self.rank]
        try:
            self.store.set(_key(self.rank), site)
            deadline = time.monotonic() + self.grace_s
            while missing and time.monotonic() < deadline:
                missing = [r for r in missing if not self.store.check([_key(r)])]
                time.sleep(0.02)
            # The first to raise ends the launch: leave the others a moment to finish their own roll
            # call.
            time.sleep(0.2)
        except RuntimeError:
            # The store went down with the rank or the agent that hosted it: nobody can be asked any
            # more.
            return PeerLost(
                f"{site}: a peer of group {list(ranks)} is gone, and the store with it: {error}",
                site=site,
            )
        silent = ", ".join(f"rank {r}" for r in missing)
        who = (
            f"{silent} did not answer"
            if missing
            else "all ranks answered the roll call, so the network is suspect"
        )
        return PeerLost(
            f"{site}: rank {self.rank} waited at most {self.timeout_s:g} s for group "
            f"{list(ranks)}; {who}. "
            f"The backend said: {str(error).strip().splitlines()[0]}",
            ranks=tuple(missing),
            site=site,
        )


def _key(rank: int) -> str:
    return f"rlkernel/noticed/{rank}"


def blames_a_peer(error: Exception) -> bool:
    """gloo and NCCL have no exception type of their own for a dead or late peer: their words
    decide.
    """
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    words = (
        "timed out",
        "timeout",
        "closed by peer",
        "connection reset",
        "broken pipe",
        "connection refused",
        "gloo",
    )
    return any(word in str(error).lower() for word in words)
