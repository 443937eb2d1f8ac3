"""Which record answers a question of a notebook."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkernel import records
from rlkernel.pages import evidence
from tests.figures import exchanges, synthetic
from tests.pages.test_show import GPUS, record


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


def test_a_record_of_the_cpu_does_not_answer_for_gpus(results):
    home = results / "tp-swiglu"
    record(home / "cpu", device="cpu")
    found = evidence.get("tp-swiglu", run=str(home), gpus=2, mode="catalogue")
    assert found.local is None and "no record of this part" in found.missing
    record(home / "gpu", device="cuda")
    found = evidence.get("tp-swiglu", run=str(home), gpus=2, mode="catalogue")
    assert found.local.path.name == "gpu"


def test_the_same_question_about_another_block_is_another_record(results):
    home, rows = results / "audit", synthetic.audits()
    for name, blocks in (("ours", ["swiglu", "gqa"]), ("torchs", ["torch-swiglu", "torch-gqa"])):
        record(home / name, rows, experiment="audit", parameters={"block": blocks, "fault": "all"})
    found = evidence.get("audit", run=str(home), fault="all", nproc=(2,), block=("swiglu", "gqa"))
    assert found.local.path.name == "ours"


def test_a_run_counts_from_the_folder_of_results(results, monkeypatch, tmp_path):
    record(results / "tp-swiglu" / "a")
    monkeypatch.chdir(Path(__file__).parent)
    found = evidence.get("tp-swiglu", run="results/tp-swiglu/a", mode="catalogue")
    assert found.local.path.name == "a"
    with pytest.raises(records.RecordError, match="no record at results/nothing"):
        evidence.get("tp-swiglu", run="results/nothing")


def test_published_records_stay_when_runs_go_elsewhere(results, monkeypatch, tmp_path):
    """Found beside what was measured there, and by the name that a page gives them."""
    monkeypatch.setenv("RLKERNEL_PUBLISHED", str(tmp_path / "checkout"))
    there = record(tmp_path / "checkout" / "published" / "tp-swiglu" / "gpu", environment=GPUS)
    local = record(results / "tp-swiglu" / "a")
    found = evidence.get("tp-swiglu", run=str(local.path), mode="catalogue")
    names = [evidence.place(one) for one in found.records]
    assert names == ["results/tp-swiglu/a", "results/published/tp-swiglu/gpu"]
    monkeypatch.chdir(Path(__file__).parent)
    given = evidence.get("tp-swiglu", run=names[1], mode="catalogue")
    assert given.local.path.resolve() == there.path.resolve()


def test_a_record_answers_for_the_parts_that_it_has(results, monkeypatch):
    monkeypatch.setattr(records, "environment", lambda: {"gpus": []})
    for name, what in {"all": ["census", "gemm", "ffn"], "census": ["census"]}.items():
        folder, asked = results / "published" / "det-ffn" / name, {"size": "qwen3", "what": what}
        record(folder, experiment="det-ffn", parameters=asked, environment=GPUS)

    # Asked for the default parts, but its layout made all its cases those of the layer.
    folder = results / "published" / "det-ffn" / "layer"
    asked = {"size": "qwen3", "what": ["census", "gemm", "ffn"]}
    told = {"experiment": "det-ffn", "parameters": asked, "environment": GPUS}
    record(folder, **told, cases=[{"parameters": {"what": "layer"}}])

    def answered(*what: str) -> set[str]:
        found = evidence.get("det-ffn", gpus=1, size="qwen3", what=what)
        return {one.path.name for one in found.records}

    assert answered("census") == {"all", "census"}
    assert answered("gemm", "ffn") == answered("census", "gemm") == {"all"}
    assert answered("layer") == {"layer"}


def test_of_answers_only_those_with_times_of_a_workload(results):
    home = results / "a2a-ffn"

    def made(name: str, **more):
        row = exchanges.row({"kernel/4": 1.2}, **more)
        return record(home / name, [row], experiment="a2a-ffn", device="cuda", environment=GPUS)

    usual, small = made("usual"), made("small", batch=4)
    untimed = made("untimed", timed=())
    found = evidence.Evidence("a2a-ffn", {}, small, (untimed, usual), "")
    told = evidence.timed(found, batch=512, dim=1280)
    assert told.local is None and [r.path.name for r in told.published] == ["usual"]
    assert told.missing == "results/a2a-ffn/small holds no times at batch 512, dim 1280"
    assert evidence.timed(found, batch=4).local is small
    assert not evidence.timed(found, batch=4, dim=64).records
