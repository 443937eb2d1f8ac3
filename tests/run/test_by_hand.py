"""The parts of a launch on their own: the worker under a hand-typed torchrun, the lifeline."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from rlkernel.records import read
from rlkernel.run import lifeline, watch
from rlkernel.run.launch import measure, prepare
from tests.processes import alive
from tests.run.launching import ROOT, TOY, wait_for

pytestmark = pytest.mark.skipif(not lifeline.supported(), reason="the kernel has no death signal")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_nodes_by_hand_then_concluded(tmp_path, marked, monkeypatch):
    """Node 1 has a copy of the spec and nothing else; rank 0's folder gets every row."""
    asked = {"nproc": "1,2", "seed": "0"}
    spec = prepare(TOY, asked, root=tmp_path / "results", timeout_s=30, peer_timeout_s=5)
    assert read(spec.parent).status == "running"
    far = tmp_path / "node1"
    far.mkdir()
    shutil.copy(spec, far)
    port = free_port()
    env = marked.environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes=2", "--nproc-per-node=1"),
                *(f"--node-rank={rank}", "--master-addr=127.0.0.1", f"--master-port={port}"),
                *("-m", "rlkernel.run.worker", str(folder / "spec.json")),
            ],
            cwd=ROOT,
            env=env,
        )
        for rank, folder in enumerate((spec.parent, far))
    ]
    try:
        assert [node.wait(40) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert sorted(path.name for path in far.iterdir()) == ["log", "spec.json"]
    assert "rank 1 is at seed 0" in (far / "log" / "rank1.txt").read_text()
    assert [row["result"]["ranks"] for row in read(spec.parent).rows] == [[0], [0, 1]]

    monkeypatch.setattr(watch, "run_agent", None)  # nothing is left to launch
    record = measure(TOY, asked, root=tmp_path / "results")
    assert record.status == "ok" and record.passed and record.run["reused"] == 2


def child(code: str) -> subprocess.Popen:
    command = [sys.executable, "-c", f"import os, signal, time\n{code}"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


TIE = "from rlkernel.run.lifeline import die_with_parent; "


def test_a_parent_that_is_gone_already():
    """Between the start of a child and its request the parent may die: the number tells."""
    code = TIE + f"die_with_parent(signal.SIGKILL, {os.getpid()}); print('on', flush=True)"
    with child(code) as same:
        assert same.stdout.read() == "on\n" and same.wait() == 0
    with child(code.replace(str(os.getpid()), str(os.getpid() + 1))) as other:
        assert other.stdout.read() == "" and other.wait() == 1


@pytest.mark.parametrize("death", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_child_follows_its_killed_parent(death):
    """Parent and grandchild print their numbers; the grandchild is in a session of its own."""
    tied = TIE + f"die_with_parent(signal.{death.name}, os.getppid()); time.sleep(60)"
    code = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', {'import os, signal, time; ' + tied!r}], "
        "start_new_session=True)\n"
        "time.sleep(0.5); print(p.pid, flush=True); time.sleep(60)"
    )
    with child(code) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)  # lives
        parent.kill()
    wait_for(lambda: not alive(pid), 3)
