"""Flags in the interpreter: at least this epoch, also where numbers wrap; every wait ends."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import triton
import triton.language as tl

from rlkernel.kernels.signal import abandon, arrived, post, release, tell

LIMIT_NS = 20_000_000
LOW, HIGH = -(2**31), 2**31 - 1  # neighbours


@triton.jit
def _wait(flags, out, epoch, limit_ns):
    """flags: [the awaited one, who is gone]."""
    tl.store(out, arrived(flags, epoch, flags + 1, limit_ns))


@triton.jit
def _say(flags, epoch):
    release(flags)
    post(flags, epoch)
    abandon(flags + 1, 4)
    abandon(flags + 1, 6)
    tell(flags + 2, 9)


def waited(flags: torch.Tensor, epoch: int, limit_ns: int = LIMIT_NS) -> tuple[int, float]:
    """(what `arrived` said, seconds)."""
    out, begin = torch.full((1,), -1, dtype=torch.int32), time.monotonic()
    _wait[(1,)](flags, out, epoch, limit_ns)
    return int(out), time.monotonic() - begin


@pytest.mark.parametrize(
    ("flag", "epoch", "came"),
    [
        (5, 5, 1),
        (6, 5, 1),
        (4, 5, 0),
        (0, 1, 0),
        (-(2**31), 2**31 - 1, 1),
        (2**31 - 1, -(2**31), 0),
    ],
)
def test_at_least_this_epoch(flag, epoch, came):
    said, seconds = waited(torch.tensor([flag, 0], dtype=torch.int32), epoch)
    assert said == came and (came or seconds >= LIMIT_NS / 1e9)


def test_a_wait_ends_when_the_flag_comes_or_somebody_has_given_up():
    for place, said in ((0, 1), (1, 0)):
        flags = torch.zeros(2, dtype=torch.int32)
        timer = threading.Timer(0.05, lambda f=flags, p=place: f[p].fill_(1))
        timer.start()
        came, seconds = waited(flags, 1, 10**10)
        assert came == said and seconds < 5
        timer.join()


def test_the_first_suspect_stays():
    words = torch.zeros(3, dtype=torch.int32)
    _say[(1,)](words, 7)
    assert words.tolist() == [7, 5, 9]
