"""What a rank can do to its launch, one launch each: named, written down, nobody left."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from rlkernel.records import RecordError, read, store
from rlkernel.run import watch
from rlkernel.run.launch import RunError, measure
from tests.run.launching import ROOT, TOY, folders, wait_for


def crash(root, fault: str, *, nproc=2, peer_timeout_s=5.0, progress=None):
    """Seed 0 is measured, at seed 1 it happens -> the error and its record as found on disk."""
    asked = {"nproc": nproc, "fault": fault, "at": 1}
    limits = {"timeout_s": 60.0, "peer_timeout_s": peer_timeout_s}
    with pytest.raises(RunError) as caught:
        measure(TOY, asked, root=root, progress=progress, **limits)
    record = read(caught.value.record.path)
    assert [row["case"]["seed"] for row in record.rows] == [0], "earlier rows stay"
    assert record.exit_code == record.run["exit_code"] == caught.value.exit_code
    assert record.run["finished"] and record.run["verdict"] is None
    assert len(record.run["failures"]) == nproc
    assert all(failure["reason"] for failure in record.run["failures"])
    return caught.value, record


def guilty(record) -> list[int]:
    return [f["rank"] for f in record.run["failures"] if f["status"] == "guilty"]


def test_a_rank_that_raises(tmp_path, marked):
    error, record = crash(tmp_path, "raise")
    assert error.exit_code == 3 and record.status == "crashed" and guilty(record) == [1]
    message = str(error)
    assert message.startswith("toy crashed: rank 1 of 2 raised ArithmeticError: seven is not eight")
    assert 'File "tests/run/toy.py", line' in message and "in misbehave" in message
    assert str(tmp_path) not in message
    assert "ArithmeticError" in record.log(1)
    written = (record.path / "run.json").read_text()
    assert "in misbehave" in written and str(ROOT) not in written and str(tmp_path) not in written


def test_a_rank_that_refuses_what_it_was_given(tmp_path, marked):
    error, record = crash(tmp_path, "refuse")
    assert error.exit_code == 2 and guilty(record) == [1]
    assert str(error).splitlines() == [
        "toy: bad usage, says rank 1 of 2: eight is not possible: seven or nine",
        "1 of 2 cases are measured and stay",
    ]


def test_a_rank_that_is_killed(tmp_path, marked):
    error, record = crash(tmp_path, "SIGKILL")
    assert error.exit_code == 3 and record.status == "crashed" and guilty(record) == [1]
    assert "rank 1 of 2 killed by SIGKILL" in str(error)
    assert record.run["failures"][0]["status"] in ("ended", "victim")


def test_a_rank_that_somebody_ends(tmp_path, marked):
    """The same signal that the agent sends to the others; only the sender differs."""
    _, record = crash(tmp_path, "SIGTERM")
    assert guilty(record) == [1]
    assert [f["reason"] for f in record.run["failures"]] == [
        "ended after rank 1 failed",
        "killed by SIGTERM",
    ]


def test_a_rank_that_aborts_below_python(tmp_path, marked):
    error, record = crash(tmp_path, "SIGABRT")
    assert guilty(record) == [1] and "killed by SIGABRT" in str(error)
    assert "in misbehave" in str(error), "where Python stood"


def test_a_rank_that_leaves_without_a_word(tmp_path, marked):
    error, record = crash(tmp_path, "exit")
    assert guilty(record) == [1] and "exited with code 7 and left no error" in str(error)


def test_a_rank_that_hangs_is_named_by_its_peers(tmp_path, marked):
    error, record = crash(tmp_path, "hang", peer_timeout_s=3.0)
    assert error.exit_code == 3 and guilty(record) == [1]
    assert "did not answer its peers" in str(error) and "in hang_here" in str(error)
    assert record.run["failures"][0]["reason"].startswith("raised PeerLost")


def test_a_rank_that_is_stopped(tmp_path, marked):
    """A stopped process does not react to SIGTERM: it is killed after a grace."""
    _, record = crash(tmp_path, "SIGSTOP", peer_timeout_s=3.0)
    assert guilty(record) == [1] and record.run["seconds"] < 25, "torchrun alone would wait 30 s"


def test_time_is_up(tmp_path, marked, monkeypatch):
    """A lone rank has no peers that miss it. The clock jumps once it hangs: no slow machine is
    mistaken for a hang, and nobody waits."""
    jump = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + jump, sleep=time.sleep)
    monkeypatch.setattr(watch, "time", clock)

    def jump_when_it_hangs(line):
        nonlocal jump
        if line.startswith("[1/2]"):
            wait_for(lambda: "rank 0 is at seed 1" in read(folders(tmp_path)[0]).log(0))
            time.sleep(0.2)
            jump = 60.0

    error, record = crash(tmp_path, "hang", nproc=1, progress=jump_when_it_hangs)
    assert error.exit_code == 4 and record.status == "timed-out"
    assert "not finished after 60 s" in str(error) and "in hang_here" in str(error)
    assert "in hang_here" in record.run["failures"][0]["traceback"]


def test_the_agent_is_killed(tmp_path, marked):
    error, record = crash(tmp_path, "agent")
    assert error.exit_code == 128 + signal.SIGKILL and record.status == "killed"
    assert "SIGKILL came to the torchrun agent" in record.run["reason"]


def test_the_disk_is_full(tmp_path, marked):
    asked = {"nproc": 2, "fault": "root full disk", "at": 1}
    with pytest.raises(RunError) as caught:
        measure(TOY, asked, root=tmp_path, timeout_s=60, peer_timeout_s=5)
    assert caught.value.exit_code == 3 and guilty(caught.value.record) == [0]
    assert "RecordError: cannot append to" in str(caught.value)
    assert "No space left on device" in str(caught.value)
    kept = caught.value.record.path / "cases.kept"
    assert kept.read_text().count("\n") == 1, "the earlier row is whole"


@pytest.mark.parametrize("last", ["spec.json", "agent.txt"])
def test_the_disk_fills_just_before_the_launch(tmp_path, monkeypatch, last):
    """The folder is there, the next file is not: a named error (exit 3), nothing launched."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(path, write):
        if path.name == last:
            raise full
        return write()

    whole = store.write_json
    monkeypatch.setattr(store, "write_json", lambda p, obj: refuse(p, lambda: whole(p, obj)))
    monkeypatch.setattr(watch, "open", lambda p, mode: refuse(p, lambda: open(p, mode)), False)
    monkeypatch.setattr(watch, "_command", None)  # nothing may be launched
    with pytest.raises(RecordError, match=f"{last}: No space left on device"):
        measure(TOY, {}, root=tmp_path)


