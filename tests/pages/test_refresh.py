"""A published record is made again by its own command, and replaced only by one that ended well."""

from __future__ import annotations

import json
import types

import pytest

from rlkernel import records
from rlkernel.pages import evidence, refresh
from rlkernel.records.store import RunFolder

ARGV = ["python", "-m", "rlkernel", "toy", "--nproc", "2", "--json", "--force"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RLKERNEL_PUBLISHED", str(tmp_path / "repository"))
    monkeypatch.setenv("RLKERNEL_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(evidence, "is_stale", lambda record: record.source == "old")
    return tmp_path


def made(root, source="old", status="ok", passed=True, number=0, **more):
    """A finished run of the experiment `toy`."""
    facts = {"argv": ARGV, "environment": {"variables": {"NCCL_PROTO": "LL"}}, "source": source}
    folder = RunFolder.create("toy", source, "k" * 8, facts | more, root)
    folder.append_row({"key": "a", "passed": passed, "result": {"number": number}})
    folder.update(status=status, verdict={"passed": passed, "checks": []}, exit_code=0)
    return folder.path


def published(home, name, **facts):
    from rlkernel.records.publish import publish

    return records.read(publish(made(home / "elsewhere", **facts), name))


@pytest.fixture
def launched(home, monkeypatch):
    """What is launched; `launched.leaves` makes the record that it leaves."""
    seen = types.SimpleNamespace(calls=[], leaves=lambda: made(home / "results", "new", number=1))

    def run(words, env):
        seen.calls.append((words[1:], env["NCCL_PROTO"]))
        seen.leaves()
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(refresh.subprocess, "run", run)
    return seen


def number(home, name):
    path = home / "repository" / "published" / "toy" / name / "cases.jsonl"
    return json.loads(path.read_text())["result"]["number"]


def test_it_is_made_by_its_own_command_and_takes_the_name(home, launched, capsys):
    published(home, "one")
    published(home, "two", source="new")
    assert refresh.main(["--stale"]) == 0
    assert launched.calls == [(["-m", "rlkernel", "toy", "--nproc", "2"], "LL")]
    assert number(home, "one") == 1 and number(home, "two") == 0
    assert "toy/one (stale)" in capsys.readouterr().out
    assert refresh.main(["--stale"]) == 2  # nothing is left to do


@pytest.mark.parametrize("left", [
    {"status": "crashed"}, {"passed": False}, {"status": "timed-out", "passed": False},
], ids=str)  # fmt: skip
def test_what_does_not_end_as_it_did_replaces_nothing(home, launched, left):
    published(home, "one")
    launched.leaves = lambda: made(home / "results", "new", number=1, **left)
    assert refresh.main([]) == 1
    assert number(home, "one") == 0
    launched.leaves = lambda: None
    assert refresh.main([]) == 1 and number(home, "one") == 0


def test_patterns_choose_and_a_list_runs_nothing(home, launched, capsys):
    for name in ("cpu-one", "cpu-two", "gpu"):
        published(home, name)
    assert refresh.main(["--list", "toy/cpu-*"]) == 0
    told = capsys.readouterr().out
    assert "toy/cpu-two" in told and "toy/gpu" not in told and "--nproc 2" in told
    assert not launched.calls and refresh.main(["nothing/*"]) == 2


def test_a_record_without_a_command_is_refused(home, launched):
    published(home, "one", argv=["notebook"])
    with pytest.raises(records.RecordError, match="does not say which command"):
        refresh.main([])
    assert not launched.calls
