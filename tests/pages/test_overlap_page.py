"""The page about hidden communication, and how its two questions, CPU and GPUs, are kept apart."""

from __future__ import annotations

import re

import pytest

from rlkernel import records
from rlkernel.figures import a2a_ffn
from rlkernel.pages import evidence, widgets
from rlkernel.pages.evidence import Evidence
from tests.figures import exchanges
from tests.pages.test_report import Page, read
from tests.pages.test_show import displayed, record


def test_the_page_shows_what_it_must(built):
    page = Page(read(built.folder, "07_overlap"))
    for text in (
        "Every schedule gives the bits of the sequential call",
        "with-sm/4: whole batch",
        "chunks: kernel, 4 token slices",
        "partial milestone",
        "ui.perfetto.dev",
        "NOT COVERED",
    ):
        assert text in page.text, text
    alts = {alt.split(".")[0]: alt for alt in page.alts}
    for start in (
        "Timelines of the schedules, slowest rank of each: none",
        "Share of the communication that is hidden, with its sign",
        "Critical path of each schedule by kind",
        "T serial / T overlap and hidden fraction by chunks",
    ):
        assert any(alt.startswith(start) for alt in alts.values()), start
    hidden = alts["Share of the communication that is hidden, with its sign"]
    number = r"[+-]\d+\.\d\d(?: \(noise: . \S+\))?"
    assert re.findall(rf"estimate {number}, trace \d\.\d\d", hidden), hidden
    timelines = next(alt for alt in page.alts if alt.startswith("Timelines"))
    assert re.search(r"none: [\d,]+ µs, hidden 0%", timelines), timelines


def test_a_call_in_order_hides_nothing_and_chunks_hide_something(built):
    """Read from the record behind the page: what the traces of two real ranks say."""
    (found,) = [r for r in records.find("a2a-ffn", built.results) if r.run["parameters"]["trace"]]
    seen = found.rows[0]["result"]["seen"]
    assert all(rank["hidden"] < 0.01 for rank in seen["none"])
    assert all(rank["hidden"] > 0.01 for rank in seen["with-sm/4"])
    assert {len(ranks) for ranks in seen.values()} == {2}


def test_what_needs_gpus_is_a_box_with_its_command(built):
    if records.environment()["gpus"]:
        pytest.skip("this machine has GPUs: there is no gap to show")
    _, *gaps = Page(read(built.folder, "07_overlap")).text.split("NOT MEASURED here: needs 2 GPUs")
    wanted = "python -m rlkernel a2a-ffn --device cuda --overlap with-sm,sm-free,kernel"
    assert len(gaps) >= 2 and all(wanted in gap[:300] for gap in gaps)
    assert sum("--backward true" in gap[:300] for gap in gaps) == 1


def asked(**parameters) -> dict:
    return {"run": parameters.pop("run"), "overlap": ("with-sm",), "batch_size": 4, **parameters}


def test_a_record_of_gpus_does_not_answer_where_the_cpu_was_asked_for(results):
    home = results / "a2a-ffn"
    for name, device in (("cpu", "cpu"), ("gpu", "cuda")):
        facts = {"experiment": "a2a-ffn", "device": device, "parameters": {"backward": False}}
        started = f"2026-01-0{1 + (name == 'gpu')}T00:00:00Z"
        record(home / name, exchanges.cpu(), started=started, **facts)
    for device, gpus, wanted in (("cpu", 0, "cpu"), ("cuda", 2, "gpu")):
        found = evidence.get("a2a-ffn", **asked(run=str(home), device=device, gpus=gpus))
        assert found.local.path.name == wanted
    found = evidence.get("a2a-ffn", **asked(run=str(home), device="cpu", backward=True))
    assert found.local is None and "--backward true" in found.command


def test_one_schedule_is_chosen_and_drawn_beside_none(results, monkeypatch):
    monkeypatch.setenv("RLKERNEL_HEADLESS", "1")
    local = record(results / "a2a-ffn" / "a", exchanges.cpu(), experiment="a2a-ffn")
    found, axes = Evidence("a2a-ffn", {}, local), ("EP", "direction", "schedule")
    chosen = {"schedule": "kernel/2"}
    (piece,) = displayed(widgets.browse, a2a_ffn.TIMELINES, found, axes, chosen, only=a2a_ffn.apart)
    assert "kernel, 2 chunks" in piece["text"] and "with-sm" not in piece["text"]
    monkeypatch.delenv("RLKERNEL_HEADLESS")
    single = records.Record(local.path, local.run, a2a_ffn.apart(local.rows))
    menus, drawn = widgets.menus(a2a_ffn.TIMELINES, Evidence("a2a-ffn", {}, single), axes)
    assert list(menus["schedule"].options) == ["with-sm/2", "kernel/2"]
    assert {name: menu.value for name, menu in menus.items()} == {
        "EP": "2", "direction": "forward", "schedule": "with-sm/2",
    }  # fmt: skip
    assert "kernel, 2 chunks" in drawn(EP="2", direction="forward", schedule="kernel/2")
