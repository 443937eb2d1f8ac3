"""What is handed in: whole, from fresh records only, equal for equal ones, and it runs elsewhere.

One submission is made for all tests, with the demo of this machine as its only record.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest

from rlkernel import records
from rlkernel.experiments import matrix
from rlkernel.pages import raw, required, submission
from tests.figures import exchanges
from tests.pages.test_browser import faults
from tests.pages.test_report import Page
from tests.pages.test_show import GPUS, record

CHAPTERS = """Correctness, Throughput, Strategy, Fusion boundaries, Pipeline, Dependencies,
Topology, Within a node, Achieved overlap, Bottlenecks, Scaling, Buffer reuse, Synchronisation,
Limitations, Unsuccessful approaches, Records"""
PLAN = """Parallel strategy, Fusion boundaries, Pipeline, Dependencies, Correctness plan, Topology,
Baseline, Methodology"""


PLACES = ("RLKERNEL_RESULTS", "RLKERNEL_PUBLISHED")


def command(*words: str, results, cwd) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "rlkernel", "submission", *words], cwd=cwd, text=True,
        env=os.environ | dict.fromkeys(PLACES, str(results)), capture_output=True, timeout=400,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """folder, results, and `unpacked`: the ZIP in an empty folder, as a stranger has it."""
    root = tmp_path_factory.mktemp("submission")
    done = command(results=root / "results", cwd=submission.report.ROOT)
    assert done.returncode == 0, done.stderr
    folder = root / "results" / "submission"
    assert done.stdout.strip() == str(folder)
    with zipfile.ZipFile(folder / submission.ZIP) as book:
        book.extractall(root / "unpacked")
    home = root / "unpacked" / "results" / "published" / "a2a-ffn" / submission.DEMO
    return SimpleNamespace(
        folder=folder, results=root / "results", unpacked=root / "unpacked", demo=home
    )


pytestmark = pytest.mark.timeout(600)


def text(made, name: str) -> str:
    return (made.folder / f"{name}.html").read_text(encoding="utf-8")


def lines(words: str) -> list[str]:
    return [word.strip() for word in words.replace("\n", " ").split(",")]


# ---- the documents -------------------------------------------------------------------------------


@pytest.mark.parametrize("name, chapters", [("report", CHAPTERS), ("proposal", PLAN)])
def test_a_document_is_whole_and_alone(made, name, chapters):
    page = Page(text(made, name))
    heads = re.findall(r"<h2[^>]*>([^<]+)", text(made, name))
    for chapter in lines(chapters):
        assert any(head.startswith(chapter) for head in heads), chapter
    assert [a for a in page.addresses if not a.startswith(("#", "data:"))] == []
    assert "partial milestone: two real nodes NOT COVERED" in page.text
    assert "PIECE" not in page.text and "{{" not in page.text


def test_the_report_s_numbers_are_the_record_s(made):
    page, demo = Page(text(made, "report")), records.read(made.demo)
    assert f"results/published/a2a-ffn/{submission.DEMO}" in page.text
    for row in demo.rows:
        times = row["result"]["times"]["documented"]
        for line in times["schedules"].values():
            assert f"{line['slowest']['median_us']:,.1f}" in page.text
            assert f"{line['tokens_per_s']:,.0f}" in page.text and f"{line['flops']:,}" in page.text
        assert f"{row['result']['seen']['none'][0]['span_us']:,.1f}" in page.text
    passed = len(demo.run["verdict"]["checks"])
    assert f"{passed} of {passed} checks hold" in page.text
    assert sum(alt.startswith("Critical path") for alt in page.alts) == 1


def test_what_no_record_holds_is_a_box_with_its_command(made):
    page = Page(text(made, "report"))
    for need in required.NEEDS:
        assert f"NOT MEASURED: {need.name}" in page.text and need.command in page.text, need.name


def test_the_proposal_measures_nothing(made):
    prose = re.sub(r"<style>.*?</style>", "", text(made, "proposal"), flags=re.S)
    page = Page(prose)
    assert "img" not in page.tags and not re.search(r"\d\s?(µs|ms|TFLOP|GB|%)", page.text)


@pytest.mark.browser
@pytest.mark.parametrize("width", (1280, 400))
def test_in_a_browser(made, chromium, width):
    for name, pictures in (("report", 4), ("proposal", 0)):
        seen = chromium.look(made.folder / f"{name}.html", width, dark=width == 400)
        assert faults(seen) == [] and len(seen.pictures) >= pictures, name


# ---- the ZIP -------------------------------------------------------------------------------------


def test_the_zip_has_what_was_asked_for_and_nothing_else(made):
    with zipfile.ZipFile(made.folder / submission.ZIP) as book:
        names = book.namelist()
        assert names == sorted(names) and {i.date_time for i in book.infolist()} == {
            (1980, 1, 1, 0, 0, 0)
        }
    demo = f"results/published/a2a-ffn/{submission.DEMO}"
    wanted = {
        "README.md", "rlkernel/plugin.py", "rlkernel/overlap/pipeline.py", "Makefile",
        "env/run_prod_local.sh", "env/run_prod_cross.sh", "env/slurm.sbatch", "requirements.txt",
        "rlkernel/pages/template/rlkernel/conf.json", "tests/overlap/test_plugin.py",
        f"configurations/a2a-ffn/{submission.DEMO}.json", "configurations/matrix.json",
        f"correctness/a2a-ffn/{submission.DEMO}.txt", f"{demo}/run.json", f"{demo}/samples.jsonl",
    }  # fmt: skip
    assert wanted <= set(names), wanted - set(names)
    assert len([n for n in names if n.startswith(f"{demo}/trace/")]) == 4
    assert not [n for n in names if re.search(r"(^|/)(\.git|\.venv|__pycache__)", n)]
    assert not [n for n in names if n.startswith("results/") and not n.startswith(demo)]
    configuration = json.loads((made.unpacked / "configurations" / "matrix.json").read_text())
    assert len(configuration) == len(matrix.FULL)
    log = (made.unpacked / "correctness" / "a2a-ffn" / f"{submission.DEMO}.txt").read_text()
    assert log.startswith("$ python -m rlkernel a2a-ffn") and "exit code 0" in log
    assert len(re.findall(r"^holds ", log, re.M)) == len(
        records.read(made.demo).run["verdict"]["checks"]
    )
    assert str(made.results) not in log


def test_equal_records_give_equal_bytes(made, tmp_path):
    again = command("--out", str(tmp_path / "again"), results=made.results, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    for path in made.folder.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def check_sums(folder) -> int:
    done = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=folder, text=True,
                          capture_output=True)  # fmt: skip
    return done.returncode


def test_an_edit_on_the_way_is_noticed(made):
    assert check_sums(made.folder) == 0 and check_sums(made.unpacked) == 0
    cases = made.demo / "cases.jsonl"
    whole = cases.read_text()
    try:
        cases.write_text(whole.replace('"median_us": ', '"median_us": 1', 1))
        assert check_sums(made.unpacked) != 0
    finally:
        cases.write_text(whole)


def test_a_stranger_follows_the_readme(made):
    """Its first block, as it stands; only the environment that it would build is this one's."""
    readme = (made.unpacked / "README.md").read_text()
    (block,) = re.findall(r"## Without a GPU.*?```bash\n(.*?)```", readme, re.S)
    setup, *steps = block.splitlines()
    assert setup == "make setup" and len(steps) == 6
    python = made.unpacked / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    hidden = ("PYTHONPATH", *PLACES)
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(steps)], cwd=made.unpacked, env=env, text=True,
        capture_output=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    runs = [r for n in ("a2a-ffn", "preflight") for r in records.find(n, made.unpacked / "results")]
    assert len(runs) == 5 and all(r.passed for r in runs)
    assert all(r.run["git"] is None for r in runs), "it ran the repository, not what was unpacked"
    assert {r.source for r in runs if r.experiment == "a2a-ffn"} == {records.read(made.demo).source}


