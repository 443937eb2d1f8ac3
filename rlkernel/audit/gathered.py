"""Every rank's boundaries side by side, and what of them cannot be audited."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import Tensor

from rlkernel.audit.boundaries import Boundaries, Layout, Reference
from rlkernel.collectives.comm import Comm

Held = list[dict[str, tuple[Tensor, Layout]]]  # one mapping a rank


class Unusable(ValueError):
    """Twin and dense side do not fit together. Names the rank, what it gave and what is possible;
    every rank raises the same.
    """


def gathered(mine: Boundaries, due: Reference, comm: Comm) -> Held:
    """All ranks' boundaries, on the CPU, in rank order. Raises Unusable."""
    problem = _no_boundaries(mine)
    told = comm.collect(
        problem or {name: (t.detach().cpu(), layout) for name, (t, layout) in mine.items()}
    )
    for rank, value in enumerate(told):
        if isinstance(value, str):
            raise Unusable(f"the twin of rank {rank} returned {value}")
    _check_names(told, due)
    for name in told[0]:
        layouts = [rank[name][1] for rank in told]
        _check_cuts(name, layouts, due.boundaries[name])
        _check_partial(name, layouts)
    return told


def _no_boundaries(mine: object) -> str:
    """What is wrong with one rank's answer by itself, "" for nothing."""
    want = "boundary -> (tensor, layout)"
    if not isinstance(mine, Mapping):
        return f"a {type(mine).__name__}: expected a mapping {want}; laid_out() makes one"
    if not mine:
        return f"an empty mapping: expected {want}; trace() and laid_out() fill it"
    for name, value in mine.items():
        pair = isinstance(value, tuple) and len(value) == 2
        if not (pair and isinstance(value[0], Tensor) and isinstance(value[1], Layout)):
            held = ", ".join(type(v).__name__ for v in value) if pair else type(value).__name__
            return (
                f"{name} -> {held}: expected {want}, such as (tensor, REPLICATED); laid_out() adds "
                f"the layouts to what trace() saw"
            )
    return ""


def _check_names(held: Held, due: Reference) -> None:
    first = list(held[0])
    for rank, other in enumerate(held):
        if list(other) == first:
            continue
        more, less = sorted(set(other) - set(first)), sorted(set(first) - set(other))
        differs = [f"also {', '.join(more)}"] if more else []
        differs += [f"not {', '.join(less)}"] if less else []
        raise Unusable(
            f"ranks 0 and {rank} list different boundaries: rank {rank} lists "
            f"{' but '.join(differs) or 'them in another order'}; expected the same names in the "
            f"same order on every rank: list what all ranks have"
        )
    unknown = [name for name in first if name not in due.boundaries]
    if unknown:
        raise Unusable(
            f"the twin of rank 0 lists boundaries that the dense side does not have: "
            f"{', '.join(unknown)}; it has {', '.join(due.boundaries)}: name them alike"
        )


def _check_cuts(name: str, layouts: Sequence[Layout], dense: Tensor) -> None:
    """The ranks' slices must be slices of the dense tensor, and cover it."""
    ways = [[(dim, parts) for dim, _, parts in layout.cuts] for layout in layouts]
    for rank, (layout, way) in enumerate(zip(layouts, ways)):
        given = f"{name}: rank {rank} gave {_told(layout)}"
        if way != ways[0]:
            raise Unusable(
                f"{given}, rank 0 {_told(layouts[0])}: expected the same dimensions and parts on "
                f"every rank, with an index of its own"
            )
        for dim, index, parts in layout.cuts:
            if not -dense.ndim <= dim < dense.ndim:
                raise Unusable(f"{given}, but the dense one has {dense.ndim} dimensions")
            pieces = len(dense.chunk(parts, dim))
            if pieces < parts or not 0 <= index < parts:
                raise Unusable(
                    f"{given}: expected an index from 0 to {parts - 1}, and at most as many parts "
                    f"as the dense {tuple(dense.shape)} gives (here {pieces})"
                )
    seen = {tuple(index for _, index, _ in layout.cuts) for layout in layouts}
    due = set(itertools.product(*(range(parts) for _, parts in ways[0])))
    if seen != due:
        lost = ", ".join(str(at if len(at) > 1 else at[0]) for at in sorted(due - seen))
        given = "; ".join(f"rank {rank} {_told(layout)}" for rank, layout in enumerate(layouts))
        raise Unusable(
            f"{name}: no rank has slice {lost}: {given}; expected every index of range(parts) on "
            f"some rank: give each its own, as in shard(dim, rank, parts)"
        )


def _check_partial(name: str, layouts: Sequence[Layout]) -> None:
    kinds = [layout.partial for layout in layouts]
    if len(set(kinds)) > 1:
        odd = kinds.index(not kinds[0])
        raise Unusable(
            f"{name}: ranks 0 and {odd} differ, one calls it partial, the other does not: expected "
            f"the same on every rank"
        )


def _told(layout: Layout) -> str:
    cuts = [f"shard({dim}, {index}, {parts})" for dim, index, parts in layout.cuts]
    return " and ".join(cuts) or "no shard"
