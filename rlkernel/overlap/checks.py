"""The supplied checker's semantics, and a check of the whole batch beside it under another name.

The supplied one looks at min(B, 2) rows: forward by torch.equal in either mode, backward bitwise or
by the Frobenius error of each gradient. What it does not see, the rest of the batch, `whole_batch`
does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlkernel.compare import ulp_distance

CHECKED = ("with-sm", "sm-free", "kernel")
MODES = ("off", "bitwise", "approx")
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
CLAMP = 1e-12
SEED_OFFSET = 7
SLICE = 2
Block = Callable[..., Tensor]


def applies(mode: str, overlap: str, comp_only: bool = False, large_block: bool = False) -> bool:
    """When the supplied checker runs at all."""
    return mode != "off" and overlap in CHECKED and not comp_only and not large_block


def check_forward(block: Block, inputs: Tensor, overlap: str) -> dict:
    """The first min(B, 2) rows against `none`. Raises AssertionError with the maximum absolute
    error and the number of elements that differ, by torch.equal in every mode.
    """
    return _equal_forward(block, inputs[:SLICE], overlap, "forward")


def check_backward(
    block: torch.nn.Module, inputs: Tensor, overlap: str, mode: str, seed: int
) -> dict[str, dict]:
    """Gradients of the input and of all parameters on min(B, 2) rows, upstream from `seed` + 7.

    Returns {gradient: diagnostics}. Raises AssertionError where the two paths give other keys, or a
    gradient fails torch.equal (bitwise) or its Frobenius limit (approx).
    """
    rows = inputs[:SLICE]
    random = torch.Generator(inputs.device).manual_seed(seed + SEED_OFFSET)
    upstream = torch.randn(rows.shape, generator=random, device=inputs.device).to(rows.dtype)
    return _compare_gradients(block, rows, upstream, overlap, mode)


def whole_batch(block: Block, inputs: Tensor, overlap: str) -> dict:
    """Not the supplied check: every row of the forward, by torch.equal."""
    return _equal_forward(block, inputs, overlap, "whole batch, forward")


def whole_batch_backward(
    block: torch.nn.Module, inputs: Tensor, overlap: str, upstream: Tensor, mode: str
) -> dict[str, dict]:
    """Not the supplied check: every row backward, from the upstream gradient that is timed."""
    return _compare_gradients(block, inputs, upstream, overlap, mode)


def check_shape(out: Tensor, inputs: Tensor) -> None:
    """The complete timed output is checked for its shape only."""
    assert out.shape == inputs.shape, f"output {tuple(out.shape)}, inputs {tuple(inputs.shape)}"


def gradients(
    block: torch.nn.Module, inputs: Tensor, upstream: Tensor, overlap: str
) -> dict[str, Tensor]:
    """name -> gradient of every active parameter, and of "input"."""
    leaf = inputs.detach().clone().requires_grad_()
    named = {"input": leaf, **{n: p for n, p in block.named_parameters() if p.requires_grad}}
    out = block(leaf, overlap)
    found = torch.autograd.grad(out, list(named.values()), upstream, allow_unused=True)
    return {name: grad for name, grad in zip(named, found, strict=True) if grad is not None}


def frobenius(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / max(|wanted|, 1e-12), in FP64."""
    gap = (got.double() - wanted.double()).norm()
    return float(gap / wanted.double().norm().clamp(min=CLAMP))


def diagnostics(got: Tensor, wanted: Tensor) -> dict:
    """Shown, never judged: maximum absolute error, p99 and maximum ULP, elements that differ."""
    if torch.equal(got, wanted):
        same = {"max_abs": 0.0, "p99_ulp": 0, "max_ulp": 0}
        return {"mismatches": 0, "elements": got.numel(), **same}
    apart = torch.isfinite(got) & torch.isfinite(wanted)
    steps = ulp_distance(got[apart], wanted[apart]).sort().values
    return {
        "mismatches": int((got != wanted).sum()),
        "elements": got.numel(),
        "max_abs": float((got.double() - wanted.double()).abs().max()),
        "p99_ulp": int(steps[max(0, -(-99 * len(steps) // 100) - 1)]) if len(steps) else None,
        "max_ulp": int(steps[-1]) if len(steps) else None,
    }


def _equal_forward(block: Block, rows: Tensor, overlap: str, what: str) -> dict:
    with torch.no_grad():
        wanted, got = block(rows, "none"), block(rows, overlap)
    found = diagnostics(got, wanted)
    if not torch.equal(got, wanted):
        raise AssertionError(
            f"{what}: {overlap} differs from none: max abs error {found['max_abs']:.6g}, "
            f"{found['mismatches']} / {found['elements']} elements mismatch"
        )
    return found


def _compare_gradients(block, rows: Tensor, upstream: Tensor, overlap: str, mode: str) -> dict:
    wanted = gradients(block, rows, upstream, "none")
    got = gradients(block, rows, upstream, overlap)
    return judge_gradients(got, wanted, overlap, mode)


def judge_gradients(
    got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], overlap: str, mode: str
) -> dict[str, dict]:
    """{name: diagnostics with "frobenius"}; AssertionError as check_backward says."""
    if got.keys() != wanted.keys():
        apart = sorted(got.keys() ^ wanted.keys())
        raise AssertionError(f"backward: {overlap} and none have other gradients: {apart}")
    report = {}
    for name in wanted:
        a, b = got[name], wanted[name]
        report[name] = {**diagnostics(a, b), "frobenius": frobenius(a, b)}
        limit = LIMITS[b.dtype]
        held = torch.equal(a, b) if mode == "bitwise" else report[name]["frobenius"] <= limit
        if not held:
            rule = "torch.equal" if mode == "bitwise" else f"Frobenius limit {limit:g}"
            raise AssertionError(
                f"backward: gradient of {name} under {overlap} fails {rule}: relative error "
                f"{report[name]['frobenius']:.6g}, max abs error {report[name]['max_abs']:.6g}, "
                f"{report[name]['mismatches']} / {report[name]['elements']} elements mismatch"
            )
    return report
