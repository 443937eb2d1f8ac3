"""Does tensor-parallel GQA attention train like the dense block, and which sum is missing if not?

Whole query/KV groups stay on a rank; where there are more ranks than KV heads, neighbours hold
replicas of one and sum its gradients. Cases, signals and checks are those of every reconstruction.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlkernel.collectives.catalogue import GQA as FAULTS
from rlkernel.experiments.reconstruction import (
    BaseParams,
    Reconstruction,
    fault_of,
    mode_of,
    size_of,
)

NAME = "tp-gqa"
SUMMARY = "tensor-parallel GQA attention against its dense reference, with injected faults"
QUESTION = (
    "Does tensor-parallel grouped-query attention train like the dense block, "
    "and which sum is missing if not?"
)
SIZES = {
    "article": {
        "seq": 5, "batch": 2, "hidden": 16, "query_heads": 4, "kv_heads": 2, "head_dim": 4,
    },
    "realistic": {
        "seq": 64, "batch": 2, "hidden": 512, "query_heads": 8, "kv_heads": 2, "head_dim": 64,
    },
}  # fmt: skip
COVERED = (
    "forward, loss, input and parameter gradients and one SGD step of one pre-RMSNorm causal GQA "
    "block with RoPE",
    "real ranks in processes of their own: P = 2, 4 and 8, KV heads replicated where P exceeds "
    "them, FP32 and BF16, sequence parallel",
    "each sum, of outputs, of input and of parameter gradients, of KV replicas, left out, doubled, "
    "averaged and on the wrong group; swapped shards, an output bias added P times, a stale "
    "gradient, a sum in arrival order: each seen where it must show first",
)
NOT_COVERED = (
    "torch's own styles beyond P = 2: they would cut through a KV head",
    "performance and communication cost; Megatron-Core itself, whose classes are not imported",
    "FlashAttention, packed sequences, fused QKV layouts, dropout and its random state",
    "context parallelism, FP8, pipeline parallelism, distributed optimizer state",
)


@dataclass(frozen=True)
class Params(BaseParams):
    mode: str = mode_of(FAULTS)
    fault: str = fault_of(FAULTS)
    size: str = size_of(
        SIZES,
        "article: S=5 B=2 H=16, 4 query / 2 KV heads of 4; "
        "realistic: S=64 B=2 H=512, 8 query / 2 KV heads of 64",
    )


def _block():
    from rlkernel.reconstruct.gqa import GQA

    return GQA


EXPERIMENT = Reconstruction(
    name=NAME,
    json_keys={
        "output": "forward_max_abs_diff",
        "loss": "loss_abs_diff",
        "input_grad": "input_grad_max_abs_diff",
        "parameter_grad": "parameter_grad_max_abs_diff",
        "post_step": "post_step_weight_max_abs_diff",
    },
    faults=FAULTS,
    sizes=SIZES,
    legal_tp={"article": (1, 2, 4), "realistic": (1, 2, 4, 8)},
    tp_rule="whole query/KV groups stay on a rank, so not beyond the query heads",
    block_path="pre-RMSNorm -> Q, K, V -> RoPE -> causal GQA -> output projection -> + residual",
    block=_block,
    torch_tp=2,  # beyond the KV heads its column style would cut through a head
)
SIGNALS = EXPERIMENT.signals
cases, run = EXPERIMENT.cases, EXPERIMENT.run
verdict, summary = EXPERIMENT.verdict, EXPERIMENT.summary
table, protocol = EXPERIMENT.table, EXPERIMENT.protocol
