"""Does a tensor-parallel SwiGLU block train like the dense one, and which sum is missing if not?

One case: build the dense block and its twin from one seed, take one training step of each, compare
every signal that a training run depends on, in the order in which a wrong one would appear.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlkernel.collectives.catalogue import SWIGLU as FAULTS
from rlkernel.experiments.reconstruction import (
    BaseParams,
    Reconstruction,
    fault_of,
    mode_of,
    size_of,
)

NAME = "tp-swiglu"
SUMMARY = "tensor-parallel SwiGLU block against its dense reference, with injected faults"
QUESTION = (
    "Does a tensor-parallel SwiGLU block train like the dense one, and which sum is missing if not?"
)
SIZES = {
    "article": {"seq": 3, "batch": 2, "hidden": 8, "ffn": 12},
    "realistic": {"seq": 64, "batch": 2, "hidden": 512, "ffn": 1536},
}
COVERED = (
    "forward, loss, input and parameter gradients and one SGD step of one pre-RMSNorm SwiGLU block",
    "real ranks in processes of their own: P = 2, 4 and 8, FP32 and BF16, sequence parallel",
    "each sum, of outputs, of input and of parameter gradients, left out, doubled, averaged and on "
    "the wrong group; swapped shards, a bias added P times, a stale gradient, a sum in arrival "
    "order: each seen where it must show first",
)
NOT_COVERED = (
    "self-attention or a complete Transformer block",
    "FP8 arithmetic; fused RMSNorm, SwiGLU or linear kernels",
    "asynchronous communication, and overlap of communication with computation",
    "gradient accumulation, pipeline parallelism, distributed optimizer state",
    "Megatron-Core itself: its semantics are rebuilt here, its classes are not imported",
)


@dataclass(frozen=True)
class Params(BaseParams):
    mode: str = mode_of(FAULTS)
    fault: str = fault_of(FAULTS)
    size: str = size_of(SIZES, "article: S=3 B=2 H=8 F=12; realistic: S=64 B=2 H=512 F=1536")


def _block():
    from rlkernel.reconstruct.swiglu import SwiGLU

    return SwiGLU


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
    block=_block,
)
SIGNALS = EXPERIMENT.signals
cases, run = EXPERIMENT.cases, EXPERIMENT.run
verdict, summary = EXPERIMENT.verdict, EXPERIMENT.summary
table, protocol = EXPERIMENT.table, EXPERIMENT.protocol
