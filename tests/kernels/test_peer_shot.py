"""How calls over ranks are cut: every cut fits the arena, and what cannot be summed is refused."""

from __future__ import annotations

import pytest
import torch

from rlkernel.contract import ReductionTree
from rlkernel.kernels import peer_gather, peer_reduce, peer_shot
from rlkernel.kernels.peer_memory import SLOTS, Arena, Peers

BF16 = torch.bfloat16


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_cut_fits_the_arena(size):
    arena, sizes = Arena(size), [1, *(1 << n for n in range(4, 32))]
    for cut in (f(n, size) for n in sizes for f in (peer_shot.shot, peer_shot.stream)):
        room = arena.words // 2 if cut.form == "words" else arena.chunk
        assert cut.block <= room and cut.block & (cut.block - 1) == 0
        assert cut.lanes <= arena.lanes, cut
        assert cut.block >= 16 * 32 * cut.warps // (2 if cut.form == "words" else 1), "idle threads"


@pytest.mark.parametrize("size", [2, 8])
def test_places_do_not_overlap(size):
    arena = Arena(size, lanes=3, chunk=64, words=32)
    flags = range(128, 128 + 4 * arena.lanes * size)
    assert flags.stop <= arena.slots and arena.slots % 16 == arena.word_slots % 16 == 0
    assert arena.word_slots - arena.slots == SLOTS * arena.lanes * size * arena.chunk
    assert arena.bytes - arena.word_slots == 2 * arena.lanes * size * arena.words


def test_refusals():
    tree, peers = ReductionTree(8), Peers(Arena(2), 0, None, None, 0)
    x = torch.ones(4, 6, dtype=BF16)
    for error, words, given, out in [
        (TypeError, "x is torch.float16", x.half(), x.half()),
        (TypeError, "out is torch.float32", x, x.float()),
        (TypeError, "x is torch.int32", x.int(), x.int()),
        (ValueError, "contiguous", x.t(), x.t().contiguous()),
        (ValueError, "does not fit", x, x[:3]),
        (ValueError, "one device", x, x.to("meta")),
        (ValueError, "cannot run on cpu", x, x),
    ]:
        with pytest.raises(error, match=words):
            peer_reduce.all_reduce(given, out, tree, peers)
    with pytest.raises(ValueError, match="does not fit"):
        peer_reduce.reduce_scatter(x[:2].clone(), x[:2].clone(), tree, peers)
    with pytest.raises(TypeError, match="torch.bfloat16"):
        peer_gather.all_gather(x, x, peers)
