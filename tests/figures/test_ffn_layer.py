"""Exactness, hashes and the official layer's bits on made-up rows."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex

from rlkernel.figures import contracts, ffn_layer, style
from tests.figures import layers, looks, products

PLOTS = {
    "exact": (ffn_layer.EXACT, [layers.layer(), layers.layer("tp4", wrong=[("tree8.bf16", "dX")])]),
    "same bits": (ffn_layer.SAME_BITS, [products.ffn(1), layers.train(1), layers.train(512)]),
}


@pytest.mark.parametrize("name", PLOTS)
def test_drawn_deterministic_and_told(name):
    looks.drawn_and_told(*PLOTS[name])


def cells(axes, gid: str) -> list:
    return [patch for patch in axes.patches if patch.get_gid() == gid]


def test_a_result_that_differs_is_red_in_its_place():
    rows = [layers.layer(), layers.layer("tp4", wrong=[("tree8.fp32", "dW up")], fault="leaves16")]
    (axes,) = ffn_layer.exact(rows).axes
    (bad,) = cells(axes, "differs")
    column = layers.RESULTS.index("dW up")
    assert (bad.get_x(), bad.get_y()) == pytest.approx((column - 0.48, 1 - 0.44))
    assert to_hex(bad.get_facecolor()) == style.FAIL and bad.get_linewidth() > 1
    assert len(cells(axes, "agrees")) == 2 * len(layers.RESULTS) - 1
    assert "6 / 20M" in looks.words(axes) and looks.words(axes).count("0 / 20M") == 15
    said = ffn_layer.exact_alt(rows)
    assert "tp2, M = 32: 0 / 160,000,000;" in said
    assert "tp4, M = 32, leaves16: 6 / 160,000,000 (dW up)." in said


def test_every_variant_has_a_line_with_transport_steps_and_hash():
    header, body = ffn_layer.exact_table([layers.layer(wrong=[("tree8.fp32", "dX")])])
    told = [dict(zip(header, line)) for line in body]
    assert [(li["contract"], li["dX"]) for li in told] == [
        (c, dx) for c in ("tree8.bf16", "tree8.fp32") for dx in ("separate", "packed")
    ]
    assert [li["elements that differ"].split(" / ")[0] for li in told] == ["0", "0", "3", "3"]
    assert {li["transport"] for li in told} == {"process-group/nccl"}
    assert {li["steps"] for li in told} == {"100"} and told[2]["hash of all results"][-1] == "2"


def test_a_contract_is_a_row_of_its_own_for_a_menu():
    rows = [layers.layer(wrong=[("tree8.fp32", "dX")]), products.census()]
    one, other = ffn_layer.by_contract(rows)
    assert [r["case"]["parameters"]["contracts"] for r in (one, other)] == [
        "tree8.bf16", "tree8.fp32"
    ]  # fmt: skip
    assert one["passed"] and not other["passed"] and not rows[0]["passed"]
    assert len(one["result"]["lines"]) == 2 * len(layers.RESULTS)
    assert list(one["result"]["digest"]) == [
        "tree8.bf16 dx separate dw local", "tree8.bf16 dx packed dw local"
    ]  # fmt: skip
    assert len(ffn_layer.exact_table([other])[1]) == 2


def test_hashes_of_processes_that_differ_are_counted():
    header, body = ffn_layer.hashes([layers.hashed(), layers.hashed(1)])
    assert [line[-1] for line in body] == ["0 / 2", "1 / 2"] and header[-1].endswith("differ")
    assert body[0][:4] == ["11", "chain", "packed", "0123456789abcdef"]


def test_where_the_chain_is_the_official_layer_is_a_zero():
    rows = [products.ffn(1), layers.train(1), layers.train(512, same=("dX", "gate dW"))]
    (axes,) = ffn_layer.same_bits(rows).axes
    assert [t.get_text() for t in axes.get_yticklabels()] == ["forward", *layers.STEP]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["M = 1", "M = 512"]
    places = {(p.get_x() + 0.48, p.get_y() + 0.44) for p in cells(axes, "agrees")}
    assert places == {(1, 2), (1, 3)}, "dX and gate dW, at M = 512"
    assert "dX: all bits at M = 512 of 2" in ffn_layer.same_bits_alt(rows)
    assert "up dW: all bits at M = none of 2" in ffn_layer.same_bits_alt(rows)
    _, body = ffn_layer.same_bits_table(rows)
    assert ["chain", "dX", "512", f"0 / {4096 * 512:,}", "0.000%"] in body


def test_nothing_compared_is_a_box_with_the_command():
    said = " ".join(looks.words(ffn_layer.same_bits(products.cpu()[:2]).axes[0]))
    assert "NOT MEASURED here" in said and ffn_layer.DIFFER in said
    assert ffn_layer.DIFFER in ffn_layer.same_bits_alt([])
    assert ffn_layer.DIFFER in ffn_layer.same_bits_table([])[1][0][0]
    assert ffn_layer.DIFFER.startswith(contracts.COMMAND)


def test_large_counts_are_short():
    assert [ffn_layer.short(n) for n in (0, 9_999_999, 10_000_000, 603_979_776)] == [
        "0", "9,999,999", "10M", "604M"
    ]  # fmt: skip
