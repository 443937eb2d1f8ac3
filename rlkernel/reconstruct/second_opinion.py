"""The same blocks under torch's own tensor parallelism: a second opinion that no one here wrote.

torch places its own collectives; none of them goes through our seam, and the comparison with the
dense block is the one that our twin has to pass.
"""

from __future__ import annotations

from rlkernel.collectives.comm import Comm
from rlkernel.reconstruct.modules import dense_module, local, torch_module
from rlkernel.reconstruct.step import Pair, backward, update
from rlkernel.reconstruct.twin import Block, dense_step


def train_both(block: Block, comm: Comm, lr: float) -> dict[str, Pair]:
    """One step of the dense block and of torch's twin, compared like our own."""
    reference = dense_step(block, lr, 1, str(comm.device))
    weights = block.weights(comm.device)
    x, target = (t.to(comm.device) for t in block.data(0))
    split = comm.grid.tp > 1
    twin = torch_module(block, weights, comm) if split else dense_module(block, weights)
    step = backward(lambda w, x: twin(x), {}, x, target, x.numel())
    before = twin.collect(lambda p: local(p.detach()))
    grads = twin.collect(lambda p: local(p.grad))
    return block.pairs(comm, update(step, step.loss, grads, before, lr), reference)