def test_every_command_of_the_readme_is_there(made):
    readme = (made.unpacked / "README.md").read_text()
    for name in re.findall(r"\b(?:env|rlkernel|configurations)/[\w./-]+\w", readme):
        assert (made.unpacked / name).exists(), name
    assert "bash scripts/run_prod_local.sh" in readme and "research_topic" not in readme


# ---- what is refused -----------------------------------------------------------------------------


@pytest.fixture
def spoilt(made, tmp_path, monkeypatch):
    """spoilt(file, old, new): the demo's copy is published as `old` in results of its own, edited;
    -> what the command says and ends with."""
    results = tmp_path / "results"
    home = results / "published" / "a2a-ffn" / "old"
    for name in PLACES:
        monkeypatch.setenv(name, str(results))

    def edit(file: str, pattern: str, new: str, capsys):
        home.mkdir(parents=True)
        for path in made.demo.glob("*.json*"):
            whole = path.read_text()
            if path.name == file:
                assert re.search(pattern, whole)
                whole = re.sub(pattern, new, whole, count=1)
            (home / path.name).write_text(whole)
        (results / "submission").mkdir()
        (results / "submission" / "earlier").write_text("stays")
        code = submission.main([])
        assert [p.name for p in (results / "submission").iterdir()] == ["earlier"]
        return code, capsys.readouterr().err

    return edit


def test_a_stale_record_is_refused_by_name(spoilt, capsys):
    code, said = spoilt("run.json", r'"source": "\w{8}', '"source": "00000000', capsys)
    assert code == 1 and "a2a-ffn/old is stale" in said
    assert "python -m rlkernel a2a-ffn" in said and "--demo" in said


@pytest.mark.parametrize(
    "file, pattern, new, what",
    [
        ("cases.jsonl", r'("slowest": \{"median_us": )', r"\g<1>1", "median us"),
        ("cases.jsonl", r'("ratio": \{"median": )', r"\g<1>1", "ratio"),
        ("cases.jsonl", r'("hidden": \{"median": )-?', r"\g<1>77", "hidden"),
        ("samples.jsonl", r'("us": )(\d+)(.*"dropped": false)', r"\g<1>9\g<2>\g<3>", "us"),
    ],
    ids=["median", "ratio", "hidden", "sample"],
)
def test_a_number_that_its_samples_do_not_give_is_refused(spoilt, file, pattern, new, what, capsys):
    code, said = spoilt(file, pattern, new, capsys)
    assert code == 1 and "a2a-ffn/old contradicts its raw samples" in said and what in said


