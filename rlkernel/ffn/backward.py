"""The gradients of the layer of module.py, and in which order they are made.

    main   dh, SwiGLU' │ gate dX │ up dX    │ down dW   │ gate dW   │ up dW    │ dx = gate + up
    lane    (gather)   │         │ "gate.dx"  "up.dx"     "down.dw"   "gate.dw"  "up.dw"

Each rank sums what it holds, a subtree; the lane adds up the ranks. Where no lane shares the tokens
gate dW and up dW are one product. A gradient that nobody wants is not computed and its ranks do not
talk, so all ranks must want the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rlkernel.ffn.lane import Pending
from rlkernel.kernels import select

if TYPE_CHECKING:
    from rlkernel.ffn.module import DeterministicFFN

BF16 = torch.bfloat16
SIZE = BF16.itemsize


class Saved(NamedTuple):
    """What forward keeps: x [T, H] of all of TP, gate and up [T, I/P], and the parameters."""

    x: Tensor
    gate: Tensor
    up: Tensor
    gate_up: Tensor
    down: Tensor


class Side(NamedTuple):
    """A weight's gradient is gradient.T @ input over the tokens, summed at `site` into `out`."""

    site: str
    gradient: Tensor  # [T, N]
    input: Tensor  # [T, K]
    out: Tensor  # [N, K]


def gradients(
    layer: DeterministicFFN, dy: Tensor, saved: Saved, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """(dx, d gate_up, d down) for the gradient dy of this rank's tokens, None where not wanted."""
    want_x, want_gate_up, want_down = wanted
    dy = layer.entered(dy.contiguous(), "down.gather")
    both, hidden = select.swiglu_backward(
        layer.root(dy, saved.down, select.CHAIN, 1),  # H is whole on every rank: nothing to sum
        saved.gate,
        saved.up,
    )
    dgate, dup = both.chunk(2, 1)
    d_gate_up = torch.empty_like(saved.gate_up) if want_gate_up else None
    d_down = torch.empty_like(saved.down) if want_down else None
    sides = []
    if want_down:
        sides.append(Side("down.dw", dy, hidden, d_down))
    if want_gate_up and layer.lanes == 1:  # nothing to sum: gate and up are one product
        sides.append(Side("gate_up.dw", both, saved.x, d_gate_up))
    elif want_gate_up:
        for_gate, for_up = d_gate_up.chunk(2)
        sides += [Side("gate.dw", dgate, saved.x, for_gate), Side("up.dw", dup, saved.x, for_up)]
    gathering, parts = _start_gather(layer, sides)  # hidden by the products of dX
    dx = _start_dx(layer, dgate, dup, saved.gate_up) if want_x else []
    dw = [_start_dw(layer, side, parts) for side in _taken(layer, sides, gathering)]
    for pending in dw:
        pending.result()
    total = None
    for pending in dx:
        total = pending.result() if total is None else total.add_(pending.result())
    return total, d_gate_up, d_down


# -- gradient of the input: over I, hence over TP --------------------------------------------------


def _start_dx(
    layer: DeterministicFFN, dgate: Tensor, dup: Tensor, gate_up: Tensor
) -> list[Pending[Tensor]]:
    """One sum of gate and one of up, both rounded to BF16; or one of both."""
    w_gate, w_up = gate_up.chunk(2)
    work = [("gate.dx", dgate, w_gate), ("up.dx", dup, w_up)]
    if layer.dx == "packed":
        leaves = layer.contract.weight.leaves // layer.tp
        work = [("gate_up.dx", *paired(dgate, dup, gate_up, leaves))]
    found = []
    for site, a, w in work:
        root = layer.root(a, w, layer.contract.weight, layer.tp)
        if layer.tp == 1:
            found.append(Pending(root))
            continue
        rows = root.shape[0] // (layer.tp if layer.sequence_parallel else 1)
        out = torch.empty(rows, layer.hidden, dtype=BF16, device=root.device)
        found.append(layer.lane.start(layer.left, root, site, out))
    if layer.tp == 1 and len(found) == 2:  # added while both are still in L2
        return [Pending(found[0].result().add_(found[1].result()))]
    return found


def paired(dgate: Tensor, dup: Tensor, gate_up: Tensor, leaves: int) -> tuple[Tensor, Tensor]:
    """Operands of one contraction over 2I whose leaf i is [gate slice i ; up slice i].

    Copies the weights: 8 I/P H bytes of traffic, in exchange for one sum over TP instead of two.
    """
    pairs = [d.unflatten(1, (leaves, -1)) for d in (dgate, dup)]
    weights = gate_up.unflatten(0, (2, leaves, -1)).transpose(0, 1)
    return torch.stack(pairs, 2).flatten(1), weights.reshape(-1, gate_up.shape[1])


# -- gradients of the weights: over the tokens, hence over CP and DP -------------------------------


def dw_route(layer: DeterministicFFN, tokens: int) -> str:
    """`local`, `reduce` or `gather`: how dW comes about for that many tokens a lane.

    auto: what moves fewer bytes to a rank. Three roots a level of the tree, or the other lanes'
    gradients and inputs: dy and x [T, H]; dgate, dup and hidden [T, I/P].
    """
    if layer.lanes == 1:
        return "local"
    if layer.dw != "auto":
        return layer.dw
    features, levels = layer.intermediate // layer.tp, layer.lanes.bit_length() - 1
    reduce = levels * 3 * features * layer.hidden * layer.contract.token.dtype.itemsize
    gather = (layer.lanes - 1) * tokens * (2 * layer.hidden + 3 * features) * SIZE
    return "reduce" if reduce < gather else "gather"


def _start_gather(layer: DeterministicFFN, sides: list[Side]) -> tuple[Pending[list[Side]], int]:
    """The operands of dW, and how many ranks share its sum."""
    if not sides or layer.lanes == 1:
        return Pending(sides), 1
    tokens = sides[0].gradient.shape[0]
    # Equal shards are exact subtrees, uneven ones are not, and the shape of dW does not show them.
    layer.comm.agree(f"{tokens} tokens", "dw.tokens", layer.token_axis)
    if dw_route(layer, tokens) == "reduce":
        return Pending(sides), layer.lanes
    return layer.lane.start(_gathered, layer, sides), 1


def _gathered(layer: DeterministicFFN, sides: list[Side]) -> list[Side]:
    """The same of all lanes' tokens; what two weights share travels once."""
    every: dict[int, Tensor] = {}
    for side in sides:
        for name, x in (("gradient", side.gradient), ("input", side.input)):
            if id(x) not in every:
                every[id(x)] = layer.comm.all_gather(x, f"{side.site}.{name}", layer.token_axis)
    return [
        side._replace(gradient=every[id(side.gradient)], input=every[id(side.input)])
        for side in sides
    ]


def _taken(layer: DeterministicFFN, sides: list[Side], gathering: Pending) -> list[Side]:
    found = gathering.result()
    if found is not sides:
        for side in found:
            layer.lane.own(side.gradient)
            layer.lane.own(side.input)
    return found


def _start_dw(layer: DeterministicFFN, side: Side, parts: int) -> Pending[Tensor]:
    """Fill side.out; `parts` ranks share its sum."""
    tree, gradient = layer.contract.token, side.gradient.t()
    if parts == 1:
        return Pending(layer.product(gradient, side.input, side.out, tree))
    comm = layer.comm.using(contract=tree)

    def reduce(root: Tensor) -> Tensor:
        return comm.all_reduce(root, side.site, layer.token_axis, out=side.out)

    return layer.lane.start(reduce, layer.root(gradient, side.input, tree, parts))
