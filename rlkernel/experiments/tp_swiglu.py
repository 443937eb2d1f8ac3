"""Does a tensor-parallel SwiGLU block train like the dense one, and which sum is missing if not?

One case: build the dense block and its twin from one seed, take one training step of each, compare
every signal that a training run depends on, in the order in which a wrong one would appear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlkernel.collectives.faults import SWIGLU as FAULTS
from rlkernel.experiments import reconstruction
from rlkernel.experiments.case import DTYPES, TARGETS, Case, UsageError, param
from rlkernel.grid import Grid

NAME = "tp-swiglu"
SUMMARY = "tensor-parallel SwiGLU block against its dense reference, with injected faults"
QUESTION = (
    "Does a tensor-parallel SwiGLU block train like the dense one, and which sum is missing if not?"
)

JSON_KEYS = {
    "output": "forward_max_abs_diff",
    "loss": "loss_abs_diff",
    "input_grad": "input_grad_max_abs_diff",
    "norm_grad": "norm_grad_max_abs_diff",
    "gate_up_grad": "gate_up_grad_max_abs_diff",
    "down_grad": "down_grad_max_abs_diff",
    "down_bias_grad": "down_bias_grad_max_abs_diff",
    "post_step": "post_step_weight_max_abs_diff",
}
SIZES = {
    "article": {"seq": 3, "batch": 2, "hidden": 8, "ffn": 12},
    "realistic": {"seq": 64, "batch": 2, "hidden": 512, "ffn": 1536},
}
LEGAL_TP = {"article": (1, 2, 4), "realistic": (1, 2, 4, 8)}
SIGNALS = tuple(JSON_KEYS)
ARTICLE_STD, LEARNING_RATE = 0.2, 0.05
ARTICLE_BOUNDS = {"output": 5e-7, "loss": 5e-7}  # every other signal: 1e-7
BLOCK_PATH = "pre-RMSNorm -> gate/up -> SiLU(gate) * up -> down -> + bias -> + residual"
MODES = ("equivalence", "inspect", "catalogue", *FAULTS)

COVERED = (
    "forward, loss, input and parameter gradients and one SGD step of one pre-RMSNorm SwiGLU block",
    "real ranks in processes of their own: P = 2, 4 and 8, FP32 and BF16, sequence parallel",
    "a forward and a backward reduction left out, each seen where it must show first",
)
NOT_COVERED = (
    "self-attention or a complete Transformer block",
    "FP8 arithmetic; fused RMSNorm, SwiGLU or linear kernels",
    "asynchronous communication, and overlap of communication with computation",
    "gradient accumulation, pipeline parallelism, distributed optimizer state",
    "Megatron-Core itself: its semantics are rebuilt here, its classes are not imported",
)


@dataclass(frozen=True)
class Params:
    nproc: tuple[int, ...] = param((2,), "tensor-parallel group sizes", unit="ranks")
    mode: str = param(
        "equivalence",
        "inspect: shapes only; equivalence: the correct twin; "
        "catalogue: the correct twin and every fault; "
        "or the name of one fault",
        choices=MODES,
    )
    fault: str = param(
        "none", "fault to inject (the same as naming it as the mode)", choices=("none", *FAULTS)
    )
    seed: tuple[int, ...] = param((11, 12, 13, 14, 15), "seeds of weights, input and target")
    size: str = param(
        "article",
        "article: S=3 B=2 H=8 F=12; realistic: S=64 B=2 H=512 F=1536",
        choices=tuple(SIZES),
    )
    dtype: tuple[str, ...] = param(("fp32",), "dtypes of weights and activations", choices=DTYPES)
    target: str = param("auto", "where the ranks compute", choices=TARGETS)
    sequence_parallel: tuple[str, ...] = param(
        ("off",),
        "split the sequence outside the linear layers; `off,on` measures both",
        choices=("off", "on"),
    )


def cases(params: Params) -> list[Case]:
    """Every combination that the parameters ask for. Raises UsageError for one that cannot be or
    cannot show.
    """
    for tp in params.nproc:
        if tp not in LEGAL_TP[params.size]:
            raise UsageError(
                f"nproc={tp} is not possible at the {params.size} size: expected one of "
                f"{', '.join(map(str, LEGAL_TP[params.size]))} (powers of two that divide "
                f"F={SIZES[params.size]['ffn']})"
            )
    if "on" in params.sequence_parallel and params.size != "realistic":
        raise UsageError(
            "sequence_parallel=on needs size=realistic: S=3 positions do not divide over ranks"
        )
    return [
        Case(
            NAME,
            Grid(tp=tp),
            dtype,
            seed,
            fault,
            {"size": params.size, "sequence_parallel": sp, "mode": kind},
        )
        for tp in params.nproc
        for dtype in params.dtype
        for sp in params.sequence_parallel
        for fault, kind in _faults(params, tp)
        for seed in params.seed
    ]


def _faults(params: Params, tp: int) -> list[tuple[str, str]]:
    """(fault, kind of case) to run on a group of tp ranks."""
    asked = params.mode if params.mode in FAULTS else params.fault
    if params.fault != "none" and params.mode not in ("equivalence", params.fault):
        raise UsageError(
            f"mode={params.mode} and fault={params.fault} contradict each other: give one of them"
        )
    if params.mode == "inspect":
        return [("none", "inspect")]
    if params.mode == "catalogue":
        shown = [fault.name for fault in FAULTS.values() if tp >= fault.smallest]
        return [("none", "step"), *((name, "step") for name in shown)]
    if asked != "none" and tp < FAULTS[asked].smallest:
        raise UsageError(
            f"fault {asked} cannot show on {tp} rank(s): it needs nproc >= {FAULTS[asked].smallest}"
        )
    return [(asked, "step")]


def run(case: Case, comm) -> dict:
    """One training step of both blocks on this rank; every signal's worst rank. The same result on
    all ranks.
    """
    from rlkernel.contract import DTYPES as TORCH_DTYPES
    from rlkernel.contract import ReductionTree
    from rlkernel.reconstruct import step, swiglu

    article = case.parameters["size"] == "article"
    fault = FAULTS.get(case.fault)
    block = swiglu.Block(
        swiglu.Shape(**SIZES[case.parameters["size"]]),
        case.seed,
        TORCH_DTYPES[case.dtype],
        std=ARTICLE_STD if article else None,
        sequence_parallel=case.parameters["sequence_parallel"] == "on",
    )
    comm = comm.using(
        contract=ReductionTree(comm.grid.tp, "fp32"), observers=fault.observers() if fault else ()
    )
    if case.parameters["mode"] == "inspect":
        return {"passed": True, "shapes": block.shapes(comm)}

    pairs = block.train_both(comm, LEARNING_RATE)
    bounds = (
        {s: ARTICLE_BOUNDS.get(s, 1e-7) for s in SIGNALS}
        if article and case.dtype == "fp32"
        else {}
    )
    mine = {s: step.compare_signal(pairs[s], block.dtype, bounds.get(s)) for s in SIGNALS}
    ranks = comm.collect(
        {"signals": mine, "digest": {s: step.fingerprint(pairs[s].twin) for s in SIGNALS}}
    )
    signals = {s: step.worst([r["signals"][s] for r in ranks]) for s in SIGNALS}
    first = step.first_wrong(signals)
    expected = fault.first_wrong if fault else None
    return {
        "passed": first is None,
        "first_wrong": first,
        "expected_first_wrong": expected,
        "caught": first == expected if fault else None,
        "contract": comm.contract.name,
        "signals": signals,
        "digest": {s: [r["digest"][s] for r in ranks] for s in SIGNALS},
        "shapes": block.shapes(comm),
    }


def verdict(params: Params, rows: Sequence[dict]) -> dict:
    return reconstruction.verdict(rows, SIGNALS, catalogue=params.mode == "catalogue")


def summary(params: Params, rows: Sequence[dict]) -> dict:
    if params.mode == "inspect":
        return {
            "mode": "inspect",
            "block_path": BLOCK_PATH,
            **rows[0]["result"]["shapes"],
            "passed": True,
        }
    mode = params.fault if params.fault != "none" else params.mode
    return reconstruction.summary(mode, rows, JSON_KEYS, verdict(params, rows)["passed"])


def table(params: Params, rows: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    if params.mode == "inspect":
        return reconstruction.shape_table([row["result"]["shapes"] for row in rows])
    return reconstruction.table(rows, SIGNALS)


def protocol(params: Params) -> dict:
    """Nothing is timed: results may be compared whenever size, learning rate and bounds are the
    same.
    """
    return {
        "size": SIZES[params.size],
        "lr": LEARNING_RATE,
        "bounds": ARTICLE_BOUNDS,
        "other_bound": 1e-7,
    }