def test_the_record_itself_is_taken(made):
    found = records.read(made.demo)
    assert required.refused([found]) == [] and raw.covers(found) and found.samples
    assert raw.covers(records.Record(found.path.parent, found.run, found.rows)) is False


# ---- which record answers what -------------------------------------------------------------------


def gpu(folder, *rows, **run) -> records.Record:
    facts = {"experiment": "a2a-ffn", "device": "cuda", "environment": GPUS, "backend": "nccl"}
    return record(folder, list(rows), **{**facts, **run})


def row(backward=False, **more) -> dict:
    plain = {"comm_scale": 1, "compute_scale": 1, "comp_only": False}
    return exchanges.row(backward=backward, **{**plain, **more})


def test_each_record_answers_its_own_need(tmp_path):
    def answered(name: str, *rows, **run) -> list[str]:
        found = gpu(tmp_path / name, *rows, **run)
        return [need.name for need in required.NEEDS if need.answers([found])]

    forward, back = "the default workload, two GPUs, forward", "and backward"
    assert answered("a", row()) == [forward]
    assert answered("b", row(backward=True)) == [f"{forward} {back}"]
    assert answered("c", row(comm_scale=2)) == ["bound by communication (comm-scale 2), two GPUs"]
    assert answered("d", row(timed=(), traced=False)) == []
    assert answered("e", row(batch=4)) == [] and answered("f", row(), device="cpu") == []
    apart = {"topology": {"agents": "agents started apart, one for each of NNODES"}}
    (emulated,) = answered("g", row(), **apart)
    assert emulated.startswith("two emulated nodes")
    sixteen = row(ranks=16, batch=2)
    assert answered("h", sixteen, device="cpu", **apart) == ["16 ranks under two agents, CPU"]


def test_records_of_gpus_and_nodes_fill_their_chapters(tmp_path):
    """Made up: a fused kernel on one host, and emulated nodes where traces say nothing."""
    rows = [row(backward=way, timed=("documented", "hot"), check_correctness="bitwise")
            for way in (False, True)]  # fmt: skip
    across = row(gains={"kernel/4": 1.1}, timed=("hot",))
    for one in (*rows, across):
        for state in one["result"]["times"].values():
            for line in (state["none"], *state["schedules"].values()):
                line["flops"] = 1
        for line in one["result"]["lines"]:
            line |= {"forward": {"mismatches": 0, "elements": 163_840}, "rung": "fused"}
    times = across["result"]["times"]["hot"]["schedules"]["kernel/4"]
    times["reached"] = {
        "time": {"mean": 0.83, "ci95": 0.02, "why": ""},
        "trace": {"mean": None, "ci95": None, "why": "4 samples"},
    }
    across["result"]["topology"] = {"kind": "emulated nodes on one host (NCCL_HOSTID)"}
    facts = {"argv": ["python"], "finished": "2026-01-02T00:00:00Z"}
    facts |= {"not_covered": ["an optimizer"]}
    found = [gpu(tmp_path / "one", *rows, **facts), gpu(tmp_path / "two", across, **facts)]
    page = Page(submission._document("report", found))
    path = exchanges.sequential()["critical"]
    for text in (
        "What kernel was: fused in a2a-ffn/one, a2a-ffn/two.", "an optimizer", "0 / 163,840",
        "none / kernel/4 = 1.170 of at most", "+0.83 ± 0.02", "NOT MEASURED: 4 samples",
        f"{path['gemm'] / sum(path.values()):.0%} product", "not measured: two real nodes",
        "2x Some GPU",
    ):  # fmt: skip
        assert text in " ".join(page.text.split()), text
    for need in (required.FORWARD, required.BACKWARD, required.EMULATED):
        assert f"NOT MEASURED: {need.name}" not in page.text
    assert f"NOT MEASURED: {required.REAL_NODES.name}" in page.text
    for start in ("Times of one", "Timelines of the", "Critical path", "Share of the comm"):
        assert sum(alt.startswith(start) for alt in page.alts) == 2, start


@pytest.mark.parametrize("kind, label", [
    ("real nodes", ""), ("emulated nodes on one host (NCCL_HOSTID)", required.PARTIAL),
    ("one agent on one host", required.PARTIAL),
])  # fmt: skip
def test_only_two_machines_end_the_partial_milestone(tmp_path, kind, label):
    across = row()
    across["result"]["topology"] = {"kind": kind}
    found = gpu(tmp_path / "a", across)
    assert required.milestone([found]) == label
    assert required.stands(found) == kind


def test_help_says_what_is_refused_and_what_is_not(capsys):
    with pytest.raises(SystemExit):
        submission.main(["--help"])
    said = capsys.readouterr().out
    assert "older than the code" in said and "NOT MEASURED box" in said
