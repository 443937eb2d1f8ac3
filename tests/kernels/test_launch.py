"""A launch that is prepared once: what is passed on, and what is remembered."""

from __future__ import annotations

import pytest
import torch

from rlkernel.contract import ReductionTree
from rlkernel.kernels import launch, select
from rlkernel.kernels.launch import Described, Launch, look

CPU = torch.device("cpu")


class Kernel:
    """Stands in for a compiled kernel: remembers how it was called."""

    def __init__(self, compiles: bool = True) -> None:
        self.compiles, self.first, self.again = compiles, [], []

    def __getitem__(self, grid):
        def call(*args, **more):
            self.first.append((grid, args, more))
            return Compiled(self) if self.compiles else None

        return call


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, stream: self.kernel.again.append((grid, args, stream))


def test_the_first_call_compiles_and_later_ones_pass_their_arguments_on(monkeypatch):
    class Driver:
        def get_current_stream(self, index):
            return f"stream of {index}"

    monkeypatch.setattr(launch.driver, "_active", Driver(), raising=False)
    monkeypatch.setattr(type(launch.driver), "active", Driver(), raising=False)
    kernel = Kernel()
    run = Launch(CPU, kernel, (5,), {"BLOCK": 64, "EVEN": True}, num_warps=4)
    for number in range(3):
        run("a", number)
    assert kernel.first == [((5, 1, 1), ("a", 0), {"BLOCK": 64, "EVEN": True, "num_warps": 4})]
    assert kernel.again == [((5, 1, 1), ("a", n, 64, True), "stream of None") for n in (1, 2)]


def test_what_is_interpreted_is_looked_up_every_time():
    kernel = Kernel(compiles=False)
    run = Launch(CPU, kernel, (2, 3), {"BLOCK": 16})
    run(1)
    run(2)
    assert [args for _, args, _ in kernel.first] == [(1,), (2,)] and not kernel.again
    assert kernel.first[0][0] == (2, 3, 1)


def test_a_descriptor_moves_to_another_base():
    class Descriptor:
        def __init__(self, base, shape):
            self.base, self.shape = base, shape

    first, second = torch.zeros(4), torch.ones(4)
    moved = Described(Descriptor(first, [4]))(second)
    assert type(moved) is Descriptor and moved.base is second and moved.shape == [4]


def test_a_look_is_shape_strides_dtype_and_alignment():
    x = torch.zeros(257, 8, dtype=torch.bfloat16)
    assert look(x[:128]) == look(x[128:256])
    shifted = x.view(-1)[1 : 1 + 128 * 8].view(128, 8)
    others = (x[:127], x[:128].t(), x[:128].view(torch.int16), shifted, x[1:129])
    assert len({look(x[:128]), *map(look, others)}) == 6


@pytest.fixture
def known(monkeypatch):
    found: dict = {}
    monkeypatch.setattr(select, "_known", found)
    monkeypatch.setattr(select, "_refused", {})
    return found


def test_a_choice_is_made_once_a_look_and_forgotten_when_a_schedule_is_refused(known, monkeypatch):
    chosen = []
    choose = select.choose
    monkeypatch.setattr(select, "choose", lambda *args: chosen.append(1) or choose(*args))
    tree = ReductionTree(2)
    x, w, out = (torch.ones(*s).bfloat16() for s in ((4, 8), (8, 6), (4, 6)))
    for _ in range(3):
        assert select.gemm(x, w, out.zero_(), tree).schedule == "twin"
        assert out.eq(8).all()
    select.gemm(x[:3], w, out[:3], tree)
    select.gemm(x, w, out, ReductionTree(4))
    assert len(chosen) == len(known) == 3
    select.refuse("twin", tree.name, "it differs")
    assert not known


def test_what_is_remembered_is_bounded(known, monkeypatch):
    monkeypatch.setattr(select, "MOST_KNOWN", 4)
    w = torch.ones(8, 6).bfloat16()
    for m in range(1, 12):
        x, out = torch.ones(m, 8).bfloat16(), torch.empty(m, 6).bfloat16()
        select.gemm(x, w, out, ReductionTree(2))
        assert out.eq(8).all() and len(known) <= 4
