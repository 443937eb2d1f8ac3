"""What a notebook displays, and what its widgets do with and without somebody in front of them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat

from rlkernel import records
from rlkernel.figures import a2a_ffn, audit, bits, style, tp_swiglu
from rlkernel.pages import evidence, show, widgets
from rlkernel.pages.evidence import Evidence
from tests.figures import exchanges, products, synthetic

CHECKS = [
    {"name": "P=2: <equivalent>", "passed": True, "value": 1.5e-8, "limit": 1e-7, "excess": 0.15},
    {"name": "P=4: caught", "passed": False, "value": "nothing", "limit": "output"},
]


def record(folder: Path, rows=None, **run) -> records.Record:
    """A finished run on disk, made up."""
    folder.mkdir(parents=True)
    facts = {
        "schema": 1, "experiment": "tp-swiglu", "status": "ok", "source": "0" * 64,
        "parameters": {"mode": "catalogue", "size": "article"}, "started": "2026-01-01T00:00:00Z",
        "environment": {"machine": "x86_64", "cores": 2, "gpus": []},
        "verdict": {"passed": False, "checks": CHECKS},
        "covered": ["one <block>"], "not_covered": ["another"],
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(facts | run))
    lines = [json.dumps(row) + "\n" for row in rows or synthetic.catalogue()]
    (folder / "cases.jsonl").write_text("".join(lines))
    return records.read(folder)


GPUS = {"machine": "x86_64", "gpus": [{"name": "Some GPU", "driver": "1"}] * 2}


@pytest.fixture
def found(results):
    return Evidence("tp-swiglu", {"nproc": (2, 4)}, record(results / "tp-swiglu" / "a"))


def displayed(call, *arguments, **named) -> list[dict]:
    """[{"html", "text", ...metadata}] of everything that a call displays."""
    found = []

    def note(data, raw, metadata):
        assert raw
        pieces = {"html": data["text/html"], "text": data["text/plain"]}
        found.append(pieces | metadata["rlkernel"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(show, "display", note)
        call(*arguments, **named)
    return found


def test_figure_has_picture_alternative_source_and_table(found):
    (piece,) = displayed(show.figure, tp_swiglu.HEAT, found, main=True)
    assert 'src="data:image/png;base64,' in piece["html"] and piece["kind"] == "figure"
    assert 'alt="Heat map of signal by fault.' in piece["html"] and piece["main"]
    assert "Measured here, 2-core x86-64 CPU" in piece["html"]
    assert "<code>results/tp-swiglu/a</code>" in piece["html"] and "<table" in piece["html"]
    assert piece["text"].startswith("Heat map")


def test_an_old_record_is_marked_and_a_fresh_one_is_not(found, results):
    (piece,) = displayed(show.figure, tp_swiglu.HEAT, found)
    assert "stale: the code has changed since" in piece["html"]
    fresh = record(results / "tp-swiglu" / "b", source=evidence.source("tp-swiglu"))
    (piece,) = displayed(show.figure, tp_swiglu.HEAT, Evidence("tp-swiglu", {}, fresh))
    assert "stale" not in piece["html"]


def test_a_published_record_that_lacks_what_is_drawn_is_left_out_where_another_has_it(results):
    home, made = results / "published" / "a2a-ffn", exchanges.whole()
    has, lacks = record(home / "has", [made]), record(home / "lacks", [exchanges.row()])
    local = record(results / "a2a-ffn" / "local", [exchanges.row()])
    for mine, published, wanted in (
        (None, (lacks, has), ["has"]), (None, (lacks, lacks), ["lacks"]),
        (local, (has, lacks), ["local", "has"]), (None, (), []),
    ):  # fmt: skip
        told = Evidence("a2a-ffn", {}, mine, published)
        shown = displayed(show.figure, a2a_ffn.MEMORY, told, gap=False)
        assert [piece["record"].rpartition("/")[2] for piece in shown] == wanted


def test_a_palette_makes_a_picture_small_and_keeps_its_colours():
    figure = tp_swiglu.HEAT.draw(synthetic.catalogue())
    whole, small = style.png(figure, dpi=80), style.png(figure, dpi=80, colours=256)
    assert len(small) < 0.6 * len(whole) and small == style.png(figure, dpi=80, colours=256)
    one, other = (Image.open(io.BytesIO(data)).convert("RGB") for data in (whole, small))
    assert one.size == other.size
    assert max(ImageStat.Stat(ImageChops.difference(one, other)).mean) < 2


def test_the_published_record_stands_beside_the_local_one(results):
    record(results / "published" / "tp-swiglu" / "gpu", environment=GPUS)
    record(results / "published" / "tp-swiglu" / "other", parameters={"mode": "inspect"})
    local = record(results / "tp-swiglu" / "a")
    found = evidence.get("tp-swiglu", run=str(local.path), mode="catalogue")
    assert [r.path.name for r in found.records] == ["a", "gpu"]
    first, second = displayed(show.verdict, found, "A claim")
    assert first["machine"] == "2-core x86-64 CPU" and "Measured here" in first["html"]
    assert second["machine"] == "2x Some GPU" and "Published, 2x Some GPU" in second["html"]


def test_verdict_shows_each_check_with_value_and_limit(found):
    (piece,) = displayed(show.verdict, found, "A claim")
    assert piece["passed"] is False and ">fails</span> <strong>A claim" in piece["html"]
    assert "P=2: &lt;equivalent&gt;" in piece["html"] and "1.5e-08" in piece["html"]
    assert piece["html"].count("FAILS") == 1


def test_a_gap_shows_what_it_needs_and_the_command(monkeypatch, results):
    monkeypatch.setattr(records, "environment", lambda: {"gpus": []})
    found = evidence.get("tp-swiglu", gpus=2, mode="catalogue", nproc=(2, 4))
    (piece,) = displayed(show.figure, tp_swiglu.HEAT, found)
    assert "NOT MEASURED here: needs 2 GPUs" in piece["html"] and piece["kind"] == "gap"
    assert "python -m rlkernel tp-swiglu --mode catalogue --nproc 2,4" in piece["html"]
    assert "<img" not in piece["html"]


def test_a_gap_is_filled_by_a_published_record(monkeypatch, results):
    record(results / "published" / "tp-swiglu" / "gpu", environment=GPUS)
    monkeypatch.setattr(records, "environment", lambda: {"gpus": []})
    found = evidence.get("tp-swiglu", gpus=2, mode="catalogue")
    for call, kind in ((show.verdict, "verdict"), (show.topology, "table")):
        line, piece = displayed(call, found, *(("A claim",) if kind == "verdict" else ()))
        assert line["kind"] == "elsewhere" and "NOT MEASURED" not in line["html"]
        assert piece["kind"] == kind and "Published, 2x Some GPU" in piece["html"]
    line, figure = displayed(show.figure, tp_swiglu.HEAT, found)
    assert line["text"] == "Measured on 2x Some GPU, below; here: needs 2 GPUs."
    assert "Published, 2x Some GPU" in figure["html"]


def test_coverage(found):
    (piece,) = displayed(show.coverage, found)
    for text in ("COVERED", "one &lt;block&gt;", "NOT COVERED", "another"):
        assert text in piece["html"]


def test_several_records_in_one_drawing_with_every_source(results):
    one, two = (
        record(results / "tp-swiglu" / n, rows=[synthetic.row(p)]) for n, p in (("a", 2), ("b", 4))
    )
    found = [Evidence("tp-swiglu", {}, one), Evidence("tp-swiglu", {}, two)]
    (piece,) = displayed(show.together, tp_swiglu.HEAT, found, main=True)
    assert piece["html"].count("<img") == 1 and piece["main"]
    assert "results/tp-swiglu/a" in piece["html"] and "results/tp-swiglu/b" in piece["html"]
    assert "P = 2" in piece["text"] and "P = 4" in piece["text"]
    gap, piece = displayed(
        show.together, tp_swiglu.HEAT, [*found, Evidence("audit", {}, None, missing="nothing")]
    )
    assert gap["kind"] == "gap" and piece["html"].count("<img") == 1
    assert len(displayed(show.together, tp_swiglu.HEAT, [Evidence("audit", {}, None)])) == 1


def test_a_listing_shows_the_chosen_parts(tmp_path):
    (tmp_path / "a.py").write_text(
        "import os\n\n\ndef one():\n    return 1 < 2\n\n\nclass Two:\n    pass\n"
    )
    (piece,) = displayed(show.listing, tmp_path / "a.py", "one")
    assert piece["text"] == "def one():\n    return 1 < 2" and "1 &lt; 2" in piece["html"]
    (piece,) = displayed(show.listing, tmp_path / "a.py")
    assert "import os" in piece["text"] and "class Two" in piece["text"]


def test_a_sentence_in_a_table_wraps():
    html = show.table_html(["a", "b"], [["word", "a sentence " * 10]])
    assert html.count('class="long"') == 1


# ---- widgets -------------------------------------------------------------------------------------


def test_headless_shows_the_default_case_as_a_figure(found, monkeypatch):
    monkeypatch.setenv("RLKERNEL_HEADLESS", "1")
    (piece,) = displayed(widgets.browse, tp_swiglu.HEAT, found)
    assert piece["kind"] == "figure" and "P = 2: missing forward reduce" in piece["html"]
    (piece,) = displayed(widgets.launch_button, "tp-swiglu", {"nproc": (2,)})
    assert piece["text"] == "python -m rlkernel tp-swiglu --nproc 2"


def test_what_was_measured_elsewhere_can_be_browsed(found, monkeypatch):
    there = Evidence("tp-swiglu", {}, None, (found.local,), "needs 2 GPUs")
    monkeypatch.setenv("RLKERNEL_HEADLESS", "1")
    line, piece = displayed(widgets.browse, tp_swiglu.HEAT, there)
    assert line["kind"] == "elsewhere" and "Published, 2-core" in piece["html"]
    menus, drawn = widgets.menus(tp_swiglu.HEAT, there)
    assert "Published, 2-core" in drawn(**{n: m.value for n, m in menus.items()})


def test_choices_and_selection(found):
    rows = found.local.rows
    assert widgets.choices(rows) == {
        "P": ["2", "4"],
        "dtype": ["fp32"],
        "fault": ["none", "missing_forward_reduce", "missing_backward_reduce"],
        "seed": ["11", "12"],
    }
    chosen = {"P": "4", "dtype": "fp32", "fault": "missing_backward_reduce", "seed": "12"}
    (row,) = widgets.select(rows, chosen)
    assert row["case"]["grid"]["tp"] == 4 and row["case"]["seed"] == 12
    assert widgets.select(rows, chosen | {"seed": "99"}) == []


def test_a_choice_redraws_the_figure(found, monkeypatch):
    """With a front end: four menus; another choice shows another case."""
    monkeypatch.delenv("RLKERNEL_HEADLESS", raising=False)
    menus, drawn = widgets.menus(tp_swiglu.HEAT, found)
    assert list(menus) == list(widgets.BROWSED)
    assert "P = 2: missing forward reduce" in drawn(**{n: m.value for n, m in menus.items()})
    menus["fault"].value = "none"
    html = drawn(**{n: m.value for n, m in menus.items()})
    assert "no fault: within its limits" in html and "<img" in html


@pytest.fixture
def audited(results):
    rows = synthetic.audits()
    return Evidence("audit", {}, record(results / "audit" / "a", rows, experiment="audit"))


THREE = ("block", "P", "fault")


def test_the_case_that_was_asked_for_stands_first(audited, monkeypatch):
    monkeypatch.setenv("RLKERNEL_HEADLESS", "1")
    start = {"block": "gqa", "fault": "stale_input_grad_reduce"}
    (piece,) = displayed(widgets.browse, audit.FINDINGS, audited, THREE, start)
    assert "norm.grad is wrong" in piece["text"]
    (piece,) = displayed(widgets.browse, audit.FINDINGS, audited, THREE, {"block": "none"})
    assert "leave is wrong" in piece["text"]  # the first that failed


def test_a_menu_offers_what_fits_those_in_front_of_it(audited, monkeypatch):
    monkeypatch.delenv("RLKERNEL_HEADLESS", raising=False)
    menus, drawn = widgets.menus(audit.FINDINGS, audited, THREE, {"block": "swiglu", "P": "4"})
    assert list(menus["fault"].options) == ["none", "missing_forward_reduce"]
    menus["P"].value = "2"
    assert "missing_data_reduce" in menus["fault"].options
    menus["block"].value = "torch-gqa"
    chosen = {name: menu.value for name, menu in menus.items()}
    assert chosen == {"block": "torch-gqa", "P": "2", "fault": "row_style_left_out"}
    assert "down is wrong" in drawn(**chosen)


def test_the_chosen_case_is_run_again_with_another_seed(audited, monkeypatch):
    monkeypatch.delenv("RLKERNEL_HEADLESS", raising=False)
    asked = []
    monkeypatch.setattr(evidence, "get", lambda name, **p: asked.append((name, p)) or audited)
    menus, _ = widgets.menus(audit.FINDINGS, audited, THREE, {"block": "gqa"})
    seed, button, _output = widgets.anew(audit.FINDINGS, "audit", menus)
    seed.value = 5
    button.click()
    case = {"block": "gqa", "nproc": "4", "fault": "stale_input_grad_reduce", "seed": 5}
    assert asked == [("audit", case)]


def test_the_button_measures_and_shows_the_verdict(found, monkeypatch):
    monkeypatch.delenv("RLKERNEL_HEADLESS", raising=False)
    asked = []
    monkeypatch.setattr(evidence, "get", lambda name, **p: asked.append((name, p)) or found)
    button, output = widgets.button("tp-swiglu", {"nproc": (2,)})
    button.click()
    assert asked == [("tp-swiglu", {"nproc": (2,), "force": True})], "anew, not from a record"
    assert output is not None


# ---- what stands once, and what is computed on the page ------------------------------------------


def test_a_second_figure_of_the_same_gap_needs_no_second_box(results, monkeypatch):
    record(results / "published" / "tp-swiglu" / "gpu", environment=GPUS)
    monkeypatch.setattr(records, "environment", lambda: {"gpus": []})
    found = evidence.get("tp-swiglu", gpus=2, mode="catalogue")
    (figure,) = displayed(show.figure, tp_swiglu.HEAT, found, gap=False)
    assert figure["kind"] == "figure"


def test_a_table_says_whose_numbers_it_shows_and_an_empty_one_is_not_there(found):
    (piece,) = displayed(show.table, found, ["n"], [["1"]])
    assert "Measured here" in piece["html"]
    elsewhere = Evidence("tp-swiglu", {}, None, (found.local,))
    (piece,) = displayed(show.table, elsewhere, ["n"], [["1"]])
    assert "Published, 2-core" in piece["html"] and "Measured here" not in piece["html"]
    assert displayed(show.table, found, ["n"], []) == []


def test_only_those_rows_may_be_chosen(found, monkeypatch):
    monkeypatch.setenv("RLKERNEL_HEADLESS", "1")
    right = lambda rows: [r for r in rows if r["passed"]]  # noqa: E731
    (piece,) = displayed(widgets.browse, tp_swiglu.HEAT, found, only=right)
    assert "first wrong" not in piece["text"] and "Measured here" in piece["html"]


OFFERED = {"m": (1, 2), "contract": ("chain", "tree8.bf16")}


def by_hand(m: int, contract: str) -> list[dict]:
    return products.look(contract, m)


def test_what_is_computed_on_the_page_says_so(monkeypatch):
    monkeypatch.setenv("RLKERNEL_HEADLESS", "1")
    (piece,) = displayed(widgets.live, bits.BITS, by_hand, OFFERED, {"m": 33})
    assert (
        piece["kind"] == "drawing" and "up to M = 33 against the row alone: chain" in piece["text"]
    )
    assert show.COMPUTED in piece["html"] and "results/" not in piece["html"]


def test_another_choice_computes_anew(monkeypatch):
    monkeypatch.delenv("RLKERNEL_HEADLESS", raising=False)
    menus, drawn = widgets.live_menus(bits.BITS, by_hand, OFFERED, {"m": 2, "contract": "chain"})
    assert {name: menu.value for name, menu in menus.items()} == {"m": 2, "contract": "chain"}
    assert list(menus["contract"].options) == ["chain", "tree8.bf16"]
    html = drawn(m=1, contract="tree8.bf16")
    assert "up to M = 1 against the row alone: tree8.bf16" in html and show.COMPUTED in html
