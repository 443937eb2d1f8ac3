"""A copy for everybody: small, complete, and silent about whose machine it was."""

from __future__ import annotations

import gzip
import json
import socket
import sys
import tempfile
from pathlib import Path

import pytest

from rlkernel.records import RecordError, RunFolder, find, read, trace
from rlkernel.records.publish import SMALL, committed_root, publish
from rlkernel.records.scrub import REPOSITORY, scrub, scrub_all
from tests.records import traces

SECRETS = {
    "home": str(Path.home() / "models" / "x.bin"),
    "linux home": "/home/alice/models/x.bin",
    "mac home": "/Users/alice/models/x.bin",
    "windows home": r"C:\Users\alice\x.bin",
    "anywhere": "/data/alice_team/run 3.bin",
    "host": "from vm:29500",
}


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "vm")


@pytest.fixture
def run(tmp_path) -> RunFolder:
    secret = {"case_keys": ["a"], "note": dict(SECRETS), "argv": ["--plugin=/home/alice/p.py"]}
    folder = RunFolder.create("toy", "s" * 8, "k" * 8, secret, tmp_path)
    folder.append_row({"key": "a", "passed": True, "result": {"path": "/home/alice/y", "x": 1e-9}})
    folder.append_samples([{"key": "a", "rank": 0, "value": 0.1}])
    (folder.path / "log" / "rank0.txt").write_text("/home/alice")
    folder.update(status="ok", verdict={"passed": True}, exit_code=0)
    return folder


def test_a_published_run_reads_like_the_original(run, tmp_path):
    target = publish(run.path, "first", tmp_path)
    assert target == tmp_path / "published" / "toy" / "first"
    (record,) = find("toy", tmp_path, published=True)
    original = read(run.path)
    assert record.path == target and record.status == "ok" and record.passed
    assert record.rows[0]["result"]["x"] == 1e-9 and record.samples == original.samples
    assert sorted(p.name for p in target.iterdir()) == ["cases.jsonl", "run.json", "samples.jsonl"]
    assert record.run["started"] == original.run["started"] and "process" not in record.run


def test_what_is_published_belongs_to_the_checkout(run, root, monkeypatch, tmp_path):
    """Runs may go elsewhere; the committed evidence does not, and is found."""
    assert committed_root() != root / "results", "no test publishes into the tree"
    assert publish(run.path, "checkout") == committed_root() / "published/toy/checkout"
    monkeypatch.setenv("RLKERNEL_RESULTS", str(tmp_path))
    monkeypatch.delenv("RLKERNEL_PUBLISHED")
    assert committed_root() == root / "results"
    assert len(find("tp-swiglu", committed_root(), published=True)) > 2


def test_nothing_tells_whose_it_was(run, tmp_path):
    target = publish(run.path, root=tmp_path)
    assert target.name == run.path.name
    text = "".join(path.read_text() for path in target.iterdir())
    for secret in ("alice", str(Path.home()) + "/", "vm", "/data"):
        assert secret not in text, secret
    note = json.loads((target / "run.json").read_text())["note"]
    assert note["linux home"] == "~/models/x.bin" and set(note) == set(SECRETS)


def test_only_a_finished_run(run, tmp_path):
    run.update(status="crashed", reason="rank 1 fell", exit_code=3)
    with pytest.raises(RecordError, match=r"this one is crashed \(rank 1 fell\)"):
        publish(run.path, "x", tmp_path)
    run.update(status="running")
    with pytest.raises(RecordError, match="this one is running"):
        publish(run.path, "x", tmp_path)
    assert not (tmp_path / "published").exists()


def test_a_failed_verdict_is_evidence_too(run, tmp_path):
    run.update(status="ok", verdict={"passed": False})
    assert read(publish(run.path, "x", tmp_path)).passed is False


def test_evidence_is_never_overwritten(run, tmp_path):
    publish(run.path, "x", tmp_path)
    with pytest.raises(RecordError, match="toy/x is published already"):
        publish(run.path, "x", tmp_path)
    assert [p.name for p in (tmp_path / "published" / "toy").iterdir()] == ["x"]


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "a b"])
def test_a_name_stays_in_its_folder(run, tmp_path, name):
    with pytest.raises(RecordError, match="is no name for a run"):
        publish(run.path, name, tmp_path)


def test_large_samples_are_left_out_and_that_is_said(run, tmp_path):
    run.append_samples([{"key": "a", "rank": 0, "pad": "x" * SMALL}])
    record = read(publish(run.path, "x", tmp_path))
    assert record.samples == [] and record.run["samples_left_out"] > SMALL


def test_traces_are_published_without_their_machine(run, tmp_path, monkeypatch):
    (run.path / "trace" / "a").mkdir(parents=True)
    names = [f"trace/a/rank{rank}.json.gz" for rank in (0, 1)]
    for rank, name in enumerate(names):
        traces.chunks(rank).write(run.path / name)
    run.append_row({"key": "a", "passed": True, "traces": names})
    target = publish(run.path, "x", tmp_path)
    assert read(target).rows[0]["traces"] == names
    for rank, path in enumerate(target / name for name in names):
        text = gzip.decompress(path.read_bytes()).decode()
        assert "secret-host" not in text and "/home" not in text
        assert trace.overlap(trace.read(path), traces.MARK)["rank"] == rank
    (run.path / "trace" / "rank2.json.gz").write_bytes(b"torn")
    with pytest.raises(RecordError, match="cannot publish a trace: rank2.json.gz is no chrome"):
        publish(run.path, "y", tmp_path)
    (run.path / "trace" / "rank2.json.gz").unlink()
    monkeypatch.setattr("rlkernel.records.publish.SMALL", 100)
    target = publish(run.path, "z", tmp_path)
    assert not (target / "trace").exists() and read(target).rows[0]["traces"] == []


@pytest.mark.parametrize(
    "text, clean",
    [
        (f'File "{REPOSITORY}/rlkernel/grid.py", line 3', 'File "rlkernel/grid.py", line 3'),
        (f"in {REPOSITORY}", "in ."),
        (f"{sys.prefix}/bin/python -m x", "<python>/bin/python -m x"),
        (f"{tempfile.gettempdir()}/abc/x", "<tmp>/abc/x"),
        ("/opt/stuff/lib/x.so: no symbol", ".../x.so: no symbol"),
        ("--results=/data/x/y", "--results=.../y"),
        ("1/2 of a/b and/or c / d", "1/2 of a/b and/or c / d"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("/", "/"),
        ("tp2 fp32 0 / 100 elements", "tp2 fp32 0 / 100 elements"),
    ],
)
def test_scrub(text, clean):
    assert scrub(text) == clean


def test_a_host_is_no_word_of_ours(monkeypatch):
    assert scrub("vm:29500 vm.lan:1 the vm here") == "<host>:29500 <host>.lan:1 the vm here"
    monkeypatch.setattr(socket, "gethostname", lambda: "workstation7")
    assert scrub("on workstation7, workstation70") == "on <host>, workstation70"


def test_scrub_goes_everywhere_and_changes_no_numbers():
    obj = {"/home/bob/k": [1, 2.5, None, True, {"x": "/home/bob/v"}]}
    assert scrub_all(obj) == {"~/k": [1, 2.5, None, True, {"x": "~/v"}]}
