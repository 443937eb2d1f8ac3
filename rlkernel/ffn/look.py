"""One small product looked at by hand, on the CPU: what a notebook's widgets show.

It computes with the contract itself (contract.py), so it needs neither a kernel nor a GPU.
"""

from __future__ import annotations

import torch

from rlkernel import compare
from rlkernel.contract import ReductionTree

CONTRACTS = ("tree8.bf16", "tree8.fp32", "tree2.bf16", "chain")
BATCHES = (1, 2, 8, 17, 33, 64)  # sizes that a row is put into, up to the one that is asked for


def bits(m: int, contract: str, seed: int = 11, k: int = 512, n: int = 64) -> list[dict]:
    """[one row] of a product a[m, k] @ b[k, n] in BF16 under `contract`.

    "batches": for each size up to m, how many elements of the first row differ in their bits from
    the row computed alone, under the contract ("ours") and by torch.mm in FP32 ("library").
    "others": every other contract -> elements by ULP from this one. ValueError for a name that is
    no contract, for m < 1 and for a k that the leaves do not divide.
    """
    if m < 1:
        raise ValueError(f"m={m} is not possible: a batch has at least 1 row")
    tree = ReductionTree.parse(contract)
    for one in (tree, *map(ReductionTree.parse, CONTRACTS)):
        one.check_axis("k", k, 1, kind="weight")
    random = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=random).bfloat16()
    b = (torch.randn(k, n, generator=random) * k**-0.5).bfloat16()
    whole, alone = _product(a, b, tree), _product(a[:1], b, tree)
    library = a[:1].float() @ b.float()
    batches = []
    for size in sorted({s for s in BATCHES if s < m} | {m}):
        ours = compare.bit_report(_product(a[:size], b, tree)[:1], alone)
        theirs = compare.bit_report((a[:size].float() @ b.float())[:1], library)
        batches.append(
            {"m": size, "ours": ours.mismatches, "library": theirs.mismatches, "elements": n}
        )
    others = {
        name: compare.ulp_histogram(_product(a, b, ReductionTree.parse(name)), whole)
        for name in CONTRACTS
        if name != tree.name
    }
    case = {"experiment": "look", "seed": seed, "parameters": {"m": m, "contract": tree.name}}
    held = not sum(line["ours"] for line in batches)
    return [{"case": case, "passed": held, "result": {"batches": batches, "others": others}}]


def _product(a: torch.Tensor, b: torch.Tensor, tree: ReductionTree) -> torch.Tensor:
    return tree.matmul(a, b, torch.bfloat16)
