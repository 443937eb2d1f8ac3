"""One schedule and chunk count of a case: which way it went, and whether it is right on all ranks.

A check is [name, held, value, limit]. Every attempt is made on every rank, also behind one that
failed on this one: the others are in the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from rlkernel.collectives.comm import Comm
from rlkernel.overlap import checks, path

OTHERS = ("none", "with-sm", "sm-free")  # what a plugin may not hand its work to
RUNGS = (path.FUSED, path.CHUNKS, path.ONE_GEMM, path.NONE)
UNKNOWN = "unknown: nothing was noted, a plugin says how it went by rlkernel.overlap.path.note"
Check = list
Block = Callable[..., Tensor]


def shapes(label: str, outs: Mapping[str, Tensor], inputs: Tensor) -> list[Check]:
    """outs: whose output -> the output, of the block and of the layer inside: what the block adds
    to it would broadcast one that is too small.
    """
    found = []
    for whose, out in outs.items():
        said = _complaint(lambda out=out: checks.check_shape(out, inputs))
        name = f"{label}: shape of the {whose}'s output"
        found.append([name, said is None, said or "as the input", "[B, T, D]"])
    return found


def ways(overlap: str, label: str, heard: list[str]) -> tuple[dict, list[Check]]:
    """What the record says of the path, and whether `kernel` is more than another schedule: one
    that says nothing, or names a rung that nobody knows, may be anything.
    """
    paths = list(dict.fromkeys(heard)) or [UNKNOWN]
    kept = {"path": paths[-1], "rung": path.rung(paths[-1]), "noted": paths}
    if overlap != "kernel":
        return kept, []
    own = not any(path.schedule(p) in OTHERS for p in paths)
    value = paths[-1] if own else f"no fusion: {paths[-1]}"
    strange = [p for p in paths if path.rung(p) not in RUNGS]
    return kept, [
        [f"{label}: the plugin does not hand over", own, value, "not none"],
        [f"{label}: the rung is known", not strange, (strange or paths)[-1], ", ".join(RUNGS[:3])],
    ]


def values(
    block: Block,
    inputs: Tensor,
    upstream: Tensor | None,
    overlap: str,
    label: str,
    *,
    mode: str,
    seed: int,
    whole: bool,
) -> tuple[dict, list[Check]]:
    """The supplied checks and, where `whole`, those of every row; diagnostics and checks."""
    some, every = min(len(inputs), checks.SLICE), len(inputs)
    gradients = "torch.equal" if mode == "bitwise" else f"{checks.LIMITS[inputs.dtype]:g}"
    tries = {"forward": (lambda: checks.check_forward(block, inputs, overlap), some)}
    if upstream is not None:
        back = lambda: checks.check_backward(block, inputs, overlap, mode, seed)  # noqa: E731
        tries["backward"] = (back, some)
    if whole:
        tries["whole batch"] = (lambda: checks.whole_batch(block, inputs, overlap), every)
    if whole and upstream is not None:
        back_all = lambda: checks.whole_batch_backward(  # noqa: E731
            block, inputs, overlap, upstream, mode
        )
        tries["whole batch backward"] = (back_all, every)
    kept, found = {}, []
    for name, (attempt, rows) in tries.items():
        said = _complaint(lambda a=attempt, n=name: kept.__setitem__(n, a()))
        limit = gradients if name.endswith("backward") else "torch.equal"
        value = said or f"holds over {rows} rows of each rank"
        found.append([f"{label}: {name}", said is None, value, limit])
    return kept, found


def by_all(comm: Comm, found: list[Check]) -> list[Check]:
    """A check holds where it holds on every rank; the first rank's words where it does not."""
    merged = []
    for same in zip(*comm.collect(found), strict=True):
        failed = [(rank, one) for rank, one in enumerate(same) if not one[1]]
        name, _, value, limit = same[0]
        if failed:
            value = f"rank {failed[0][0]}: {failed[0][1][2]}"
        merged.append([name, not failed, value, limit])
    return merged


def _complaint(attempt: Callable[[], object]) -> str | None:
    try:
        attempt()
    except AssertionError as error:
        return str(error)
    return None
