"""The faults of each reconstructed block: every sum broken in each of four ways, and what else goes
wrong in practice. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlkernel.collectives.faults import (
    ArrivalOrder,
    BiasOnEveryRank,
    Fault,
    Stale,
    always,
    averaged,
    doubled,
    missing,
    swap_shards,
    wrong_group,
)
from rlkernel.grid import Grid

TWO_LANES, TWO_BY_TWO, FOUR_RANKS = Grid(dp=2), Grid(dp=2, tp=2), Grid(tp=4)
BIASED = {"bias_std": 1.0}
WAYS = {
    "missing": (missing, "is left out: each rank goes on with its own share"),
    "doubled": (doubled, "runs twice: the result is too large by the size of its group"),
    "averaged": (averaged, "is a mean: the result is too small by the size of its group"),
    "wrong_group": (wrong_group, "runs over {elsewhere}"),
}


def _every_way(
    what: str,
    site: str,
    first_wrong: str,
    says: str,
    *,
    smallest: Grid = Grid(tp=2),
    crossed: Grid = TWO_BY_TWO,
    elsewhere: str = "the data-parallel group",
    unsummed: str = "missing",
    only: str = "",
    fixture: Mapping[str, float] | None = None,
) -> Iterator[Fault]:
    """One sum, broken in each of the four ways. what: `forward_reduce`. crossed: the smallest grid
    for the wrong group, `elsewhere`. unsummed: what an audit should call the sum left out.
    """
    for way, (observer, how) in WAYS.items():
        yield Fault(
            f"{way}_{what}",
            unsummed if way == "missing" else way,
            site,
            first_wrong,
            f"{says} {how.format(elsewhere=elsewhere)}",
            always(observer),
            smallest=crossed if way == "wrong_group" else smallest,
            only=only,
            fixture=fixture or {},
        )


def _data_reduce(first_wrong: str) -> Iterator[Fault]:
    """The sum over lanes. Left out beside tensor parallelism it leaves values that a sum over too
    small a group leaves as well: equal within a lane, the lanes adding up. Hence `subset`.
    """
    return _every_way(
        "data_reduce",
        "dw",
        first_wrong,
        "the weight-gradient sum over data-parallel lanes",
        smallest=TWO_LANES,
        elsewhere="the tensor-parallel group",
        unsummed="subset",
    )


def _positions(what: str, site: str, first_wrong: str, says: str, **rest) -> Iterator[Fault]:
    """A gradient of something replicated that sequence parallel sums over the ranks' positions."""
    says = f"the sum of {says} over the ranks' positions"
    return _every_way(what, site, first_wrong, says, only="sequence_parallel", **rest)


def _bias(site: str, vector: str) -> Fault:
    return Fault(
        "bias_on_every_rank",
        "added_again",
        site,
        "output",
        "the bias is added in front of the sum, so P times",
        lambda local: BiasOnEveryRank(local[vector]),
        fixture=BIASED,
    )


def _swapped(what: str, weight: str, says: str) -> Fault:
    return Fault(
        f"swapped_{what}_shards",
        "swapped",
        f"{weight}.load",
        "output",
        f"neighbouring ranks hold each other's columns of {says}",
        load=swap_shards(weight, 1),
    )


def _stale(what: str, site: str, says: str) -> Fault:
    return Fault(
        f"stale_{what}",
        "stale",
        site,
        "input_grad",
        f"{says} is that of the step before",
        lambda local: Stale(),
        steps=2,
    )


def _arrival(what: str, site: str, says: str) -> Fault:
    return Fault(
        f"arrival_order_{what}",
        "unsteady",
        site,
        "output",
        f"{says} runs in the order of arrival",
        lambda local: ArrivalOrder(),
        smallest=FOUR_RANKS,
        detector="repeat",
    )


def _by_name(*faults: Fault) -> Mapping[str, Fault]:
    return {fault.name: fault for fault in faults}


_DOWN, _GATE_UP = "the sum behind the down projection", "the gradient sum in front of gate and up"
SWIGLU = _by_name(
    *_every_way("forward_reduce", "down.forward", "output", _DOWN),
    *_every_way("backward_reduce", "gate_up.dx", "input_grad", _GATE_UP),
    *_data_reduce("norm_grad"),
    *_positions("norm_reduce", "norm.dw", "norm_grad", "the norm weight's gradient"),
    *_positions("bias_reduce", "down.db", "down_bias_grad", "the bias gradient"),
    _swapped("down", "down", "the down projection"),
    _bias("down.forward", "down_bias"),
    _stale("backward_reduce", "gate_up.dx", _GATE_UP),
    _arrival("forward_reduce", "down.forward", _DOWN),
)

_OUT, _QKV = "the sum behind the output projection", "the gradient sum in front of Q, K and V"
GQA = _by_name(
    *_every_way("output_reduce", "out.forward", "output", _OUT),
    *_every_way("input_grad_reduce", "qkv.dx", "input_grad", _QKV),
    *_every_way(
        "kv_reduce",
        "kv.dw",
        "parameter_grad",
        "the gradient sum over the replicas of a KV head",
        smallest=FOUR_RANKS,
        crossed=FOUR_RANKS,
        elsewhere="all ranks, those of other KV heads too",
    ),
    *_data_reduce("parameter_grad"),
    *_positions("norm_reduce", "norm.dw", "parameter_grad", "the norm weight's gradient"),
    *_positions("bias_reduce", "out.db", "parameter_grad", "the bias gradient", fixture=BIASED),
    _swapped("output", "wo", "the output projection"),
    _bias("out.forward", "out_bias"),
    _stale("input_grad_reduce", "qkv.dx", _QKV),
    _arrival("output_reduce", "out.forward", _OUT),
)
