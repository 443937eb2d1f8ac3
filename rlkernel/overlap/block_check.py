"""The complete block of a lone rank and its gradients, against FP64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlkernel.collectives.comm import Comm
from rlkernel.overlap.checks import frobenius
from rlkernel.overlap.layer import A2AFFN, RankMixer, closed, exact, mixed, with_ep

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def row(case, comm: Comm, limit: float) -> dict:
    """Output and every gradient within `limit` (Frobenius) of FP64 autograd."""
    at, dtype = case.parameters, DTYPES[case.dtype]
    layer = A2AFFN(at["dim"], at["tokens"], at["k"], with_ep(comm), dtype=dtype, seed=case.seed)
    block = RankMixer(layer, at["tokens"], at["dim"])
    random = torch.Generator(comm.device).manual_seed(case.seed)
    shape = (at["batch_size"], at["tokens"], at["dim"])
    x, dy = (torch.randn(shape, generator=random, device=comm.device).to(dtype) for _ in range(2))
    got, wanted = signals(block, x, dy, block), signals(block, x, dy, lambda x: oracle(block, x))
    checks = []
    for name, right in wanted.items():
        error = frobenius(got[name], right)
        checks.append([name, error <= limit, f"{error:.2e}", f"{limit:g}"])
    return {"passed": all(held for _, held, _, _ in checks), "checks": checks}


def signals(
    block: RankMixer, x: Tensor, dy: Tensor, forward: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """{"output", "gradient of input", "gradient of <parameter>"}."""
    leaf = x.detach().clone().requires_grad_()
    named = {"input": leaf, **dict(block.named_parameters())}
    out = forward(leaf)
    grads = torch.autograd.grad(out, list(named.values()), dy.to(out.dtype))
    return {"output": out.detach()} | {f"gradient of {n}": g for n, g in zip(named, grads)}


def oracle(block: RankMixer, x: Tensor) -> Tensor:
    """The block in FP64 by plain operators. x [B, T, D] of a lone rank."""
    mix, out = (
        [p.double() for p in norm.parameters()] for norm in (block.norm_mix, block.norm_out)
    )
    s = mixed(x.double(), *mix)
    return closed(exact(block.ffn, s), s, *out)
