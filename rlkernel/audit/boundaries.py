"""Which sum is missing in somebody else's block? Told from values alone.

A twin hands out, at named boundaries, the tensor of its rank and where that tensor should lie:

    boundary     layout                            what must hold on the ranks
    "norm"       REPLICATED                        every rank has the dense value
    "gate"       shard(-1, rank, P)                rank r has slice r of the dense value
    "down"       PARTIAL                           the ranks' tensors add up to the dense value

The ranks' tensors of a boundary are held against the dense one. Where they do not match, each thing
that could have gone wrong predicts other values; the prediction that fits is the diagnosis, and how
many fit says how sure it is. Boundaries are taken in the order in which the twin lists them, that
of dependency: the first wrong one is where the cause lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Where a rank's tensor lies in the dense one. cuts: (dim, index, parts) for each split dim."""

    cuts: tuple[tuple[int, int, int], ...] = ()
    partial: bool = False

    def take(self, dense: Tensor) -> Tensor:
        """The slice of the dense tensor that this rank should hold (or a summand of it)."""
        for dim, index, parts in self.cuts:
            dense = dense.chunk(parts, dim)[index]
        return dense

    def and_shard(self, dim: int, index: int, parts: int) -> Layout:
        """Split along one more dimension. One part is no split."""
        cut = ((dim, index, parts),) if parts > 1 else ()
        return Layout((*self.cuts, *cut), self.partial)


REPLICATED, PARTIAL = Layout(), Layout(partial=True)


def shard(dim: int, index: int, parts: int) -> Layout:
    """Slice `index` of `parts` along `dim`. Ranks that name the same index hold replicas."""
    return REPLICATED.and_shard(dim, index, parts)


Boundaries = Mapping[str, tuple[Tensor, Layout]]


@dataclass(frozen=True)
class Reference:
    """What the dense side hands out: the data that the twin gets too, and its boundaries."""

    state_dict: Mapping[str, Tensor]
    x: Tensor
    target: Tensor
    boundaries: Mapping[str, Tensor]


def trace(
    module: nn.Module,
    x: Tensor,
    target: Tensor,
    *,
    lr: float = 0.05,
    elements: int | None = None,
    after_backward: Callable[[], None] | None = None,
) -> dict[str, Tensor]:
    """One training step of a module, seen by hooks, in the order of dependency.

    name -> tensor: the parameters as loaded; the outputs of all leaf modules and "output"; "loss"
    (squared error summed and divided by `elements`, by default x's own); "<module>.grad", the
    gradient at each output, in the order of backward; "input.grad"; "<parameter>.grad" and
    "<parameter>.updated" after SGD.
    after_backward: runs between backward and the update, where gradients are reduced.
    """
    seen = {name: _plain(p.detach()).clone() for name, p in module.named_parameters()}

    def watch(name: str, output: Tensor) -> None:
        seen[name] = output.detach().clone()
        if output.requires_grad:
            output.register_hook(
                lambda grad: seen.setdefault(f"{name}.grad", _plain(grad.detach().clone()))
            )

    leaves = [(n, m) for n, m in module.named_modules() if n and not any(m.children())]
    handles = [
        m.register_forward_hook(lambda m, i, output, n=n: watch(n, output)) for n, m in leaves
    ]
    try:
        x = x.detach().clone().requires_grad_()
        output = module(x)
        watch("output", output)
        loss = (output.float() - target.float()).square().sum() / (elements or x.numel())
        seen["loss"] = loss.detach().clone()
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    seen["input.grad"] = x.grad
    if after_backward:
        after_backward()
    trained = [(n, p) for n, p in module.named_parameters() if p.grad is not None]
    parameters = [(n, _plain(p.detach()), _plain(p.grad)) for n, p in trained]
    seen |= {f"{name}.grad": grad.clone() for name, _, grad in parameters}
    seen |= {f"{name}.updated": value - lr * grad for name, value, grad in parameters}
    return seen


def laid_out(
    seen: Mapping[str, Tensor], where: Mapping[str, Layout]
) -> dict[str, tuple[Tensor, Layout]]:
    """What trace() saw, each tensor with its layout: all that a twin has to return.

    where: only what is split or partial. A gradient and an updated weight lie as what they belong
    to ("up.grad" as "up", "up.weight.updated" as "up.weight"), the gradient at a partial output is
    whole, and whatever is not named is REPLICATED. Raises ValueError for a name that was not seen.
    """
    strange = [name for name in where if name not in seen]
    if strange:
        raise ValueError(f"no boundary {', '.join(strange)}: there are {', '.join(seen)}")

    def layout(name: str) -> Layout:
        owner = name.removesuffix(".grad").removesuffix(".updated")
        inherited = where.get(owner, REPLICATED)
        return where.get(name) or Layout(inherited.cuts)

    return {name: (tensor, layout(name)) for name, tensor in seen.items()}


def _plain(x: Tensor) -> Tensor:
    """This rank's part of a distributed tensor, any other as it is."""
    return x.to_local() if hasattr(x, "to_local") else x
