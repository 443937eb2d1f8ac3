"""The check of CUDA graphs on played graphs: it passes what is replayed and fails what is not."""

from __future__ import annotations

import contextlib

import pytest
import torch

from rlkernel.collectives.groups import alone
from rlkernel.experiments.case import Case
from rlkernel.ffn import capture, exactness
from rlkernel.grid import Grid

AT = {"m": 16, "hidden": 64, "intermediate": 128, "sequence_parallel": False, "dw": "reduce"}
CASE = Case(
    "det-ffn", Grid(), "bf16", 11, parameters=AT | {"contracts": "tree8.bf16", "dx": "packed"}
)


class Quiet:
    """A stream, and whatever else needs a GPU and decides nothing here."""

    def wait_stream(self, other):
        pass


def played(monkeypatch, replay):
    """(mismatches, elements) of each operator where a replay is `replay(step, captured)`."""
    steps = []

    class Graph:
        def replay(self):
            replay(*steps[0])

    def step(layer, x, dy, real=capture._step):
        values = real(layer, x, dy)
        if inside and not steps:
            steps.append((lambda: real(layer, x, dy), values))
        return values

    inside = []

    @contextlib.contextmanager
    def graph(_, capture_error_mode):
        inside.append(True)
        yield
        inside.clear()

    fakes = {"CUDAGraph": Graph, "graph": graph, "synchronize": lambda: None, "Stream": Quiet}
    fakes |= {
        "stream": lambda s: contextlib.nullcontext(),
        "current_stream": lambda d=None: Quiet(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(capture, "_step", step)
    tensors = exactness.full(16, 64, 128, 11, torch.device("cpu"))
    variant = {"contract": "tree8.bf16", "dx": "packed", "dw": "local"}
    return capture._replayed(CASE, alone(), tensors, variant)


def again(step, captured):
    for old, new in zip(captured, step()):
        old.detach().copy_(new)


def test_a_replay_that_computes_anew_has_the_bits_of_the_eager_call(monkeypatch):
    counts = played(monkeypatch, again)
    assert {name: wrong for name, (wrong, _) in counts.items()} == dict.fromkeys(
        capture.OPERATORS, 0
    )
    assert counts["d gate_up"][1] == capture.REPLAYS * 2 * 128 * 64


@pytest.mark.parametrize("stale", range(len(capture.OPERATORS)))
def test_a_result_that_a_replay_leaves_as_it_was_is_counted(monkeypatch, stale):
    def partly(step, captured):
        keep = captured[stale].detach().clone()
        again(step, captured)
        captured[stale].detach().copy_(keep)

    counts = played(monkeypatch, partly)
    wrong = [name for name, (mismatches, _) in counts.items() if mismatches]
    assert wrong == [capture.OPERATORS[stale]]


def test_without_a_gpu_nothing_is_claimed():
    row = capture.graph_row(CASE, alone())
    assert row["checks"] == [] and row["not_measured"] == "a CUDA graph needs a GPU"
