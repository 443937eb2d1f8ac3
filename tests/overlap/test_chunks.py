"""What the side stream of a GPU waits for, and who waits for it, with the streams played."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from rlkernel.collectives.groups import alone
from rlkernel.overlap import chunks, pipeline
from rlkernel.overlap.layer import with_ep
from rlkernel.overlap.layout import layout_of
from rlkernel.overlap.stage import stage_of
from tests.overlap.inputs import differing, drawn, layer, trained


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
