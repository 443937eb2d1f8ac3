"""What the tests of the A2A-FFN share: layers with every parameter random, and all gradients."""

from __future__ import annotations

import torch

from rlkernel.overlap.layer import A2AFFN


def layer(tokens, dim, k, comm=None, seed=5, **options) -> A2AFFN:
    """Norm weights and biases are random too: ones and zeros would hide what is wrong."""
    options.setdefault("dtype", torch.float32)
    made = A2AFFN(dim, tokens, k, comm, seed=seed, **options)
    random = torch.Generator().manual_seed(seed)
    for norm in (made.norm_x, made.norm_gate):
        for value in (norm.weight, norm.bias):
            value.data = torch.randn(value.shape, generator=random).to(value.dtype)
    return made


def drawn(rank, *shape, dtype=torch.float32, seed=0) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=random).to(dtype)


def trained(forward, module, x, dy) -> dict[str, torch.Tensor]:
    """{"output", "input", parameter names}: output and gradients of forward(x)."""
    leaf = x.detach().clone().requires_grad_()
    named = {"input": leaf, **dict(module.named_parameters())}
    out = forward(leaf)
    grads = torch.autograd.grad(out, list(named.values()), dy)
    return {"output": out.detach(), **dict(zip(named, grads, strict=True))}


def differing(got, wanted) -> list[str]:
    assert got.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(got[name], wanted[name])]


def far(got, wanted, limit) -> dict[str, float]:
    """Names whose Frobenius error is not within the limit."""
    errors = {
        name: float((got[name].detach().double() - right.double()).norm() / right.double().norm())
        for name, right in ((name, value.detach()) for name, value in wanted.items())
    }
    return {name: error for name, error in errors.items() if not error <= limit}
