"""What can go wrong between ranks, by name."""

from __future__ import annotations


class CommError(RuntimeError):
    """Base of every error that the seam between ranks raises."""


class Disagreement(CommError):
    """The ranks of a group came to one site with different shapes, dtypes, contracts or calls."""


class PeerLost(CommError):
    """A rank of the group died or did not arrive in time.

    ranks: the ranks that did not answer the roll call (global ranks; empty when all did). site:
    where it was noticed.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), site: str = "") -> None:
        super().__init__(message)
        self.ranks = ranks
        self.site = site
