"""Ways to break the order of an exchange, for the checks to find. Imports no torch at import.

    swapped-slices   the slices that ranks 0 and 1 should get are sent to each other
    early-chunk      a chunk is computed before it has arrived: its buffer still holds anything

On `sm-free`, whose bytes go past the seam's messages, the schedule itself obeys `ffn.fault`.
"""

from __future__ import annotations

FAULTS = ("none", "swapped-slices", "early-chunk")


def observer(fault: str):
    """An observer of the seam that breaks dispatches; None for "none"."""
    return {"none": None, "swapped-slices": _swap, "early-chunk": _early}[fault]


def _swap(call, x, proceed):
    if call.site != "dispatch" or call.kind != "all_to_all":
        return proceed(x)
    order = [1, 0, *range(2, len(x))]
    return proceed(x[order])


def _early(call, x, proceed):
    """What a reader finds who does not wait: the own part, and a poisoned buffer."""
    came = proceed(x)
    if call.site != "dispatch" or call.kind != "all_to_all":
        return came
    found = came.new_full(came.shape, float("nan"))
    found[call.link.index] = x[call.link.index]
    return found
