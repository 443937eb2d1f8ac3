"""The public checks of the A2A-FFN, as cases of the preflight. Imports no torch.

target cpu: the complete block and its gradients at EP=1, FP32 and BF16; local compute only.
target cuda: two GPUs, (B, T, D, k) = (4, 16, 128, 2), seed 7101, bmm, no compilation, two warm-ups
and three tests: sequential forward, `kernel` forward, `kernel` forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlkernel.experiments import a2a_ffn
from rlkernel.experiments.case import Case
from rlkernel.grid import Grid

SHAPE = {"batch_size": 4, "tokens": 16, "dim": 128, "k": 2}
SEED = 7101
SHORT = {"compile": False, "warmup": 2, "num_tests": 3, "nproc": (2,), "seed": (SEED,), **SHAPE}
GPU = {
    "sequential forward": {"overlap": ("none",)},
    "kernel forward": {"overlap": ("kernel",), "check_correctness": "bitwise"},
    "kernel forward and backward": {
        "overlap": ("kernel",), "check_correctness": "approx", "backward": True,
    },
}  # fmt: skip
LIMITS = {"fp32": 1e-5, "bf16": 3e-2}  # Frobenius, against FP64


def cases(experiment: str, target: str) -> list[Case]:
    """[] for a target that is not named: which checks there are depends on it."""
    if target == "cpu":
        at = {"what": "complete block at EP=1", **SHAPE}
        return [Case(experiment, Grid(), dtype, SEED, "none", at) for dtype in LIMITS]
    found = []
    for what, given in GPU.items() if target == "cuda" else ():
        (case,) = a2a_ffn.cases(a2a_ffn.Params(**{**SHORT, **given}))
        at = {"what": what, **case.parameters}
        found.append(Case(experiment, case.grid, case.dtype, case.seed, "none", at))
    return found


def run(case: Case, comm) -> dict:
    """A row with "checks" as [name, held, value, limit]."""
    if case.parameters["what"] in GPU:
        return a2a_ffn.run(case, comm)
    from rlkernel.overlap import block_check

    return block_check.row(case, comm, LIMITS[case.dtype])


def checks(row: Mapping) -> list[dict]:
    case = row["case"]
    label = f"{case['parameters']['what']}, {case['dtype']}"
    return [
        {"name": f"{label}: {name}", "passed": held, "value": value, "limit": limit}
        for name, held, value, limit in row["result"]["checks"]
    ]
