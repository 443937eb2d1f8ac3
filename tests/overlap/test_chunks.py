"""What the side stream of a GPU waits for, and who waits for it, with the streams played."""

from __future__ import annotations

import contextlib
import types
import weakref

import pytest
import torch

from rlkernel.collectives.comm import Link
from rlkernel.collectives.groups import alone
from rlkernel.collectives.transport import Arriving
from rlkernel.overlap import chunks, pipeline
from rlkernel.overlap.layer import with_ep
from rlkernel.overlap.layout import layout_of
from rlkernel.overlap.nodes import Nodes
from rlkernel.overlap.stage import stage_of
from rlkernel.overlap.two_levels import TwoLevels
from tests.overlap.inputs import differing, drawn, layer, trained
from tests.overlap.played import rank_of


class Stream:
    def __init__(self, name, log):
        self.name, self.log, self.events = name, log, 0

    def record_event(self):
        self.events += 1
        self.log.append(f"{self.name} records {self.events}")
        return self.events

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for event {event}")

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    """Everything runs at once, on the CPU; the log says in which order it was given to whom."""
    said: list[str] = []

    @contextlib.contextmanager
    def on(stream):
        said.append(f"on {stream.name}")
        yield
        said.append("on main")

    cuda = types.SimpleNamespace(stream=on)
    played = types.SimpleNamespace(cuda=cuda, cat=torch.cat, Tensor=torch.Tensor)
    monkeypatch.setattr(chunks, "torch", played)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda x, s: said.append(f"kept for {s.name}")
    )
    real = torch.bmm

    def bmm(*given, **out):
        said.append("gemm")
        return real(*given, **out)

    monkeypatch.setattr(torch, "bmm", bmm)
    return said


@pytest.mark.parametrize("silent", [True, False])
def test_a_chunk_waits_for_its_pack_and_is_unpacked_beside_the_next(log, silent):
    ffn, x, dy = layer(8, 16, 2), drawn(0, 2, 8, 16), drawn(1, 2, 8, 16)
    wanted = trained(ffn, ffn, x, dy)
    at, comm = layout_of(ffn, x), with_ep(alone())
    cut = at.slices(2)

    def open_route(direction, slices):
        route = chunks.Messages(comm, at, slices, x, direction, name="played", silent=silent)
        route.side, route.caller = Stream("side", log), Stream("main", log)
        return route

    plan = pipeline.Plan(at, cut, cut, stage_of(ffn), open_route)
    log.clear()
    with torch.no_grad():
        out = pipeline.run(ffn, x, plan)
    assert torch.equal(out, wanted["output"])
    assert log == [
        "side waits for main", "on side",
        "kept for main", "side records 1", "kept for main", "side records 2", "on main",
        "main waits for event 1", "gemm", "gemm", "side waits for main", "on side", "on main",
        "main waits for event 2", "gemm", "gemm", "side waits for main", "on side", "on main",
        "main waits for side",
    ]  # fmt: skip
    assert not differing(trained(lambda x: pipeline.run(ffn, x, plan), ffn, x, dy), wanted)


class Slow:
    """A transport that reads what it was given only once somebody's stream has waited, as NCCL may;
    and holds it, as NCCL does, until a message is waited for on any stream.
    """

    name = "played"

    def __init__(self):
        self.reading = {}  # tag -> what is still to be read

    def start_all_to_all(self, x, tag=0):
        outgoing = x.detach().view(-1)
        self.reading.setdefault(tag, []).append(weakref.ref(outgoing.untyped_storage()))
        return Arriving(torch.zeros_like(x), [lambda: None], outgoing)

    def read(self, first):
        """Messages from this tag on."""
        for tag in [tag for tag in self.reading if tag >= first]:
            for memory in self.reading.pop(tag):
                assert memory() is not None, f"message {tag} is read when its memory is free"


class Caller(Stream):
    """Behind its wait for the side stream everything has been read."""

    def __init__(self, log, transport, back):
        super().__init__("main", log)
        self.transport, self.back = transport, back

    def wait_stream(self, other):
        super().wait_stream(other)
        self.transport.read(self.back)


@pytest.mark.parametrize("of", [None, (0, 1), (0, 0)], ids=["messages", "far", "near"])
@pytest.mark.parametrize("scale, copies", [(1, False), (2, False), (1, True)])
def test_what_is_sent_is_held_until_the_callers_stream_has_waited(log, of, scale, copies):
    """As it is, padded, or an observer's own copy, all made on the caller's stream; the side stream
    waits for the message at once.
    """
    ffn, x = layer(8, 16, 2, rank_of(2, 0)), drawn(0, 2, 8, 16)
    transport, seen = Slow(), []
    link = Link((0, 1), 0, transport, None)
    comm = ffn.comm.using(observers=[lambda _, x, proceed: proceed(x.clone())] * copies)
    comm.links, comm.agree, at = {"ep": link}, lambda *words: None, layout_of(ffn, x)
    cut = at.slices(2)

    def open_route(direction, slices):
        given = (comm, at, slices, x, direction)
        if of is None:
            route = chunks.Messages(*given, name="played", scale=scale)
        else:
            route = Levels(*given, Nodes(of, 0), False, None, "played", name="played", scale=scale)
        route.side, route.caller = Stream("side", log), Caller(log, transport, len(slices))
        seen.append(route)
        return route

    class Levels(TwoLevels):
        def _seam(self, places):
            return comm

    with torch.no_grad():
        pipeline.run(ffn, x, pipeline.Plan(at, cut, cut, stage_of(ffn), open_route))
    assert set(transport.reading) == {0, 1}, "what was sent back has been read"
    assert seen[0].lent == [], "and is held no longer"
