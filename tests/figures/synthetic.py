"""Rows as cases.jsonl holds them, made up: small, deterministic, and with the fault where the
caller wants it."""

from __future__ import annotations

SIGNALS = (
    "output",
    "loss",
    "input_grad",
    "norm_grad",
    "gate_up_grad",
    "down_grad",
    "down_bias_grad",
    "post_step",
)
# Which signals a missing sum makes wrong: everything behind the output, or everything in front of
# the norm.
WRONG = {
    "none": (),
    "missing_forward_reduce": SIGNALS,
    "missing_backward_reduce": ("input_grad", "norm_grad", "post_step"),
}


def signal(ratio: float, bound: float = 1e-6, elements: int = 48) -> dict:
    """A signal whose largest difference is ratio x bound, growing linearly over the quantiles."""
    worst = ratio * bound
    curve = [worst * max(0, i - 8) / 12 for i in range(21)]
    return {
        "max_abs": worst,
        "bound": bound,
        "rel_l2_bound": None,
        "excess": ratio,
        "p95": curve[19],
        "p99": worst,
        "mean_abs": worst / 3,
        "rel_l2": worst,
        "mismatches": 0 if worst == 0 else 28 * elements // 48,
        "elements": elements,
        "ecdf": curve,
    }


def row(
    tp: int = 2,
    fault: str = "none",
    seed: int = 11,
    dtype: str = "fp32",
    wrong=None,
    ratio: float = 0.2,
    **parameters,
) -> dict:
    """One row; `wrong` overrides which signals break their bound (by a factor of 10^4)."""
    broken = WRONG[fault] if wrong is None else wrong
    signals = {name: signal(1e4 if name in broken else ratio) for name in SIGNALS}
    first = next((name for name in SIGNALS if name in broken), None)
    case = {
        "experiment": "tp-swiglu",
        "grid": {"dp": 1, "cp": 1, "tp": tp},
        "dtype": dtype,
        "seed": seed,
        "fault": fault,
        "parameters": {"size": "article", "sequence_parallel": "off", **parameters},
    }
    result = {
        "passed": not broken,
        "first_wrong": first,
        "expected_first_wrong": first,
        "caught": bool(broken),
        "signals": signals,
        "shapes": {"dense_shapes": {"x": [3, 2, 8], "w_gate_up": [2, 12, 8]}},
    }
    return {
        "key": f"{tp}{fault}{seed}{dtype}",
        "reuse": "0",
        "case": case,
        "result": result,
        "passed": not broken,
        "seconds": 0.1,
        "paths": {},
        "backend": "gloo",
        "device": "cpu",
        "world": tp,
        "finished": "",
    }


def catalogue(sizes=(2, 4), seeds=(11, 12)) -> list[dict]:
    return [row(size, fault, seed) for size in sizes for fault in WRONG for seed in seeds]


def realistic() -> list[dict]:
    return [
        row(size, dtype=dtype, ratio=0.01 * size, size="realistic", sequence_parallel=sequence)
        for dtype in ("fp32", "bf16")
        for size in (2, 4, 8)
        for sequence in ("off", "on")
    ]
