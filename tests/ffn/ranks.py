"""What every rank of the layer's tests runs, over gloo; test_ranks.py shows one test a check.

    torchrun --nproc-per-node 8 ranks.py FOLDER

A check is a function of `world` that asserts on every rank. The groups of all grids are
made first, by everybody; a rank outside a grid waits at the end of the check.
"""

from __future__ import annotations

import os

import torch

os.environ["TRITON_INTERPRET"] = "1"  # for sums through shared memory, whose kernels are few

from rlkernel.collectives import symmetric  # noqa: F401
from rlkernel.collectives.errors import Disagreement
from rlkernel.collectives.groups import World
from rlkernel.collectives.observers import Capture
from rlkernel.compare import bit_report
from rlkernel.contract import LayerContract, ReductionTree
from rlkernel.experiments import det_ffn
from rlkernel.experiments.case import Case
from rlkernel.experiments.layouts import LAYOUTS
from rlkernel.ffn import exactness, walltime
from rlkernel.ffn.module import NAMES, DeterministicFFN
from rlkernel.grid import Grid
from rlkernel.kernels import bf16
from tests.eight_ranks import run_checks
from tests.ffn import operators, shares
from tests.ffn.inputs import WIDE, H, M, refused, trained, weights
from tests.kernels.inputs import matrix

bf16.INTERPRETED = False  # the layer itself runs on its plain-torch twins
BF16 = torch.bfloat16
GRIDS = [*dict.fromkeys(grid for grid, _ in LAYOUTS.values()), Grid(cp=2), Grid(2, 2, 2)]
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def results(world, **asked) -> list[tuple[Case, dict]]:
    """(case, row) of det-ffn's layer, of the cases in whose grid this rank is."""
    found = []
    for case in det_ffn.cases(det_ffn.Params(what=("layer",), device="cpu", **asked)):
        comm = world.comm(case.grid)
        if comm is not None:
            found.append((case, exactness.layer_row(case, comm)))
    return found


def share(layer, x):
    """This rank's tokens of x."""
    return x[exactness.own_tokens(layer, x.shape[0])]


# -- bits ------------------------------------------------------------------------------------------


@check
def every_layout_has_the_bits_of_one_rank(world):
    """Contracts, both ways to sum dX, both routes of dW, three steps each."""
    digests = {}
    for case, row in results(world):
        assert row["passed"] and not row["mismatches"], (case.title, row["lines"])
        assert all(line["elements"] for line in row["lines"]) and row["caught"] is None
        for name, digest in row["digest"].items():
            digests.setdefault(name.rpartition(" dw ")[0], set()).add(digest)
    assert len(digests) == (8 if world.rank < 4 else 6)  # tree2 stands on small grids only
    assert all(len(found) == 1 for found in digests.values()), digests


@check
def uneven_and_absent_leaves_of_a_lanes_tokens(world):
    """A lane of 6 tokens has leaves of 1 and 2, one of 2 lacks two of its four leaves."""
    for m, layouts in ((12, ("tp2_cp2", "tp2_cp2_sp")), (4, ("tp2_cp2", "tp2_cp2_sp"))):
        few = {"contract": ("tree8.bf16",), "dx": ("separate",)}
        for case, row in results(world, layout=layouts, m=(m,), **few):
            assert row["passed"], (case.title, row["lines"])


@check
def over_shared_memory_the_layer_has_the_bits_of_one_rank(world):
    shared = World(world.store, "symmetric", 120, "cpu")
    shared._groups = world._groups
    few = {"contract": ("tree8.bf16",), "dw": ("reduce",), "repeats": 2, "m": (8,)}
    both = {**few, "contract": ("tree8.bf16", "tree8.fp32"), "layout": ("tp2_sp", "tp2_cp2")}
    rest = ("tp2", "tp4", "tp2_cp2_sp", "tp8", "tp4_cp2", "tp4_cp2_sp")
    more = {**few, "dx": ("separate",), "layout": rest}
    for case, row in (*results(shared, **both), *results(shared, **more)):
        assert row["passed"] and not row["mismatches"], (case.title, row["lines"])
    opened = [ranks for ranks, arena in shared._arenas.items() if arena.cache_info().currsize]
    assert opened, "whoever summed has shared its memory"


# what of a variant differs: between-rank orders show where four ranks sum, leaves everywhere
FEATURES, WEIGHTS = {"forward", "training output", "dX"}, {"dW gate", "dW up", "dW down"}
CONTROLS = {
    ("left-fold", "tp4"): FEATURES,
    ("exchanged", "tp4_cp2_sp"): FEATURES,
    ("arrival-order", "tp8"): FEATURES | {"no-grad", "repeat"},
    ("leaves16", "tp2_sp"): FEATURES | WEIGHTS,
    ("local-left-fold", "tp2"): FEATURES | WEIGHTS,
    ("local-left-fold", "tp8"): WEIGHTS,  # a single leaf of the features on each rank
}


