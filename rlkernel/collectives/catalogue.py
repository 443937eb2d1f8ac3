"""The faults of each reconstructed block: its forward and its backward sum broken in every way,
sums of parameter gradients left out, and what else goes wrong in practice. Imports no torch.
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

TWO_BY_TWO, FOUR_RANKS = Grid(dp=2, tp=2), Grid(tp=4)
WAYS = {
    "missing": (missing, "is left out: each rank goes on with its own share"),
    "doubled": (doubled, "runs twice: the result is P times too large"),
    "averaged": (averaged, "is a mean: the result is P times too small"),
    "wrong_group": (wrong_group, "runs over the data-parallel group"),
}


def _every_way(what: str, site: str, first_wrong: str, says: str) -> Iterator[Fault]:
    """One collective, broken in each of the four ways. what: `forward_reduce`."""
    for way, (observer, how) in WAYS.items():
        smallest = TWO_BY_TWO if way == "wrong_group" else Grid(tp=2)
        yield Fault(
            f"{way}_{what}",
            way,
            site,
            first_wrong,
            f"{says} {how}",
            always(observer),
            smallest=smallest,
        )


def _by_name(*faults: Fault) -> Mapping[str, Fault]:
    return {fault.name: fault for fault in faults}


SWIGLU = _by_name(
    *_every_way("forward_reduce", "down.forward", "output", "the sum behind the down projection"),
    *_every_way(
        "backward_reduce", "gate_up.dx", "input_grad", "the gradient sum in front of gate and up"
    ),
    Fault(
        "missing_data_reduce",
        "subset",
        "dw",
        "norm_grad",
        "the weight-gradient sum over data-parallel lanes is left out",
        always(missing),
        smallest=TWO_BY_TWO,
    ),
    Fault(
        "missing_norm_reduce",
        "missing",
        "norm.dw",
        "norm_grad",
        "the norm weight's gradient is not summed over the ranks' positions",
        always(missing),
        only="sequence_parallel",
    ),
    Fault(
        "missing_bias_reduce",
        "missing",
        "down.db",
        "down_bias_grad",
        "the bias gradient is not summed over the ranks' positions",
        always(missing),
        only="sequence_parallel",
    ),
    Fault(
        "swapped_down_shards",
        "swapped",
        "down.load",
        "output",
        "neighbouring ranks hold each other's columns of the down projection",
        load=swap_shards("down", 1),
    ),
    Fault(
        "bias_on_every_rank",
        "added_again",
        "down.forward",
        "output",
        "the bias is added in front of the sum, so P times",
        lambda local: BiasOnEveryRank(local["down_bias"]),
        fixture={"bias_std": 1.0},
    ),
    Fault(
        "stale_backward_reduce",
        "stale",
        "gate_up.dx",
        "input_grad",
        "the gradient sum in front of gate and up is that of the step before",
        lambda local: Stale(),
        steps=2,
    ),
    Fault(
        "arrival_order_forward_reduce",
        "unsteady",
        "down.forward",
        "output",
        "the sum behind the down projection runs in the order of arrival",
        lambda local: ArrivalOrder(),
        smallest=FOUR_RANKS,
        detector="repeat",
    ),
)

GQA = _by_name(
    *_every_way("output_reduce", "out.forward", "output", "the sum behind the output projection"),
    *_every_way(
        "input_grad_reduce", "qkv.dx", "input_grad", "the gradient sum in front of Q, K and V"
    ),
    Fault(
        "missing_kv_reduce",
        "missing",
        "kv.dw",
        "parameter_grad",
        "the gradients of a replicated KV head are not summed over its replicas",
        always(missing),
        smallest=FOUR_RANKS,
    ),
    Fault(
        "doubled_kv_reduce",
        "doubled",
        "kv.dw",
        "parameter_grad",
        "the gradients of a replicated KV head are summed twice",
        always(doubled),
        smallest=FOUR_RANKS,
    ),
    Fault(
        "missing_data_reduce",
        "subset",
        "dw",
        "parameter_grad",
        "the weight-gradient sum over data-parallel lanes is left out",
        always(missing),
        smallest=TWO_BY_TWO,
    ),
    Fault(
        "missing_norm_reduce",
        "missing",
        "norm.dw",
        "parameter_grad",
        "the norm weight's gradient is not summed over the ranks' positions",
        always(missing),
        only="sequence_parallel",
    ),
    Fault(
        "swapped_output_shards",
        "swapped",
        "wo.load",
        "output",
        "neighbouring ranks hold each other's columns of the output projection",
        load=swap_shards("wo", 1),
    ),
    Fault(
        "stale_input_grad_reduce",
        "stale",
        "qkv.dx",
        "input_grad",
        "the gradient sum in front of Q, K and V is that of the step before",
        lambda local: Stale(),
        steps=2,
    ),
    Fault(
        "arrival_order_output_reduce",
        "unsteady",
        "out.forward",
        "output",
        "the sum behind the output projection runs in the order of arrival",
        lambda local: ArrivalOrder(),
        smallest=FOUR_RANKS,
        detector="repeat",
    ),
)
