"""The figures of the deterministic kernels on made-up rows of a GPU and of a CPU."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex

from rlkernel.figures import bits, contracts, cost, det_ffn, fp64, style, tree
from tests.figures import looks, products

PLOTS = {
    "contract": (det_ffn.CONTRACT, [products.census()]),
    "census": (det_ffn.CENSUS, [products.census()]),
    "batches": (det_ffn.BATCHES, [products.census()]),
    "drift": (det_ffn.DRIFT, [products.gemm(17, timed=False), products.ffn(17, timed=False)]),
    "cost": (det_ffn.COST, [products.ffn(m) for m in (1, 64, 4096)]),
    "gemm": (det_ffn.GEMM_COST, [products.gemm(m) for m in (1, 64, 4096)]),
    "bits": (det_ffn.BITS, products.look()),
}


@pytest.mark.parametrize("name", PLOTS)
def test_drawn_deterministic_and_told(name):
    looks.drawn_and_told(*PLOTS[name])


def patches(axes, gid: str) -> list:
    return [patch for patch in axes.patches if patch.get_gid() == gid]


# ---- contract ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_owns_an_exact_subtree(ranks):
    """15 nodes over eight leaves: P - 1 of them are the collective's, the rest lie in a rank."""
    axes = tree.contract([]).axes[4 + (1, 2, 4).index(ranks)]
    nodes = [line for line in axes.lines if line.get_gid()]
    added = [line for line in nodes if line.get_gid() == "sum"]
    assert (len(nodes), len(added)) == (15, ranks - 1)
    slices = patches(axes, "slice")
    assert len({patch.get_facecolor() for patch in slices}) == ranks
    for node in nodes:
        if node.get_gid() == "own":
            left = node.get_xdata()[0]
            here = min(slices, key=lambda p: abs(p.get_x() + p.get_width() / 2 - left))
            wanted = style.RANKS.index(node.get_color()) if ranks > 1 else 0
            assert (
                here.get_facecolor() == patches(axes, "slice")[wanted * 8 // ranks].get_facecolor()
            )
        else:
            assert node.get_color() == style.SUM


def test_the_tree_is_that_of_the_rows():
    _, body = tree.contract_table([products.census(contracts=("tree2.bf16", "chain"))])
    assert [line[:3] for line in body] == [["tree2.bf16", "2", "6,144"], ["chain", "1", "12,288"]]
    assert [line[-1] for line in body] == ["1, 2", "1"]
    assert len(tree.contract([products.census(contracts=("chain",))]).axes) == 1 + 1


def test_what_is_rounded_is_a_square():
    marks = {
        name: {line.get_marker() for line in axes.lines} - {"None"}
        for name, axes in zip(products.CONTRACTS, tree.contract([]).axes)
    }
    assert marks["tree8.bf16"] == {"s"} and marks["tree8.fp32"] == {"o", "s"}
    assert marks["chain"] == {"s"}


# ---- census --------------------------------------------------------------------------------------


def test_a_mismatch_jumps_to_the_eye():
    wrong = ("tree8.fp32", "decode", "cancellation")
    rows = [products.census(m, wrong=[wrong]) for m in (1, 33)]
    figure = det_ffn.census(rows)
    families, layouts = figure.axes[2:4]  # the second contract's panels
    (cell,) = patches(families, "differs")
    line, column = 1, products.FAMILIES.index("cancellation")
    assert (cell.get_x(), cell.get_y()) == pytest.approx((column - 0.48, line - 0.44))
    assert to_hex(cell.get_facecolor()) == style.FAIL and cell.get_linewidth() > 1
    assert {to_hex(p.get_facecolor()) for p in patches(families, "agrees")} == {det_ffn.CLEAN}
    assert "2 / 6" in looks.words(families) and len(patches(layouts, "differs")) == 1
    for axes in figure.axes[:2] + figure.axes[4:]:
        assert patches(axes, "differs") == []
    assert "tree8.fp32: 2 / 180 differ (decode on cancellation data)" in det_ffn.census_alt(rows)
    assert "at M = 1, 33" in det_ffn.census_alt(rows)


def test_the_table_says_what_was_refused():
    rows = [products.census(wrong=[("chain", "hopper", "normal")])]
    header, body = det_ffn.census_table(rows)
    (refused,) = [line for line in body if line[-1] != "-"]
    assert refused[:4] == ["chain", "hopper", "3", "5 / 30"] and "normal data" in refused[-1]
    assert refused[4] == f"25 / {24 * 33 * 30:,}" and len(header) == len(refused)


def test_nothing_wrong_is_zero_of_n():
    figure = det_ffn.census(products.cpu())
    assert not any(patches(axes, "differs") for axes in figure.axes)
    said = {word for axes in figure.axes for word in looks.words(axes)}
    assert said == {"0 / 20", "0 / 4", "0 / 24"}


def test_what_was_not_tried_is_a_dot():
    row = products.census(contracts=("chain",))
    found = row["result"]["census"]
    row["result"]["census"] = [
        one for one in found if (one["schedule"], one["layout"]) != ("decode", "a[K,M] b[K,N]")
    ]
    families, layouts = det_ffn.census([row]).axes
    assert "·" in looks.words(layouts) and "·" not in looks.words(families)


# ---- batches -------------------------------------------------------------------------------------


def test_each_batch_counts_its_places():
    (axes,) = det_ffn.batches([products.census()]).axes
    assert looks.words(axes)[:3] == ["0 / 24", "0 / 48", "0 / 72"]
    assert [t.get_text() for t in axes.get_xticklabels()][:3] == ["M = 1", "M = 2", "M = 17"]


def test_a_row_that_moves_is_one_red_bar_and_the_worst_row_counts():
    rows = [products.census(1), products.census(33, moved=7), products.census(200)]
    (axes,) = det_ffn.batches(rows).axes
    (bar,) = patches(axes, "differs")
    assert bar.get_y() == pytest.approx(-0.44) and bar.get_width() > 7
    assert to_hex(bar.get_facecolor()) == style.FAIL
    assert "7 / 504 elements differ" in looks.words(axes)
    assert "tree8.bf16: 7 / 504" in det_ffn.batches_alt(rows)


# ---- drift ---------------------------------------------------------------------------------------


def test_drift_is_that_of_the_largest_batch():
    rows = [products.gemm(17, timed=False), products.gemm(1, timed=False), products.ffn(17)]
    found = fp64.largest(rows)
    assert {one["m"] for one in found} == {17} and len(found) == (6 + 1) * 4
    figure = fp64.drift(rows)
    for axes, field in zip(figure.axes, fp64.MEASURES):
        drawn = {line.get_xdata()[0] for line in axes.lines if line.get_marker() in tuple("osD^")}
        assert drawn == {one["drift"][field] for one in found}
    assert "tree8.bf16 0.0034 to 0.0034" in fp64.drift_alt(rows)


def test_the_official_layers_bits_are_counted_for_the_whole_only():
    _, body = fp64.drift_table([products.gemm(17), products.ffn(17)])
    assert {line[-1] for line in body if line[0] == "whole FFN"} == {"17,000"}
    assert {line[-1] for line in body if line[0] != "whole FFN"} == {"-"}


def test_a_shared_scale_has_ticks_that_do_not_collide():
    for high in (2.0, 30.0, 3000.0):
        axes = style.canvas(4, 2).subplots()
        axes.set_xscale("log")
        fp64._readable(axes, [1.0, high])
        assert 2 <= len(axes.get_xticks()) <= 5


# ---- cost ----------------------------------------------------------------------------------------


def test_ratio_has_its_band_and_the_line_at_one():
    rows = [products.ffn(m) for m in (1, 64, 4096)]
    latency, official, compiled = cost.cost(rows).axes
    assert latency.get_xscale() == latency.get_yscale() == "log"
    for axes, name in ((official, "official"), (compiled, "official compiled")):
        assert name in axes.get_title(loc="left")
        (even,) = [line for line in axes.lines if line.get_gid() == "even"]
        assert set(even.get_ydata()) == {1.0}
        bands = [c for c in axes.collections if c.get_gid() == "band"]
        curves = [line for line in axes.lines if line.get_gid() != "even"]
        assert len(bands) == len(curves) == 4
        first = [line for line in contracts.lines(rows, "ffn") if line["contract"] == "tree8.bf16"]
        wanted = [line["ratios"][name]["median"] for line in first]
        assert list(curves[0].get_ydata()) == wanted
        heights = bands[0].get_paths()[0].get_extents()
        ratios = [line["ratios"][name] for line in first]
        assert heights.y0 == pytest.approx(min(r["p10"] for r in ratios))
        assert heights.y1 == pytest.approx(max(r["p90"] for r in ratios))


def test_the_floor_lies_under_every_time():
    rows = [products.ffn(m) for m in (1, 4096)]
    for line in contracts.lines(rows, "ffn"):
        line["floor_us"] = 50.0 * line["m"]
    axes = cost.cost(rows).axes[0]
    path = axes.collections[0].get_paths()[0].vertices
    assert path[:, 1].max() == pytest.approx(50.0 * 4096)


def test_throughput_is_the_inverse_of_the_time():
    line = products.gemm()["result"]["lines"][0]
    line["ratios"]["library"] = {"median": 0.5, "p10": 0.4, "p90": 0.8}
    assert cost.throughput(line) == {"median": 2.0, "low": 1.25, "high": 2.5}


def test_a_panel_a_product_and_a_mark_a_contract():
    rows = [products.gemm(m) for m in (1, 64)]
    figure = cost.gemm_cost(rows)
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(products.OPERATORS)
    for axes in figure.axes:
        marks = [line.get_marker() for line in axes.lines if line.get_marker() != "None"]
        assert sorted(marks) == sorted("osD^" * 2)


@pytest.mark.parametrize("plot", [det_ffn.COST, det_ffn.GEMM_COST], ids=lambda p: p.title)
def test_nothing_timed_is_a_box_with_the_command(plot):
    rows = products.cpu()
    said = " ".join(looks.words(plot.draw(rows).axes[0]))
    assert "NOT MEASURED here" in said and contracts.COMMAND in said
    assert contracts.COMMAND == "python -m rlkernel det-ffn --device cuda --size qwen3"
    assert contracts.COMMAND in plot.alt(rows) and contracts.COMMAND in plot.table(rows)[1][0][0]


def test_memory_is_a_table_of_what_was_measured():
    header, body = cost.memory([products.census(), products.ffn(1), products.ffn(1024)])
    assert header == ["M", *(f"{c}, MiB" for c in (*products.CONTRACTS, "official"))]
    assert [line[0] for line in body] == ["1", "1,024"] and body[1][1] == "152.0"
    assert float(body[1][-1]) == pytest.approx(152.0 + 48.0)
    assert cost.memory(products.cpu())[1] == []


# ---- FP16, by hand -------------------------------------------------------------------------------


def test_fp16_says_a_number_or_why_there_is_none():
    absent = products.fp16(not_measured="transformers is not installed")
    _, (measured, missing) = det_ffn.fp16([products.ffn(1), products.fp16(), absent])
    assert measured == ["(8, 4,096, 12,288)", "0.00045", "0.00225", "0.00015", "-"]
    assert missing[1:] == ["-", "-", "-", "transformers is not installed"]


def test_bars_and_shares_are_those_of_the_row():
    left, right = bits.by_hand(products.look(ours=3)).axes
    for who, heights in (("ours", [0, 3, 3, 3]), ("library", [0, 0, 61, 61])):
        assert [p.get_height() for p in patches(left, who)] == heights
    total = sum(patch.get_width() for patch in right.patches)
    assert total == pytest.approx(300) and len(right.patches) == 3 * 5  # 0, 1, 2, <=4, <=16
    assert [t.get_text() for t in right.get_yticklabels()] == ["tree8.fp32", "tree2.bf16", "chain"]
    assert "tree8.bf16 9 / 256 elements differ" in bits.by_hand_alt(products.look(ours=3))


def test_every_contract_has_a_colour_and_a_mark_of_its_own():
    found = [contracts.look(name) for name in (*contracts.ALL, "tree4.bf16")]
    assert len({one["color"] for one in found}) == len({one["marker"] for one in found}) == 5
