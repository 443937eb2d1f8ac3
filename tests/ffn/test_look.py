"""The product that a notebook computes by hand: its bits are the contract's, its counts add up."""

from __future__ import annotations

import pytest

from rlkernel.contract import ReductionTree
from rlkernel.ffn import look


@pytest.mark.parametrize("contract", look.CONTRACTS)
def test_a_row_keeps_its_bits_and_every_element_is_counted(contract):
    (row,) = look.bits(17, contract)
    batches, others = row["result"]["batches"], row["result"]["others"]
    assert [line["m"] for line in batches] == [1, 2, 8, 17]
    assert row["passed"] and {line["ours"] for line in batches} == {0}
    assert set(others) == set(look.CONTRACTS) - {contract}
    assert all(sum(counts.values()) == 17 * 64 for counts in others.values())
    apart = {name for name, counts in others.items() if counts["0"] < 17 * 64}
    # FP32 joints and no joints differ in FP32 bits, which one rounding to BF16 may hide.
    assert apart >= set(others) - {"tree8.fp32", "chain"}


def test_a_product_that_depends_on_its_batch_is_found_out(monkeypatch):
    right = look._product

    def moved(a, b, tree):
        out = right(a, b, tree)
        out[0, :3] += float(len(a) > 2)
        return out

    monkeypatch.setattr(look, "_product", moved)
    (row,) = look.bits(8, "chain")
    assert [line["ours"] for line in row["result"]["batches"]] == [0, 0, 3] and not row["passed"]


def test_the_seed_counts_and_nothing_else():
    once, again, other = (look.bits(2, "tree8.bf16", seed=s)[0]["result"] for s in (1, 1, 2))
    assert once == again != other


@pytest.mark.parametrize(
    ("given", "words"),
    [((0, "chain"), "m=0"), ((1, "tree"), "unknown contract"), ((1, "chain", 11, 12), "k=12")],
)
def test_what_cannot_be_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        look.bits(*given)


def test_every_name_is_a_contract():
    assert [ReductionTree.parse(name).name for name in look.CONTRACTS] == list(look.CONTRACTS)
