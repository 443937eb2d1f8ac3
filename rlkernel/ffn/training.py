"""What a training step of the layer costs and how far it drifts: forward, dX and all three dW.

The step is judged against FP32 autograd on the same BF16 numbers, and timed beside the official
layer's own step, interleaved in one process. How often each result has the official layer's bits is
counted, never judged: its library chooses an order of additions by shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from rlkernel import compare
from rlkernel.ffn.measure import add_times, check, layer_inputs, timed
from rlkernel.ffn.memory import peak
from rlkernel.ffn.module import DeterministicFFN
from rlkernel.ffn.opponents import PLAIN, opponents

OPERATORS = ("training output", "dX", "gate dW", "up dW", "down dW")
OUTPUT, GRADIENT = (5e-2, 2e-2), (1e-1, 2e-2)  # absolute and relative tolerance of an element


def train_row(case, device: torch.device) -> dict:
    """One step on M tokens under every contract: repeat, drift, tolerance and, on a GPU, time.

    The upstream gradient has standard deviation 1/sqrt(M), so that dW is of order one.
    """
    at = case.parameters
    x, *weights = layer_inputs(case, device)
    random = torch.Generator(device).manual_seed(case.seed + 1)
    dy = torch.randn(x.shape, generator=random, device=device).mul(at["m"] ** -0.5).bfloat16()
    exact = _step_in_fp32(x, dy, *weights)
    rivals, said = opponents(tuple(weights), lambda layer: step_of(layer, x, dy)())
    theirs = {name: step_of(layer, x, dy) for name, layer in rivals.items()}
    official = _named(theirs[PLAIN]()) if theirs else {}
    lines, checks, work = [], [], {}
    contracts = at["contracts"].split("+")
    for contract in contracts:
        layer = DeterministicFFN(*weights, contract=contract)
        step = work[contract] = step_of(layer, x, dy)
        first, again = _named(step()), _named(step())
        for operator in OPERATORS:
            line = _judged(operator, first[operator], again[operator], exact[operator], at["m"])
            line |= {"contract": contract, "schedule": "one rank"}
            if official:
                report = compare.bit_report(first[operator], official[operator])
                line["differ_from_official"] = report.mismatches
            name = f"{operator} {contract}"
            count = f"{line['mismatches']} / {line['elements']} elements"
            checks.append(check(f"{name}: repeats", not line["mismatches"], count, "0"))
            count = f"{line['outside']} / {line['elements']} outside"
            checks.append(check(f"{name}: FP32 within tolerance", not line["outside"], count, "0"))
            lines.append(line)
    whole = {"operator": "step", "m": at["m"], "schedule": "one rank", "first": ""}
    steps = [whole | {"contract": name, "mismatches": 0, "elements": 0} for name in contracts]
    held = 2 * sum(weight.numel() for weight in weights)
    memory = {name: peak(call, held, device) for name, call in (work | theirs).items()}
    samples = timed(case, device, work | theirs)
    flops = 18 * at["m"] * at["hidden"] * at["intermediate"]
    moved = 3 * held + 10 * x.numel()  # weights twice, dW once; x and dy, y and dX, x again for dW
    add_times(steps, samples, tuple(theirs), flops, moved)
    return {
        "passed": all(held for _, held, _, _ in checks),
        "checks": checks,
        "lines": steps + lines,
        "samples": samples,
        "official": said[PLAIN],
        "opponents": said,
        "peak_bytes": memory,
        "ceilings": _ceilings() if samples else None,
        "mismatches": sum(line["mismatches"] for line in lines),
        "elements": sum(line["elements"] for line in lines),
    }


def _ceilings() -> dict[str, float]:
    """What the floors were made with, for the record."""
    from rlkernel.run.timing import ceilings

    return dict(ceilings())


def step_of(layer: torch.nn.Module, x: Tensor, dy: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """-> a call that makes (output, dX, gradients of the parameters in their order)."""
    x = x.detach().requires_grad_()
    wanted = [x, *layer.parameters()]

    def step() -> tuple[Tensor, ...]:
        y = layer(x)
        return y.detach(), *torch.autograd.grad(y, wanted, dy)

    return step


def _named(results: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Our layer has gate and up in one parameter, the official one has them apart."""
    y, dx, *grads = results
    if len(grads) == 2:
        grads = [*grads[0].chunk(2), grads[1]]
    return dict(zip(OPERATORS, (y, dx, *grads)))


def _step_in_fp32(x: Tensor, dy: Tensor, *weights: Tensor) -> dict[str, Tensor]:
    """The same step by autograd in FP32; nothing is rounded to BF16 on the way."""
    leaves = [tensor.float().requires_grad_() for tensor in (x, *weights)]
    x32, gate, up, down = leaves
    y = F.linear(F.silu(F.linear(x32, gate)) * F.linear(x32, up), down)
    return dict(zip(OPERATORS, (y.detach(), *torch.autograd.grad(y, leaves, dy.float()))))


def _judged(operator: str, value: Tensor, again: Tensor, exact: Tensor, m: int) -> dict:
    """Bits against the repeat, drift of about a million elements, elements outside of tolerance."""
    report = compare.bit_report(value, again)
    absolute, relative = OUTPUT if operator == "training output" else GRADIENT
    scale = m**0.5 if operator == "dX" else 1.0  # its upstream gradient is that much smaller
    outside = (value.float() - exact).abs() * scale > absolute + relative * exact.abs() * scale
    few = max(1, (1 << 20) // value.shape[1])
    return {
        "operator": operator,
        "mismatches": report.mismatches,
        "elements": report.elements,
        "first": "" if report else str(report),
        "outside": int(outside.sum()) + int(value.isnan().sum()),
        "drift": compare.drift(value[:few], exact[:few]).to_dict(),
    }
