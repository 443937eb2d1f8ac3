"""The reconstructed blocks as somebody else's: watched from outside by hooks, nothing is told.

What runs is the module form of each block, under our regions or under torch's own styles. A fault,
where there is one, sits in the Comm or in the loaded shards; this file does not know of any.
"""

from __future__ import annotations

from torch import nn

from rlkernel.audit.boundaries import REPLICATED, Boundaries, Layout, Reference, trace
from rlkernel.audit.report import Twin
from rlkernel.collectives.comm import Comm
from rlkernel.reconstruct.gqa import GQA
from rlkernel.reconstruct.modules import dense_module, torch_module, twin_module
from rlkernel.reconstruct.twin import Block, Weights, over_data

LEARNING_RATE = 0.05


def reference(block: Block, seed: int) -> Reference:
    """The dense block's weights, the data of `seed`, and its boundaries."""
    weights, (x, target) = block.weights(), block.data(seed)
    module = dense_module(block, weights)
    state = {name: value.detach().clone() for name, value in module.named_parameters()}
    return Reference(state, x, target, trace(module, x, target, lr=LEARNING_RATE))


def our_twin(block: Block, comm: Comm, local: Weights) -> Twin:
    """The twin over these shards and this seam, to be watched."""

    def run(due: Reference) -> Boundaries:
        module, here = twin_module(block, local, comm), block.part(comm)

        def over_lanes() -> None:
            for p in module.parameters():
                p.grad = over_data(comm, p.grad, "dw")

        seen = trace(
            module,
            due.x[here],
            due.target[here],
            lr=LEARNING_RATE,
            elements=due.x.numel(),
            after_backward=over_lanes,
        )
        loss = over_data(comm, seen["loss"].reshape(1), "loss")
        if block.sequence_parallel:
            loss = comm.all_reduce(loss, "loss.positions")
        seen["loss"] = loss[0]
        return {name: (t, _layout(name, block, module, comm)) for name, t in seen.items()}

    return run


def torch_twin(block: Block, comm: Comm, skip: tuple[str, ...]) -> Twin:
    """torch's tensor parallelism over the dense block; `skip` leaves out the styles of layers."""

    def run(due: Reference) -> Boundaries:
        module = torch_module(block, block.weights(comm.device), comm, skip=skip)
        seen = trace(module, due.x, due.target, lr=LEARNING_RATE)
        # torch's row style sums inside the layer, its column style inside the layer's input.
        whole = (*module.ROWS, "enter")
        return {
            name: (t, REPLICATED if name.partition(".grad")[0] in whole and "weight" not in name
                   else _layout(name, block, module, comm))
            for name, t in seen.items()
        }  # fmt: skip

    return run


def _layout(name: str, block: Block, module: nn.Module, comm: Comm) -> Layout:
    """Where a boundary of the twin lies by the design of tensor parallelism."""
    at, grid = comm.grid.coords(comm.rank), comm.grid
    layer, _, rest = name.partition(".")
    if rest.startswith("weight") or layer == "bias":
        return _weight_layout(layer, block, module, comm)
    if name == "loss":
        return REPLICATED
    lanes = REPLICATED.and_shard(1, at.dp, grid.dp)  # tokens are [S, B, H]
    if layer in module.COLUMNS:
        parts = _parts(layer, block, grid.tp)
        cut = lanes.and_shard(-1, at.tp * parts // grid.tp, parts)
        # A replica of a KV head sees the gradient of its own query heads only.
        return Layout(cut.cuts, partial=rest == "grad" and parts < grid.tp)
    if (layer in module.ROWS and not rest) or name == "enter.grad":
        return Layout(lanes.cuts, partial=True)
    inside = layer in ("enter", *module.ROWS)
    if block.sequence_parallel and not inside:
        return lanes.and_shard(0, at.tp, grid.tp)
    return lanes


def _weight_layout(layer: str, block: Block, module: nn.Module, comm: Comm) -> Layout:
    at, tp = comm.grid.coords(comm.rank).tp, comm.grid.tp
    if layer in module.ROWS:
        return REPLICATED.and_shard(1, at, tp)
    if layer in module.COLUMNS:
        parts = _parts(layer, block, tp)
        return REPLICATED.and_shard(0, at * parts // tp, parts)
    return REPLICATED


def _parts(layer: str, block: Block, tp: int) -> int:
    """Into how many shards tp ranks split a column layer: KV heads are not split further."""
    return min(tp, block.kv_heads) if isinstance(block, GQA) and layer in ("wk", "wv") else tp
