"""The command line: what it prints where, its exit codes, and that it needs no torch itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

import rlkernel.__main__ as command_line
from rlkernel import experiments
from rlkernel.experiments.case import UsageError, param
from rlkernel.records import RunFolder, read
from rlkernel.run import launch
from tests.run.launching import TOY, Marked, folders

ROOT = Path(__file__).resolve().parents[1]


def run(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """In a process of its own, from any folder, without an installed package."""
    command = [sys.executable, "-m", "rlkernel", *map(str, words)]
    env = Marked().environment()
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=250)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two real launches of the real experiment: the correct twin and one with a missing sum."""
    root = tmp_path_factory.mktemp("results")
    common = ("tp-swiglu", "--seed", "11", "--results", root, "--timeout", 60)
    right = run(*common, "--nproc", 2, "--mode", "equivalence", "--json", cwd=root)
    wrong = run(*common, "--nproc", 2, "--mode", "missing_backward_reduce", cwd=root)
    return root, right, wrong


def test_json_stands_alone_on_stdout(measured):
    root, right, _ = measured
    assert right.returncode == 0, right.stderr
    summary = json.loads(right.stdout)
    assert summary["passed"] is True and summary["status"] == "ok" and summary["exit_code"] == 0
    assert summary["first_wrong"] is None
    record = read(root / summary["record"])
    assert record.run["argv"][:4] == ["python", "-m", "rlkernel", "tp-swiglu"]
    assert str(root) not in " ".join(record.run["argv"])
    assert "[1/1] tp2 fp32 seed 11" in right.stderr


def test_a_failed_check_is_exit_1(measured):
    _, _, wrong = measured
    assert wrong.returncode == 1, wrong.stderr
    assert "FAILED" in wrong.stdout and "input_grad" in wrong.stdout


def test_the_folder_is_the_last_line(measured):
    root, _, wrong = measured
    last = wrong.stdout.splitlines()[-1]
    assert read(root / last).run["exit_code"] == 1 and not Path(last).is_absolute()


def test_asked_again_it_answers_at_once(measured):
    root, right, _ = measured
    again = run("tp-swiglu", "--seed", 11, "--results", root, "--json", cwd=root)
    assert json.loads(again.stdout) == json.loads(right.stdout)
    assert "measured before: all 1 cases" in again.stderr and "launching" not in again.stderr


def test_a_crash_shows_the_guilty_rank_and_exits_3(tmp_path):
    crashed = run(TOY, "--fault", "raise", "--at", 1, "--results", tmp_path, "--json")
    assert crashed.returncode == 3
    assert "rank 1 of 2 raised ArithmeticError: seven is not eight" in crashed.stderr
    assert 'File "tests/run/toy.py", line' in crashed.stderr
    summary = json.loads(crashed.stdout)
    assert (summary["passed"], summary["status"], summary["exit_code"]) == (False, "crashed", 3)
    assert len(read(summary["record"]).rows) == 1


def test_a_reader_who_has_gone_is_no_failed_check(tmp_path):
    """`... | head -1`: neither a traceback nor exit code 1, which says that a check failed."""
    for words in (["--help"], ["preflight", "--target", "cuda", "--results", str(tmp_path)]):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "rlkernel", *words]
        done = subprocess.run(
            command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
        )
        os.close(writer)
        assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


BAD = {
    "an unknown experiment": (["tp-swigul"], "did you mean tp-swiglu?"),
    "an unknown command": (["reprot"], "did you mean report?"),
    "an unknown flag": (["tp-swiglu", "--sede", "1"], "unknown flag --sede; did you mean --seed?"),
    "no abbreviation": (["tp-swiglu", "--nproc=2", "--js"], "unknown flag --js"),
    "a value that cannot be": (["tp-swiglu", "--nproc", "3"], "nproc=3"),
    "a value that does not parse": (["tp-swiglu", "--seed", "x"], "parameter seed: expected"),
    "a choice that is none": (["tp-swiglu", "--mode", "equivalance"], "equivalence"),
    "no value": (["tp-swiglu", "--nproc"], "expected one argument"),
    "a list with blanks": (["tp-swiglu", "--nproc", "2", "4"], "lists are written with commas"),
    "no time": (["tp-swiglu", "--timeout", "0"], "positive number of seconds"),
    "nothing at all": ([], "usage: python -m rlkernel"),
}


@pytest.mark.parametrize("words, says", BAD.values(), ids=BAD)
def test_bad_usage_is_exit_2_and_leaves_no_folder(results, capsys, monkeypatch, words, says):
    monkeypatch.setattr(launch.watch, "run_agent", None)
    assert command_line.main(words) == 2
    out, err = capsys.readouterr()
    assert says in err and out == "" and "Traceback" not in err
    assert list(results.iterdir()) == []


def test_bad_usage_from_outside(tmp_path):
    done = run("tp-swiglu", "--nproc", "3", "--json", "--results", tmp_path / "new")
    assert done.returncode == 2 and done.stdout == "" and "nproc=3" in done.stderr
    assert not (tmp_path / "new").exists()


WATCHED = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'numpy', 'matplotlib', 'papermill', 'IPython'):
            raise AssertionError(name + ' was imported')
