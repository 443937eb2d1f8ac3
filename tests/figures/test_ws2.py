"""The figures of ws2 on made-up rows: who is green, what is said of whom, what is a node."""

from __future__ import annotations

import pytest

from rlkernel.figures import nodes, style, ws2
from tests.figures import deployment, looks

PLOTS = {name: getattr(ws2, name) for name in ("TOPOLOGY", "MATRIX", "DRIFT", "LATENCY")}


@pytest.mark.parametrize("name", PLOTS)
def test_drawn_deterministic_and_told(name):
    looks.drawn_and_told(PLOTS[name], deployment.rows())


def patches(axes, gid):
    return [patch for patch in axes.patches if patch.get_gid() == gid]


# ---- topology ------------------------------------------------------------------------------------


def test_a_box_a_node_a_disc_a_rank_and_a_line_a_group():
    (axes,) = nodes.topology(deployment.rows()).axes
    assert len(patches(axes, "node")) == 2
    discs = [line for line in axes.lines if line.get_gid() == "rank"]
    assert [d.get_color() for d in discs] == [*style.RANKS[:2]] * 2, "the colour is the shard's"
    lines = {line.get_gid(): line.get_color() for line in axes.lines if line.get_gid() != "rank"}
    assert lines == {"group tp": nodes.INSIDE, "group cp": nodes.BETWEEN}
    said = looks.words(axes)
    assert said.count("TP  P2P/CUMEM") == said.count("CP  NET/Socket") == 2
    assert said[-1] == deployment.KIND, "an emulation is called one"


def test_the_table_has_a_line_for_each_setting_and_group():
    rows = [deployment.start(), deployment.start("Tree/LL")]
    _, body = nodes.topology_table(rows)
    assert len(body) == 8 and [line[0] for line in body] == ["default"] * 4 + ["Tree/LL"] * 4
    assert body[2] == ["default", "CP", "[0, 2]", "between nodes", "NET/Socket",
                       "ALLREDUCE 2048 B: RING/LL"]  # fmt: skip


def test_without_a_log_the_transport_is_not_guessed():
    row = deployment.start()
    row["result"]["nccl"] = []
    assert "by not told" in nodes.topology_alt([row])
    row["result"]["topology"]["gpus"] = 0
    assert "by gloo over TCP" in nodes.topology_alt([row])


# ---- matrix and drift ----------------------------------------------------------------------------


def test_nine_cells_and_who_sums():
    (axes,) = ws2.matrix(deployment.rows()).axes
    assert len(patches(axes, "holds")) == 9 and not patches(axes, "fails")
    said = looks.words(axes)
    assert said.count("no collective") == 3
    assert said.count("sum over TP [0,1] [2,3]") == said.count("sum over CP [0,2] [1,3]") == 3
    assert said.count("100 repeats, 1 hash") == 9


@pytest.mark.parametrize("wrong", ["down.forward", "down.dh", "up.dw"])
def test_a_boundary_that_differs_is_framed_and_told(wrong):
    rows = deployment.tracks(wrong)
    (axes,) = ws2.matrix(rows).axes
    assert len(patches(axes, "fails")) == 1 and len(patches(axes, "holds")) == 8
    assert any("7 / 4,096 differ" in text for text in looks.words(axes))
    assert ws2.matrix_alt(rows).count(": fails") == 1


@pytest.mark.parametrize("name, value", [("repeats_that_differ", 1), ("one_rank", [3, 4096])])
def test_other_bits_of_a_repeat_or_of_one_rank_are_no_success(name, value):
    rows = deployment.tracks()
    rows[0]["result"]["lines"][2][name] = value
    (axes,) = ws2.matrix(rows).axes
    assert len(patches(axes, "fails")) == 1


def test_nothing_measured_is_not_green():
    (axes,) = ws2.matrix(deployment.tracks()[:1]).axes
    assert len(patches(axes, "fails")) == 6
    assert looks.words(axes).count("not looked at") == 6


def test_drift_of_both_sides_and_contracts():
    (axes,) = ws2.drift(deployment.rows()).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["chain local", "tree2.bf16 pre-reduce", "tree2.bf16 post-reduce",
                      "tree2.fp32 pre-reduce", "tree2.fp32 post-reduce"]  # fmt: skip
    limits = [line for line in axes.lines if line.get_color() == style.LIMIT]
    assert sorted({line.get_xdata()[0] for line in limits}) == [5e-2, 1e-1]
    drawn = [x for line in axes.lines for x in line.get_xdata()]
    assert min(drawn) == ws2.FLOOR, "no difference at all still has a place"


# ---- latency -------------------------------------------------------------------------------------


def test_inside_and_between_and_what_it_may_be_quoted_for():
    (axes,) = nodes.latency([deployment.latency()]).axes
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert named == ["TP, inside a node, by the tree", "TP, inside a node, by the backend",
                     "CP, between nodes, by the tree", "CP, between nodes, by the backend"]  # fmt: skip  # noqa: E501
    assert "ranks share GPUs: good for bits, not for timing" in nodes.latency_alt(
        [deployment.latency()]
    )
    assert "share" not in nodes.latency_alt([deployment.latency(gpus=4)])
    real = deployment.latency(gpus=4)
    real["result"]["topology"]["kind"] = "real nodes"
    assert nodes.latency_table([real])[1][0][-1] == "two machines"
