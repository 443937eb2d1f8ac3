"""Kernels that stand beside a product: what they leave behind, by any number of programs."""

from __future__ import annotations

import pytest
import torch

from rlkernel.kernels import bystander


@pytest.mark.parametrize("size", [1, bystander.BLOCK - 1, 2 * bystander.BLOCK, 10_001])
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_element_is_copied_and_nothing_else_written(size, programs, dtype):
    source = torch.randn(size).to(dtype)
    room = torch.full((size + 2 * bystander.BLOCK,), torch.nan, dtype=dtype)
    target = room[bystander.BLOCK : bystander.BLOCK + size]
    assert bystander.copy(programs, 2, source, target) is target
    assert torch.equal(target, source)
    assert room.isnan().sum() == 2 * bystander.BLOCK


def test_no_rounds_copy_nothing():
    target = torch.full((5,), torch.nan)
    bystander.copy(2, 0, torch.ones(5), target)
    assert target.isnan().all()


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_what_is_held_counts_its_steps(steps):
    out = torch.full((3 * bystander.BLOCK,), torch.nan)
    wanted = torch.arange(len(out), dtype=torch.float32)
    for _ in range(steps):
        wanted = wanted * 0.5 + 1.0
    assert torch.equal(bystander.hold(3, steps, out), wanted)
    if steps:
        assert not torch.equal(bystander.hold(3, steps - 1, out), wanted)


def test_refused_before_anything_is_launched():
    ones, room = torch.ones(6), torch.full((bystander.BLOCK,), torch.nan)
    for words, call in (
        ("programs=0", lambda: bystander.copy(0, 1, ones, ones)),
        ("rounds=-1", lambda: bystander.copy(1, -1, ones, ones)),
        ("one shape", lambda: bystander.copy(1, 1, ones, ones[:5])),
        ("one shape, dtype", lambda: bystander.copy(1, 1, ones, ones.double())),
        ("contiguous", lambda: bystander.copy(1, 1, ones[::2], ones[::2])),
        ("steps=-1", lambda: bystander.hold(1, -1, room)),
        ("FP32 of 8192 elements", lambda: bystander.hold(2, 1, room)),
        ("FP32 of 4096 elements", lambda: bystander.hold(1, 1, room.double())),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert room.isnan().all()
