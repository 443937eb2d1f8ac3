"""The cost of a step and of layouts, and the roofline, on made-up rows."""

from __future__ import annotations

import pytest

from rlkernel.figures import cost, ffn_cost
from tests.figures import layers, looks, products

MS = (1, 64, 4096)
PLOTS = {
    "train": (ffn_cost.TRAIN, [layers.train(m) for m in MS]),
    "layouts": (ffn_cost.PER_LAYOUT, [layers.timed(), layers.timed("tp2_sp", 4096)]),
    "roofline": (ffn_cost.ROOFLINE, [make(m) for m in MS for make in (products.ffn, layers.train)]),
}


@pytest.mark.parametrize("name", PLOTS)
def test_drawn_deterministic_and_told(name):
    looks.drawn_and_told(*PLOTS[name])


@pytest.mark.parametrize(
    ("plot", "command"),
    [
        (ffn_cost.TRAIN, "--what train"),
        (ffn_cost.PER_LAYOUT, "--what time --layout tp2,tp2_sp"),
        (ffn_cost.ROOFLINE, "--size qwen3"),
    ],
    ids=lambda value: getattr(value, "title", None),
)
def test_nothing_timed_is_a_box_with_the_command(plot, command):
    rows = [layers.train(1, timed=False), layers.timed(modes=())]
    said = " ".join(looks.words(plot.draw(rows).axes[0]))
    assert "NOT MEASURED here" in said and command in said
    assert command in plot.alt(rows) and command in plot.table(rows)[1][0][0]


# ---- a training step -----------------------------------------------------------------------------


def test_a_step_has_times_the_floor_and_the_ratio():
    rows = [layers.train(m, graph=False) for m in MS]
    times, ratios = ffn_cost.train(rows).axes
    assert "forward + backward, plain calls" in times.get_title(loc="left")
    first = next(line for line in times.lines if line.get_marker() == "o")
    lines = cost.timed(rows, "train")["tree8.bf16"]
    assert list(first.get_ydata()) == [line["median_us"] for line in lines]
    floor = times.collections[0].get_paths()[0].vertices[:, 1].max()
    assert floor == pytest.approx(max(line["floor_us"] for line in lines))
    curve = next(line for line in ratios.lines if line.get_marker() == "o")
    assert list(curve.get_ydata()) == [line["ratios"]["official"]["median"] for line in lines]
    header, body = ffn_cost.train_table(rows)
    assert len(body) == len(MS) * len(products.CONTRACTS) and "floor µs" in header
    assert "CUDA graphs" in ffn_cost.train_alt([layers.train(1)])


def test_memory_of_a_step():
    header, body = cost.memory([products.ffn(1), layers.train(8)], "train")
    assert body == [["8", *["768.0"] * 5]] and header[-1] == "official, MiB"


# ---- layouts -------------------------------------------------------------------------------------


def test_a_panel_a_kind_and_m_and_a_mark_a_contract():
    rows = [layers.timed(), layers.timed(m=4096), layers.timed("tp2_sp")]
    figure = ffn_cost.per_layout(rows)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["forward, M = 32", "forward, M = 4,096",
                      "forward + backward, M = 32", "forward + backward, M = 4,096"]  # fmt: skip
    first, second = figure.axes[:2]
    marks = [line for line in first.lines if line.get_marker() != "None"]
    assert len(marks) == 2 * 2 * 2, "layouts, modes, contracts"
    assert {m.get_ydata()[0] for m in marks} == {100 / 80, 125 / 80}
    filled = [m for m in marks if m.get_markerfacecolor() == m.get_color()]
    assert len(filled) == 4, "graphs are filled"
    assert len([line for line in second.lines if line.get_marker() != "None"]) == 4
    assert len([c for c in first.collections if c.get_gid() == "spread"]) == 8
    step = figure.axes[2]
    heights = {m.get_ydata()[0] for m in step.lines if m.get_marker() != "None"}
    assert heights == {300 / 80, 375 / 80}, "packed is in the table only"


def test_the_table_has_every_variant_memory_and_transport():
    header, body = ffn_cost.per_layout_table([layers.timed()])
    assert len(body) == 2 * (2 + 4)
    told = [dict(zip(header, line)) for line in body]
    assert told[0]["peak MiB a rank"] == "5.0" and told[-1]["peak MiB a rank"] == "-"
    assert {li["transport"] for li in told} == {"process-group/nccl"}
    assert told[0]["/ official (p10, p90)"].startswith("1.250 (")
    assert told[0]["/ official compiled (p10, p90)"].startswith("1.111 (")
    assert {li["dX"] for li in told} == {"-", "separate", "packed"}


def test_without_an_opponent_there_is_a_time_in_the_table_and_a_reason():
    rows = [layers.timed(official=False)]
    assert "NOT MEASURED" in " ".join(looks.words(ffn_cost.per_layout(rows).axes[0]))
    assert ffn_cost.per_layout_table(rows)[1][0][7] == "100.0"
    rows[0]["result"] |= {"not_captured": "staged", "not_measured": "ranks share a GPU"}
    _, ((layout, m, said, beside),) = ffn_cost.rivals(rows)
    assert (layout, m, beside) == ("tp2", "32", "3,072")
    for text in ("official: transformers 5", "official compiled: no compiler",
                 "CUDA graph: staged", "times: ranks share a GPU"):  # fmt: skip
        assert text in said


def test_who_moved_the_bytes():
    row = layers.timed()
    assert ffn_cost.transport(row) == "process-group/nccl"
    more = {"up.dx": "all_reduce over tp by symmetric memory", "x": "one rank, nothing"}
    row["paths"] = row["paths"] | more
    assert ffn_cost.transport(row) == "process-group/nccl, symmetric memory"
    assert ffn_cost.transport({"paths": {}}) == "nothing moved"


# ---- roofline ------------------------------------------------------------------------------------


def test_the_roof_is_what_the_floors_were_made_with():
    rows = [layers.train(m) for m in MS]
    found = ffn_cost.ceilings(rows)
    assert found == pytest.approx(layers.MOST)
    rows[1]["result"]["ceilings"] = {"flops_per_us": 1.0, "bytes_per_us": 2.0}
    assert ffn_cost.ceilings(rows) == {"flops_per_us": 1.0, "bytes_per_us": 2.0}
    assert ffn_cost.ceilings([layers.train(1, timed=False)]) is None


def test_points_lie_where_their_work_and_time_put_them():
    rows = [layers.train(m) for m in MS]
    (axes,) = ffn_cost.roofline(rows).axes
    flops, moved = ffn_cost.work(rows[0])
    assert (flops, moved) == (18 * 4096 * 12288, 2 * (9 * 4096 * 12288 + 5 * 4096))
    line = rows[0]["result"]["lines"][0]
    points = {(m.get_xdata()[0], m.get_ydata()[0]) for m in axes.lines if m.get_marker() == "o"}
    assert (flops / moved, flops / line["median_us"] / 1e6) in points
    (roof,) = [line for line in axes.lines if line.get_gid() == "roof"]
    assert max(roof.get_ydata()) == pytest.approx(700.0)
    share = 1 / (1.3 * products.SLOWER["tree8.bf16"])
    assert ffn_cost.of_roof(rows[0], line, layers.MOST) == pytest.approx(share)
    assert f"tree8.bf16 {share:.0%} to {share:.0%} of the roof" in ffn_cost.roofline_alt(rows)


def test_a_forward_is_a_third_of_a_step():
    forward, step = (ffn_cost.work(make(64))[0] for make in (products.ffn, layers.train))
    assert 3 * forward == step
