"""Do all ranks run the same libraries under the same NCCL settings? Asked before any collective.

A rank with another NCCL_PROTO meets its peers inside a collective with another protocol: that hangs
or fails far from its cause. So every rank says what it was given, over the control group, first.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

from rlkernel.collectives.errors import CommError

# Each rank's own by intent: which emulated host it is on, where its log goes.
OWN = ("NCCL_HOSTID", "NCCL_DEBUG_FILE")


class SettingsDiffer(CommError):
    """Ranks with other settings or libraries than most. ranks: who they are."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


def of_this_rank() -> dict[str, str]:
    """The NCCL_ variables of this process that all ranks must share."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("NCCL_") and name not in OWN
    }


def require_equal(said: Sequence[Mapping[str, object]]) -> None:
    """said: one mapping a rank. Raises SettingsDiffer, naming ranks and values; the odd ones are
    those that differ from what most ranks say (the lowest ranks, where it is even)."""
    odd: dict[int, list[str]] = {}
    for name in sorted({name for one in said for name in one}):
        values = [one.get(name) for one in said]
        usual = Counter(values).most_common(1)[0][0]
        for rank, value in enumerate(values):
            if value != usual:
                odd.setdefault(rank, []).append(f"{name} is {_told(value)}, not {_told(usual)}")
    if odd:
        listed = "; ".join(f"rank {rank}: {', '.join(what)}" for rank, what in odd.items())
        raise SettingsDiffer(
            f"the ranks were started differently: {listed}. All must be alike", tuple(odd)
        )


def _told(value: object) -> str:
    return "unset" if value is None else repr(value)
