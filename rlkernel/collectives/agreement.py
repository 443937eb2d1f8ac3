"""Do the ranks of a group mean the same call? Asked before any data moves.

gloo does not notice when ranks come with different shapes: one of them gets garbage as a success,
or the process aborts. Two ways to ask, one for each kind of backend:

- `HeaderAgreement`: a fixed-size header goes ahead of the data at every call (a fraction of a
  millisecond on gloo).
- `StoreAgreement`: the signature is posted to the rendezvous store at its first use at a site and
  the others' are awaited with a timeout, so that nobody waits inside a GPU collective for a peer
  that has not come. Later calls with the same signature cost nothing, and nothing happens under
  CUDA graph capture.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from rlkernel.collectives.errors import Disagreement, PeerLost
from rlkernel.collectives.transport import Transport

HEADER_BYTES = 256


class Agreement(Protocol):
    def check(self, site: str, signature: str) -> None:
        """Return when all ranks of the group came with this signature. Raises Disagreement or
        PeerLost.
        """
        ...


class HeaderAgreement:
    """Exchange a fixed-size text through the group's own transport at every call."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self.transport, self.ranks = transport, tuple(ranks)
        self.calls = 0

    def check(self, site: str, signature: str) -> None:
        self.calls += 1
        # The running number catches a rank that skipped a call and met the others at the next alike
        # one.
        text = f"call {self.calls}: {signature}".encode()[:HEADER_BYTES]
        header = torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)
        said = [
            bytes(h.tolist()).decode(errors="replace").rstrip()
            for h in self.transport.gather(header)
        ]
        compare(site, dict(zip(self.ranks, said, strict=True)))


class StoreAgreement:
    """Post each new signature to the store; wait for the peers' with a timeout."""

    def __init__(
        self, store: dist.Store, ranks: Sequence[int], rank: int, timeout_s: float
    ) -> None:
        self.store, self.ranks, self.rank = store, tuple(ranks), rank
        self.timeout = datetime.timedelta(seconds=timeout_s)
        # A group is wrapped anew for each case: the how-manieth wrapping keeps their words apart.
        group = "-".join(map(str, self.ranks))
        self.prefix = f"rlkernel/agree/{group}/{store.add(f'wrapped/{group}/{rank}', 1)}"
        self.agreed: dict[str, str] = {}
        self.changes: dict[str, int] = {}

    def check(self, site: str, signature: str) -> None:
        if self.agreed.get(site) == signature:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise Disagreement(
                f"site {site!r} was first used under graph capture: run it once before capturing"
            )
        self.changes[site] = self.changes.get(site, 0) + 1
        prefix = f"{self.prefix}/{site}/{self.changes[site]}"
        self.store.set(f"{prefix}/{self.rank}", signature)
        said = {}
        for peer in self.ranks:
            try:
                self.store.wait([f"{prefix}/{peer}"], self.timeout)
            except Exception as error:
                waited = f"within {self.timeout.total_seconds():g} s"
                raise PeerLost(
                    f"rank {peer} did not come to {site!r} {waited}", ranks=(peer,), site=site
                ) from error
            said[peer] = self.store.get(f"{prefix}/{peer}").decode()
        compare(site, said)
        self.agreed[site] = signature


def compare(site: str, said: dict[int, str]) -> None:
    """Raise Disagreement, naming what every rank gave, unless all said the same."""
    if len(set(said.values())) > 1:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in said.items())
        raise Disagreement(
            f"the ranks of a group disagree at {site!r}: {listed}. All must make the same call"
        )
