"""Checks of ranks.py: chunks, their ladder, faults, names of sites, and the CPU's matrix."""

from __future__ import annotations

import threading
import time

import torch

from rlkernel.collectives.comm import Link
from rlkernel.collectives.errors import Disagreement, PeerLost
from rlkernel.collectives.groups import World
from rlkernel.collectives.observers import Capture
from rlkernel.collectives.transport import Arriving, ProcessGroupTransport
from rlkernel.experiments import a2a_ffn, matrix
from rlkernel.grid import Grid
from rlkernel.overlap import checks, faults, ladder, measure, path, patience, timeline
from rlkernel.overlap import layer as layers
from rlkernel.overlap.layout import seam_of
from tests.overlap.inputs import drawn, layer, trained
from tests.overlap.registered import check, seam

# -- chunks ----------------------------------------------------------------------------------------


class Late(ProcessGroupTransport):
    """This rank comes to the exchange of one chunk late, and to all others in time."""

    chunk, seconds = 1, 1.0

    def start_all_to_all(self, x, tag=0):
        if tag != self.chunk:
            return super().start_all_to_all(x, tag)
        landing, came = torch.empty_like(x), []

        def later():
            time.sleep(self.seconds)
            came.append(super(Late, self).start_all_to_all(x, tag))

        thread = threading.Thread(target=later)
        thread.start()
        return Arriving(landing, [thread.join, lambda: landing.copy_(came[0].wait())])


@check
def a_delayed_rank_delays_exactly_its_chunks(world):
    comm = seam(world, 4)
    if comm is None:
        return
    ffn = layer(16, 16, 2, comm)
    x = drawn(comm.rank, 2, 16, 16)
    wanted = ffn(x, "none")
    assert torch.equal(ffn(x, "kernel"), wanted)
    if comm.rank == 1:
        link = comm.links["ep"]
        late = Late(link.transport.group, 20)
        ffn.comm = comm.using()
        ffn.comm.links = {"ep": Link(link.ranks, link.index, late, link.agreement)}
    with timeline.recording() as names, torch.no_grad():
        got = ffn(x, "kernel")
    order = [name for name in names if name.startswith("comp/gemm1")]
    assert sorted(order) == [f"comp/gemm1 {i}" for i in range(4)]
    assert order[-1] == "comp/gemm1 1", order
    assert torch.equal(got, wanted)


@check
def a_rank_that_is_gone_is_missed_where_all_meet(world):
    """It has given a sign of life, and gives no other; some have come, one is on its way."""
    comm = seam(world, 4)
    if comm is None:
        return
    real = patience.QUIET_S, comm.roll_call.timeout_s, patience._live
    patience.QUIET_S = comm.roll_call.timeout_s = 3.0
    if comm.rank == 2:
        patience._live = lambda store, name, left: store.set(f"{name}/1", "alive")
    try:
        with patience.meeting(comm, "first calls"):
            time.sleep({1: 1.5, 2: 9.0}.get(comm.rank, 0.0))
        assert comm.rank == 2, "rank 2 comes when all others have left"
    except PeerLost as error:
        assert comm.rank != 2 and error.ranks == (2,) and "no sign of life for" in str(error), error
    finally:
        patience.QUIET_S, comm.roll_call.timeout_s, patience._live = real


@check
def the_ladder_is_climbed_together(world):
    """A cut whose bits differ on one rank is taken by none; fewer chunks are, or one GEMM."""
    comm = seam(world, 4)
    if comm is None:
        return
    x, real, asked = drawn(comm.rank, 2, 16, 16), ladder.proven, []
    wanted = layer(16, 16, 2, comm)(x)
    for worst, rung in ((4, "chunks: kernel, 2 token"), (2, "one-gemm: kernel, 1 token")):

        def proven(at, cut, stage, like, trial, spared, worst=worst):
            asked.append(len(cut))
            if comm.rank == 2 and len(cut) >= worst:
                return False, False
            return real(at, cut, stage, like, trial, spared)

        ladder._known.clear()
        ladder.proven = proven
        try:
            with path.listening() as heard:
                got = layer(16, 16, 2, comm)(x, "kernel")
                layer(16, 16, 2, comm)(x, "kernel")
        finally:
            ladder.proven = real
            ladder._known.clear()
        assert heard[0].startswith(rung) and heard[0] == heard[1], heard
        assert torch.equal(got, wanted)
    assert asked == [4, 2, 4, 2], "the second call was answered from memory"


