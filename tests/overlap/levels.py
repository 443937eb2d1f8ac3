"""Checks of ranks.py: groups that span nodes. A rank is on a node because its agent's number, which
is measured, says so; what comes inside a node and what comes from others is told apart by that.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import time
from functools import partial

import torch
import torch.distributed as dist

from rlkernel.collectives.between import Between
from rlkernel.collectives.groups import comm_of
from rlkernel.collectives.transport import Arriving
from rlkernel.overlap import checks, faults, ladder, nodes, path, timeline, two_levels
from rlkernel.overlap.nodes import Nodes
from tests.overlap.inputs import differing, drawn, layer, trained
from tests.overlap.registered import BF16, check, pair, seam
from tests.overlap.values import right_on_every_rank


@contextlib.contextmanager
def on_nodes(world, *of):
    """Rank r is on node of[r]."""
    real = os.environ.get("GROUP_RANK", "0")
    os.environ["GROUP_RANK"] = str(of[world.rank]) if world.rank < len(of) else real
    nodes._known.clear()
    try:
        yield
    finally:
        os.environ["GROUP_RANK"] = real
        nodes._known.clear()


def same_as_none(ffn, x, dy):
    """Output, gradients and comp-only of `kernel` are those of `none` -> its path."""
    with path.listening() as heard:
        got = trained(partial(ffn, overlap="kernel"), ffn, x, dy)
    assert not differing(got, trained(ffn, ffn, x, dy))
    alone = [trained(lambda x, o=o: ffn(x, o, comp_only=True), ffn, x, dy)
             for o in ("kernel", "none")]  # fmt: skip
    assert not differing(*alone)
    return heard[0]


@check
def a_group_that_spans_nodes_has_the_bits_of_none(world):
    for of in ((0, 0, 1, 1), (0, 0, 0, 0, 1, 1, 1, 1), (0, 1, 0, 2, 1, 2, 0, 2)):
        comm = seam(world, len(of))
        if comm is None:
            continue
        with on_nodes(world, *of):
            for dtype in (torch.float32, BF16):
                ffn = layer(16, 32, 2, comm, dtype=dtype)
                x, dy = (drawn(comm.rank, 3, 16, 32, dtype=dtype, seed=s) for s in (0, 1))
                said = same_as_none(ffn, x, dy)
                count = "+".join(str(n) for n in nodes.of(comm).sizes)
                assert said.startswith("chunks: kernel") and f"nodes of {count} ranks" in said, said
                assert said.endswith("first in forward and backward"), said


@check
def a_part_of_the_world_out_of_order_spans_nodes_too(world):
    """Members 5, 2, 7, 0 of nodes 1, 0, 1, 0: neither node's rows lie together."""
    make = dist.distributed_c10d._new_group_with_tag
    free = {"sort_ranks": False} if "sort_ranks" in inspect.signature(make).parameters else {}
    ranks = [5, 2, 7, 0] if free else [0, 2, 5, 7]
    group = make(ranks, backend="gloo", **free)
    if world.rank not in ranks:
        return
    with on_nodes(world, 0, 0, 0, 0, 1, 1, 1, 1):
        comm, me = comm_of(group), ranks.index(world.rank)
        where = nodes.of(comm)
        assert where.sizes == (2, 2) and where.index == me
        assert where.near == (((0, 2), (1, 3)) if free else ((2, 3), (0, 1)))[world.rank < 4]
        ffn, of = layer(16, 24, 2, comm), partial(pair, (2, 16, 24), torch.float32)
        assert "in two levels" in same_as_none(ffn, *of(me))
        right_on_every_rank(comm, ffn, *of(me), of, "kernel")


@check
def one_rank_a_node_and_one_node_stay_one_level(world):
    comm = seam(world, 4)
    if comm is None:
        return
    ffn, x = layer(16, 16, 2, comm), drawn(comm.rank, 2, 16, 16)
    for of in ((0, 1, 2, 3), (0, 0, 0, 0)):
        with on_nodes(world, *of), path.listening() as heard:
            ffn(x, "kernel")
            ffn(x, "with-sm")
        assert all("levels" not in said for said in heard) and len(heard) == 2, heard