def test_torchrun_itself_fails(tmp_path, marked, monkeypatch):
    command = watch._command

    def broken(*args):
        return [word.replace("--nnodes=1", "--nnodes=none") for word in command(*args)]

    monkeypatch.setattr(watch, "_command", broken)
    with pytest.raises(RunError) as caught:
        measure(TOY, {}, root=tmp_path, timeout_s=30)
    assert caught.value.exit_code == 3 and caught.value.record.status == "crashed"
    assert "invalid literal for int" in str(caught.value), "the agent's own words"


def test_a_disk_that_is_really_full(tmp_path, marked):
    """48 KiB for everything: rows end in the middle, and not even the failure can be noted."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "none", tmp_path]).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        with pytest.raises((RunError, RecordError), match="No space left on device"):
            measure(TOY, {"nproc": 1, "seed": tuple(range(60))}, root=tmp_path, timeout_s=60)
        record = read(folders(tmp_path)[0])
        assert 0 < len(record.rows) < 60
        assert [row["case"]["seed"] for row in record.rows] == list(range(len(record.rows)))
        with pytest.raises(RecordError, match="No space left on device"):
            measure(TOY, {"nproc": 1, "seed": 99}, root=tmp_path, timeout_s=60)
        assert read(record.path).rows == record.rows and folders(tmp_path) == [record.path]
    finally:
        subprocess.run(["umount", tmp_path], check=True)
