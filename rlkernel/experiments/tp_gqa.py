"""Does tensor-parallel GQA attention train like the dense block, and which sum is missing if not?

Whole query/KV groups stay on a rank; where there are more ranks than KV heads, neighbours hold
replicas of one and sum its gradients. Cases, signals and checks are those of every reconstruction.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlkernel.collectives.catalogue import GQA as FAULTS
from rlkernel.experiments.case import DTYPES, TARGETS, Case, param
from rlkernel.experiments.reconstruction import ARTICLE_STD, Reconstruction

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
MODES = ("equivalence", "inspect", "catalogue", *FAULTS)
COVERED = (
    "forward, loss, input and parameter gradients and one SGD step of one pre-RMSNorm causal GQA "
    "block with RoPE",
    "real ranks in processes of their own: P = 2, 4 and 8, KV heads replicated where P exceeds "
    "them, FP32 and BF16, sequence parallel",
    "every collective left out, doubled, averaged and on the wrong group; KV gradients not summed, "
    "swapped shards, a stale gradient, a sum in arrival order: each seen where it must show first",
)
NOT_COVERED = (
    "performance and communication cost; Megatron-Core itself, whose classes are not imported",
    "FlashAttention, packed sequences, fused QKV layouts, dropout and its random state",
    "context parallelism, FP8, pipeline parallelism, distributed optimizer state",
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
        "article: S=5 B=2 H=16, 4 query / 2 KV heads of 4; "
        "realistic: S=64 B=2 H=512, 8 query / 2 KV heads of 64",
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
    from rlkernel.reconstruct.gqa import GQA

    options = case.parameters
    std = ARTICLE_STD if options["size"] == "article" else None
    split = options["sequence_parallel"] == "on"
    return GQA(case.seed, TORCH_DTYPES[case.dtype], std, split, **size, **fixture)


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
    make=_block,
    torch_tp=2,  # beyond the KV heads its column style would cut through a head
)
SIGNALS = EXPERIMENT.signals
cases, run = EXPERIMENT.cases, EXPERIMENT.run
verdict, summary = EXPERIMENT.verdict, EXPERIMENT.summary
table, protocol = EXPERIMENT.table, EXPERIMENT.protocol
