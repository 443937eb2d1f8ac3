"""Ranks start at one instant, and the slowest of each sample counts. Ranks are threads here."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from rlkernel.run import aligned
from rlkernel.run.timing import Protocol

CPU = torch.device("cpu")
PROTOCOL = Protocol(samples=4, graph=False)


def ranks_of(count: int, work, after=lambda rank: None) -> list[list[dict]]:
    """aligned() on that many threads; `after` runs on each behind every meeting."""
    barrier, values, found = threading.Barrier(count), [None] * count, [None] * count

    def run(rank: int) -> None:
        def collect(value):
            values[rank] = value
            barrier.wait()
            every = list(values)
            barrier.wait()
            after(rank)
            return every

        found[rank] = aligned.aligned({"work": lambda: work(rank)}, PROTOCOL, collect, CPU)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_who_leaves_the_meeting_late_starts_with_the_others(monkeypatch):
    monkeypatch.setattr(aligned, "LEAD_S", 0.05)
    begun = [[], []]
    ranks_of(2, lambda rank: begun[rank].append(time.monotonic()),
             lambda rank: time.sleep(0.02 * rank))  # fmt: skip
    apart = [abs(a - b) for a, b in zip(*begun)][-PROTOCOL.samples :]  # without warm-ups
    assert sorted(apart)[1] < 0.01


def test_lateness_is_counted_and_told(monkeypatch):
    monkeypatch.setattr(aligned, "LEAD_S", 0.0)
    mine, late = ranks_of(2, lambda rank: None, lambda rank: time.sleep(0.03 * rank))
    assert all(s["late_us"] > 25_000 and s["us"] >= s["late_us"] for s in late)
    assert all(s["us"] < 25_000 for s in mine)


def test_hosts_without_a_common_clock_start_at_the_barrier(monkeypatch):
    monkeypatch.setattr(aligned, "one_host", lambda collect: False)
    (found,) = ranks_of(1, lambda rank: time.sleep(0.002))
    assert all(s["late_us"] is None and 2000 <= s["us"] < 50_000 for s in found)
    assert aligned.told(PROTOCOL, False)["start"] == "a barrier"
    assert "instant" in aligned.told(PROTOCOL, True)["start"]


def test_one_host_is_one_boot():
    assert aligned.one_host(lambda here: [here, here])
    assert not aligned.one_host(lambda here: [here, f"another than {here}"])


def test_every_variant_once_a_round_and_per_call():
    calls = []
    variants = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    protocol = Protocol(samples=2, graph=False, repeats=3)
    found = aligned.aligned(variants, protocol, lambda value: [value], CPU)
    assert [(s["variant"], s["round"]) for s in found] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert "".join(calls)[6:] == "aaabbb" * 2  # three warm-up calls of each ahead
    assert not any(s["graph"] for s in found)


def test_the_slowest_is_chosen_sample_by_sample():
    times = ([1.0, 9.0, 1.0], [8.0, 2.0, 2.0])
    ranks = [[{"round": n, "us": us} for n, us in enumerate(rank)] for rank in times]
    found = aligned.slowest(ranks)
    assert [(s["us"], s["rank"]) for s in found] == [(8.0, 1), (9.0, 0), (2.0, 1)]
    with pytest.raises(ValueError):
        aligned.slowest([ranks[0], ranks[1][:2]])