sys.meta_path.insert(0, Refuse())
from rlkernel.__main__ import main
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "words, code",
    [(["--help"], 0), (["tp-swiglu", "--nproc", "3"], 2), (["preflight", "--nprocs", "2"], 2)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_no_torch_before_a_launch(words, code):
    command = [sys.executable, "-c", WATCHED, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "was imported" not in done.stderr


def test_help_names_everything(capsys):
    assert command_line.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for word in ("preflight", "tp-swiglu", "report", "notebook", "sweep", "publish", "readme"):
        assert re.search(rf"^  {word} +\w", shown, re.M), word
    for code in ("0", "1", "2", "3", "4", "128"):
        assert re.search(rf"\b{code}\b", shown), code


@dataclass(frozen=True)
class Odd:
    block_size: int = param(4, "size of a block", unit="elements", choices=(4, 8))
    rates: tuple[float, ...] = param((0.5, 1.0), "100% of them")
    deep: bool = param(False, "go deep")
    limit: int | None = param(None, "at most", unit="s")


def odd() -> SimpleNamespace:
    return SimpleNamespace(NAME="odd", QUESTION="Odd?", SUMMARY="odd", Params=Odd)


def test_flags_come_from_the_parameters():
    text = " ".join(command_line.experiment_parser("odd", odd()).format_help().split())
    assert "--block-size N size of a block [elements] (4); one of 4, 8" in text
    assert "--rates X[,X...] 100% of them (0.5,1.0)" in text
    assert "--deep true|false go deep (False)" in text and "--limit N at most [s] (None)" in text
    for flag in ("--json", "--force", "--timeout S", "--peer-timeout S", "--results DIR"):
        assert flag in text


def test_every_flag_of_the_real_experiments_is_explained(capsys):
    for name in command_line.experiments.NAMES:
        with pytest.raises(SystemExit) as done:
            command_line.main([name, "--help"])
        assert done.value.code == 0
        shown = capsys.readouterr().out
        for flag in re.findall(r"^  (--[a-z-]+)", shown, re.M):
            assert re.search(rf"^  {flag}\b[^\n]*(  \w|\n {{20,}}\w)", shown, re.M), (name, flag)


def test_columns_line_up():
    lines = command_line._columns(["name", "n"], [["a", 1], ["longer", 1000], [None, 2.5]])
    assert lines == [
        "name       n",
        "------  ----",
        "a          1",
        "longer  1000",
        "         2.5",
    ]


def test_json_has_no_nan():
    found = command_line._finite({"a": [float("nan"), 1.5, (float("inf"),)], "b": None})
    assert json.loads(json.dumps(found, allow_nan=False)) == {"a": ["nan", 1.5, ["inf"]], "b": None}


def test_what_cannot_be_measured_here_says_so(results, capsys, monkeypatch):
    monkeypatch.setattr(launch.plan, "place", lambda *_: ("cuda", "needs 2 GPU(s)"))
    monkeypatch.setattr(launch.plan, "reuse_key", lambda *_: "reuse")
    assert command_line.main([TOY, "--seed", "0"]) == 1
    assert "NOT MEASURED here: needs 2 GPU(s)" in capsys.readouterr().out
    assert read(folders(results)[0]).status == "skipped"


def test_a_record_that_cannot_be_written_is_exit_3(tmp_path, capsys):
    (tmp_path / "toy").write_text("no folder")
    assert command_line.main([TOY, "--results", str(tmp_path)]) == 3
    assert "cannot create a run folder" in capsys.readouterr().err


def test_publish_prints_where_it_went(results, capsys, monkeypatch):
    monkeypatch.chdir(results)
    folder = RunFolder.create("toy", "s" * 8, "k" * 8, {}, results)
    for asked, said in ((folder.path, "this one is running"), (results / "no", "no record here")):
        assert command_line.main(["publish", str(asked)]) == 2
        assert said in capsys.readouterr().err
    folder.update(status="ok", verdict={"passed": True})
    assert command_line.main(["publish", str(folder.path), "--name", "first"]) == 0
    assert capsys.readouterr().out == f"{os.path.join('published', 'toy', 'first')}\n"


@pytest.mark.parametrize(
    "word, module, function",
    [
        ("report", "report", "main"),
        ("notebook", "report", "notebook"),
        ("sweep", "sweep", "main"),
        ("readme", "readme", "main"),
    ],
)
def test_commands_are_handed_to_the_pages(monkeypatch, word, module, function):
    fake = SimpleNamespace(**{function: lambda rest: (rest == ["--x", "1"]) and 7})
    pages = SimpleNamespace(**{module: fake})
    monkeypatch.setitem(sys.modules, "rlkernel.pages", pages)
    monkeypatch.setitem(sys.modules, f"rlkernel.pages.{module}", fake)
    assert command_line.main([word, "--x", "1"]) == 7


@pytest.mark.parametrize("name", experiments.NAMES)
def test_an_experiment_needs_no_flag(name, monkeypatch, capsys):
    """Its defaults reach the launcher; nothing is launched here."""

    def measure(experiment, params, **_):
        raise UsageError(f"{experiment} reached the launcher")

    monkeypatch.setattr("rlkernel.run.launch.measure", measure)
    assert command_line.main([name]) == 2
    assert f"{name} reached the launcher" in capsys.readouterr().err
