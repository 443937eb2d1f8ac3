"""The exchange by copy engine with CUDA played by threads: which bytes go where, under which flag.

Each rank is a thread; a copy is done at once, a flag write is an assignment, a wait spins. What is
judged is addresses, sets and epochs, not what a device does with them.
"""

from __future__ import annotations

import threading
import time
import types

import pytest
import torch

from rlkernel.collectives import peer_exchange
from rlkernel.collectives.peer_exchange import SETS, PeerExchange

LIMIT_S = 20.0


class Stream:
    def wait_event(self, event): ...

    def wait_stream(self, stream): ...

    def record_event(self):
        return object()


class Memory:
    """PeerMemory of P ranks in one process; `shared` is seen by all of them."""

    def __init__(self, index, size, elements, shared):
        self.index, self.size, self.shared, self.epoch = index, size, shared, 0
        self.elements, self.device = elements, "cpu"

    def next_epoch(self):
        self.epoch += 1
        return self.epoch

    def buffer(self, name, which, peer):
        whole = self.shared[name, peer]
        return whole[which * self.elements : (which + 1) * self.elements]

    def copy_2d(self, to, to_pitch, of, pitch, width, rows, stream):
        assert rows == 1 and width == of.numel()
        to[:width].copy_(of)

    def signal(self, peer, flag, epoch, stream):
        self.shared["flag", peer, self.index] = epoch

    def wait(self, peer, flag, epoch, stream):
        until = time.monotonic() + LIMIT_S
        while self.shared.get(("flag", self.index, peer), 0) < epoch:
            assert time.monotonic() < until, f"rank {self.index} waits for {peer}"
            time.sleep(1e-4)


@pytest.fixture
def ranks(monkeypatch):
    """ranks(P, n) -> [PeerExchange of each rank] over one shared memory."""
    cuda = types.SimpleNamespace(current_stream=lambda device: Stream(), synchronize=lambda d: None)
    monkeypatch.setattr(
        peer_exchange, "torch", types.SimpleNamespace(cuda=cuda, Tensor=torch.Tensor)
    )

    def make(size: int, words: int) -> list[PeerExchange]:
        shared = {("in", p): torch.full((SETS * size * words,), -1, dtype=torch.int32)
                  for p in range(size)}  # fmt: skip
        made = []
        for index in range(size):
            one = object.__new__(PeerExchange)
            one.elements, one.streams = words, [Stream()] * size
            one.memory = Memory(index, size, size * words, shared)
            one.watch = types.SimpleNamespace(check=lambda: None, after=lambda *_: None)
            made.append(one)
        return made

    return make


def together(made, call) -> list:
    found: list = [None] * len(made)
    errors = []

    def run(index):
        try:
            found[index] = call(index, made[index])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not errors, errors
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_part_p_goes_to_rank_p_call_after_call(ranks, size):
    made, words = ranks(size, 5), 5

    def calls(index, one):
        found = []
        for number in range(5):
            if index == number % size:
                time.sleep(0.01)  # another rank is late each time
            parts = torch.stack([
                torch.full((words,), 1000 * number + 10 * index + p, dtype=torch.int32)
                for p in range(size)
            ])  # fmt: skip
            found.append(one(parts).clone())
        return found

    for me, came in enumerate(together(made, calls)):
        for number, landing in enumerate(came):
            for source in range(size):
                assert (landing[source] == 1000 * number + 10 * source + me).all()


def test_poison_is_laid_where_the_next_call_lands(ranks):
    made = ranks(2, 3)
    parts = torch.arange(6, dtype=torch.int32).view(2, 3)
    for _ in range(3):
        for one in made:
            one.poison(-7)
        which = (made[0].memory.epoch + 1) % SETS
        assert (made[0].memory.buffer("in", which, 0) == -7).all()
        assert not (made[0].memory.buffer("in", 1 - which, 0) == -7).any()
        came = together(made, lambda index, one: one(parts).clone())
        assert not any((landing == -7).any() for landing in came)