@check
def every_negative_control_shows_where_it_must(world):
    few = {"contract": ("tree8.bf16",), "dw": ("reduce",)}
    for (fault, layout), expected in CONTROLS.items():
        for _, row in results(world, fault=fault, layout=(layout,), **few):
            wrong = {line["operator"] for line in row["lines"] if line["mismatches"]}
            assert wrong == expected, (fault, layout, wrong)
            assert row["caught"] and not row["passed"]


@check
def a_layout_is_timed_by_the_slowest_of_its_ranks(world):
    few = {"contract": ("tree8.bf16",), "dx": ("separate",), "dw": ("auto",), "samples": 3}
    for case in det_ffn.cases(det_ffn.Params(what=("time",), device="cpu", m=(M,), **few)):
        comm = world.comm(case.grid)
        if comm is not None:
            row = walltime.time_row(case, comm)
            assert row["passed"] and row["elements"] and row["ranks"] == 2, row["checks"]
            for line in row["lines"]:
                own = [s["us"] for s in row["samples"] if s["operator"] == line["operator"]
                       and s["variant"] == line["variant"]]  # fmt: skip
                assert line["against"] == "official" and line["mode"] == "eager"
                assert line["median_us"] >= sorted(own)[1] and line["ratio"]["median"] > 0


@check
def data_parallel_lanes_sum_tokens_too(world):
    comm = world.comm(Grid(2, 2, 2))
    at = {"m": M, "hidden": H, "intermediate": WIDE, "contracts": "tree8.bf16", "dx": "separate"}
    at |= {"dw": "reduce+gather", "repeats": 2, "sequence_parallel": True}
    row = exactness.layer_row(Case("det-ffn", comm.grid, "bf16", 3, parameters=at), comm)
    assert row["passed"] and {line["dw"] for line in row["lines"]} == {"reduce", "gather"}
    narrow = LayerContract(token=ReductionTree(2))
    refused(ValueError, "4 shards", lambda: DeterministicFFN(*weights(), comm, contract=narrow))


@check
def tokens_are_summed_under_their_own_tree(world):
    """Features in BF16 joints and tokens in FP32 ones, and the other way round."""
    x, dy = matrix(M, H, 3), matrix(M, H, 4)
    for first, second in (("bf16", "fp32"), ("fp32", "bf16")):
        contract = LayerContract(ReductionTree(4, first), ReductionTree(8, second))
        comm = world.comm(Grid(cp=2, tp=2))
        if comm is not None:
            right = trained(DeterministicFFN(*weights(), contract=contract), x, dy)
            layer = DeterministicFFN(*weights(), comm, contract=contract, dw="reduce")
            found = trained(layer, share(layer, x), share(layer, dy))
            for name, value in found.items():
                of_weight = name in NAMES
                part = layer.shard(name, right[name]) if of_weight else share(layer, right[name])
                assert bit_report(value, part), (first, second, name)


@check
def the_gradient_of_ones_does_not_grow_with_p(world):
    x = torch.ones(M, H, dtype=BF16)
    right = trained(DeterministicFFN(*weights()), x, x)["dx"]
    for grid in (Grid(tp=2), Grid(tp=4)):
        comm = world.comm(grid)
        if comm is not None:
            report = bit_report(trained(DeterministicFFN(*weights(), comm), x, x)["dx"], right)
            assert report, (grid, report)


@check
def three_steps_in_place_keep_every_rank_on_the_path_of_one(world):
    data = [(matrix(M, H, 20 + n), matrix(M, H, 30 + n)) for n in range(3)]
    for grid, split in ((Grid(cp=2, tp=2), True), (Grid(tp=8), False)):
        comm = world.comm(grid)
        if comm is None:
            continue
        alone = DeterministicFFN(*weights())
        layer = DeterministicFFN(*weights(), comm, sequence_parallel=split)
        for x, dy in data:
            for one in (alone, layer):
                trained(one, share(one, x), share(one, dy))
                with torch.no_grad():
                    for weight in one.parameters():
                        weight.sub_(weight.grad, alpha=0.01)
        right = alone.state_dict()
        for name, value in layer.whole(layer.local()).items():
            assert bit_report(value, right[name]), (grid, name)
            assert not bit_report(value, weights()[NAMES.index(name)])


@check
def any_layout_of_the_upstream_gradient_under_sequence_parallel(world):
    comm = world.comm(Grid(cp=2, tp=2))
    if comm is not None:
        layer = DeterministicFFN(*weights(), comm, sequence_parallel=True)
        x = share(layer, matrix(M, H, 3))
        right = trained(layer, x, torch.ones_like(x))
        found = trained(layer, x, torch.ones(1, dtype=BF16).expand_as(x))
        assert all(bit_report(value, right[name]) for name, value in found.items())


