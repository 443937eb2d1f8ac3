"""What went wrong at one boundary: each possible cause predicts values, the one that fits is named.

A hypothesis takes a Scene and answers (kind, sentence, distance between its prediction and what the
ranks hold), or None where it predicts nothing. It knows nothing of the code that was run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlkernel.audit.boundaries import Layout
from rlkernel.audit.values import distance, factor_between, listed, root_mean_square, sum_of

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Scene:
    """All ranks' tensors of one boundary, what each should hold, and what else is known.

    before: what each should have held in the step before. vectors: the state's 1-D tensors. whole:
    dense tensors that may have been added behind the sum, by name. coarse: the dtype in which the
    block computes, where that is coarser than the boundary's own. noise: an RMS below which a
    gradient is nothing but rounding.
    """

    name: str
    held: Sequence[Tensor]
    due: Sequence[Tensor]
    layouts: Sequence[Layout]
    before: Sequence[Tensor] | None = None
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    whole: Mapping[str, Tensor] = field(default_factory=dict)
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
    whole = scene.as_sums() if partial else scene
    off = whole.fits(zip(whole.held, whole.due))
    if off <= scene.tolerance:
        return Finding(scene.name, "equal", f"{scene.name}: as it should be", off, off, "certain")
    if max(map(root_mean_square, (*scene.held, *scene.due))) < scene.noise:
        text = f"{scene.name}: nothing but rounding, here and in the dense block"
        return Finding(scene.name, "equal", text, 0.0, 0.0, "certain")
    extra = _added(whole) if partial else None
    if extra and extra[1] == -1:
        text = f"{scene.name}: partials without {extra[0]}, which is due once, behind the sum"
        return Finding(scene.name, "equal", text, extra[2], extra[2], "certain")
    found = []
    for hypothesis in PARTIAL_HYPOTHESES if partial else HYPOTHESES:
        answer = hypothesis(scene)
        if answer is not None and answer[2] <= scene.tolerance:
            found.append(answer)
    if not found:
        text = f"{scene.name}: wrong by {off:.1e} in relative L2, and no known cause predicts it"
        text += "" if partial else _apart(scene)
        return Finding(scene.name, "unknown", text, off, off, "unsure")
    kind, text, residual = found[0]
    also = tuple(dict.fromkeys(other for other, *_ in found[1:] if other != kind))
    clear = not also and off > 10 * scene.tolerance
    why = (
        f"this predicts the ranks' values to {residual:.0e}, what should be there is {off:.0e} off"
    )
    return Finding(
        scene.name, kind, f"{scene.name}: {text}; {why}", residual, off,
        "certain" if clear else "unsure", also,
    )  # fmt: skip


def _apart(scene: Scene) -> str:
    """Which ranks are right and which are not, where they differ in that."""
    pairs = enumerate(zip(scene.held, scene.due))
    right = [rank for rank, (h, d) in pairs if distance(h, d) <= scene.tolerance]
    wrong = [rank for rank in range(len(scene.held)) if rank not in right]
    return f"; ranks {listed(right)} are right, ranks {listed(wrong)} are not" if right else ""


Answer = tuple[str, str, float] | None  # kind, sentence, distance between prediction and ranks


def _stale(scene: Scene) -> Answer:
    if scene.before is None:
        return None
    residual = scene.fits(zip(scene.held, scene.before))
    return "stale", "every rank holds the value of the step before", residual


def _scaled(scene: Scene) -> Answer:
    factor = factor_between(scene.held, scene.due)
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
        distances = [distance(held, due) for due in scene.due]
        right = distances[rank] <= scene.tolerance
        best = rank if right else min(range(len(distances)), key=distances.__getitem__)
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
    sums = scene.fits((sum_of(scene.held, c), scene.due[c[0]]) for c in scene.classes())
    ranks = " and ".join(f"ranks {listed(group)}" for group in groups)
    text = f"the sum over {ranks} is missing: each holds its own partial, and these add up"
    return "missing", text, sums


def _subset(scene: Scene) -> Answer:
    """Equal tensors within parts of a group, and the parts add up."""
    found, pairs = [], []
    for ranks in scene.classes():
        parts = _equal_parts(scene, ranks)
        if not 1 < len(parts) < len(ranks):
            return None
        pairs.append((sum_of(scene.held, [part[0] for part in parts]), scene.due[ranks[0]]))
        found.append(" and ".join(map(listed, parts)))
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
    pairs = [(sum_of(scene.held, ranks), whole) for ranks in classes]
    pairs += [(scene.held[rank], scene.held[lane[0]]) for lane in lanes for rank in lane[1:]]
    ran, due = ", ".join(map(listed, lanes)), ", ".join(map(listed, classes))
    text = f"the sum ran over the wrong group: over {ran} instead of {due}"
    return "wrong_group", text, scene.fits(pairs)


def _offset(scene: Scene) -> Answer:
    """A vector of the state is added too often, or not at all."""
    found = _added(scene)
    if found is None:
        return None
    name, times, residual = found
    return "added_again", f"{name} is added {times + 1} times instead of once", residual


def _offset_partials(scene: Scene) -> Answer:
    return _offset(scene.as_sums())


def _added(scene: Scene) -> tuple[str, int, float] | None:
    """(vector, how many times it is added beyond what is due, residual) if that explains all."""
    if any(h.shape != d.shape or d.ndim < 2 for h, d in zip(scene.held, scene.due)):
        return None
    gaps = [h.double() - d.double() for h, d in zip(scene.held, scene.due)]
    for name, vector in scene.vectors.items():
        if len(vector) != gaps[0].shape[-1] or not vector.any():
            continue
        factor = factor_between(gaps, [vector.expand_as(gap) for gap in gaps])
        times = round(factor) if math.isfinite(factor) else 0
        predicted = [due.double() + times * vector.double() for due in scene.due]
        residual = scene.fits(zip(scene.held, predicted))
        if times and residual <= scene.tolerance:
            return name, times, residual
    return None


def _behind(scene: Scene) -> Answer:
    """The sum went wrong, and something whole was added behind it: a bias, a residual."""
    if any(h.shape != d.shape for h, d in zip(scene.held, scene.due)):
        return None
    for name, rest in {**scene.vectors, **scene.whole}.items():
        fits = rest.shape == scene.due[0].shape or rest.shape == scene.due[0].shape[-1:]
        if not fits or not rest.any():
            continue
        inner = replace(
            scene,
            held=[h.double() - rest.double() for h in scene.held],
            due=[d.double() - rest.double() for d in scene.due],
        )
        for hypothesis in (_scaled, _missing, _subset):
            answer = hypothesis(inner)
            if answer and answer[0] != "scaled" and answer[2] <= scene.tolerance:
                return answer[0], f"{answer[1]} ({name} was added behind it)", answer[2]
    return None


def _summed_already(scene: Scene) -> Answer:
    residual = scene.fits(zip(scene.held, scene.due))
    return "summed_already", "a partial was expected, every rank holds the whole sum", residual


def _scaled_partials(scene: Scene) -> Answer:
    sums = scene.as_sums()
    factor = factor_between(sums.held, sums.due)
    residual = sums.fits((s, factor * d.double()) for s, d in zip(sums.held, sums.due))
    return "scaled", f"the ranks' partials add up to {factor:.4g} times the right value", residual


def _stale_partials(scene: Scene) -> Answer:
    if scene.before is None:
        return None
    residual = scene.fits((sum_of(scene.held, c), scene.before[c[0]]) for c in scene.classes())
    return "stale", "the ranks' partials add up to the value of the step before", residual


HYPOTHESES = (
    _stale, _scaled, _swapped, _not_gathered, _missing, _subset, _crossed, _offset, _behind,
)  # fmt: skip
PARTIAL_HYPOTHESES = (_stale_partials, _summed_already, _scaled_partials, _offset_partials)


def _equal_parts(scene: Scene, ranks: Sequence[int]) -> list[list[int]]:
    parts: list[list[int]] = []
    for rank in ranks:
        twin = next((p for p in parts if scene.held[p[0]].equal(scene.held[rank])), None)
        if twin is None:
            parts.append([rank])
        else:
            twin.append(rank)
    return parts
