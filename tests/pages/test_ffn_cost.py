"""What the page of the FFN's cost asks of evidence, drawings and menus."""

from __future__ import annotations

import pytest

from rlkernel.figures import ffn_cost, ffn_layer
from rlkernel.pages import evidence, show, widgets
from rlkernel.pages.evidence import Evidence
from tests.figures import layers, looks, products
from tests.pages.test_show import displayed, record

SIZE = {"size": "qwen3", "fault": "none"}


def made(folder, rows, what: str, **parameters):
    given = {**SIZE, "what": [what], "graph": True, **parameters}
    cases = [row["case"] for row in rows]
    return record(folder, rows, experiment="det-ffn", parameters=given, cases=cases, device="cuda")


def test_plain_calls_and_graphs_are_two_questions(results):
    home = results / "det-ffn"
    made(home / "graphs", [layers.train(1)], "train")
    later = {"graph": False}
    made(home / "plain", [layers.train(1, graph=False)], "train", **later)
    for graph, wanted in ((True, "graphs"), (False, "plain")):
        asked = {"size": "qwen3", "what": ("train",), "graph": graph, "gpus": 1}
        found = evidence.get("det-ffn", run=str(home), **asked)
        assert found.local.path.name == wanted
    assert "--graph false" in found.command


def test_two_records_in_one_drawing_without_a_second_box(results):
    whole = made(results / "det-ffn" / "ffn", [products.ffn(1)], "ffn")
    gaps = [Evidence("det-ffn", {"what": ("train",)}, None, missing="needs 1 GPU")]
    there = Evidence("det-ffn", {}, None, (whole,), missing="needs 1 GPU")
    (piece,) = displayed(show.together, ffn_cost.ROOFLINE, [there, *gaps], gap=False)
    assert piece["kind"] == "figure" and "results/det-ffn/ffn" in piece["html"]
    pieces = displayed(show.together, ffn_cost.ROOFLINE, [there, *gaps])
    assert [p["kind"] for p in pieces] == ["elsewhere", "gap", "figure"]


@pytest.fixture
def compared(results):
    rows = [layers.layer(), layers.layer("tp4", wrong=[("tree8.fp32", "dX")])]
    return Evidence("det-ffn", {}, made(results / "det-ffn" / "a", rows, "layer"))


def test_a_layout_and_a_contract_are_chosen(compared, monkeypatch):
    monkeypatch.setenv("RLKERNEL_HEADLESS", "1")
    axes = ("layout", "M", "contract")
    start = {"layout": "tp2", "M": "32", "contract": "tree8.fp32"}
    how = {"only": ffn_layer.by_contract}
    (piece,) = displayed(widgets.browse, ffn_layer.EXACT, compared, axes, start, **how)
    assert "tp2, M = 32: 0 / 80,000,000." in piece["text"]
    (piece,) = displayed(widgets.browse, ffn_layer.EXACT, compared, axes, **how)
    assert "tp4, M = 32: 6 / 80,000,000 (dX)." in piece["text"], "the first that failed"
    rows = ffn_layer.by_contract(compared.local.rows)
    assert widgets.choices(rows, axes) == {
        "layout": ["tp2", "tp4"], "M": ["32"], "contract": ["tree8.bf16", "tree8.fp32"]
    }  # fmt: skip
    (axes_,) = ffn_layer.exact(widgets.select(rows, start)).axes
    assert len(looks.words(axes_)) == len(layers.RESULTS)
