"""Windows of work on a played chip: what they cut out, divide by and wait for. Time passes where
work is launched, and the counters count it interval by interval.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from rlkernel.overlap import chip_load
from rlkernel.overlap.counters import Window
from rlkernel.overlap.sampler import METRICS

CALL_US, TICK = 100, 20_000  # a call's time alone; ns of an interval, in which RATES are counted
RATES = {"dram_read": 40.0, "dram_written": 20.0, "l2": 60.0, "sm_cycles": 27_000.0,
         "tensor_cycles": 60_000.0, "cycles": 30_000.0}  # fmt: skip


class Chip:
    """now, until: ns, the latter when what is beside ends; slower: a call's time over CALL_US."""

    def __init__(self) -> None:
        self.now, self.until, self.side, self.calls, self.begun = 0, 0, False, 0, []
        self.slower = 1

    def work(self) -> None:
        self.calls += 1
        self.sleep(CALL_US * self.slower / 1e6)

    def begin(self, count: int) -> None:
        self.begun.append(count)
        self.until = self.now + 10_000 * count

    def sleep(self, seconds: float) -> None:
        self.now += round(1e9 * seconds)

    @contextlib.contextmanager
    def stream(self, _):
        self.side = True
        yield
        self.side = False

    def event(self, **_) -> SimpleNamespace:
        it = SimpleNamespace(at=None, synchronize=lambda: None)
        it.record = lambda: setattr(it, "at", self.until if self.side else self.now)
        it.elapsed_time = lambda last: (last.at - it.at) / 1e6
        it.query = lambda: self.now >= it.at
        return it

    # -- counters ----------------------------------------------------------------------------------

    def start(self) -> None:
        self.started, self.calls_ahead = self.now, self.calls

    def stop(self) -> Window:
        ns = tuple(range(self.started + TICK, self.now + 1, TICK))
        assert set(RATES) == set(METRICS)
        values = {name: (rate,) * len(ns) for name, rate in RATES.items()}
        return Window(ns, values | {"l2": tuple(60.0 * n for n in range(len(ns)))})


@pytest.fixture
def chip(monkeypatch):
    it = Chip()
    here = SimpleNamespace(synchronize=lambda: None)
    cuda = SimpleNamespace(Event=it.event, Stream=lambda: None, stream=it.stream,
                           current_stream=lambda: here, synchronize=lambda: None)  # fmt: skip
    clock = SimpleNamespace(time_ns=lambda: it.now, monotonic=lambda: it.now / 1e9, sleep=it.sleep)
    monkeypatch.setattr(chip_load, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(chip_load, "time", clock)
    return it


def test_a_window_is_its_calls_and_nothing_ahead_or_behind(chip):
    line = chip_load.window(chip, chip.work, 30)
    assert line["us"] == CALL_US and line["gap_ns"] == TICK
    ticks = CALL_US * 1000 / TICK  # of a call
    assert line["dram_read"] == pytest.approx(40 * ticks)
    assert line["dram_written"] == pytest.approx(20 * ticks)
    assert line["sm_cycles"] == pytest.approx(0.9) and line["tensor_cycles"] == pytest.approx(0.5)
    assert line["mhz"] == pytest.approx(1500) and "lasted" not in line
    heated = chip_load.HEAT_S * 1e6 / CALL_US
    assert chip.calls_ahead >= heated + chip_load.LEAD  # counted where the chip is hot
    assert set(chip_load.window(None, chip.work, 30)) == {"us"}


@pytest.mark.parametrize(("slower", "lasted"), [(1, True), (2, True), (4, False)])
def test_what_is_beside_outlasts_a_product_that_is_slowed_down(chip, slower, lasted):
    chip.slower = slower
    beside = chip_load.Bystander(chip.begin, 10.0, 4_000_000, 32)
    line = chip_load.window(chip, chip.work, 30, beside, CALL_US)
    assert line["lasted"] is lasted and line["us"] == slower * CALL_US
    assert line["gb_per_s"] == pytest.approx(400)
    assert len(chip.begun) == 1


@pytest.mark.parametrize(("half", "moved"), [(False, 1000), (True, 500)])
def test_half_a_copy_says_that_it_is_whole(monkeypatch, half, moved):
    monkeypatch.setattr(chip_load, "COPIED", 1000)
    copy = chip_load.copied("cpu", half)
    assert copy.work().numel() == moved and (copy.read, copy.written) == (1000, 1000)


def test_an_idle_time_is_as_long_as_asked(chip):
    assert chip_load.idle(chip, 1000.0)["dram_read"] == 50 * RATES["dram_read"]


def test_what_reading_costs_is_over_the_same_unread(chip, monkeypatch):
    us = {True: 102.0, False: 100.0}
    monkeypatch.setattr(chip_load, "window", lambda reader, *_: {"us": us[reader is not None]})
    assert chip_load.cost(chip, chip.work, 30, 3) == pytest.approx(1.02)


def test_over_time_rates_are_those_of_whole_intervals(chip):
    seen = chip_load.timeline(chip, chip.work)
    assert seen["us"] == [40.0, 60.0, 80.0, 100.0]  # where the first began is not known
    assert seen["dram_read"] == [40.0 / TICK] * 4 and seen["mhz"] == [1500.0] * 4
    assert seen["l2"] == [60.0 * n / TICK for n in range(1, 5)]
    assert seen["tensor_cycles"] == [0.5] * 4 and seen["sm_cycles"] == [0.9] * 4
