"""What went wrong at one boundary: each possible cause predicts values, the one that fits is named.

A hypothesis takes a Scene and answers (kind, sentence, distance between its prediction and what the
ranks hold), or None where it predicts nothing. It knows nothing of the code that was run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlkernel.audit.boundaries import Layout

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Scene:
    """All ranks' tensors of one boundary, what each should hold, and what else is known.

    before: what each should have held in the step before. vectors: the state's 1-D tensors.
    """

    name: str
    held: Sequence[Tensor]
    due: Sequence[Tensor]
    layouts: Sequence[Layout]
    before: Sequence[Tensor] | None = None
    vectors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        return TOLERANCE.get(self.due[0].dtype, 1e-5)

    def classes(self) -> list[list[int]]:
        """Ranks that should hold the same slice, in rank order: who would be summed with whom."""
        by_slice: dict[tuple, list[int]] = {}
        for rank, layout in enumerate(self.layouts):
            by_slice.setdefault(layout.cuts, []).append(rank)
        return list(by_slice.values())

    def fits(self, pairs) -> float:
        """Largest relative L2 distance of (tensor, prediction) pairs; infinite for other shapes."""
        return max((_distance(a, b) for a, b in pairs), default=float("inf"))


@dataclass(frozen=True)
class Finding:
    """What is so at one boundary. kind: "equal" or the name of a hypothesis; sure: certain, unsure.

    residual: relative L2 distance between what the hypothesis predicts and what the ranks hold;
    off: distance to what they should hold. also: other hypotheses that fit.
    """

    boundary: str
    kind: str
    sentence: str
    residual: float
    off: float
    sure: str
    also: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        return self.kind == "equal"


def diagnose(scene: Scene) -> Finding:
    """Try every hypothesis on one boundary; the first that fits is the finding."""
    partial = scene.layouts[0].partial
    off = _off_as_partials(scene) if partial else scene.fits(zip(scene.held, scene.due))
    if off <= scene.tolerance:
        return Finding(scene.name, "equal", f"{scene.name}: as it should be", off, off, "certain")
    found = []
    for hypothesis in PARTIAL_HYPOTHESES if partial else HYPOTHESES:
        answer = hypothesis(scene)
        if answer is not None and answer[2] <= scene.tolerance:
            found.append(answer)
    if not found:
        text = f"{scene.name}: wrong by {off:.1e} in relative L2, and no known cause predicts it"
        return Finding(scene.name, "unknown", text, off, off, "unsure")
    kind, text, residual = found[0]
    also = tuple(other for other, *_ in found[1:])
    clear = not also and off > 10 * scene.tolerance
    why = (
        f"this predicts the ranks' values to {residual:.0e}, what should be there is {off:.0e} off"
    )
    return Finding(
        scene.name, kind, f"{scene.name}: {text}; {why}", residual, off,
        "certain" if clear else "unsure", also,
    )  # fmt: skip


Answer = tuple[str, str, float] | None  # kind, sentence, distance between prediction and ranks


def _stale(scene: Scene) -> Answer:
    if scene.before is None:
        return None
    residual = scene.fits(zip(scene.held, scene.before))
    return "stale", "every rank holds the value of the step before", residual


def _scaled(scene: Scene) -> Answer:
    factor = _factor(scene.held, scene.due)
    size = max(map(len, scene.classes()))
    residual = scene.fits((h, factor * d) for h, d in zip(scene.held, scene.due))
    if abs(factor - size) < 1e-2 * size and size > 1:
        return (
            "doubled",
            f"the sum over {size} ranks ran twice: {factor:.3g} times too large",
            residual,
        )
    if abs(factor - 1 / size) < 1e-2 / size and size > 1:
        return (
            "averaged",
            f"a mean over {size} ranks stands where the sum should: {factor:.3g} of it",
            residual,
        )
    return "scaled", f"every rank holds {factor:.4g} times the right value", residual


def _swapped(scene: Scene) -> Answer:
    """Each rank holds what some other rank should."""
    found = []
    for rank, held in enumerate(scene.held):
        distances = [_distance(held, due) for due in scene.due]
        best = min(range(len(distances)), key=distances.__getitem__)
        found.append((rank, best, distances[best]))
    moved = [f"rank {rank} holds that of rank {owner}" for rank, owner, _ in found if rank != owner]
    if not moved:
        return None
    return (
        "swapped",
        "shards lie on the wrong ranks: " + ", ".join(moved),
        max(d for *_, d in found),
    )


def _not_gathered(scene: Scene) -> Answer:
    """A shard stands where the whole should: the gather in front is left out."""
    size = len(scene.held)
    for dim in range(scene.due[0].ndim):
        pieces = [due.chunk(size, dim) for due in scene.due]
        if all(len(p) == size for p in pieces):
            residual = scene.fits((h, p[r]) for r, (h, p) in enumerate(zip(scene.held, pieces)))
            if residual <= scene.tolerance:
                return (
                    "sharded",
                    f"each rank holds its slice of dimension {dim}: the gather is missing",
                    residual,
                )
    return None


def _missing(scene: Scene) -> Answer:
    groups = [ranks for ranks in scene.classes() if len(ranks) > 1]
    # Summands of different shards are never equal: what is equal was summed or scaled already.
    if not groups or any(len(_equal_parts(scene, ranks)) < len(ranks) for ranks in groups):
        return None
    sums = scene.fits((_sum(scene.held, c), scene.due[c[0]]) for c in scene.classes())
    ranks = " and ".join(f"ranks {_ranks(group)}" for group in groups)
    text = f"the sum over {ranks} is missing: each holds its own partial, and these add up"
    return "missing", text, sums


def _subset(scene: Scene) -> Answer:
    """Equal tensors within parts of a group, and the parts add up."""
    found, pairs = [], []
    for ranks in scene.classes():
        parts = _equal_parts(scene, ranks)
        if not 1 < len(parts) < len(ranks):
            return None
        pairs.append((_sum(scene.held, [part[0] for part in parts]), scene.due[ranks[0]]))
        found.append(" and ".join(map(_ranks, parts)))
    text = (
        f"ranks agree only within {'; within '.join(found)}, and one of each adds up to the right "
        f"value: the sum between these parts is missing (or the sum ran over too small a group)"
    )
    return "subset", text, scene.fits(pairs)


def _crossed(scene: Scene) -> Answer:
    """The sum ran across ranks that hold other data: all slices together add up, none by itself."""
    classes = scene.classes()
    if len(classes) < 2 or len({due.shape for due in scene.due}) > 1 or len(classes[0]) < 2:
        return None
    whole = torch.stack([scene.due[ranks[0]].double() for ranks in classes]).sum(0)
    lanes = [list(lane) for lane in zip(*classes)]
    pairs = [(_sum(scene.held, ranks), whole) for ranks in classes]
    pairs += [(scene.held[rank], scene.held[lane[0]]) for lane in lanes for rank in lane[1:]]
    ran, due = ", ".join(map(_ranks, lanes)), ", ".join(map(_ranks, classes))
    text = f"the sum ran over the wrong group: over {ran} instead of {due}"
    return "wrong_group", text, scene.fits(pairs)


def _offset(scene: Scene) -> Answer:
    """A vector of the state is added too often."""
    if any(h.shape != d.shape or d.ndim < 2 for h, d in zip(scene.held, scene.due)):
        return None
    gaps = [h.double() - d.double() for h, d in zip(scene.held, scene.due)]
    for name, vector in scene.vectors.items():
        if len(vector) != gaps[0].shape[-1] or not vector.any():
            continue
        times = round(_factor(gaps, [vector.expand_as(gap) for gap in gaps]))
        predicted = [due.double() + times * vector.double() for due in scene.due]
        residual = scene.fits(zip(scene.held, predicted))
        if times and residual <= scene.tolerance:
            return "added_again", f"{name} is added {times + 1} times instead of once", residual
    return None


def _summed_already(scene: Scene) -> Answer:
    residual = scene.fits(zip(scene.held, scene.due))
    return "summed_already", "a partial was expected, every rank holds the whole sum", residual


def _scaled_partials(scene: Scene) -> Answer:
    sums = [(_sum(scene.held, c), scene.due[c[0]]) for c in scene.classes()]
    factor = _factor([s for s, _ in sums], [d for _, d in sums])
    residual = scene.fits((s, factor * d.double()) for s, d in sums)
    return "scaled", f"the ranks' partials add up to {factor:.4g} times the right value", residual


def _stale_partials(scene: Scene) -> Answer:
    if scene.before is None:
        return None
    residual = scene.fits((_sum(scene.held, c), scene.before[c[0]]) for c in scene.classes())
    return "stale", "the ranks' partials add up to the value of the step before", residual


HYPOTHESES = (
    _stale, _scaled, _swapped, _not_gathered, _missing, _subset, _crossed, _offset,
)  # fmt: skip
PARTIAL_HYPOTHESES = (_stale_partials, _summed_already, _scaled_partials)


# -- small things ----------------------------------------------------------------------------------


def _distance(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, infinite for other shapes or values that are no numbers."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    gap = (a - b).norm().item()
    if gap != gap:
        return float("inf")
    return gap / max(b.norm().item(), 1e-12)


def _factor(held: Sequence[Tensor], due: Sequence[Tensor]) -> float:
    """The one number c that brings c * due closest to what all ranks hold."""
    pairs = [(h.double(), d.double()) for h, d in zip(held, due) if h.shape == d.shape]
    square = sum((d * d).sum().item() for _, d in pairs)
    return sum((h * d).sum().item() for h, d in pairs) / max(square, 1e-30)


def _sum(held: Sequence[Tensor], ranks: Sequence[int]) -> Tensor:
    if len({held[r].shape for r in ranks}) > 1:
        return torch.zeros(0)
    return torch.stack([held[r].double() for r in ranks]).sum(0)


def _off_as_partials(scene: Scene) -> float:
    return scene.fits((_sum(scene.held, c), scene.due[c[0]]) for c in scene.classes())


def _equal_parts(scene: Scene, ranks: Sequence[int]) -> list[list[int]]:
    parts: list[list[int]] = []
    for rank in ranks:
        twin = next((p for p in parts if scene.held[p[0]].equal(scene.held[rank])), None)
        if twin is None:
            parts.append([rank])
        else:
            twin.append(rank)
    return parts


def _ranks(ranks: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, ranks)) + "}"
