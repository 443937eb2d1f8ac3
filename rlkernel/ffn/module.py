"""The bias-free Qwen3 FFN as a layer: the same bits under TP, CP and SP, forward and backward.

    y = (silu(x Wg') * (x Wu')) Wd'         rank r of P holds features [r I/P, (r+1) I/P)

    forward   x -> gate_r, up_r -> hidden_r -> subtree root ── sum "down.forward" ─> y
    backward  dy -> dhidden_r -> dgate_r, dup_r     a chain over H, whole everywhere: nothing to sum
              dgate_r Wg_r, dup_r Wu_r -> subtree roots ── sums "gate.dx", "up.dx" ─> dx
              over this rank's tokens -> subtree roots ── sums "gate.dw", "up.dw", "down.dw" ─> dW

Sums over I run over TP, sums over tokens over CP (and DP), each in the order of the contract's
tree; what no rank splits is a chain. Hence one rank and any grid give the same bits.

Under sequence parallel a rank holds T/P of its lane's tokens outside the layer: x and dy are
gathered at "gate_up.gather" and "down.gather", the sums over TP become reduce-scatters.

Tokens are numbered sequence-major, token = s * B + b, so a context shard is contiguous.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlkernel.collectives.comm import Comm
from rlkernel.collectives.groups import alone
from rlkernel.contract import LayerContract, ReductionTree
from rlkernel.ffn import backward
from rlkernel.ffn.backward import BF16
from rlkernel.ffn.lane import Lane
from rlkernel.kernels import select

NAMES = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")  # as Hugging Face has them
DX, DW = ("separate", "packed"), ("reduce", "gather", "auto")
Contract = LayerContract | ReductionTree | str
DEFAULT = LayerContract()


class DeterministicFFN(nn.Module):
    """One rank's share of the layer, made of whole Hugging Face weights: gate, up [I, H], down
    [H, I], BF16.

    comm: this rank's end of a grid; none: a single rank. contract: of the sums, a LayerContract or
    one tree for features and tokens; by default eight leaves of features, two of tokens. dx:
    `separate` rounds the gradients through gate and up as eager does and adds them; `packed` sums
    both in one tree whose leaf i is [gate slice i ; up slice i]: another contract, one sum over TP.
    dw: `reduce` sums the ranks' subtree roots, `gather` brings all tokens to every rank and runs
    the whole tree; the same bits, `auto` takes the one that moves fewer bytes. batch_first: an
    input of three axes is [B, S, H], as in Hugging Face, else [S, B, H]; one of two axes is tokens.
    overlap: sums run beside the GEMMs on a GPU.

    Raises ValueError, TypeError for weights that the contract cannot split over the grid.
    """

    def __init__(
        self,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        comm: Comm | None = None,
        *,
        contract: Contract = DEFAULT,
        sequence_parallel: bool = False,
        dx: str = "separate",
        dw: str = "auto",
        batch_first: bool = True,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        _check_weights(gate, up, down)
        _check_choice("dx", dx, DX)
        _check_choice("dw", dw, DW)
        self.intermediate, self.hidden = gate.shape
        self.contract = layer_contract(contract)
        comm = alone(gate.device) if comm is None else comm
        # DP and CP ranks hold other tokens of the same features.
        self.token_axis = "grad" if comm.grid.dp > 1 else "cp"
        self.tp, self.lanes = comm.grid.tp, comm.grid.axis_size(self.token_axis)
        self.contract.weight.check_axis("I", self.intermediate, self.tp, kind="weight")
        self.contract.token.subtree(self.lanes)
        self.comm = comm.using(contract=self.contract.weight)
        self.sequence_parallel, self.dx, self.dw = sequence_parallel, dx, dw
        self.batch_first, self.lane = batch_first, Lane(comm.device, overlap)
        own = [self.shard(*named).to(comm.device) for named in zip(NAMES, (gate, up, down))]
        # The only storage of both projections; everything else is a view of it.
        self.gate_up = nn.Parameter(torch.cat(own[:2]))  # [2 I/P, H]
        self.down = nn.Parameter(own[2].clone(memory_format=torch.contiguous_format))  # [H, I/P]

    @classmethod
    def from_hf(cls, mlp: nn.Module, comm: Comm | None = None, **options) -> DeterministicFFN:
        """The layer that computes what this Qwen3MLP computes; options as of the class.

        Raises ValueError for biases and for another activation than SiLU.
        """
        layers = [getattr(mlp, name.partition(".")[0]) for name in NAMES]
        if any(layer.bias is not None for layer in layers):
            raise ValueError("the layer has biases: expected a bias-free Qwen3MLP")
        probe = torch.linspace(-4, 4, 9)
        if not torch.equal(getattr(mlp, "act_fn", F.silu)(probe), F.silu(probe)):
            raise ValueError(f"activation {mlp.act_fn} is not supported: expected SiLU")
        return cls(*(layer.weight.detach() for layer in layers), comm, **options)

    # -- weights in Hugging Face's names and layout ------------------------------------------------

    def shard(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a Hugging Face weight or of its gradient; a view."""
        at = self.comm.grid.shard(self.intermediate, "tp", self.comm.rank, "I")
        return whole[:, at] if name == NAMES[2] else whole[at]

    def local(self) -> dict[str, Tensor]:
        """Hugging Face name -> this rank's weight, a view of the parameter."""
        return dict(zip(NAMES, (*self.gate_up.detach().chunk(2), self.down.detach())))

    def gradients(self) -> dict[str, Tensor | None]:
        """Hugging Face name -> this rank's gradient, a view of the parameter's, or None."""
        packed = self.gate_up.grad
        return dict(zip(NAMES, (*((None, None) if packed is None else packed.chunk(2)),
                                self.down.grad)))  # fmt: skip

    def whole(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every rank's local() or gradients() put together over TP, on every rank."""
        dims = dict(zip(NAMES, (0, 0, 1)))
        return {n: self.comm.all_gather(x, n, dim=dims[n]) for n, x in local.items()}

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        parts = (*self.gate_up.chunk(2), self.down)
        for name, part in zip(NAMES, parts):
            destination[prefix + name] = part if keep_vars else part.detach()

    def _load_from_state_dict(
        self, state_dict, prefix, metadata, strict, missing, unexpected, errors
    ) -> None:
        """Takes whole weights, of which this rank keeps its share, and shares."""
        for name, mine in self.local().items():
            given = state_dict.get(prefix + name)
            if given is None:
                missing.append(prefix + name)
                continue
            dim = int(name == NAMES[2])
            whole = given.ndim == 2 and given.shape[dim] == self.intermediate
            part = (self.shard(name, given) if whole else given).detach()
            if part.shape != mine.shape:
                errors.append(f"{prefix + name} is {list(given.shape)}: {self} needs "
                              f"{list(mine.shape)}, or the whole weight")  # fmt: skip
            else:
                mine.copy_(part)
        known = {prefix + name for name in NAMES}
        unexpected += [k for k in state_dict if k.startswith(prefix) and k not in known]

    def extra_repr(self) -> str:
        split = ", sequence parallel" if self.sequence_parallel else ""
        return (
            f"H={self.hidden}, I={self.intermediate} over {self.comm.grid}{split}, "
            f"{self.contract.name}, dx={self.dx}, dw={self.dw}"
        )

    # -- forward -----------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H], [B, S, H] or [S, B, H], BF16: this rank's tokens -> the same shape."""
        if x.dtype != BF16:
            raise TypeError(f"x is {x.dtype}: expected torch.bfloat16; cast it first")
        if x.ndim not in (2, 3) or x.shape[-1] != self.hidden:
            raise ValueError(
                f"x has shape {tuple(x.shape)}: expected [tokens, H] or three axes, "
                f"with H={self.hidden} as the last one"
            )
        swapped = x.ndim == 3 and self.batch_first
        given = x.transpose(0, 1) if swapped else x  # [S, B, H]
        tokens = given.reshape(-1, self.hidden)
        trained = any(t.requires_grad for t in (x, self.gate_up, self.down))
        if torch.is_grad_enabled() and trained:
            y = _Function.apply(tokens, self.gate_up, self.down, self)
        else:
            y = self._forward(tokens, self.gate_up, self.down, save=False)[0]
        y = y.view(given.shape)
        return y.transpose(0, 1) if swapped else y

    def dw_route(self, tokens: int) -> str:
        """`local`, `reduce` or `gather`: how dW comes about for that many tokens a lane."""
        return backward.dw_route(self, tokens)

    def _forward(self, x: Tensor, gate_up: Tensor, down: Tensor, save: bool):
        """-> y of this rank's tokens, then what backward needs: x of all of TP, gate, up."""
        x = self.entered(x, "gate_up.gather")
        hidden, gate, up = select.gate_up(x, *gate_up.chunk(2), save=save)
        y = self.root(hidden, down.t(), self.contract.weight, self.tp)
        return self.left(y, "down.forward"), x, gate, up

    def root(self, a: Tensor, b: Tensor, tree: ReductionTree, parts: int) -> Tensor:
        """a @ b as one of `parts` shards of its reduction -> the root of this rank's subtree.

        Kept as the tree keeps its joints; one part is everything, rounded to BF16.
        """
        dtype = BF16 if parts == 1 else tree.dtype
        out = torch.empty(a.shape[0], b.shape[1], dtype=dtype, device=a.device)
        return self.product(a, b, out, tree.subtree(parts))

    def product(self, a: Tensor, b: Tensor, out: Tensor, tree: ReductionTree) -> Tensor:
        """out = a @ b under `tree`: all that this rank adds up by itself, gate and up apart."""
        select.gemm(a, b, out, tree)
        return out

    def entered(self, x: Tensor, site: str) -> Tensor:
        """The tokens of all of TP, of which sequence parallel leaves a rank its share."""
        split = self.sequence_parallel and self.tp > 1
        return self.comm.all_gather(x, site) if split else x

    def left(self, root: Tensor, site: str, out: Tensor | None = None) -> Tensor:
        """The sum of the ranks' roots over TP in BF16, of this rank's tokens."""
        if self.tp > 1:
            collective = self.comm.all_reduce
            if self.sequence_parallel:
                collective = self.comm.reduce_scatter
            root = collective(root, site)
        return root.to(BF16) if out is None else out.copy_(root)


class _Function(torch.autograd.Function):
    """Keeps x, gate and up; the hidden activations are computed again in backward."""

    @staticmethod
    def forward(ctx, x, gate_up, down, layer):
        y, *kept = layer._forward(x, gate_up, down, save=True)
        ctx.save_for_backward(*kept, gate_up, down)
        ctx.layer = layer
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        saved = backward.Saved(*ctx.saved_tensors)
        return *backward.gradients(ctx.layer, dy, saved, ctx.needs_input_grad[:3]), None


def layer_contract(contract: Contract) -> LayerContract:
    """A name or one tree stands for both axes."""
    if isinstance(contract, LayerContract):
        return contract
    if isinstance(contract, str):
        return LayerContract.parse(contract)
    return LayerContract(contract, contract)


def _check_weights(gate: Tensor, up: Tensor, down: Tensor) -> None:
    for name, weight in zip(NAMES, (gate, up, down)):
        if weight.dtype != BF16:
            raise TypeError(f"{name} is {weight.dtype}: expected torch.bfloat16; cast it first")
    if gate.ndim != 2 or up.shape != gate.shape or down.shape != gate.shape[::-1]:
        shapes = ", ".join(str(list(weight.shape)) for weight in (gate, up, down))
        raise ValueError(f"gate, up and down are {shapes}: expected [I, H], [I, H] and [H, I]")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not possible: expected one of {', '.join(choices)}")
