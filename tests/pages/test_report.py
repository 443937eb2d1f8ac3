"""The report: every notebook, its page, the index; kept when nothing changed, honest when not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from types import SimpleNamespace

import nbformat
import pytest

from rlkernel import records
from rlkernel.experiments.case import UsageError
from rlkernel.pages import evidence, render, report
from rlkernel.run import launch

PAGES = ("index", "00_start", "01_tp_swiglu", "02_tp_gqa", "03_which_sum", "04_determinism")
PAGES += ("05_ffn_cost", "06_ws2_two_nodes", "07_overlap", "08_cross_node")
TIME = re.compile(r"<time>[^<]*</time>")


class Page(HTMLParser):
    """Addresses, text alternatives and text of a page."""

    def __init__(self, html: str):
        super().__init__()
        self.addresses, self.alts, self.text, self.tags = [], [], "", []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append(tag)
        self.addresses += [found[n] for n in ("src", "href", "srcset", "action") if n in found]
        if tag == "img":
            self.alts.append(found.get("alt", ""))

    def handle_data(self, data):
        self.text += data + ("" if data.isspace() else "\n")


def read(folder, name) -> str:
    return (folder / f"{name}.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_and_alone(built, name):
    html = read(built.folder, name)
    page = Page(html)
    assert len(html.encode()) < 2_000_000
    foreign = [a for a in page.addresses if re.match(r"(https?:|//|file:|/)", a)]
    assert foreign == [] and "script" not in page.tags and "url(" not in html
    assert page.alts and all(len(alt) > 40 for alt in page.alts)
    shared = html
    if name != "index":
        shared += (built.folder / f"{name}.ipynb").read_text(encoding="utf-8")
    assert str(report.ROOT) not in shared and str(built.results) not in shared


def test_the_index_tells_question_verdict_machine_and_figure(built):
    page = Page(read(built.folder, "index"))
    for text in (
        "Does a tensor-parallel SwiGLU block train like the dense one",
        "What can this machine measure",
        "Each fault is caught where it must show first",
        "Every fault of both blocks is named rightly",
        "Are the bits of a GEMM and of an FFN fixed by the contract alone",
        "Every layout gives the bits of one rank",
        records.label(records.environment()),
    ):
        assert text in page.text
    assert "Fault by signal. SwiGLU block" in " ".join(page.alts)
    assert {f"{name}.html" for name in PAGES[1:]} <= set(page.addresses)
    assert "notebook failed" not in page.text
    # One record fails, and must: the example's twin that forgets a sum.
    assert page.text.count("fails") == 1 and "ok, fails" in page.text


STORIES = {
    "Same bits?": ("yes 0 of ", "04_determinism", "05_ffn_cost", "06_ws2_two_nodes"),
    "Which sum is missing?": ("named ", "01_tp_swiglu", "02_tp_gqa", "03_which_sum"),
    "Is communication hidden?": ("not measured No record of", "07_overlap", "08_cross_node"),
}


def test_the_index_answers_three_questions(built):
    """Each with its verdict, figure, limits and pages; each number beside its record."""
    _, *sections = read(built.folder, "index").split('<section class="story"')
    sections = [section.partition("</section>")[0] for section in sections]
    assert len(sections) == len(STORIES)
    for section, (question, (verdict, *pages)) in zip(sections, STORIES.items()):
        page = Page(f"<section{section}")
        text = " ".join(page.text.split())
        assert f"<h2>{question}</h2>" in section and verdict in text, text[:300]
        assert len(page.alts) == 1 and "COVERED" in text and "NOT COVERED" in text
        assert {f"{name}.html" for name in pages} <= set(page.addresses)
        shown = re.findall(r"<code>(results/[\w./-]+)</code>", section)
        assert shown and all(
            records.read(built.results / name.removeprefix("results/")).status == "ok"
            for name in shown
        )
    assert "partial milestone: two real nodes NOT COVERED" in sections[-1]


def test_what_this_machine_cannot_measure_is_a_box_with_its_command(built):
    if records.environment()["gpus"]:
        pytest.skip("this machine has GPUs: there is no gap to show")
    for name, need in {
        "00_start": "2 GPUs",
        "01_tp_swiglu": "2 GPUs",
        "04_determinism": "1 GPU",
        "05_ffn_cost": "2 GPUs",
        "06_ws2_two_nodes": "2 GPUs",
        "08_cross_node": "2 GPUs",
    }.items():
        text = Page(read(built.folder, name)).text
        assert f"NOT MEASURED here: needs {need}" in text
        assert "python -m rlkernel" in text.split("NOT MEASURED here")[1][:200]


def test_every_number_names_a_record_that_is_there(built):
    shown = set(re.findall(r"results/[\w./-]+", Page(read(built.folder, "01_tp_swiglu")).text))
    folders = [name for name in shown if re.search(r"/\d{8}T\d{6}Z-", name)]
    assert folders
    for name in folders:
        path = built.results / name.removeprefix("results/")
        assert records.read(path).status == "ok", name


def test_again_is_quick_and_a_changed_package_changes_the_time_only(
    beside, tmp_path, monkeypatch, capsys
):
    """Pages kept, then pages made again from the same records: the same text but for <time>."""
    before = {name: read(beside.folder, name) for name in PAGES}
    folder = tmp_path / "report"
    shutil.copytree(beside.folder, folder)
    start = time.monotonic()
    report.build(folder)
    assert time.monotonic() - start < 10
    assert capsys.readouterr().err.count("unchanged") == len(PAGES) - 1
    assert (folder / "00_start.html").read_text() == before["00_start"]
    monkeypatch.setattr(report, "inputs_of_package", lambda: "another")
    runs = sorted(beside.results.glob("*/*/run.json"))
    report.build(folder)
    assert "unchanged" not in capsys.readouterr().err
    assert sorted(beside.results.glob("*/*/run.json")) == runs  # nothing was measured again
    for name in PAGES:
        assert TIME.sub("", read(folder, name)) == TIME.sub("", before[name]), name
        assert len(TIME.findall(before[name])) == 1


def test_an_edit_makes_older_results_stale(beside, tmp_path, root):
    """A copy of the tree with one edited line, given one record of this one: marked, not hidden."""
    assert "holds" in render.record_table() and "stale" not in render.record_table()
    tree = tmp_path / "tree"
    shutil.copytree(root / "rlkernel", tree / "rlkernel", ignore=shutil.ignore_patterns("__py*"))
    found = records.find("tp-swiglu", beside.results)[0].path
    run = tmp_path / "results" / "tp-swiglu" / found.name
    shutil.copytree(found, run)
    look = (
        "import sys\nfrom rlkernel import records\n"
        "from rlkernel.pages import evidence, render, show\n"
        "from rlkernel.figures import tp_swiglu as draw\n"
        f"record = records.read({str(run)!r})\n"
        "for _ in sys.stdin:\n"
        "    html = show.figure_html(draw.DRIFT, record.rows, show.sources(record))\n"
        "    print(evidence.is_stale(record), 'stale: the code has changed' in html,\n"
        "          'holds, stale' in render.record_table(), flush=True)"
    )

    def ask() -> str:
        looking.stdin.write("\n")
        looking.stdin.flush()
        return looking.stdout.readline().strip()

    block = tree / "rlkernel" / "reconstruct" / "swiglu.py"
    with subprocess.Popen(
        [sys.executable, "-c", look], cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"RLKERNEL_RESULTS": str(tmp_path / "results")}, text=True,
    ) as looking:  # fmt: skip
        assert ask() == "False False False"
        block.write_text(block.read_text() + "\n# a remark changes nothing\n")
        assert ask() == "False False False"
        block.write_text(block.read_text() + "\nEDITED = 1\n")
        assert ask() == "True True True"


@pytest.mark.parametrize("name", ["grid.py", "pages/template/page.css", "figures/style.py"])
def test_every_file_that_can_change_a_page_counts(tmp_path, root, name):
    package = tmp_path / "rlkernel"
    shutil.copytree(root / "rlkernel", package, ignore=shutil.ignore_patterns("__py*"))
    before = report.inputs_of_package(package)
    (package / "note.txt").write_text("does not count")
    assert report.inputs_of_package(package) == before
    (package / name).write_text((package / name).read_text() + "\n")
    assert report.inputs_of_package(package) != before


def test_a_failing_notebook_is_told_and_the_others_are_made(notebook, tmp_path, results, capsys):
    good = notebook("#md # Good\n\n> Is it?", "1 + 1", name="00_good.ipynb")
    notebook("#md # Bad\n\n> Is it?", "print('so far')", "1 / 0", name="01_bad.ipynb")
    out = tmp_path / "out"
    code = report.main(["--out", str(out), "--notebooks", str(good.parent)])
    assert code == 1
    index = Page((out / "index.html").read_text()).text
    assert "notebook failed" in index and "ZeroDivisionError: division by zero" in index
    assert index.count("notebook failed") == 1 and "Good" in index
    assert "so far" in Page((out / "01_bad.html").read_text()).text
    said = capsys.readouterr()
    assert "01_bad: ZeroDivisionError" in said.err and "[2/2] 01_bad ... " in said.err
    assert said.out.strip() == str(out / "index.html")
    # It is not kept as if it were good: the next build runs it again, and only it.
    assert report.main(["--out", str(out), "--notebooks", str(good.parent)]) == 1
    again = capsys.readouterr().err
    assert "00_good ... unchanged" in again and "01_bad ... unchanged" not in again


def test_force_reaches_the_kernel_and_the_launch(notebook, tmp_path, results, monkeypatch):
    book = notebook("import os\nprint('force', os.environ['RLKERNEL_FORCE'] or 'no')")
    executed = tmp_path / "out" / book.name
    for force, word in ((False, "no"), (True, "1")):
        report.build(executed.parent, force=force, notebooks=book.parent)
        assert f"force {word}" in executed.read_text()
    asked = []
    local = SimpleNamespace(status="ok")
    monkeypatch.setattr(launch, "measure", lambda *_, **how: asked.append(how["force"]) or local)
    for value in ("", "1"):
        monkeypatch.setenv("RLKERNEL_FORCE", value)
        evidence.get("preflight")
    assert asked == [False, True]


def test_only_knows_its_notebooks(tmp_path):
    with pytest.raises(
        UsageError, match="unknown notebook 01_tp_swiglo; did you mean 01_tp_swiglu"
    ):
        report.build(tmp_path, only=["01_tp_swiglo"])


def test_runs_from_the_folder_of_the_notebooks(beside, tmp_path, environment, root):
    """The same imports and paths from notebooks/; a record is given instead of measured."""
    run = records.find("preflight", beside.results)[0].path
    environment = {n: v for n, v in environment.items() if n != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(root), "RLKERNEL_RESULTS": str(beside.results)}
    output = tmp_path / "given.ipynb"
    done = subprocess.run(
        [sys.executable, "-m", "rlkernel", "notebook", "00_start.ipynb", "-o", str(output)]
        + ["-p", "run", str(run)],
        cwd=root / "notebooks", env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(output.with_suffix(".html"))
    assert evidence.place(records.read(run)) in output.with_suffix(".html").read_text()


def test_notebooks_are_short_and_in_reading_order(root):
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        book = nbformat.read(path, as_version=4)
        nbformat.validate(book)
        assert len(book.cells) <= 25 and book.cells[0].source.startswith("# ")
        assert "\n> " in book.cells[0].source
        code = "\n".join(c.source for c in book.cells if c.cell_type == "code")
        assert "init_process_group" not in code and "import torch" not in code
        assert json.loads(path.read_text())["metadata"]["kernelspec"]["name"] == "python3"
