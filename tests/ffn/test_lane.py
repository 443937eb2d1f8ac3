"""The order that a lane imposes, on played streams: there is no GPU here."""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace

import torch

from rlkernel.ffn import lane


class Stream:
    """Writes down who waits for whom, and what runs."""

    def __init__(self, name, log):
        self.name, self.log, self.device = name, log, "cuda:0"

    def wait_stream(self, other):
        self.log.append(f"{self.name} behind {other.name}")

    def record_event(self):
        self.log.append(f"event of {self.name}")
        return self.name

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


def test_a_call_starts_behind_the_main_stream_and_the_taker_waits_for_it(monkeypatch):
    log = []
    main, side = Stream("main", log), Stream("lane", log)
    current = [main]

    @contextlib.contextmanager
    def inside(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(lane, "_stream", lambda device: side)
    beside = lane.Lane(torch.device("cuda:0"))
    pending = beside.start(lambda x: log.append(f"sum on {current[-1].name}") or 2 * x, 21)
    log.append("GEMM on main")
    assert pending.result() == pending.result() == 42
    beside.own(SimpleNamespace(record_stream=lambda s: log.append(f"memory kept for {s.name}")))
    assert log == [
        "lane behind main",
        "sum on lane",
        "event of lane",
        "GEMM on main",
        "main waits for lane",
        "memory kept for main",
    ]


def test_without_a_side_stream_a_call_runs_where_it_stands():
    for here in (lane.Lane(torch.device("cpu")), lane.Lane(torch.device("cuda:0"), side=False)):
        assert here.stream is None and here.start(lambda x: x + 1, 1).result() == 2
        assert here.own(x := torch.ones(1)) is x


def test_what_a_call_reads_lives_until_its_result_is_taken(monkeypatch):
    main = Stream("main", [])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    operand = torch.zeros(1)
    held = weakref.ref(operand)
    pending = lane.Pending(1, Stream("lane", []), (operand,))
    del operand
    assert held() is not None
    pending.result()
    assert held() is None