def late(comm, who, level, chunk, seconds=1.0):
    """Rank `who` comes late to one chunk's dispatch with the ranks of one level."""

    def start(self, x, tag=0):
        mine = self.index in self.peers
        if comm.rank not in who or tag not in chunk or mine != (level == two_levels.NEAR):
            return real(self, x, tag)
        came = []

        def later():
            time.sleep(seconds)
            came.append(real(self, x, tag))

        thread = threading.Thread(target=later)
        thread.start()
        return Arriving(self.landings[tag], [thread.join, lambda: came[0].wait()])

    real = Between.start_all_to_all
    return start


@check
def a_late_rank_of_another_node_delays_exactly_its_chunk(world):
    comm = seam(world, 4)
    if comm is None:
        return
    with on_nodes(world, 0, 0, 1, 1):
        ffn, x = layer(16, 16, 2, comm), drawn(comm.rank, 2, 16, 16)
        wanted = ffn(x, "none")
        assert torch.equal(ffn(x, "kernel"), wanted)
        for who, chunk in (((3,), (1,)), ((2, 3), (0, 1, 2, 3))):
            real = Between.start_all_to_all
            Between.start_all_to_all = late(comm, who, two_levels.FAR, chunk)
            try:
                with timeline.recording() as names, torch.no_grad():
                    got = ffn(x, "kernel")
            finally:
                Between.start_all_to_all = real
            assert torch.equal(got, wanted)
            order = [n.removeprefix("comp/") for n in names if n.startswith("comp/")]
            if who == (2, 3):  # all of one node: nothing of the other has come
                assert sorted(order[:4]) == [f"gemm1 {i}" for i in range(4)], order
            elif comm.rank != 2:  # which does not wait for rank 3's other messages
                assert order[-4:] == ["gemm1 1", "stage 1", "gemm2 1", "bias 1"], order
                assert "gemm1 1" in order[:-4], "the rows of its own node came"


@check
def rows_that_are_not_proven_wait_for_their_chunk(world):
    """On one rank the bits of rows differ: all ranks take whole chunks, still in two levels."""
    comm = seam(world, 4)
    ladder._known.clear()  # on all ranks: who knows a shape does not ask with the others
    if comm is None:
        return
    x, dy = (drawn(comm.rank, 3, 16, 32, seed=s) for s in (0, 1))
    real = ladder.proven

    def proven(at, cut, stage, like, trial, spared):
        same = real(at, cut, stage, like, trial, spared)
        by_rows = isinstance(trial, two_levels.RowsByNode)
        return (same[0], same[1] and not (by_rows and comm.rank == 2))

    ladder.proven = proven
    try:
        with on_nodes(world, 0, 0, 1, 1):
            said = same_as_none(layer(16, 32, 2, comm), x, dy)
    finally:
        ladder.proven = real
        ladder._known.clear()
    assert said.startswith("chunks: kernel, 4 token slices (4 backward)"), said
    assert said.endswith("first in forward"), said


@check
def slices_that_are_exchanged_across_nodes_are_seen(world):
    for ranks, of in ((4, (0, 0, 1, 1)), (4, (0, 1, 0, 1))):
        comm = seam(world, ranks)
        for fault in faults.FAULTS[1:] if comm else ():
            with on_nodes(world, *of):
                ffn = layer(16, 16, 2, comm)
                ffn.faulty = comm.using(observers=[faults.observer(fault)])
                said = ""
                try:
                    checks.check_forward(ffn, drawn(comm.rank, 3, 16, 16), "kernel")
                except AssertionError as error:
                    said = str(error)
            assert "elements mismatch" in said, (of, fault, said)


@check
def a_padded_payload_changes_nothing_between_nodes(world):
    comm = seam(world, 4)
    if comm is None:
        return
    x, dy = (drawn(comm.rank, 2, 16, 16, seed=s) for s in (0, 1))
    with on_nodes(world, 0, 0, 1, 1):
        for scale in (1, 3):
            assert "in two levels" in same_as_none(layer(16, 16, 2, comm, comm_scale=scale), x, dy)


def test_places_of_a_node():
    where = Nodes((0, 1, 0, 0, 2), 2)
    assert where.near == (0, 2, 3) and where.far == (1, 4) and where.sizes == (3, 1, 1)
    assert nodes.runs(where.near) == [slice(0, 1), slice(2, 4)]
    assert where.two_levels
    assert not Nodes((0, 0), 0).two_levels and not Nodes((0, 1), 0).two_levels