# -- who talks, and when ---------------------------------------------------------------------------

SUMS = {"separate": ["gate.dx", "up.dx"], "packed": ["gate_up.dx"]}
DW = ["down.dw", "gate.dw", "up.dw"]
GATHERED = [f"{site}.{side}" for site in DW for side in ("gradient", "input")][:5]  # x goes once


@check
def the_gradient_of_the_intermediate_needs_no_collective(world):
    """All that is said between ranks, call by call: nothing stands between dY and dH."""
    for (grid, split), dx, dw in (
        ((Grid(tp=4), False), "separate", "reduce"),
        ((Grid(tp=2), True), "separate", "reduce"),
        ((Grid(tp=2), True), "packed", "reduce"),
        ((Grid(cp=2, tp=2), False), "packed", "gather"),
        ((Grid(cp=2, tp=2), True), "separate", "reduce"),
    ):
        comm = world.comm(grid)
        if comm is None:
            continue
        forward, backward = spoken(comm, sequence_parallel=split, dx=dx, dw=dw)
        total = "reduce_scatter" if split else "all_reduce"
        gather = [("all_gather", "gate_up.gather"), ("all_gather", "down.gather")]
        assert forward == [*gather[: int(split)], (total, "down.forward")], forward
        sums = [(total, site) for site in SUMS[dx]]
        over_tokens = [("all_reduce", site) for site in DW] if grid.cp > 1 else []
        if grid.cp > 1 and dw == "gather":  # ahead of the products of dX, so that they hide it
            sums, over_tokens = [("all_gather", site) for site in GATHERED] + sums, []
        assert backward == [*gather[2 - int(split) :], *sums, *over_tokens], (grid, backward)


def spoken(comm, **options):
    """(kind, site) of all calls of a forward, and of its backward."""
    heard = Capture(keep=lambda x: None)
    layer = DeterministicFFN(*weights(), comm.using(observers=[heard]), **options)
    x, dy = share(layer, matrix(M, H, 3)), share(layer, matrix(M, H, 4))
    y = layer(x.clone().requires_grad_())
    forward = [(call.kind, call.site) for call in heard.calls]
    y.backward(dy)
    return forward, [(call.kind, call.site) for call in heard.calls[len(forward) :]]


@check
def dh_alone_makes_no_rank_speak(world):
    """gate's and up's dW are made of dH; under TP alone their backward is silent, and right."""
    comm = world.comm(Grid(tp=4))
    if comm is None:
        return
    heard = Capture(keep=lambda x: None)
    layer = DeterministicFFN(*weights(), comm.using(observers=[heard]))
    x, dy = matrix(M, H, 3), matrix(M, H, 4)
    y = layer(x)
    heard.calls.clear()
    y.backward(dy)
    assert heard.calls == []
    right = trained(DeterministicFFN(*weights()), x, dy)
    for name, value in layer.gradients().items():
        assert bit_report(value, layer.shard(name, right[name])), name


@check
def lanes_of_different_length_are_refused_on_every_rank(world):
    comm = world.comm(Grid(cp=2, tp=2))
    if comm is None:
        return
    for dw in ("reduce", "gather", "auto"):
        layer = DeterministicFFN(*weights(), comm, dw=dw)
        y = layer(matrix(16 + comm.grid.coords(comm.rank).cp, H, 3))
        for words in ("dw.tokens 16 tokens", "dw.tokens 17 tokens"):
            refused(Disagreement, words, lambda y=y: y.sum().backward(retain_graph=True))
        layer = DeterministicFFN(*weights(), comm, dw=dw)
        trained(layer, matrix(16, H, 3), matrix(16, H, 4))  # the groups are still usable


@check
def ranks_under_different_contracts_or_options_are_refused(world):
    comm = world.comm(Grid(tp=2))
    if comm is None:
        return
    odd, x = comm.rank == 1, matrix(16, H, 3)
    for words, options in (
        ("tree4.bf16", {"contract": "tree4.bf16" if odd else "tree8.bf16"}),
        ("gate_up.gather", {"sequence_parallel": odd}),
    ):
        layer = DeterministicFFN(*weights(), comm, **options)
        with torch.no_grad():
            refused(Disagreement, words, lambda layer=layer: layer(x[:16]))
    layer = DeterministicFFN(*weights(), comm, dx="packed" if odd else "separate")
    y = layer(x.clone().requires_grad_())
    refused(Disagreement, "gate_up.dx", lambda: y.sum().backward())


for function in (*shares.CHECKS, *operators.CHECKS):
    check(function)


if __name__ == "__main__":
    run_checks(CHECKS, GRIDS)
