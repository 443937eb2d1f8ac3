"""The tile tables of the A2A GEMMs, and their protocol carried out tile by tile on the host."""

from __future__ import annotations

import random

import pytest
import torch

from rlkernel.kernels.a2a_order import Cut, chunk_slices, halves, ordered, packed, phases
from rlkernel.kernels.a2a_signal import MOST_CHUNKS, back, flag_count, there

SHAPES = [(1, 2, 48, 1, 1), (5, 3, 300, 2, 2), (130, 4, 512, 2, 3), (300, 2, 700, 4, 2)]


def _cuts():
    for batch, tokens, columns, size, chunks in SHAPES:
        for arrive in (True, False):
            for lead in (0, 1, 99):
                own = size - 1
                yield Cut(batch, tokens, columns, 256, size, own, arrive, chunks, lead, 3)


@pytest.mark.parametrize("cut", list(_cuts()), ids=str)
def test_every_tile_comes_once(cut):
    order = ordered(cut)
    assert len(order) == cut.tiles == len(set(map(tuple, order.tolist())))
    token, rank, chunk, row, column = order.unbind(1)
    assert int(token.max()) == cut.tokens - 1 and int(rank.max()) == cut.size - 1
    assert int(row.max()) == (cut.tiles_m - 1) * 128 and int(column.max()) < cut.columns
    slices = chunk_slices(cut.tokens, cut.chunks)
    assert all(slices[c].start <= t < slices[c].stop for t, c in zip(token, chunk))


@pytest.mark.parametrize("cut", list(_cuts()), ids=str)
def test_what_a_kernel_unpacks_is_what_was_ordered(cut):
    order = ordered(cut)
    words = packed(order)
    low, high = words & 0xFFFFFFFF, words >> 32
    read = (high & 0xFFFF, low >> 24 & 0x7F, low >> 16 & 0xFF, (high >> 16 & 0x7FFF) * 64,
            (low & 0xFFFF) * 64)  # fmt: skip
    assert torch.equal(torch.stack(read, 1), order)


def test_own_rows_come_first_where_they_arrive_and_last_where_they_leave():
    for arrive in (True, False):
        cut = Cut(128, 8, 512, 256, 4, 2, arrive, lead=3)
        rank = ordered(cut)[:, 1]
        apart = 3 * 2 * (1 if arrive else 3)  # tiles of the first three tokens
        own = rank == 2
        assert bool(own[:apart].all()) if arrive else not bool(own[:apart].any())
        rest = 3 * 2 * (3 if arrive else 1)
        assert not bool(own[-rest:].any()) if arrive else bool(own[-rest:].all())


def test_one_rank_has_no_phases_apart():
    assert [len(t) * len(r) for t, r in phases(Cut(4, 5, 64, 128, 1, 0, True, lead=2))] == [0, 5, 0]


def test_flags_do_not_share_a_place():
    size = 4
    every = [(rank, chunk) for rank in range(size) for chunk in range(MOST_CHUNKS)]
    places = [there(*at) for at in every] + [back(*at, size) for at in every]
    assert len(set(places)) == len(places) and max(places) < flag_count(size) - 1


UNSET = 10**9


