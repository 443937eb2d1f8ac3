"""What went wrong at one boundary: each cause predicts values, the one that fits is named."""

from __future__ import annotations

from dataclasses import dataclass

from rlkernel.audit.hypotheses import HYPOTHESES, PARTIAL_HYPOTHESES, added
from rlkernel.audit.scene import Scene
from rlkernel.audit.values import distance, listed, root_mean_square


@dataclass(frozen=True)
class Finding:
    """What is so at one boundary. kind: "equal" or the name of a hypothesis; sure: certain, unsure.

    residual: relative L2 distance between what the hypothesis predicts and what the ranks hold;
    off: distance to what they should hold. also: other hypotheses that fit. replicas_differ: ranks
    that should hold the same do not, to the bit.
    """

    boundary: str
    kind: str
    sentence: str
    residual: float
    off: float
    sure: str
    also: tuple[str, ...] = ()
    replicas_differ: bool = False

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
    extra = added(whole) if partial else None
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
