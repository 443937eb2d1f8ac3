"""Are the bits of a GEMM and of an FFN fixed by the contract alone, and what does that cost?

`--what census` runs every schedule on adversarial data, `gemm` the products of an FFN step and
`ffn` the whole forward against the official layer. On the CPU the kernels run in Triton's
interpreter and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlkernel.experiments.case import Case, UsageError, check_seeds, param
from rlkernel.grid import Grid

NAME = "det-ffn"
SUMMARY = (
    "deterministic GEMM and FFN kernels: the same bits from every schedule, and what they cost"
)
QUESTION = (
    "Are the bits fixed by the contract alone, whatever batch, tile or schedule; at what cost?"
)

WHAT = ("census", "gemm", "ffn")
CONTRACTS = ("tree8.bf16", "tree8.fp32", "tree2.bf16", "chain")
SIZES = {
    "small": {"hidden": 64, "intermediate": 128, "m": (1, 17, 33)},
    "qwen3": {
        "hidden": 4096,
        "intermediate": 12288,
        "m": (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192),
    },
}
CENSUS_ROWS = {"small": (1, 33), "qwen3": (1, 32, 200, 1024)}
FAULTS = ("none", "extra-rounding")

COVERED = (
    "every schedule, tile and operand order of a contract against one oracle, bit for bit, on "
    "random, cancelling, subnormal, large-residual, integer and signed-zero data",
    "one row inside batches of other sizes; all products of an FFN step, forward and backward",
    "the whole forward against the official layer, interleaved in one process, hot",
)
NOT_COVERED = (
    "other GPU architectures: on gfx942 the kernels compile, they were not run",
    "bits across architectures, library versions or contracts: none are promised",
    "distributed layouts and the backward as a layer",
)


@dataclass(frozen=True)
class Params:
    what: tuple[str, ...] = param(("census", "gemm", "ffn"), "what to look at", choices=WHAT)
    size: str = param("small", "small: H=64 I=128; qwen3: H=4096 I=12288", choices=tuple(SIZES))
    m: tuple[int, ...] = param((), "rows of the batch; by default those of the size", unit="rows")
    contract: tuple[str, ...] = param(CONTRACTS, "orders of additions", choices=CONTRACTS)
    fault: str = param(
        "none", "extra-rounding: halve each leaf and round both halves", choices=FAULTS
    )
    seed: tuple[int, ...] = param((11,), "seeds of weights and data")
    graph: bool = param(True, "time CUDA graphs on all sides; false: plain calls on all sides")
    warmup: float = param(1.0, "matrix products ahead of the first sample", unit="s")
    samples: int = param(40, "timed rounds, each with every variant once; 0: no timing")
    device: str = param("auto", "where to compute", choices=("auto", "cpu", "cuda"))


def cases(params: Params) -> list[Case]:
    """Raises UsageError for what cannot run."""
    check_seeds(params.seed)
    if any(m < 1 for m in params.m):
        raise UsageError("each m must be at least 1 row")
    if params.samples < 0 or params.warmup < 0:
        raise UsageError("samples and warmup cannot be negative")
    size = SIZES[params.size]
    found = []
    for what in params.what:
        rows = params.m or (CENSUS_ROWS[params.size] if what == "census" else size["m"])
        for m in rows:
            found += [
                Case(NAME, Grid(), "bf16", seed, params.fault, _parameters(params, what, m))
                for seed in params.seed
            ]
    if "ffn" in params.what and params.fault == "none":
        what = _parameters(params, "fp16", 8)
        found += [Case(NAME, Grid(), "bf16", seed, "none", what) for seed in params.seed]
    return found


def _parameters(params: Params, what: str, m: int) -> dict:
    size = SIZES[params.size]
    timed = what in ("gemm", "ffn")
    return {
        "what": what,
        "m": m,
        "hidden": size["hidden"],
        "intermediate": size["intermediate"],
        "contracts": "+".join(params.contract),
        **(
            {"graph": params.graph, "warmup": params.warmup, "samples": params.samples}
            if timed
            else {}
        ),
    }


def run(case: Case, comm) -> dict:
    """One shape: a row with the bits, the drift and, on a GPU, the times of every contract."""
    import os

    if comm.device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    from rlkernel.ffn import measure

    row = {
        "census": measure.census_row,
        "gemm": measure.gemm_row,
        "ffn": measure.ffn_row,
        "fp16": measure.fp16_row,
    }[case.parameters["what"]]
    return row(case, comm.device)


def verdict(params: Params, rows: Sequence[Mapping]) -> dict:
    checks = []
    for row in rows:
        for name, held, value, limit in row["result"]["checks"]:
            checks.append(
                {"name": f"{_label(row)}: {name}", "passed": held, "value": value, "limit": limit}
            )
    return {"passed": bool(checks) and all(check["passed"] for check in checks), "checks": checks}


def summary(params: Params, rows: Sequence[Mapping]) -> dict:
    return {
        "passed": verdict(params, rows)["passed"],
        "mismatches": sum(row["result"].get("mismatches", 0) for row in rows),
        "elements": sum(row["result"].get("elements", 0) for row in rows),
        "cases": [
            {"case": _label(row), "passed": row["passed"]}
            | {k: v for k, v in row["result"].items() if k not in ("checks", "samples", "passed")}
            for row in rows
        ],
    }


def table(params: Params, rows: Sequence[Mapping]) -> tuple[list[str], list[list[str]]]:
    """One line a contract and product: bits, drift and time."""
    header = ["case", "contract", "schedule", "differ", "rel L2 to FP64", "us", "/ baseline"]
    body = []
    for row in rows:
        for line in row["result"].get("lines", ()):
            ratio = line.get("ratio")
            body.append(
                [
                    f"{_label(row)} {line['operator']}",
                    line["contract"],
                    line["schedule"],
                    f"{line['mismatches']} / {line['elements']}",
                    f"{line['drift']['rel_l2']:.2e}" if line.get("drift") else "-",
                    f"{line['median_us']:.1f}" if line.get("median_us") else "-",
                    f"{ratio['median']:.3f}" if ratio else "-",
                ]
            )
    return header, body


def protocol(params: Params) -> dict:
    """What must agree before two records may be compared."""
    return {
        "graph": params.graph,
        "warm_s": params.warmup,
        "samples": params.samples,
        "order": "variants interleaved call by call in one process, hot",
        "clock": "CUDA events, microseconds a call",
    }


def _label(row: Mapping) -> str:
    case = row["case"]
    fault = "" if case["fault"] == "none" else f" {case['fault']}"
    return f"{case['parameters']['what']} M={case['parameters']['m']}{fault}"