class Rank:
    """What one rank's kernels do, tile by tile in table order, on integers."""

    def __init__(self, own, world, P, B, L, D, N, chunks, lead, fault=""):
        random = torch.Generator().manual_seed(own)
        self.own, self.world, self.at, self.fault = own, world, (P, B, L, D, N), fault
        self.x = torch.randint(-9, 9, (B, P * L, D), generator=random)
        self.w = torch.randint(-9, 9, (L, D, N), generator=random)
        self.came = torch.full((P * B, L, D), UNSET)
        self.out = torch.full((B, P * L, N), UNSET)
        self.flags, self.counts = {}, {}
        self.waiting = ordered(Cut(B, L, N, 256, P, own, True, chunks, lead)).tolist()
        self.leaving = ordered(Cut(B, L, N, 256, P, own, False, chunks, lead)).tolist()
        self.halves = halves(torch.tensor(self.leaving), P).tolist()
        self.z = torch.full((L, P * B, N), UNSET)
        self.pushes = [(c, peer) for c in range(chunks) for peer in range(P) if peer != own]
        self.chunks = chunks

    def push(self):
        P, B, L, D, N = self.at
        chunk, peer = self.pushes.pop(0)
        tokens = chunk_slices(L, self.chunks)[chunk]
        to = self.world[peer]
        source = self.x[:, peer * L + tokens.start : peer * L + tokens.stop]
        if self.fault != "flag first":
            to.came[self.own * B : (self.own + 1) * B, tokens] = source
        to.flags[there(self.own, chunk)] = 1

    def complete(self, rank, chunk):
        """Whoever sees the flag that is raised now sees all of these results."""
        P, B, L, D, N = self.at
        tokens = chunk_slices(L, self.chunks)[chunk]
        theirs = self.world[rank].out[:, self.own * L + tokens.start : self.own * L + tokens.stop]
        assert int(theirs.max()) < UNSET, "released before it left"

    def step(self):
        """One push, one arriving or one leaving tile; False where a wait holds it."""
        P, B, L, D, N = self.at
        if self.pushes and random.random() < 0.3:
            self.push()
            return True
        if self.waiting:
            token, rank, chunk, row, column = self.waiting[0]
            if rank != self.own and there(rank, chunk) not in self.flags:
                return bool(self.pushes) and (self.push() or True)
            rows = slice(row, min(row + 128, B))
            a = self.x[rows, self.own * L + token]
            if rank != self.own:
                a = self.came[rank * B :][:B][rows, token]
            assert int(a.max()) < UNSET, "computed before it came"
            place = self.z[token, rank * B :][:B][rows]
            place[:, column : column + 256] = a @ self.w[token][:, column : column + 256]
            self.waiting.pop(0)
            return True
        if self.leaving:
            token, rank, chunk, row, column = self.leaving.pop(0)
            rows = slice(row, min(row + 128, B))
            result = self.z[token, rank * B :][:B][rows][:, column : column + 256]
            self.world[rank].out[rows, self.own * L + token, column : column + 256] = result
            if rank != self.own:
                key = rank * MOST_CHUNKS + chunk
                self.counts[key] = self.counts.get(key, 0) + 2
                early = 2 if self.fault == "one tile early" else 0
                if self.counts[key] == self.halves[key] - early:
                    self.complete(rank, chunk)
                    self.world[rank].flags[back(self.own, chunk, P)] = 1
            return True
        return False


def carried_out(P, B, L, N, chunks, lead, fault=""):
    """All ranks in random turns, to their end."""
    random.seed(P)
    world = []
    world += [Rank(r, world, P, B, L, 16, N, chunks, lead, fault) for r in range(P)]
    while any(rank.waiting or rank.leaving or rank.pushes for rank in world):
        steps = [rank.step() for rank in random.sample(world, P)]
        assert any(steps), "all ranks wait"
    return world


@pytest.mark.parametrize("P, B, L, N, chunks, lead", [(2, 130, 3, 300, 2, 1), (4, 3, 2, 48, 1, 9)])
def test_ranks_that_follow_their_tables_end_with_the_layer(P, B, L, N, chunks, lead):
    world = carried_out(P, B, L, N, chunks, lead)
    for rank in world:
        wanted = torch.cat([
            torch.einsum("bld,ldn->bln", rank.x[:, p * L : (p + 1) * L], world[p].w)
            for p in range(P)
        ], 1)  # fmt: skip
        assert torch.equal(rank.out, wanted)
        expected = {back(p, c, P) for p in range(P) if p != rank.own for c in range(chunks)}
        assert expected <= rank.flags.keys()


@pytest.mark.parametrize(
    "fault, says", [("flag first", "before it came"), ("one tile early", "before it left")]
)
def test_a_flag_that_is_raised_too_early_shows(fault, says):
    with pytest.raises(AssertionError, match=says):
        carried_out(2, 130, 3, 300, 2, 1, fault)
