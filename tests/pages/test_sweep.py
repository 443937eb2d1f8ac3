"""A sweep does every point once, over kills and restarts, and says so in one table."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from rlkernel.experiments.case import UsageError
from rlkernel.pages import sweep
from rlkernel.run import launch
from tests.pages.test_show import record

POINT = """
# parameters
n: int = 1
kind: str = "a"
log: str = ""
wait_s: float = 0.0
"""
WORK = """
import time
time.sleep(wait_s)
with open(log, "a") as file:
    print(n, kind, file=file)
"""


@pytest.fixture
def book(notebook):
    return notebook("#md # Point", POINT.strip(), WORK, name="point.ipynb")


def write(tmp_path, text: str):
    path = tmp_path / "my_sweep.yaml"
    path.write_text(text)
    return path


def grid(tmp_path, book, wait_s=0.0):
    return write(
        tmp_path,
        f"notebook: {book}\nfixed: {{log: '{tmp_path / 'log'}', wait_s: {wait_s}}}\n"
        "parameters:\n  n: [1, 2]\n  kind: [a, b]\n",
    )


def index(results) -> dict:
    return json.loads((results / "sweeps" / "my_sweep" / "index.json").read_text())


def lines(tmp_path) -> list[str]:
    path = tmp_path / "log"
    return path.read_text().splitlines() if path.exists() else []


def test_a_killed_sweep_does_only_what_is_missing(tmp_path, book, results, environment, ends):
    file = grid(tmp_path, book, wait_s=0.3)
    command = [sys.executable, "-m", "rlkernel", "sweep", str(file)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        path = results / "sweeps" / "my_sweep" / "index.json"
        points = json.loads(path.read_text())["points"] if path.exists() else []
        if sum(p["status"] == "ok" for p in points) >= 2:
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = [p["parameters"] for p in points if p["status"] == "ok"]
    assert 2 <= len(done) < 4
    time.sleep(2)  # a kernel whose parent is gone ends by itself
    before = lines(tmp_path)
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 0
    after = lines(tmp_path)[len(before) :]
    assert len(after) == 4 - len(done)
    for point in done:
        assert f"{point['n']} {point['kind']}" not in after
    assert [p["status"] for p in index(results)["points"]] == ["ok"] * 4


def test_one_table_and_nothing_twice(tmp_path, book, results, capsys):
    file = grid(tmp_path, book)
    assert sweep.run(file) == 0
    assert lines(tmp_path) == ["1 a", "1 b", "2 a", "2 b"]
    said = capsys.readouterr()
    assert "[3/4] n=2 kind=a ... " in said.err
    folder = results / "sweeps" / "my_sweep"
    assert said.out.strip() == str(folder / "index.md")
    table = list(csv.reader((folder / "index.csv").read_text().splitlines()))
    assert table[0] == ["n", "kind", "status", "seconds", "record"]
    assert [row[:3] for row in table[1:]] == [
        ["1", "a", "holds"], ["1", "b", "holds"], ["2", "a", "holds"], ["2", "b", "holds"],
    ]  # fmt: skip
    for row in table[1:]:
        assert (results / row[-1].removeprefix("results/")).exists()
    assert (folder / "index.md").read_text().count("| holds |") == 4
    assert sweep.run(file) == 0 and len(lines(tmp_path)) == 4
    assert sweep.run(file, force=True) == 0 and len(lines(tmp_path)) == 8
    (folder / "n-1_kind-b.html").unlink()
    assert sweep.run(file) == 0 and lines(tmp_path)[8:] == ["1 b"]


def test_a_failing_point_is_told_and_run_again(tmp_path, notebook, results):
    book = notebook(POINT.strip(), "assert n == 1, 'not one'", name="point.ipynb")
    file = write(tmp_path, f"notebook: {book}\nparameters: {{n: [1, 2]}}\n")
    assert sweep.run(file) == 1
    good, bad = index(results)["points"]
    assert (good["status"], bad["status"]) == ("ok", "failed")
    assert bad["error"] == "AssertionError: not one"
    started = os.stat(results / good["record"].removeprefix("results/")).st_mtime_ns
    assert sweep.run(file) == 1
    assert os.stat(results / good["record"].removeprefix("results/")).st_mtime_ns == started


def test_a_point_whose_check_fails_makes_the_sweep_fail(tmp_path, results, monkeypatch):
    """Status ok, verdict failed: done, not run again, and exit code 1 each time."""
    failing = record(results / "tp-swiglu" / "a")
    asked = []
    monkeypatch.setattr(launch, "measure", lambda *given, **_: asked.append(given) or failing)
    file = write(tmp_path, "experiment: tp-swiglu\nparameters: {nproc: [2]}\n")
    assert sweep.run(file) == 1 and sweep.run(file) == 1 and len(asked) == 1
    (point,) = index(results)["points"]
    assert (point["status"], point["passed"]) == ("ok", False)
    assert "| fails |" in (results / "sweeps" / "my_sweep" / "index.md").read_text()


def test_a_measured_point_names_its_record(tmp_path, results):
    file = write(
        tmp_path, "experiment: preflight\nfixed: {nproc: 1, iterations: 1}\n"
        "parameters: {message: [4, 8]}\n",
    )  # fmt: skip
    assert sweep.run(file) == 0
    points = index(results)["points"]
    for point in points:
        path = results / point["record"].removeprefix("results/")
        assert json.loads((path / "run.json").read_text())["parameters"]["message"] in ([4], [8])
    assert len({p["record"] for p in points}) == 2


@pytest.mark.parametrize(
    "text, says",
    [
        ("experiment: tp-swiglu\nparameters: {nproc: [2, 3]}", "nproc=3 is not possible"),
        ("experiment: tp-swiglu\nparameters: {nprok: [2]}", "did you mean nproc?"),
        ("experiment: tp-swiglo\nparameters: {}", "did you mean tp-swiglu?"),
        ("experiment: preflight\nparametres: {}", "unknown entry parametres"),
        ("parameters: {}", "give either `experiment:` or `notebook:`"),
        ("[1, 2]", "is not a sweep"),
        ("a: [", "is not YAML"),
    ],
)
def test_refused_before_anything_runs(tmp_path, results, text, says, capsys):
    assert sweep.main([str(write(tmp_path, text))]) == 2
    assert says in capsys.readouterr().err
    assert list(results.iterdir()) == []


def test_the_example_is_legal(root):
    (found,) = (sweep.load(p) for p in (root / "notebooks" / "sweeps").glob("*.yaml"))
    assert len(found.points) == 8 and len({p.key for p in found.points}) == 8


def test_no_file():
    with pytest.raises(UsageError, match="no such sweep"):
        sweep.load("nothing.yaml")
