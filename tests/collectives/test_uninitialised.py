"""Without torch.distributed a Comm is refused by name, before anything else is looked at."""

import pytest
import torch

from rlkernel.collectives.arenas import open_arena
from rlkernel.collectives.groups import World, comm_over
from rlkernel.contract import ReductionTree
from rlkernel.grid import Grid


def test_an_uninitialised_world_is_refused_by_name():
    with pytest.raises(ValueError, match="torch.distributed is not initialised"):
        comm_over(Grid(tp=2), {}, store=None, contract=ReductionTree())


def test_a_backend_that_cannot_serve_the_device_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for backend, device, words in (
        ("mpi", "cpu", "expected one of gloo, nccl"),
        ("nccl", "cpu", "nccl moves cuda tensors"),
        ("nccl", "", "nccl on cuda needs a GPU"),
        ("gloo", "cuda", "gloo on cuda needs a GPU"),
        ("symmetric", "", "symmetric on cuda needs a GPU"),
    ):
        with pytest.raises(ValueError, match=words):
            World.join(backend, device=device)


def test_memory_that_cannot_be_shared_is_refused_by_name(monkeypatch):
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        open_arena(None, (0, 1), 0, torch.device("cpu"), None, 1.0)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="while a CUDA graph is captured"):
        open_arena(None, (0, 1), 0, torch.device("cuda", 0), None, 1.0)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "an older GPU")
    with pytest.raises(ValueError, match="an older GPU: symmetric memory is for NVIDIA's SM90"):
        open_arena(None, (0, 1), 0, torch.device("cuda", 0), None, 1.0)
