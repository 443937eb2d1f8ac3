"""Does a tensor-parallel SwiGLU block train like the dense one, and which sum is missing if not?

One case: build the dense block and its twin from one seed, take one training step of each, compare
every signal that a training run depends on, in the order in which a wrong one would appear.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlkernel.collectives.catalogue import SWIGLU as FAULTS
from rlkernel.experiments.case import DTYPES, TARGETS, Case, param
from rlkernel.experiments.reconstruction import ARTICLE_STD, Reconstruction

NAME = "tp-swiglu"
SUMMARY = "tensor-parallel SwiGLU block against its dense reference, with injected faults"
QUESTION = (
    "Does a tensor-parallel SwiGLU block train like the dense one, and which sum is missing if not?"
)
SIZES = {
    "article": {"seq": 3, "batch": 2, "hidden": 8, "ffn": 12},
    "realistic": {"seq": 64, "batch": 2, "hidden": 512, "ffn": 1536},
}
MODES = ("equivalence", "inspect", "catalogue", *FAULTS)
COVERED = (
    "forward, loss, input and parameter gradients and one SGD step of one pre-RMSNorm SwiGLU block",
    "real ranks in processes of their own: P = 2, 4 and 8, FP32 and BF16, sequence parallel",
    "every collective left out, doubled, averaged and on the wrong group; swapped shards, a bias "
    "added P times, a stale gradient, a sum in arrival order: each seen where it must show first",
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
    twin: tuple[str, ...] = param(
        ("ours",),
        "whose tensor parallelism: ours, or torch's parallelize_module as a second opinion",
        choices=("ours", "torch"),
    )


def _block(case: Case, size: dict, fixture: dict):
    from rlkernel.contract import DTYPES as TORCH_DTYPES
    from rlkernel.reconstruct.swiglu import SwiGLU

    options = case.parameters
    std = ARTICLE_STD if options["size"] == "article" else None
    split = options["sequence_parallel"] == "on"
    return SwiGLU(case.seed, TORCH_DTYPES[case.dtype], std, split, **size, **fixture)


EXPERIMENT = Reconstruction(
    name=NAME,
    json_keys={
        "output": "forward_max_abs_diff",
        "loss": "loss_abs_diff",
        "input_grad": "input_grad_max_abs_diff",
        "norm_grad": "norm_grad_max_abs_diff",
        "gate_up_grad": "gate_up_grad_max_abs_diff",
        "down_grad": "down_grad_max_abs_diff",
        "down_bias_grad": "down_bias_grad_max_abs_diff",
        "post_step": "post_step_weight_max_abs_diff",
    },
    faults=FAULTS,
    sizes=SIZES,
    legal_tp={"article": (1, 2, 4), "realistic": (1, 2, 4, 8)},
    tp_rule="powers of two that divide the intermediate features",
    block_path="pre-RMSNorm -> gate/up -> SiLU(gate) * up -> down -> + bias -> + residual",
    make=_block,
)
SIGNALS = EXPERIMENT.signals
cases, run = EXPERIMENT.cases, EXPERIMENT.run
verdict, summary = EXPERIMENT.verdict, EXPERIMENT.summary
table, protocol = EXPERIMENT.table, EXPERIMENT.protocol
