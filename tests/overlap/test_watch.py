"""Who is late, how a hung wait ends, and what happens where it cannot be ended: a device that
hangs, played by a runtime whose streams stand still.
"""

from __future__ import annotations

import threading
import time
import types

import pytest
import torch

from rlkernel.collectives.comm import Link
from rlkernel.collectives.errors import PeerLost
from rlkernel.collectives.groups import alone
from rlkernel.collectives.peer_memory import RELEASED
from rlkernel.overlap import copy_engine, near_memory, settled, watch
from rlkernel.overlap.watch import Watch
from tests.overlap.played import Driver

DONE, NOT_READY, FAILED = 0, 600, 719


class Runtime(Driver):
    """Copies are made at once by streams that answer; an event says what its number says."""

    cudaError_t = types.SimpleNamespace(cudaErrorNotReady=NOT_READY)
    cudaMemcpyKind = types.SimpleNamespace(cudaMemcpyDeviceToHost=2, cudaMemcpyHostToDevice=1)
    cudaStreamCaptureMode = types.SimpleNamespace(cudaStreamCaptureModeRelaxed=2)
    cudaStreamNonBlocking = 1

    def __init__(self):
        super().__init__()
        self.made, self.dead, self.threads = [], set(), set()
        self.hangs = None  # an event that calls wait for

    def cudaDeviceGetStreamPriorityRange(self):
        return DONE, 0, -5

    def cudaStreamCreateWithPriority(self, flags, priority):
        assert (flags, priority) == (self.cudaStreamNonBlocking, -5)
        self.made.append(len(self.made) + 1)
        return DONE, self.made[-1]

    def cudaMemcpyAsync(self, to, of, count, kind, stream):
        self.threads.add(threading.current_thread())
        if self.hangs is not None:
            self.hangs.wait(20)
        if stream not in self.dead:
            super().cudaMemcpyAsync(to, of, count, kind, stream)
        return (DONE,)

    def cudaStreamSynchronize(self, stream):
        return (DONE,)

    cudaSetDevice = cudaThreadExchangeStreamCaptureMode = cudaStreamSynchronize

    def cudaStreamQuery(self, stream):
        return (NOT_READY if stream in self.dead else DONE,)

    def cudaEventQuery(self, event):
        return (event,)


@pytest.fixture
def runtime(monkeypatch):
    played = Runtime()
    watch._streams.cache_clear()
    monkeypatch.setattr(watch, "driver", lambda: (played, None))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(watch, "ANSWER_S", 0.05)
    monkeypatch.setattr(watch, "GRACE_S", 0.05)
    yield played
    watch._streams.cache_clear()


@pytest.fixture
def aborted(monkeypatch):
    """Set where the process would have ended."""
    said = threading.Event()
    monkeypatch.setattr(watch.os, "abort", said.set)
    return said


class Memory:
    """Rank 1 of ranks 4, 6, 8; flags [sender, flag] as they stand on it. Nothing of torch is called
    on them but for their address.
    """

    index, size, axis = 1, 3, "ep"

    def __init__(self, *flags):
        self.flags = torch.tensor(flags, dtype=torch.int32)
        self.comm = alone()
        self.comm.links = {"ep": Link((4, 6, 8), 1, None, None)}

    def table(self, name, peer):
        assert (name, peer) == ("flags", 1)
        return self.flags.flatten()


def stream(event):
    """A stream whose event says so."""
    said = types.SimpleNamespace(cuda_event=event)
    return types.SimpleNamespace(record_event=lambda: said)


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("given", ["all are given", "giving them hangs"])
def test_a_hung_wait_is_released_and_has_a_name(runtime, aborted, given):
    memory = Memory([2, 2, 1], [0, 0, 0], [2, 1, 2])
    minded = Watch(memory, 0.2)
    wait = minded.before(2, "combine", range(0, 2))
    if given == "all are given":
        wait.end(stream(NOT_READY))
    minded.check()
    until(lambda: (memory.flags == RELEASED).all())
    with pytest.raises(PeerLost, match="combine: rank 8 did not send within 0.2 s") as lost:
        minded.check()
    assert lost.value.ranks == (8,) and lost.value.site == "combine"
    time.sleep(0.2)
    assert not aborted.is_set()


