"""The timing protocol on a CPU: order, warm-up, what is dropped; a meter that reads a stream."""

from __future__ import annotations

import time
import types

import torch

from rlkernel.collectives.groups import alone
from rlkernel.overlap import clock
from rlkernel.overlap.layer import with_ep


def test_variants_are_interleaved_and_the_first_round_is_dropped():
    called = []
    work = {name: lambda name=name: called.append(name) for name in ("a", "b")}
    found = clock.interleaved(work, clock.Clock(warmup=2, tests=3, sleep_ms=0), with_ep(alone()))
    assert called[:4] == ["a", "a", "b", "b"] and called[4:] == [s["variant"] for s in found]
    assert [(s["round"], s["position"], s["dropped"]) for s in found] == [
        (n, position, n == 0) for n in range(3) for position in range(2)
    ]
    assert all({s["variant"] for s in found if s["round"] == n} == {"a", "b"} for n in range(3))
    assert {s["state"] for s in found} == {"cpu"} and found[0]["sm_mhz"] is None
    (alone_one,) = clock.interleaved(
        {"a": work["a"]}, clock.Clock(warmup=0, tests=1, sleep_ms=0), with_ep(alone())
    )
    assert not alone_one["dropped"], "a lone measurement is kept"


def test_the_order_is_drawn_anew_for_each_round_and_written_down():
    names = [f"{overlap}/{chunks}" for overlap in ("with-sm", "kernel") for chunks in (1, 2, 4, 8)]
    works = {name: lambda: None for name in names}
    calm, cold = clock.Clock(warmup=1, tests=200, sleep_ms=0), clock.Clock(0, 1, 0)
    found = clock.interleaved(works, calm, with_ep(alone()))
    ran = [s["variant"] for s in found]
    assert [s["behind"] for s in found] == [names[-1], *ran[:-1]], "the warm-up's last is ahead"
    assert clock.interleaved(works, cold, with_ep(alone()))[0]["behind"] is None
    rounds = [[s["variant"] for s in found if s["round"] == n] for n in range(calm.tests)]
    assert rounds == [clock.order(names, n) for n in range(calm.tests)], "no rank's own luck in it"
    for name in names:  # each is anywhere in a round, behind anybody, and as often
        places = [s["position"] for s in found if s["variant"] == name]
        assert abs(sum(places) / len(places) - 3.5) < 0.6 and set(places) == set(range(8))
        assert {s["behind"] for s in found if s["variant"] == name} >= set(names) - {name}
    assert len({tuple(names) for names in rounds}) > 190


def test_what_is_ahead_of_a_call_is_no_part_of_its_sample():
    called = []
    work = {name: lambda name=name: called.append(name) for name in ("a", "b")}
    ahead = {"b": lambda: called.append("ahead") or time.sleep(0.05)}
    found = clock.interleaved(work, clock.Clock(1, 2, 0), with_ep(alone()), ahead)
    calls = {"a": ["a"], "b": ["ahead", "b"]}
    order = ["a", "b", *(s["variant"] for s in found)]
    assert called == [call for name in order for call in calls[name]]
    assert all(s["us"] < 40e3 for s in found)


def test_a_sample_is_the_time_of_the_call():
    slow = {"slow": lambda: time.sleep(0.02)}
    found = clock.interleaved(slow, clock.Clock(0, 2, 0), with_ep(alone()))
    assert all(20e3 <= s["us"] < 200e3 for s in found)


def test_the_pause_is_ahead_of_the_first_sample():
    begin = time.perf_counter()
    clock.interleaved({"a": lambda: None}, clock.Clock(0, 1, 30), with_ep(alone()))
    assert time.perf_counter() - begin >= 0.03


def test_defaults_are_the_documented_ones():
    assert clock.Clock().to_dict() == {
        "warmup": 50, "tests": 50, "sleep_ms": 10.0, "flush": True, "state": "documented",
    }  # fmt: skip


def test_a_meter_keeps_the_last_line_that_reads(monkeypatch, tmp_path):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho '1980, 312.5'\necho '[N/A], x'\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(clock.Meter, "_library", lambda self: dict(clock.Meter.UNKNOWN))
    gpu = types.SimpleNamespace(uuid="0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    with clock.Meter(torch.device("cuda", 0)) as meter:
        until = time.monotonic() + 10
        while meter.read()["sm_mhz"] is None and time.monotonic() < until:
            time.sleep(0.01)
        assert meter.read() == {"sm_mhz": 1980.0, "power_w": 312.5}
    assert meter.process.returncode is not None
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with clock.Meter(torch.device("cuda", 0)) as meter:
        assert meter.read() == clock.Meter.UNKNOWN
