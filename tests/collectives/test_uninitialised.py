"""Without torch.distributed a Comm is refused by name, before anything else is looked at."""

import pytest

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
    ):
        with pytest.raises(ValueError, match=words):
            World.join(backend, device=device)
