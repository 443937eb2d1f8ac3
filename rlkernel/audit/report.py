"""A whole audit: run dense side and twin, gather every boundary, name the first wrong one.

The twin runs on other data in a second step (what is stale shows only then) and repeats that step
(what depends on the order of arrival shows only between repeats).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

import torch
from torch import Tensor

from rlkernel import compare
from rlkernel.audit.boundaries import Boundaries, Layout, Reference
from rlkernel.audit.diagnose import Finding, diagnose
from rlkernel.audit.gathered import Held, Unusable, gathered
from rlkernel.audit.scene import Scene, Shares
from rlkernel.audit.values import root_mean_square
from rlkernel.collectives.comm import Comm

REPEATS = 6
Dense = Callable[[int], Reference]
Twin = Callable[[Reference], Boundaries]


def audit(dense: Dense, twin: Twin, comm: Comm, seed: int) -> dict[str, object]:
    """Every rank calls it; the same report on all of them, JSON-able.

    dense: seed -> Reference. twin: Reference -> boundaries of this rank. Raises Unusable when what
    they hand out does not fit together.
    """
    first, second = (_on(comm.device, dense(s)) for s in (seed, seed + 1))
    findings = _step(first, twin(first), None, comm)
    step = 1
    if all(f.right for f in findings):
        mine = twin(second)
        later = _step(second, mine, first, comm)
        findings, step = later, 2
        if all(f.right for f in later):
            repeats = [twin(second) for _ in range(REPEATS)]
            findings = _unsteady(mine, repeats, later, comm)
    wrong = next((f for f in findings if not f.right), None)
    return {
        "passed": wrong is None,
        "step": step,
        "boundary": wrong.boundary if wrong else None,
        "kind": wrong.kind if wrong else "clean",
        "sure": wrong.sure if wrong else "certain",
        "says": wrong.sentence if wrong else _clean(findings, second),
        "replicas_differ": [f.boundary for f in findings if f.right and f.replicas_differ],
        "findings": [asdict(f) for f in findings],
    }


def _step(due: Reference, mine: Boundaries, before: Reference | None, comm: Comm) -> list[Finding]:
    """Findings of one step, in the order in which the twin lists its boundaries."""
    held = gathered(mine, due, comm)
    vectors = {n: v.cpu() for n, v in due.state_dict.items() if v.ndim == 1}
    dense = {name: value.detach().cpu() for name, value in due.boundaries.items()}
    whole, noise = {"x": due.x.cpu(), **_behind_a_sum(held, dense)}, _noise(dense)
    findings = []
    for name in held[0]:
        layouts = [rank[name][1] for rank in held]
        scene = Scene(
            name,
            [rank[name][0] for rank in held],
            _slices(dense[name], layouts),
            layouts,
            _slices(before.boundaries[name], layouts) if before else None,
            vectors,
            whole,
            functools.partial(_shares, name, held, dense),
            due.x.dtype,
            noise if name.endswith(".grad") else 0.0,
        )
        findings.append(replace(diagnose(scene), replicas_differ=_replicas_differ(scene)))
    return findings


def _shares(name: str, held: Held, dense: Mapping[str, Tensor]) -> Shares:
    """What each linear layer, y = x W', would add to the gradient `name` if that were one of its
    input: dy W, of the ranks' own values and of the dense ones.
    """
    found, layouts = {}, [rank[name][1] for rank in held]
    for weight in (name for name in held[0] if name.endswith(".weight")):
        layer = weight.removesuffix(".weight")
        grad = f"{layer}.grad"
        if grad not in held[0]:
            continue
        pairs = [(rank[grad][0], rank[weight][0]) for rank in held] + [(dense[grad], dense[weight])]
        if all(w.ndim == 2 and dy.shape[-1:] == w.shape[:1] for dy, w in pairs):
            *own, whole = [dy.double() @ w.double() for dy, w in pairs]
            if whole.shape == dense[name].shape:
                found[layer] = (own, _slices(whole, layouts))
    return found


def _behind_a_sum(held: Held, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a block may add to a sum before anybody sees it: the input's gradient to the residual,
    and whatever stands between a partial and the output.
    """
    found = {name: dense[name] for name in ("output.grad",) if name in dense}
    output = dense.get("output")
    for name, (_, layout) in held[0].items():
        if layout.partial and output is not None and dense[name].shape == output.shape:
            found[f"what stands between {name} and output"] = output - dense[name]
    return found


def _noise(dense: Mapping[str, Tensor]) -> float:
    """An RMS so far below the block's gradients that only rounding is left of one."""
    sizes = sorted(
        root_mean_square(value) for name, value in dense.items() if name.endswith(".grad")
    )
    return 1e-6 * sizes[len(sizes) // 2] if sizes else 0.0


def _replicas_differ(scene: Scene) -> bool:
    """Whether ranks that should hold the same tensor differ in any bit."""
    kinds = [{compare.digest(scene.held[rank]) for rank in c} for c in scene.classes()]
    return not scene.layouts[0].partial and max(map(len, kinds)) > 1


def _slices(dense: Tensor, layouts: list[Layout]) -> list[Tensor]:
    return [layout.take(dense.detach().cpu()) for layout in layouts]


def _unsteady(
    mine: Boundaries, repeats: list[Boundaries], findings: list[Finding], comm: Comm
) -> list[Finding]:
    """Boundaries whose bits change although nothing else does."""
    changed = [
        n for n, (t, _) in mine.items() if any(not compare.bit_report(r[n][0], t) for r in repeats)
    ]
    everywhere = {name for rank in comm.collect(changed) for name in rank}
    text = "its bits change between equal steps: a sum in front of it runs in the order of arrival"
    return [
        replace(f, kind="unsteady", sentence=f"{f.boundary}: {text}", sure="certain")
        if f.boundary in everywhere
        else f
        for f in findings
    ]


def _clean(findings: list[Finding], due: Reference) -> str:
    """What was seen, and what could not show: unlisted boundaries, vectors that are all zero."""
    worst = max(findings, key=lambda f: f.off)
    text = (
        f"all {len(findings)} boundaries are as they should be in two steps; the largest distance "
        f"is {worst.off:.0e}, at {worst.boundary}; {REPEATS} repeats change no bit"
    )
    differ = [f.boundary for f in findings if f.replicas_differ]
    if differ:
        text += f"; within that, replicas differ in their bits at {', '.join(differ)}"
    unseen = sorted(set(due.boundaries) - {f.boundary for f in findings})
    if unseen:
        text += f"; NOT looked at, because the twin does not list them: {', '.join(unseen)}"
    zero = sorted(n for n, v in due.state_dict.items() if v.ndim == 1 and not v.any())
    if zero:
        text += f"; {', '.join(zero)} is all zero, so adding it too often could not show"
    return text


def _on(device: torch.device, due: Reference) -> Reference:
    """What the twin gets lies where its rank computes; the dense boundaries stay where they are."""
    if not isinstance(due, Reference):
        raise Unusable(
            f"the dense side returned a {type(due).__name__}: expected "
            f"Reference(state_dict, x, target, boundaries)"
        )
    state = {name: value.to(device) for name, value in due.state_dict.items()}
    return Reference(state, due.x.to(device), due.target.to(device), due.boundaries)
