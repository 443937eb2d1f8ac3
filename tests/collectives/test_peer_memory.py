"""What of peer memory needs no GPU: who is late, how a hung wait ends, which hosts are one."""

from __future__ import annotations

import contextlib
import sys
import time
import types

import pytest
import torch

from rlkernel.collectives import peer_memory
from rlkernel.collectives.comm import Link
from rlkernel.collectives.errors import PeerLost
from rlkernel.collectives.groups import alone
from rlkernel.collectives.peer_memory import PeerMemory, Watch, check_one_host


@pytest.fixture
def no_gpu(monkeypatch):
    """Events that tell what `done` says, streams that are none."""
    done = []
    event = types.SimpleNamespace(record=lambda stream: None, query=lambda: bool(done))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return done


def memory(flags):
    """Rank 1 of ranks 4, 6, 8; flags [sender, flag] as they stand on it."""
    made = object.__new__(PeerMemory)
    comm = alone()
    comm.links = {"ep": Link((4, 6, 8), 1, None, None)}
    made.comm, made.axis, made.index, made.size, made.device = comm, "ep", 1, 3, "cpu"
    made.flags = flags.shape[1]
    made._tables = {"flags": [None, flags.flatten(), None]}
    return made


def test_it_names_who_is_late_by_the_flags_that_the_call_waits_for():
    flags = torch.tensor([[5, 5, 3], [0, 0, 0], [5, 4, 5]], dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        assert memory(flags).behind(5, range(0, 1)) == []
        assert memory(flags).behind(5, range(0, 2)) == [8]
        assert memory(flags).behind(5, range(2, 3)) == [4]


def test_a_hung_wait_is_released_and_has_a_name(no_gpu):
    flags = torch.tensor([[2, 2], [0, 0], [2, 1]], dtype=torch.int32)
    held = memory(flags)
    watch = Watch(held, 0.1)
    watch.after(None, 2, "combine", range(0, 2))
    watch.check()
    until = time.monotonic() + 20
    while watch.lost is None and time.monotonic() < until:
        time.sleep(0.02)
    with pytest.raises(PeerLost, match="combine: rank 8 did not send within 0.1 s") as lost:
        watch.check()
    assert lost.value.ranks == (8,) and lost.value.site == "combine"
    time.sleep(0.1)
    assert (held._tables["flags"][1] == peer_memory.RELEASED).all()


def test_a_call_that_is_through_is_forgotten(no_gpu):
    watch = Watch(memory(torch.zeros(3, 1, dtype=torch.int32)), 0.05)
    no_gpu.append("all events are done")
    watch.after(None, 1, "dispatch", range(0, 1))
    time.sleep(0.3)
    watch.check()
    assert watch._calls == []


def test_emulated_nodes_are_several_hosts(monkeypatch):
    comm = alone()
    comm.links = {"ep": Link((0, 1), 0, None, None)}
    said = []
    comm.all_gather = lambda x, site, axis: torch.cat([*said, x])
    monkeypatch.setenv("NCCL_HOSTID", "node0")
    check_one_host(comm)
    comm.all_gather = lambda x, site, axis: said.append(x) or x
    check_one_host(comm)
    comm.all_gather = lambda x, site, axis: torch.cat([x, *said])
    monkeypatch.setenv("NCCL_HOSTID", "node1")
    with pytest.raises(ValueError, match=r"ranks \[1\] are on another node"):
        check_one_host(comm)


def test_without_cuda_bindings_it_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ValueError, match="cuda-bindings"):
        peer_memory.driver()
