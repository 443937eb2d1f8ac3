"""The causes that are known, each as a prediction of the ranks' values.

A hypothesis takes a Scene and answers (kind, sentence, distance between its prediction and what the
ranks hold), or None where it predicts nothing. It knows nothing of the code that was run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlkernel.audit.scene import Scene
from rlkernel.audit.values import distance, factor_between, listed, sum_of

Answer = tuple[str, str, float] | None  # kind, sentence, distance between prediction and ranks


def _stale(scene: Scene) -> Answer:
    if scene.before is None:
        return None
    residual = scene.fits(zip(scene.held, scene.before))
    return "stale", "every rank holds the value of the step before", residual


def _scaled(scene: Scene) -> Answer:
    """One multiple on all ranks. Where it is the size of a group it tells what happened."""
    factor = factor_between(scene.held, scene.due)
    residual = scene.fits((h, factor * d) for h, d in zip(scene.held, scene.due))
    size = max(map(len, scene.classes()))
    for n in (n for n in range(size, 1, -1) if size % n == 0):
        over = f"{n} ranks" if n == size else f"{n} of these {size} ranks"
        if abs(factor - n) < 1e-2 * n:
            text = f"the sum over {over} ran twice: {factor:.3g} times too large"
            return "doubled", text, residual
        if abs(factor - 1 / n) < 1e-2 / n:
            text = f"a mean over {over} stands where the sum should: {factor:.3g} of it"
            return "averaged", text, residual
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


def _missing_share(scene: Scene) -> Answer:
    """Several layers feed one gradient, and what comes from some of them was not summed: each rank
    holds its own share of that, and all of the rest.
    """
    gaps = {}
    for name, (own, whole) in scene.shares().items():
        if all(o.shape == w.shape == h.shape for o, w, h in zip(own, whole, scene.held)):
            gaps[name] = [o - w for o, w in zip(own, whole)]
    if not gaps:
        return None
    flat = [torch.cat([gap.flatten() for gap in found]) for found in gaps.values()]
    off = torch.cat([(h.double() - d.double()).flatten() for h, d in zip(scene.held, scene.due)])
    if not off.isfinite().all():
        return None
    part = torch.linalg.lstsq(torch.stack(flat, 1), off[:, None]).solution[:, 0]  # 0 or 1 a layer
    names = [name for name, share in zip(gaps, part.tolist()) if share > 0.5]
    if not names:
        return None
    predicted = [
        d.double() + sum(gaps[name][rank] for name in names) for rank, d in enumerate(scene.due)
    ]
    ranks = " and ".join(f"ranks {listed(group)}" for group in scene.classes())
    what = " and ".join(names)
    text = (
        f"the sum over {ranks} of what comes from {what} is missing: each holds its own share of "
        f"that, and the whole of the rest"
    )
    return "missing", text, scene.fits(zip(scene.held, predicted))


def _crossed(scene: Scene) -> Answer:
    """The sum ran across ranks that hold other data: all slices together add up, none by itself."""
    classes = scene.classes()
    if not _alike(scene) or len(classes[0]) < 2:
        return None
    lanes = [list(lane) for lane in zip(*classes)]
    pairs = [(sum_of(scene.held, ranks), _all_slices(scene)) for ranks in classes]
    pairs += [(scene.held[rank], scene.held[lane[0]]) for lane in lanes for rank in lane[1:]]
    return "wrong_group", _instead(lanes, classes), scene.fits(pairs)


def _too_wide(scene: Scene) -> Answer:
    """The sum ran over ranks that hold other slices as well: all of them hold all slices' sum."""
    if not _alike(scene):
        return None
    everybody = [list(range(len(scene.held)))]
    whole = _all_slices(scene)
    return (
        "wrong_group",
        _instead(everybody, scene.classes()),
        scene.fits((held, whole) for held in scene.held),
    )


def _twice_within(scene: Scene) -> Answer:
    """Equal within parts of m ranks, and the parts add up to m times what is due: the sum ran
    within the parts, where it was whole already, and not between them.
    """
    ran, due, pairs = [], [], []
    for ranks in scene.classes():
        parts = _equal_parts(scene, ranks)
        m = len(parts[0])
        if not 1 < len(parts) < len(ranks) or any(len(part) != m for part in parts):
            return None
        total = sum_of(scene.held, [part[0] for part in parts])
        pairs.append((total, m * scene.due[ranks[0]].double()))
        ran, due = ran + parts, due + [list(across) for across in zip(*parts)]
    return "wrong_group", _instead(ran, due), scene.fits(pairs)


def _offset(scene: Scene) -> Answer:
    """A vector of the state is added too often, or not at all."""
    found = added(scene)
    if found is None:
        return None
    name, times, residual = found
    return "added_again", f"{name} is added {times + 1} times instead of once", residual


def _offset_partials(scene: Scene) -> Answer:
    return _offset(scene.as_sums())


def added(scene: Scene) -> tuple[str, int, float] | None:
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
    _stale, _scaled, _swapped, _not_gathered, _missing, _subset, _missing_share, _crossed,
    _too_wide, _twice_within, _offset, _behind,
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


def _alike(scene: Scene) -> bool:
    """Whether the ranks should hold several slices, all of one shape."""
    return len(scene.classes()) > 1 and len({due.shape for due in scene.due}) == 1


def _all_slices(scene: Scene) -> Tensor:
    return sum_of(scene.due, [ranks[0] for ranks in scene.classes()])


def _instead(ran: Sequence[Sequence[int]], due: Sequence[Sequence[int]]) -> str:
    over, right = (", ".join(map(listed, groups)) for groups in (ran, due))
    return f"the sum ran over the wrong group: over {over} instead of {right}"
