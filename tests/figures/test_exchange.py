"""Figures of exchange, and of the layer on several nodes, on made-up rows; models say so."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from rlkernel.figures import cross_node, exchange, exchange_steps, style
from tests.figures import exchanges, messages

ROWS = messages.rows(1, 4) + messages.rows(2, 2)


def colours(figure) -> int:
    image = Image.open(io.BytesIO(style.png(figure, dpi=60))).convert("RGB")
    return len(np.unique(np.asarray(image).reshape(-1, 3), axis=0))


@pytest.mark.parametrize("plot", [exchange.TOPOLOGY, exchange.COST, exchange_steps.STEPS])
def test_drawn_told_and_in_numbers(plot):
    assert colours(plot.draw(ROWS)) > 20
    header, body = plot.table(ROWS)
    assert body and all(len(line) == len(header) for line in body)


def test_every_rank_and_link_is_drawn():
    figure = exchange.topology(ROWS)
    drawn = [artist.get_gid() for axes in figure.axes for artist in axes.lines]
    assert drawn.count("rank") == 8
    assert drawn.count("intra") == 6 + 2 and drawn.count("inter") == 4
    boxes = [patch for axes in figure.axes for patch in axes.patches if patch.get_gid() == "node"]
    assert len(boxes) == 3
    said = exchange.topology_alt(ROWS)
    assert "4 ranks on 1 node: inside a node from 16 µs" in said
    assert "4 ranks on 2 emulated nodes of one host: inside" in said and "between nodes" in said


def test_curves_by_where_bytes_go():
    found = exchange.curves(ROWS)
    tints = {key[:2]: exchange.colour(lines[0]) for key, lines in found.items()}
    two = "2 emulated nodes of one host"
    assert tints["1 node", "group"] == tints[two, "inside"] == exchange.INSIDE
    assert tints[two, "across"] == exchange.BETWEEN and tints[two, "group"] == exchange.BOTH
    for lines in found.values():
        assert [line["message"] for line in lines] == list(messages.SIZES)
    names = [exchange.name(key) for key in found]
    assert "2 ranks across nodes, 2 emulated nodes of one host, process group, CUDA graph" in names
    assert "2 ranks inside each node, 2 emulated nodes of one host, copy engine" in names
    said = exchange.cost_alt(ROWS)
    assert "all 4 ranks, 1 node, process group" in said and "48 MiB" in said


def test_two_steps_beside_a_flat_exchange():
    found = exchange_steps.steps(ROWS)
    assert set(found) == {f"2 emulated nodes of one host, process group{how}"
                          for how in ("", ", CUDA graph")}  # fmt: skip
    small, *_, large = found["2 emulated nodes of one host, process group"]
    fabric = messages.FABRIC
    flat = fabric.us({"intra": 1, "inter": 2}, {"intra": 1024, "inter": 2048})
    both = fabric.us({"intra": 1}, {"intra": 2048}) + fabric.us({"inter": 1}, {"inter": 2048})
    assert small == (4096, pytest.approx(flat), pytest.approx(both))
    assert large[0] == messages.SIZES[-1]
    assert "NOT MEASURED" in exchange_steps.ratio_alt(messages.rows(1, 4))
    assert "NOT MEASURED" in exchange_steps.ratio(messages.rows(1, 4)).axes[0].texts[0].get_text()


def test_agents_are_no_nodes():
    row = messages.row(2, 1, 4096, gpus=False)
    row["result"]["topology"]["kind"] = "agents on one host, a network namespace each"
    assert exchange.where(row) == "2 agents of one host"
    row["result"]["topology"]["kind"] = "real nodes"
    assert exchange.where(row) == "2 real nodes"
    assert exchange.where({"result": {}}) == "1 node"


def test_nothing_timed_is_a_visible_gap():
    rows = messages.rows(1, 2, shared=True)
    assert "NOT MEASURED" in exchange.cost(rows).axes[0].texts[0].get_text()
    assert "NOT MEASURED" in exchange.cost_alt(rows) and exchange.cost_table(rows)[1]
    assert "not timed" in exchange.told(rows, "intra") and exchange.topology(rows)


# ---- the layer by placement ----------------------------------------------------------------------


def layers() -> list[dict]:
    near, far = exchanges.row(), exchanges.row({"with-sm/4": 1.3, "kernel/4": 1.4, "levels/4": 1.5})
    at = messages.row(2, 1, 4096)["result"]["topology"]
    return [near, {**far, "result": {**far["result"], "topology": at}}]


def test_exposed_communication_of_every_schedule_a_record_has():
    rows = layers()
    assert colours(cross_node.exposed(rows)) > 20
    header, body = cross_node.exposed_table(rows)
    assert [line[0] for line in body] == [
        *(f"{name}, 1 node" for name in ("none", "with-sm, 4 chunks", "sm-free, 4 chunks",
                                         "kernel, 4 chunks")),
        *(f"{name}, 2 emulated nodes of one host" for name in (
            "none", "with-sm, 4 chunks", "kernel, 4 chunks", "levels, 4 chunks")),
    ]  # fmt: skip
    exposed = dict(zip(header, body[1]))
    assert exposed["exposed µs"] == "+160.0" and exposed["T comm µs"] == "774.0"
    none = dict(zip(header, body[0]))
    assert none["exposed µs"] == "+774.0", "sequential: all of its communication"
    assert "levels, 4 chunks, 2 emulated nodes of one host: +160 µs exposed" in (
        cross_node.exposed_alt(rows)
    )
    assert "NOT MEASURED" in cross_node.exposed_alt([]) and cross_node.exposed_table([])[1]
    assert "NOT MEASURED" in cross_node.exposed([]).axes[0].texts[0].get_text()


# ---- models --------------------------------------------------------------------------------------


def checked() -> list[dict]:
    return [
        {"kind": "exchange", "label": f"point {n}", "measured_us": 10.0 * n, "model_us": 11.0 * n,
         "relative": 0.1, "left_out": 0.15 if n > 1 else None}
        for n in (1, 2, 3)
    ]  # fmt: skip


def predictions() -> list[dict]:
    common = {"comp_us": 3000.0, "comm_us": 900.0, "wire_us": 400.0, "serial_us": 3900.0,
              "workload": "B=512", "links": "intra, as fitted", "of_what_can_be": 0.7}  # fmt: skip
    return [
        {"placement": place, "ranks": ranks, "order": order, "chunks": chunks,
         "overlap_us": 3000.0 + 400 / chunks, "exposed_us": 400.0 / chunks,
         "hidden": (900 - 400 / chunks) / 900, **common}
        for place, ranks, order in (("1 x 8", 8, "flat"), ("2 x 8", 16, "flat"),
                                    ("2 x 8", 16, "two steps"))
        for chunks in (1, 2, 4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "plot, rows", [(cross_node.CHECK, checked()), (cross_node.PREDICTED, predictions())]
)
def test_a_model_is_called_one_everywhere(plot, rows):
    figure = plot.draw(rows)
    assert colours(figure) > 20
    titles = [axes.get_title("left") + axes.get_ylabel() for axes in figure.axes]
    assert all("model" in title for title in titles), titles
    header, body = plot.table(rows)
    assert all(len(line) == len(header) for line in body) and "model" in " ".join(header).lower()
    for text in (plot.title, plot.note, plot.alt(rows)):
        assert "model" in text.lower(), text


def test_the_error_of_every_point_is_told():
    header, body = cross_node.check_table(checked())
    assert [line[-2:] for line in body] == [["+10.0%", "-"], ["+10.0%", "+15.0%"]] + [
        ["+10.0%", "+15.0%"]
    ]
    assert "exchange: 3 points, median error 10%, worst 10%" in cross_node.check_alt(checked())
    drawn = [artist.get_gid() for artist in cross_node.check(checked()).axes[0].lines]
    assert drawn.count("model") == 3 and drawn.count("left out") == 2


def test_the_fastest_chunk_count_of_each_placement_is_drawn():
    said = cross_node.predicted_alt(predictions())
    assert "not a measurement" in said
    assert said.count("4 chunks") == 3 and "P = 16, 2 x 8, two steps" in said
    assert len(cross_node.predicted_table(predictions())[1]) == 9
