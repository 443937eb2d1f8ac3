"""Who is guilty, from what the ranks left behind: no processes needed to decide it."""

from __future__ import annotations

import signal

import pytest

from rlkernel.run.blame import Fate, all_ended, judge

KILL, TERM, ABRT = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT


def raised(kind: str, *, time: float = 0.0, lost: bool = False, suspects=()) -> dict:
    return {
        "type": kind,
        "message": f"{kind} here",
        "traceback": f"Traceback of {kind}",
        "time": time,
        "peer_lost": lost,
        "suspects": list(suspects),
    }


def lost(rank: int, *suspects: int, time: float = 0.0) -> Fate:
    return Fate(rank, 1, error=raised("PeerLost", time=time, lost=True, suspects=suspects))


ended = {"exit_code": TERM, "ended": True}

CASES = {
    "a killed rank and its victim": ([lost(0, 1), Fate(1, KILL)], [1]),
    "the victim complained first": ([lost(0, time=1.0), Fate(1, KILL)], [1]),
    "an error and a rank ended for it": ([Fate(0, **ended), Fate(1, 1, error=raised("E"))], [1]),
    "an error and a victim": ([lost(0, 1), Fate(1, 1, error=raised("E"))], [1]),
    "a signal before its echo": ([Fate(0, 1, error=raised("Echo")), Fate(1, ABRT)], [1, 0]),
    "a death and the abort of who waited for it": ([Fate(0, ABRT), Fate(2, KILL)], [2, 0]),
    "two errors in the order of time": (
        [Fate(0, 1, error=raised("B", time=2.0)), Fate(1, 1, error=raised("A", time=1.0))],
        [1, 0],
    ),
    "ended by somebody else's TERM": ([Fate(0, **ended), Fate(1, TERM)], [1]),
    "a silent exit": ([Fate(0, **ended), Fate(1, 7)], [1]),
    "a hung rank that its peers name": ([lost(0, 1), Fate(1, **ended)], [1]),
    "the rank most peers miss": (
        [lost(0, 2, 3), lost(1, 3), Fate(2, **ended), Fate(3, **ended)],
        [3, 2],
    ),
    "nobody to name: the first complaint": ([lost(0, time=2.0), lost(1, time=1.0)], [1]),
    "mutual suspicion is no proof": ([lost(0, 1, time=1.0), lost(1, 0, time=2.0)], [0]),
    "a suspect that ended well": ([lost(0, 1)], [0]),
    "ended, and nobody said why": ([Fate(1, **ended)], [1]),
}


@pytest.mark.parametrize("fates, guilty", CASES.values(), ids=CASES)
def test_guilty(fates, guilty):
    assert judge(4, fates).guilty == guilty


@pytest.mark.parametrize("fates, guilty", CASES.values(), ids=CASES)
def test_every_rank_has_a_reason(fates, guilty):
    failures = judge(5, fates).failures
    assert [failure["rank"] for failure in failures] == [0, 1, 2, 3, 4]
    assert all(failure["reason"] for failure in failures)
    assert {f["rank"] for f in failures if f["status"] == "guilty"} == set(guilty)
    assert failures[4] == {
        "rank": 4,
        "status": "finished",
        "reason": "ended well",
        "traceback": None,
    }


def test_reasons_say_what_happened():
    fates = [lost(0, 1), Fate(1, KILL), Fate(2, **ended, stack="Stack"), Fate(3, 7)]
    reasons = [failure["reason"] for failure in judge(4, fates).failures]
    assert reasons == [
        "raised PeerLost: PeerLost here",
        "killed by SIGKILL",
        "ended after rank 1 failed",
        "exited with code 7 and left no error",
    ]


def test_an_exception_without_words_ends_without_a_colon():
    silent = raised("KeyboardInterrupt") | {"message": ""}
    assert judge(1, [Fate(0, 1, error=silent)]).of(0)["reason"] == "raised KeyboardInterrupt"


def test_a_hung_rank_shows_where_it_stood():
    judgement = judge(2, [lost(0, 1), Fate(1, **ended, stack="Stack of hang")])
    assert judgement.of(1)["traceback"] == "Stack of hang"
    assert judgement.of(0)["status"] == "victim"


def test_ended_from_above_blames_nobody():
    failures = all_ended(2, "ended: enough", {1: "Stack"})
    assert [failure["status"] for failure in failures] == ["ended", "ended"]
    assert [failure["traceback"] for failure in failures] == [None, "Stack"]


def test_a_rank_of_another_node_has_not_ended_well():
    """Its agent was ended there; here a peer misses it, and nobody else can say more."""
    judgement = judge(4, [lost(0, 2), Fate(1, **ended)], away={2, 3})
    assert judgement.guilty == [2]
    assert "did not answer its peers" in judgement.of(2)["reason"]
    assert [judgement.of(rank)["status"] for rank in (0, 2, 3)] == ["victim", "guilty", "ended"]
    assert "another node" in judgement.of(3)["reason"]
