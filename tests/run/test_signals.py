"""Signals to the launcher and to the agent, from outside, at a launch of the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from rlkernel.records import find, read
from rlkernel.run.launch import measure
from tests.run.launching import ROOT, TOY, folders, wait_for


@contextmanager
def running(marked, root, *words):
    """A launch of two ranks in which seed 0 is measured and seed 1 takes for ever."""
    asked = ("--nproc", 2, "--fault", "hang", "--at", 1, "--timeout", 60, "--peer-timeout", 50)
    child = marked.start(TOY, *asked, "--results", root, *words)
    try:
        wait_for(lambda: folders(root) and read(folders(root)[0]).rows)
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    "number, status",
    [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "killed"), (signal.SIGHUP, "killed")],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_signal_to_the_launcher(tmp_path, marked, number, status):
    with running(marked, tmp_path) as child:
        assert len(marked.ranks()) == 2
        assert read(folders(tmp_path)[0]).status == "running"
        child.send_signal(number)
        out, err = child.communicate(timeout=30)
        assert not marked.alive(), "the ranks end before the launcher does"
    died = number == signal.SIGHUP  # the command line leaves that one at its default
    assert child.returncode == (-number if died else 128 + number)
    record = read(folders(tmp_path)[0])
    assert record.status == status and record.run["exit_code"] == 128 + number
    assert f"{number.name} came to the launcher" in record.run["reason"]
    assert len(record.rows) == 1 and len(record.run["failures"]) == 2
    if not died:
        assert f"toy {status}: {number.name}" in err
        assert any("in hang_here" in failure["traceback"] for failure in record.run["failures"])
        assert ("in hang_here" in err) == (number != signal.SIGINT), "who stops it knows why"
        assert str(ROOT) not in err, "what a notebook's cell shows ends up in a page"
        assert out.splitlines()[-1] == str(record.path)


def test_the_launcher_is_killed(tmp_path, marked):
    """It can write nothing any more: the status is inferred, also while nobody has reaped it."""
    with running(marked, tmp_path) as child:
        child.kill()
        marked.assert_nobody_left()
        record = read(folders(tmp_path)[0])
        assert record.run["status"] == "running" and record.status == "killed"
        assert record.exit_code == 137
    assert read(record.path).status == "killed" and len(record.rows) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_signal_to_the_agent(tmp_path, marked, number):
    with running(marked, tmp_path, "--json") as child:
        (agent,) = marked.agents()
        os.kill(agent, number)
        out, err = child.communicate(timeout=30)
    assert child.returncode == 128 + number
    assert f"{number.name} came to the torchrun agent" in err
    assert f'"exit_code": {128 + number}' in out and '"status": "killed"' in out


def test_a_sweep_killed_at_60_percent_goes_on(tmp_path, marked):
    asked = ("--nproc", 1, "--seed", "0,1,2,3,4", "--wait-s", 0.4)
    child = marked.start(TOY, *asked, "--results", tmp_path)
    try:
        wait_for(lambda: folders(tmp_path) and len(read(folders(tmp_path)[0]).rows) >= 3)
    finally:
        child.kill()
        child.communicate()
    marked.assert_nobody_left()
    (broken,) = find("toy", tmp_path)
    done = len(broken.rows)
    assert 3 <= done < 5
    again = {"nproc": 1, "seed": (0, 1, 2, 3, 4), "wait_s": 0.4}
    record = measure(TOY, again, root=tmp_path, timeout_s=30)
    assert record.status == "ok" and record.run["reused"] == done
    assert [row["finished"] for row in record.rows[:done]] == [r["finished"] for r in broken.rows]
    assert record.log(0).count("rank 0 is at") == 5 - done


def test_a_launcher_that_left_the_signal_at_its_default_dies_of_it(tmp_path, marked):
    """As a notebook's kernel does: cleaned up and written down first."""
    script = (
        "import sys; from rlkernel.run.launch import measure\n"
        f"measure('{TOY}', dict(nproc=1, fault='hang', at=1), root=sys.argv[1], timeout_s=60)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    child = subprocess.Popen(command, cwd=ROOT, env=marked.environment())
    try:
        wait_for(lambda: folders(tmp_path) and read(folders(tmp_path)[0]).rows)
        child.terminate()
        assert child.wait(30) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()
    assert read(folders(tmp_path)[0]).run["status"] == "killed"
