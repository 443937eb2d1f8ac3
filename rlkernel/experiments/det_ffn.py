"""Are the bits of a GEMM and of an FFN fixed by the contract alone, and what does that cost?

`--what census` runs every schedule on adversarial data, `gemm` the products of an FFN step, `ffn`
the whole forward and `train` a whole training step against the official layer; `layer` compares
forward and backward of the distributed layer with one rank, bit for bit, `graph` the replays of its
CUDA graph with eager calls, `hash` two fresh processes with each other; `time` says what a layout
costs, beside the official layer on each of its ranks. On the CPU the kernels run in Triton's
interpreter, the layer on their plain-torch twins, and nothing is timed but layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlkernel.experiments import layouts
from rlkernel.experiments.case import Case, UsageError, check_seeds, param
from rlkernel.grid import Grid

NAME = "det-ffn"
SUMMARY = "deterministic FFN: the same bits from every schedule and layout, and what they cost"
QUESTION = (
    "Are the bits fixed by the contract alone, whatever batch, tile, schedule or layout; at what "
    "cost?"
)

KERNELS = ("census", "gemm", "ffn")
ALONE = (*KERNELS, "train", "hash")  # what one rank does by itself
LAYER = ("graph", "layer", "time")  # what has a layout
WHAT = (*ALONE, *LAYER)
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
FAULTS = ("none", "extra-rounding", *layouts.FAULTS)

COVERED = (
    "every schedule, tile and operand order of a contract against one oracle, bit for bit, on "
    "random, cancelling, subnormal, large-residual, integer and signed-zero data",
    "one row inside batches of other sizes; all products of an FFN step, forward and backward",
    "the whole forward and a whole training step against the official layer, interleaved in one "
    "process, hot",
    "forward, dX and dW of the layer under TP, CP and SP against one rank; negative controls",
    "two fresh processes of one seed: one hash of forward, dX and dW",
    "the time of a layout, slowest rank of each sample, beside the official layer on one rank",
)
NOT_COVERED = (
    "ROCm (gfx942): compiles; not run",
    "other GPU architectures",
    "bits across architectures, library versions or contracts: none are promised",
    "times where ranks share a GPU or stand on several hosts",
    "data parallelism",
)


@dataclass(frozen=True)
class Params:
    what: tuple[str, ...] = param(KERNELS, "what to look at", choices=WHAT)
    size: str = param("small", "small: H=64 I=128; qwen3: H=4096 I=12288", choices=tuple(SIZES))
    m: tuple[int, ...] = param((), "rows of the batch; by default those of the size", unit="rows")
    contract: tuple[str, ...] = param(
        CONTRACTS,
        "orders of additions; those that name tokens are of the layer (dW)",
        choices=(*CONTRACTS, *layouts.OF_TOKENS),
    )
    fault: str = param(
        "none",
        "extra-rounding: halve each leaf and round both halves; the others: an order of additions "
        "of the layer",
        choices=FAULTS,
    )
    seed: tuple[int, ...] = param((11,), "seeds of weights and data")
    graph: bool = param(True, "time CUDA graphs on all sides; false: plain calls on all sides")
    warmup: float = param(1.0, "matrix products ahead of the first sample", unit="s")
    samples: int = param(40, "timed rounds, each with every variant once; 0: no timing")
    device: str = param("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    layout: tuple[str, ...] = layouts.layout_param()
    dx: tuple[str, ...] = layouts.dx_param()
    dw: tuple[str, ...] = layouts.dw_param()
    repeats: int = param(3, "training steps of the layer whose bits must be equal")
    transport: str = layouts.transport_param()


def cases(params: Params) -> list[Case]:
    """Raises UsageError for what cannot run."""
    check_seeds(params.seed)
    if any(m < 1 for m in params.m):
        raise UsageError("each m must be at least 1 row")
    if params.samples < 0 or params.warmup < 0:
        raise UsageError("samples and warmup cannot be negative")
    size, asked = SIZES[params.size], _what(params)
    named = [contract for contract in params.contract if contract in layouts.OF_TOKENS]
    if named and set(KERNELS) & set(asked):
        raise UsageError(
            f"contract {named[0]} names the tokens of a layer: it is of what=train, layer and graph"
        )
    found = []
    for what in (what for what in asked if what in ALONE):
        own = {"census": CENSUS_ROWS[params.size], "hash": (layouts.TOKENS,)}
        rows = params.m or own.get(what, size["m"])
        for m in rows:
            found += [
                Case(NAME, Grid(), "bf16", seed, params.fault, _parameters(params, what, m))
                for seed in params.seed
            ]
    if "ffn" in asked and params.fault == "none":
        what = _parameters(params, "fp16", 8)
        found += [Case(NAME, Grid(), "bf16", seed, "none", what) for seed in params.seed]
    dims = (size["hidden"], size["intermediate"])
    for what in LAYER:  # last: the kernels' cases decide first whether to interpret
        if what in asked:
            for grid, at in layouts.layer_cases(params, what, *dims, CONTRACTS):
                found += [Case(NAME, grid, "bf16", seed, params.fault, at) for seed in params.seed]
    return found


def _what(params: Params) -> tuple[str, ...]:
    """A layout asks for the layer. Raises UsageError for a fault that is not of what is asked."""
    asked = ("layer",) if params.layout and params.what == KERNELS else params.what
    if params.layout and not set(LAYER) & set(asked):
        raise UsageError(
            "layout is of what=layer, what=graph and what=time only: leave one of them out"
        )
    for what in asked if params.fault != "none" else ():
        planted = ("extra-rounding",) if what in (*KERNELS, "train") else ()
        own = layouts.FAULTS if what == "layer" else planted
        if params.fault not in own:
            raise UsageError(
                f"fault {params.fault} cannot show in {what}, whose faults are: "
                f"{', '.join(own) or 'none'}"
            )
    return asked


def _parameters(params: Params, what: str, m: int) -> dict:
    size = SIZES[params.size]
    timed = what in ("gemm", "ffn", "train")
    contracts = params.contract
    if what == "train" and contracts == CONTRACTS:
        contracts = (*layouts.OF_TOKENS, *contracts)
    return {
        "what": what,
        "m": m,
        "hidden": size["hidden"],
        "intermediate": size["intermediate"],
        "contracts": "+".join(contracts),
        **({"dx": "+".join(params.dx)} if what == "hash" else {}),
        **(
            {"graph": params.graph, "warmup": params.warmup, "samples": params.samples}
            if timed
            else {}
        ),
    }


def run(case: Case, comm) -> dict:
    """One shape: a row with the bits, the drift and, on a GPU, the times of every contract."""
    import os

    if case.parameters["what"] in LAYER:
        from rlkernel.ffn import capture, exactness, walltime

        row = {
            "graph": capture.graph_row,
            "layer": exactness.layer_row,
            "time": walltime.time_row,
        }
        return row[case.parameters["what"]](case, comm)
    if comm.device.type == "cpu" and case.parameters["what"] in KERNELS:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    from rlkernel.ffn import fresh, measure, training

    row = {
        "census": measure.census_row,
        "gemm": measure.gemm_row,
        "ffn": measure.ffn_row,
        "fp16": measure.fp16_row,
        "train": training.train_row,
        "hash": fresh.hash_row,
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
        lines = row["result"].get("lines", ())
        if "layout" in row["case"]["parameters"]:
            timed = row["case"]["parameters"]["what"] == "time"
            lines = layouts.timed(lines) if timed else layouts.merged(lines)
        for line in lines:
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
    apart = {}
    if "time" in params.what:
        apart = {"layouts": "host clock from one start of all ranks, slowest rank of each sample"}
    return {
        "graph": params.graph,
        "warm_s": params.warmup,
        "samples": params.samples,
        "order": "variants interleaved call by call in one process, hot",
        "clock": "CUDA events, microseconds a call",
        **apart,
    }


def _label(row: Mapping) -> str:
    case = row["case"]
    fault = "" if case["fault"] == "none" else f" {case['fault']}"
    at = case["parameters"]
    layout = f" {at['layout']}" if "layout" in at else ""
    return f"{at['what']}{layout} M={at['m']}{fault}"