@check
def a_rank_that_compiles_is_not_dead(world):
    """It takes longer than peers wait in a collective: in its first calls, and in a try of cuts."""
    hasty = World(world.store, "gloo", timeout_s=2.0)
    comm, slow = hasty.comm(Grid(dp=2)), []
    if comm is None:
        return

    def compile_slowly(what):
        if comm.rank == 1 and what not in slow:
            slow.append(what)
            time.sleep(2.6)

    def compiled(function, like):
        compile_slowly("the block")
        return function

    def proven(*given):
        compile_slowly("a cut")
        return real[1](*given)

    real = layers.compiled, ladder.proven
    layers.compiled, ladder.proven = compiled, proven
    ladder._known.clear()
    asked = {"batch_size": 2, "tokens": 8, "dim": 16, "k": 2, "num_tests": 0, "chunks": (1, 4)}
    try:
        row = measure.row(*a2a_ffn.cases(a2a_ffn.Params(overlap=("with-sm",), **asked)), comm)
    finally:
        layers.compiled, ladder.proven = real
    assert row["passed"], row["checks"]
    assert len(slow) == 2 * comm.rank


@check
def a_broken_order_is_seen(world):
    for ranks in (2, 4):
        comm = seam(world, ranks)
        for fault in faults.FAULTS[1:] if comm else ():
            ffn = layer(16, 16, 2, comm)
            ffn.faulty = comm.using(observers=[faults.observer(fault)])
            for overlap in ("with-sm", "kernel"):
                said = ""
                try:
                    checks.check_forward(ffn, drawn(comm.rank, 3, 16, 16), overlap)
                except AssertionError as error:
                    said = str(error)
                assert "elements mismatch" in said, (ranks, fault, overlap, said)


@check
def ranks_that_cut_differently_are_told_so(world):
    comm = seam(world, 2)
    ladder._known.clear()  # on all ranks: who knows a shape does not ask with the others
    if comm is None:
        return
    ffn = layer(16, 16, 2, comm, chunks=4 - 2 * comm.rank)
    x = drawn(comm.rank, 2, 16, 16)
    real, ladder._try = ladder._try, lambda at, most, *_: (most, most)
    try:
        ffn(x, "kernel")
    except Disagreement as error:
        assert "in 4" in str(error) and "in 2" in str(error)
    else:
        raise AssertionError("nobody noticed")
    finally:
        ladder._try = real
        ladder._known.clear()


@check
def what_speaks_is_at_a_named_site(world):
    comm = seam(world, 2)
    if comm is None:
        return
    heard = Capture(keep=lambda x: x.shape)
    ffn = layer(8, 16, 2, comm.using(observers=[heard]), chunks=2)
    x = drawn(comm.rank, 3, 8, 16)
    trained(ffn, ffn, x, x)
    assert [(c.kind, c.site) for c in heard.calls] == [
        ("all_to_all", site) for site in ("dispatch", "combine", "combine.dx", "dispatch.dx")
    ]
    assert {c.pre_reduce for c in heard.calls} == {(2, 3, 4, 16)}
    assert seam_of(ffn) is ffn.comm
    paths = ffn.comm.paths()
    assert paths["dispatch"] == "all_to_all over ep by process-group/gloo"


@check
def the_matrix_that_a_cpu_can_do(world):
    """As the command line runs it: every case by the supplied check and over the whole batch."""
    asked = {"overlap": ("with-sm", "kernel"), "num_tests": 0, "compile": False}
    found = []
    for dtype, mode in (("fp32", "bitwise"), ("bf16", "approx")):
        more = {"dtype": dtype, "check_correctness": mode, "backward": dtype == "fp32"}
        for case in a2a_ffn.cases(a2a_ffn.Params(matrix="small", **asked, **more)):
            comm = world.comm(case.grid)
            if comm is not None:
                row = measure.row(case, comm)
                assert row["passed"], (case.title, row["checks"])
                found.append(row)
    assert len(found) == 2 * sum(c.ranks > world.rank for c in matrix.SMALL)
