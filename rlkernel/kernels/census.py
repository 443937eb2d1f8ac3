"""Do all schedules, tiles and operand orders of a contract give the same bits, on this device?

Every legal choice runs on data that would show another order of additions, and is compared with the
oracle, bit for bit: leaf products of the vendor's library (on the CPU: contract.leaf) folded in
plain torch. What differs is refused from there on, by name.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlkernel import compare
from rlkernel.contract import ReductionTree
from rlkernel.kernels import reference, select

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
FAMILIES = {
    "normal": "normal numbers, the second operand scaled by 1/sqrt(K)",
    "cancellation": "large terms that cancel in pairs over K and leave small ones",
    "subnormal": "products below the smallest normal FP32 number",
    "residual": "one term of 75,000 (a BF16 step is 512 there) beside small ones",
    "integers": "small integers, every partial sum exact in FP32",
    "signed zeros": "+0 and -0 in both operands, and a few ones",
}


def operands(
    family: str, m: int, k: int, n: int, *, seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """(a[m, k], b[k, n]) in BF16, row-major, the same for a seed on every device."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    a, b = normal(m, k), normal(k, n) * k**-0.5
    if family == "cancellation":
        half = k // 2
        order = torch.randperm(k, generator=random)
        a[:, half : 2 * half] = a[:, :half]
        b[:half] *= 2.0 ** torch.randint(0, 12, (half, 1), generator=random)
        b[half : 2 * half] = -b[:half]
        a, b = a[:, order] * (1 + 2.0**-7 * normal(m, k).sign()), b[order]
    elif family == "subnormal":
        a, b = a * 2.0**-70, b * 2.0**-66
    elif family == "residual":
        at = int(torch.randint(0, k, (), generator=random))
        a[:, at], b[at] = 1.0, 75_000.0
    elif family == "integers":
        a = torch.randint(-8, 9, (m, k), generator=random).float()
        b = torch.randint(-8, 9, (k, n), generator=random).float()
    elif family == "signed zeros":
        a, b = (x.sign() * (x.abs() > 2.0) for x in (normal(m, k), normal(k, n)))
        a, b = a.copysign(normal(m, k)), b.copysign(normal(k, n))
    elif family != "normal":
        raise ValueError(f"unknown family {family!r}: expected one of {', '.join(FAMILIES)}")
    return a.bfloat16().to(device), b.bfloat16().to(device)


def layouts(a: Tensor, b: Tensor, every: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The same values in the order of memory of the forward; with `every` in all four that training
    needs, and misaligned.
    """
    ta, tb = a.t().contiguous().t(), b.t().contiguous().t()
    yield "a[M,K] w[N,K]", a, tb  # forward: a Hugging Face weight as it is
    if not every:
        return
    yield "a[M,K] b[K,N]", a, b  # gradient of the input
    yield "a[K,M] b[K,N]", ta, b  # gradient of a weight
    yield "a[K,M] w[N,K]", ta, tb
    shifted = torch.empty(a.numel() + 1, dtype=a.dtype, device=a.device)[1:].view(a.shape)
    yield "a misaligned", shifted.copy_(a), tb


def compare_choices(
    a: Tensor,
    b: Tensor,
    tree: ReductionTree,
    *,
    run_as: ReductionTree | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> list[dict]:
    """Every legal choice on these operands against the oracle of `tree`.

    run_as: what the kernels are told instead, to see a wrong order of additions found out.

    -> rows {"schedule", "config", "mismatches", "elements", "first"}; outputs are poisoned first.
    """
    expected = reference.gemm(a, b, tree, out_dtype)
    rows = []
    template = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    told = run_as or tree
    for choice in select.choices(a, b, template, told):
        out = torch.full_like(template, float("nan"))
        select.gemm(a, b, out, told, choice)
        report = compare.bit_report(out, expected)
        rows.append(
            {
                "schedule": choice.schedule,
                "config": str(choice.config or ""),
                "mismatches": report.mismatches,
                "elements": report.elements,
                "first": str(report) if not report else "",
            }
        )
    return rows


def census(
    m: int,
    k: int,
    n: int,
    tree: ReductionTree,
    *,
    seed: int,
    device: torch.device,
    run_as: ReductionTree | None = None,
) -> list[dict]:
    """All families, layouts and choices of one shape; refuses what differs.

    Where joints keep FP32, so do the outputs: rounded to BF16 they would hide most of the order.
    On a GPU the BF16 outputs are compared as well, because other kernels write those.

    -> rows of compare_choices with "family", "layout" and "out".
    """
    rows = []
    outs = [torch.float32 if tree.round_to == "fp32" else torch.bfloat16]
    if device.type != "cpu" and torch.bfloat16 not in outs:
        outs.append(torch.bfloat16)
    for family in FAMILIES:
        a, b = operands(family, m, k, n, seed=seed, device=device)
        # Interpreted kernels take their time, and a layout is a matter of addresses, not of values.
        every = family == "normal" or device.type != "cpu"
        for layout, left, right in layouts(a, b, every):
            for out in outs:
                found = compare_choices(left, right, tree, run_as=run_as, out_dtype=out)
                where = {"family": family, "layout": layout, "out": DTYPE_NAMES[out]}
                rows += [where | row for row in found]
    for row in rows:
        if row["mismatches"] and run_as in (None, tree):
            where = f"{row['family']} data, {row['layout']}, {row['config']}"
            select.refuse(row["schedule"], tree.name, f"{where}: {row['first']}")
    return rows


def gate_up_census(
    m: int, hidden: int, intermediate: int, *, seed: int, device: torch.device
) -> list[dict]:
    """Every legal schedule of the fused projections on all families, with its factors and without.

    The oracle is two chains of the library and torch's own SwiGLU. Refuses what differs.

    -> rows {"family", "layout", "schedule", "config", "mismatches", "elements", "first"}; layout
    says whether both weights lie in one tensor, and outputs are poisoned first.
    """
    rows = []
    for family in FAMILIES:
        x, both = operands(family, m, hidden, 2 * intermediate, seed=seed, device=device)
        packed = both.t().contiguous()
        w_gate, w_up = (half.clone() for half in packed.chunk(2))
        gate, up, product = reference.gate_up(x, w_gate, w_up)
        for layout, weights, wanted in (
            ("packed, factors kept", packed.chunk(2), (product, gate, up)),
            ("two weights", (w_gate, w_up), (product,)),
        ):
            for choice in select.gate_up_choices(x, *weights):
                outs = [torch.full_like(right, float("nan")) for right in wanted]
                select.prepared_gate_up(choice, x, *weights, *outs)(x, *weights, *outs)
                reports = [compare.bit_report(*pair) for pair in zip(outs, wanted)]
                wrong = next((str(report) for report in reports if not report), "")
                rows.append(
                    {
                        "family": family,
                        "layout": layout,
                        "schedule": choice.schedule,
                        "config": "" if choice.config is None else str(choice.config),
                        "mismatches": sum(report.mismatches for report in reports),
                        "elements": sum(report.elements for report in reports),
                        "first": wrong,
                    }
                )
                if wrong:
                    select.refuse(choice.schedule, "gate_up", f"{family} data, {layout}: {wrong}")
    return rows
