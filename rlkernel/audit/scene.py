"""All that is known of one boundary: what the ranks hold, what they should, what may explain it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlkernel.audit.boundaries import Layout
from rlkernel.audit.values import distance, sum_of

# layer -> (what each rank has of what it adds to a gradient, what each should have)
Shares = Mapping[str, tuple[Sequence[Tensor], Sequence[Tensor]]]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Scene:
    """All ranks' tensors of one boundary, what each should hold, and what else is known.

    before: what each should have held in the step before. vectors: the state's 1-D tensors. whole:
    dense tensors that may have been added behind the sum, by name. shares: what single layers add
    to a gradient. coarse: the dtype in which the block computes, where that is coarser than the
    boundary's own. noise: an RMS below which a gradient is nothing but rounding.
    """

    name: str
    held: Sequence[Tensor]
    due: Sequence[Tensor]
    layouts: Sequence[Layout]
    before: Sequence[Tensor] | None = None
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    whole: Mapping[str, Tensor] = field(default_factory=dict)
    shares: Callable[[], Shares] = dict
    coarse: torch.dtype = torch.float64
    noise: float = 0.0

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE.get(kind, 1e-5) for kind in (self.coarse, self.due[0].dtype))

    def as_sums(self) -> Scene:
        """The same with one member a class: what its ranks' tensors add up to."""
        classes = self.classes()
        held, first = [sum_of(self.held, c) for c in classes], [c[0] for c in classes]
        due, layouts = [self.due[r] for r in first], [self.layouts[r] for r in first]
        return replace(self, held=held, due=due, layouts=layouts, before=None)

    def classes(self) -> list[list[int]]:
        """Ranks that should hold the same slice, in rank order: who would be summed with whom."""
        by_slice: dict[tuple, list[int]] = {}
        for rank, layout in enumerate(self.layouts):
            by_slice.setdefault(layout.cuts, []).append(rank)
        return list(by_slice.values())

    def fits(self, pairs) -> float:
        """Largest relative L2 distance of (tensor, prediction) pairs; infinite for other shapes."""
        return max((distance(a, b) for a, b in pairs), default=float("inf"))
