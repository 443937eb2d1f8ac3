"""What a notebook displays, and what its widgets do with and without somebody in front of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkernel import records
from rlkernel.figures import tp_swiglu
from rlkernel.pages import evidence, show, widgets
from rlkernel.pages.evidence import Evidence
from tests.figures import synthetic

CHECKS = [
    {"name": "P=2: <equivalent>", "passed": True, "value": 1.5e-8, "limit": 1e-7},
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
    assert "<code>results/tp-swiglu/a</code>" in piece["html"] and "<table>" in piece["html"]
    assert piece["text"].startswith("Heat map")


def test_an_old_record_is_marked_and_a_fresh_one_is_not(found, results):
    (piece,) = displayed(show.figure, tp_swiglu.HEAT, found)
    assert "stale: the code has changed since" in piece["html"]
    fresh = record(results / "tp-swiglu" / "b", source=evidence.source("tp-swiglu"))
    (piece,) = displayed(show.figure, tp_swiglu.HEAT, Evidence("tp-swiglu", {}, fresh))
    assert "stale" not in piece["html"]


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
    gap, figure = displayed(show.figure, tp_swiglu.HEAT, found)
    assert gap["kind"] == "gap" and "Published, 2x Some GPU" in figure["html"]


def test_coverage(found):
    (piece,) = displayed(show.coverage, found)
    for text in ("COVERED", "one &lt;block&gt;", "NOT COVERED", "another"):
        assert text in piece["html"]


# ---- which record is given -----------------------------------------------------------------------


def test_a_folder_of_records_gives_each_part_its_own(results):
    home = results / "tp-swiglu"
    record(home / "old")
    record(home / "new", started="2026-02-01T00:00:00Z")
    record(home / "real", parameters={"mode": "equivalence", "size": "realistic"})
    for wanted, asked in (("new", {"mode": "catalogue"}), ("real", {"size": "realistic"})):
        found = evidence.get("tp-swiglu", run=str(home), **asked)
        assert found.local.path.name == wanted
    none = evidence.get("tp-swiglu", run=str(home), mode="inspect")
    assert none.local is None and none.missing == "results/tp-swiglu holds no record of this part"


def test_a_run_counts_from_the_folder_of_results(results, monkeypatch, tmp_path):
    record(results / "tp-swiglu" / "a")
    monkeypatch.chdir(Path(__file__).parent)
    found = evidence.get("tp-swiglu", run="results/tp-swiglu/a", mode="catalogue")
    assert found.local.path.name == "a"
    with pytest.raises(records.RecordError, match="no record at results/nothing"):
        evidence.get("tp-swiglu", run="results/nothing")


# ---- widgets -------------------------------------------------------------------------------------


def test_headless_shows_the_default_case_as_a_figure(found, monkeypatch):
    monkeypatch.setenv("RLKERNEL_HEADLESS", "1")
    (piece,) = displayed(widgets.browse, tp_swiglu.HEAT, found)
    assert piece["kind"] == "figure" and "P = 2: missing forward reduce" in piece["html"]
    (piece,) = displayed(widgets.launch_button, "tp-swiglu", {"nproc": (2,)})
    assert piece["text"] == "python -m rlkernel tp-swiglu --nproc 2"


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
    assert list(menus) == list(widgets.AXES)
    assert "P = 2: missing forward reduce" in drawn(**{n: m.value for n, m in menus.items()})
    menus["fault"].value = "none"
    html = drawn(**{n: m.value for n, m in menus.items()})
    assert "no fault: within its limits" in html and "<img" in html


def test_the_button_measures_and_shows_the_verdict(found, monkeypatch):
    monkeypatch.delenv("RLKERNEL_HEADLESS", raising=False)
    asked = []
    monkeypatch.setattr(evidence, "get", lambda name, **p: asked.append((name, p)) or found)
    button, output = widgets.button("tp-swiglu", {"nproc": (2,)})
    button.click()
    assert asked == [("tp-swiglu", {"nproc": (2,), "force": True})], "anew, not from a record"
    assert output is not None
