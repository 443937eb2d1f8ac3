"""One training step, and how the twin's differs from the dense one: shared by all reconstructed
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel import compare

REL_L2_STEPS = 4
Forward = Callable[[dict[str, Tensor], Tensor], Tensor]


class Pair(NamedTuple):
    """A signal of the twin, the dense slice that it must equal, and the length of the longest sum
    behind it.
    """

    twin: Tensor
    dense: Tensor
    length: int


@dataclass(frozen=True)
class Step:
    """What one training step leaves behind. grads and updated are keyed by the parameters'
    names.
    """

    output: Tensor
    loss: Tensor
    input_grad: Tensor
    grads: dict[str, Tensor]
    updated: dict[str, Tensor]


def backward(
    forward: Forward, weights: Mapping[str, Tensor], x: Tensor, target: Tensor, elements: int
) -> Step:
    """Forward, squared error averaged over `elements` values, backward. Nothing is updated yet.

    `elements` is the size of the whole output even where a rank holds a part of it: then the ranks'
    losses add up to the dense loss and their gradients need no rescaling.
    """
    weights = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
    x = x.detach().clone().requires_grad_()
    output = forward(weights, x)
    loss = (output.float() - target.float()).square().sum() / elements
    loss.backward()
    grads = {name: w.grad for name, w in weights.items()}
    return Step(output.detach(), loss.detach(), x.grad, grads, {})


def update(
    step: Step, loss: Tensor, grads: Mapping[str, Tensor], weights: Mapping[str, Tensor], lr: float
) -> Step:
    """The step with its final loss and gradients, and the weights after plain SGD."""
    updated = {name: w.detach() - lr * grads[name] for name, w in weights.items()}
    return replace(step, loss=loss, grads=dict(grads), updated=updated)


def compare_signal(pair: Pair, dtype: torch.dtype, bound: float | None) -> dict[str, object]:
    """One signal of this rank against its dense slice, as plain numbers. `dtype` is the block's.

    A fixed `bound` limits the largest absolute difference and is the only limit. None takes two:
    rounding_bound for sums of the pair's length, and REL_L2_STEPS rounding steps of relative L2.
    The second is what sees a missing summand in BF16, where the first grows with sqrt(length)
    although accumulation is FP32. `excess` is the larger ratio of a difference to its limit: above
    1 the signal is wrong.
    """
    drift = compare.drift(pair.twin, pair.dense)
    bits = compare.bit_report(pair.twin, pair.dense)
    if bound is None:
        bound = compare.rounding_bound(dtype, pair.length, pair.dense)
        rel_l2_bound = REL_L2_STEPS * compare.EPS[dtype]
        excess = max(_ratio(drift.max_abs, bound), _ratio(drift.rel_l2, rel_l2_bound))
    else:
        rel_l2_bound, excess = None, _ratio(drift.max_abs, bound)
    return {
        "bound": bound,
        "rel_l2_bound": rel_l2_bound,
        "excess": excess,
        **drift.to_dict(),
        "mismatches": bits.mismatches,
        "elements": bits.elements,
    }


def worst(reports: list[dict]) -> dict[str, object]:
    """The report of the rank that is furthest out; mismatches and elements summed over the
    ranks.
    """
    top = max(reports, key=lambda r: r["excess"])
    return {
        **top,
        "mismatches": sum(r["mismatches"] for r in reports),
        "elements": sum(r["elements"] for r in reports),
        "rank": reports.index(top),
    }


def first_wrong(signals: Mapping[str, dict]) -> str | None:
    """The earliest signal, in the order given, that left its bound."""
    return next((name for name, report in signals.items() if report["excess"] > 1), None)


def fingerprint(*tensors: Tensor) -> str:
    """16 hex digits over the exact bytes: equal across processes only if every bit is."""
    return compare.digest(*tensors)[:16]


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """All parameters in one vector, in the order of their names' insertion."""
    return torch.cat([t.flatten() for t in tensors.values()])


def _ratio(difference: float, limit: float) -> float:
    """difference / limit for a record: finite, and 0 for an exact match even where the limit is
    0.
    """
    return 0.0 if difference == 0 else min(difference / max(limit, 1e-30), 1e30)
