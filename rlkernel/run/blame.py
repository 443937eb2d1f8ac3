"""Who is guilty? From what torchrun, the ranks and the kernel left behind, a reason for every rank.

torchrun ends the survivors at the first failure, a rank killed by SIGKILL writes nothing, and its
peers complain about a lost connection, often before torchrun looks. So the first complaint is
rarely the cause:

    died by a signal that the agent did not send      guilty
    raised anything but PeerLost                      guilty
    ended without a word, exit code not 0             guilty
    raised PeerLost                                   victim
    ended by the agent                                ended after rank k failed;
                                                      guilty if nobody else is and victims name it
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass, field

GUILTY, VICTIM, ENDED, FINISHED = "guilty", "victim", "ended", "finished"


@dataclass(frozen=True)
class Fate:
    """What is known of one rank. exit_code as of subprocess: negative for a signal.

    ended: the agent ended it. error: {"type", "message", "traceback", "time" (s), "peer_lost":
    bool, "suspects": [ranks]} where the rank could still write. stack: where it stood when a signal
    came, as far as its log tells.
    """

    rank: int
    exit_code: int
    ended: bool = False
    error: dict | None = None
    stack: str = ""


@dataclass
class Judgement:
    """failures: {"rank", "status", "reason", "traceback"} a rank. guilty: the first one first."""

    failures: list[dict] = field(default_factory=list)
    guilty: list[int] = field(default_factory=list)

    def of(self, rank: int) -> dict:
        return next(failure for failure in self.failures if failure["rank"] == rank)


def judge(world: int, fates: list[Fate], away: Collection[int] = ()) -> Judgement:
    """A reason for each of `world` ranks; ranks without a fate ended well.

    away: ranks of other nodes, whose agents tell nobody here how they ended; one that its peers
    miss is guilty.
    """
    known = {fate.rank: fate for fate in fates}
    guilty = sorted((fate for fate in fates if _acted(fate)), key=_first)
    if not guilty:
        suspects = [rank for rank in _suspects(fates) if rank in known or rank in away]
        guilty = [known.get(rank, Fate(rank, 0)) for rank in suspects] or fates[:1]
    names = [fate.rank for fate in guilty]
    because = f"rank {names[0]} failed" if names else "a rank failed"
    failures = [
        _away(rank, rank in names)
        if rank in away and rank not in known
        else _entry(rank, known.get(rank), rank in names, because)
        for rank in range(world)
    ]
    return Judgement(failures, names)


def all_ended(world: int, reason: str, stacks: dict[int, str]) -> list[dict]:
    """The failures of a run that was ended from above: nobody is guilty, all have a reason."""
    return [
        {"rank": rank, "status": ENDED, "reason": reason, "traceback": stacks.get(rank) or None}
        for rank in range(world)
    ]


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _acted(fate: Fate) -> bool:
    """Whether this rank failed by itself."""
    if fate.error is not None:
        return not fate.error["peer_lost"]
    return fate.exit_code != 0 and not fate.ended


def _first(fate: Fate) -> tuple:
    """Signals before exceptions (they may be their echo), exceptions by their time.

    An abort comes last of the signals: so a library ends a process that has lost its peer.
    """
    aborted = fate.exit_code == -signal.SIGABRT
    return (fate.error is not None, aborted, fate.error["time"] if fate.error else 0.0, fate.rank)


def _suspects(fates: list[Fate]) -> list[int]:
    """Whom the victims miss, the most missed first; only ranks that did not complain themselves.

    Everybody complains only where the network is broken: then whoever complained first is shown.
    """
    complained = sorted((f for f in fates if f.error is not None), key=_first)
    votes: dict[int, int] = {}
    for fate in complained:
        for rank in fate.error["suspects"]:
            votes[rank] = votes.get(rank, 0) + 1
    for fate in complained:
        votes.pop(fate.rank, None)
    if votes:
        return sorted(votes, key=lambda rank: (-votes[rank], rank))
    return [fate.rank for fate in complained[:1]]


def _away(rank: int, guilty: bool) -> dict:
    reason = "ran on another node, which alone knows how it ended"
    if guilty:
        reason = "did not answer its peers; it " + reason
    status = GUILTY if guilty else ENDED
    return {"rank": rank, "status": status, "reason": reason, "traceback": None}


def _entry(rank: int, fate: Fate | None, guilty: bool, because: str) -> dict:
    if fate is None or (fate.exit_code == 0 and fate.error is None):
        return {"rank": rank, "status": FINISHED, "reason": "ended well", "traceback": None}
    if fate.error is not None:
        status = GUILTY if guilty else VICTIM
        reason = f"raised {fate.error['type']}: {fate.error['message']}".removesuffix(": ")
        return {
            "rank": rank,
            "status": status,
            "reason": reason,
            "traceback": fate.error["traceback"],
        }
    stack = fate.stack or None
    if guilty and fate.ended:
        reason = "did not answer its peers, ended by the agent"
        return {"rank": rank, "status": GUILTY, "reason": reason, "traceback": stack}
    if fate.ended:
        reason = f"ended after {because}"
        return {"rank": rank, "status": ENDED, "reason": reason, "traceback": stack}
    if fate.exit_code < 0:
        name = signal_name(-fate.exit_code)
        reason = f"killed by {name}"
    else:
        reason = f"exited with code {fate.exit_code} and left no error"
    return {"rank": rank, "status": GUILTY, "reason": reason, "traceback": stack}
