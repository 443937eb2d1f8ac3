"""A block of one's own and two twins of it, to be audited: plain torch, plain all_reduce.

    export PYTHONPATH=notebooks/examples
    python -m rlkernel audit --dense my_block:dense --twin my_block:twin --nproc 4
    python -m rlkernel audit --dense my_block:dense --twin my_block:forgetful --nproc 4

The block is y = W2 gelu(W1 x). A twin cuts W1 by rows and W2 by columns; then the partial outputs
have to be added on the way forward, and the partial gradients of x on the way back.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from rlkernel.audit import PARTIAL, Reference, laid_out, shard, trace


class MLP(nn.Module):
    """x [tokens, 16] -> [tokens, 16] over whole weights, or over one rank's part of them."""

    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = (nn.Linear(*w.T.shape, bias=False) for w in (up, down))
        self.up.weight, self.down.weight = nn.Parameter(up.clone()), nn.Parameter(down.clone())

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def dense(seed):
    g = torch.Generator().manual_seed(seed)
    up, down = torch.randn(32, 16, generator=g) / 4, torch.randn(16, 32, generator=g) / 6
    x, target = torch.randn(6, 16, generator=g), torch.randn(6, 16, generator=g)
    state = {"up.weight": up, "down.weight": down}
    return Reference(state, x, target, trace(MLP(up, down), x, target))


class Add(torch.autograd.Function):
    """The sum over the ranks: of the values going forward, or of the gradients going back."""

    @staticmethod
    def forward(ctx, x, group, back):
        ctx.group, ctx.back = group, back
        return x.view_as(x) if back else add(x, group)

    @staticmethod
    def backward(ctx, grad):
        return add(grad, ctx.group) if ctx.back else grad, None, None


def add(x, group):
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


class Split(MLP):
    group, sums = None, ("forward", "back")

    def forward(self, x):
        x = Add.apply(x, self.group, True) if "back" in self.sums else x
        y = super().forward(x)
        return Add.apply(y, self.group, False) if "forward" in self.sums else y


def twin(rank, group, state_dict, x, target, sums=("forward", "back")):
    size = dist.get_world_size(group)
    up, down = state_dict["up.weight"], state_dict["down.weight"]
    mlp = Split(up.chunk(size, 0)[rank], down.chunk(size, 1)[rank])
    mlp.group, mlp.sums = group, sums
    where = {
        "up.weight": shard(0, rank, size),
        "down.weight": shard(1, rank, size),
        "up": shard(-1, rank, size),
        "down": PARTIAL,
    }
    return laid_out(trace(mlp, x, target), where)


def forgetful(*given):
    """The same without the sum going back: output and loss are right."""
    return twin(*given, sums=("forward",))
