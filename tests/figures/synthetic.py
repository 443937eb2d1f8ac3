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
GQA_SIGNALS = ("output", "loss", "input_grad", "parameter_grad", "post_step")
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


def gqa(tp: int = 2, fault: str = "none", seed: int = 11, dp: int = 1, wrong=(), **parameters):
    """One row of the attention block; `wrong` names the signals that break their bound."""
    made = row(tp, fault, seed, wrong=(), **parameters)
    made["case"] |= {"experiment": "tp-gqa", "grid": {"dp": dp, "cp": 1, "tp": tp}}
    first = next((name for name in GQA_SIGNALS if name in wrong), None)
    made["passed"] = not wrong
    made["result"] |= {
        "passed": not wrong, "first_wrong": first, "expected_first_wrong": first,
        "signals": {n: signal(1e4 if n in wrong else 0.2) for n in GQA_SIGNALS},
        "shapes": {"dense_shapes": {"x": [5, 2, 16], "q": [5, 2, 4, 4], "k_v": [5, 2, 2, 4]}},
    }  # fmt: skip
    return made


def attention(sizes=(2, 4), seeds=(11, 12)) -> list[dict]:
    """A small catalogue: right, wrong from the output on, wrong in the weight gradients only."""
    faults = {
        "none": (),
        "missing_output_reduce": GQA_SIGNALS,
        "missing_kv_reduce": ("parameter_grad", "post_step"),
    }
    return [
        gqa(size, fault, seed, wrong=wrong)
        for size in sizes
        for fault, wrong in faults.items()
        for seed in seeds
    ]


BOUNDARIES = ("norm", "down", "leave", "output", "norm.grad", "input.grad")


def audit(block="swiglu", tp=4, fault="none", first=None, kind="missing", told="right", dp=1):
    """One audited case: wrong from the boundary `first` on, with `kind` there, unknown behind."""
    start = BOUNDARIES.index(first) if first else len(BOUNDARIES)
    findings = [
        {
            "boundary": name, "kind": "equal" if i < start else kind if i == start else "unknown",
            "sentence": f"{name}: told; this predicts", "residual": 1e-7,
            "off": 0.0 if i == 0 else 1e-7 if i < start else 0.5, "sure": "certain", "also": (),
        }
        for i, name in enumerate(BOUNDARIES)
    ]  # fmt: skip
    result = {
        "passed": first is None, "step": 1, "boundary": first, "kind": kind if first else "clean",
        "sure": "certain", "says": f"{first}: a sentence" if first else "all is as it should be",
        "findings": findings, "expected_kind": kind if first else "clean",
        "expected_boundary": first, "told": told,
    }  # fmt: skip
    case = {
        "experiment": "audit", "grid": {"dp": dp, "cp": 1, "tp": tp}, "dtype": "fp32", "seed": 11,
        "fault": fault, "parameters": {"block": block},
    }  # fmt: skip
    key = f"{block}{tp}{fault}{dp}"
    return {"key": key, "case": case, "result": result, "passed": first is None}


def audits() -> list[dict]:
    return [
        audit(tp=2), audit(), audit(fault="missing_forward_reduce", first="leave"),
        audit(tp=2, fault="missing_forward_reduce", first="leave", told="unsure"),
        audit(tp=2, fault="missing_data_reduce", first="norm.grad", kind="subset", dp=2),
        audit("gqa", fault="stale_input_grad_reduce", first="norm.grad", told="wrong"),
        audit("torch-gqa", 2, "row_style_left_out", "down"),
    ]  # fmt: skip