def test_it_is_named_by_the_flags_that_the_call_waits_for(runtime):
    memory = Memory([5, 5, 3], [0, 0, 0], [5, 4, 5])
    minded = Watch(memory, 100.0)
    for flags, late in ((range(0, 1), []), (range(0, 2), [8]), (range(2, 3), [4])):
        assert minded._behind(minded.before(5, "dispatch", flags)) == late


def test_who_has_come_in_time_is_forgotten(runtime, aborted):
    minded = Watch(Memory([1], [0], [1]), 0.15)
    for code in (DONE, FAILED):  # behind a failure no stream hangs, and others say what failed
        minded.before(7, "dispatch", range(0, 1)).end(stream(code))
    first = minded.before(1, "combine", range(0, 1))
    assert list(minded._waits) == [first], "what is through is dropped as the next one comes"
    first.end(stream(NOT_READY))  # late, and no flag is missing: nobody to be released from
    until(lambda: not minded._waits)
    minded.check()
    assert not aborted.is_set() and minded.memory.flags.tolist() == [[1], [0], [1]]


def test_a_stream_that_does_not_answer_is_not_the_last_word(runtime, aborted):
    memory = Memory([3], [0], [2])
    minded = Watch(memory, 0.1)
    runtime.dead = set(runtime.made[:2])
    minded.before(3, "dispatch", range(0, 1)).end(stream(NOT_READY))
    until(lambda: (memory.flags == RELEASED).all())
    assert minded.lost.ranks == (8,) and not aborted.is_set()


def test_where_no_stream_answers_the_process_ends(runtime, aborted, capfd):
    minded = Watch(Memory([3], [0], [2]), 0.1)
    runtime.dead = set(runtime.made)
    minded.before(3, "dispatch", range(0, 1))
    assert aborted.wait(30)
    with pytest.raises(PeerLost, match="dispatch: its waits were not through"):
        minded.check()
    assert "PeerLost: dispatch" in capfd.readouterr().err


def test_a_driver_that_hangs_keeps_nobody_from_the_end(runtime, aborted, monkeypatch):
    """The thread that minds the time makes no call that could hang."""
    monkeypatch.setattr(watch, "LAST_S", 0.2)
    minded = Watch(Memory([3], [0], [2]), 0.1)
    runtime.hangs, runtime.threads = threading.Event(), set()
    try:
        minded.before(3, "combine", range(0, 1)).end(stream(NOT_READY))
        assert aborted.wait(30)
        assert isinstance(minded.lost, PeerLost) and minded.lost.site == "combine"
    finally:
        runtime.hangs.set()
    assert threading.main_thread() not in runtime.threads


def test_everything_is_there_and_used_before_anything_hangs(runtime):
    used = []
    runtime.cudaStreamSynchronize = lambda stream: used.append(stream) or (DONE,)
    first, second = (Watch(Memory([1], [2], [3]), 100.0) for _ in range(2))
    assert runtime.made == [1, 2, 3, 4], "one set a device: idle streams take queues, too"
    assert used == [1, 2, 3, 4] * 2
    assert first.memory.flags.tolist() == [[1], [2], [3]], "peers write them by now"
    assert first._flags.released.data_ptr() != second._flags.released.data_ptr()


@pytest.mark.parametrize("module", [copy_engine, near_memory], ids=["sm-free", "two levels"])
def test_who_was_lost_in_the_last_call_is_asked_for(runtime, monkeypatch, module):
    lost = Watch(Memory([1], [0], [1]), 100.0)
    lost.lost = PeerLost("combine: rank 8", ranks=(8,), site="combine")
    found = (None, lost) if module is copy_engine else (None, lost, ())
    monkeypatch.setitem(module._MEMORIES, "a shape", found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with pytest.raises(PeerLost, match="combine: rank 8"):
        settled.settled(torch.device("cuda", 0))
