"""Nodes that do not fit, or are gone: the others say so, and end within a minute.

Three pairs of nodes run beside each other, once for all tests: one whose ranks are killed, one
whose cable is pulled (where the machine allows network namespaces), one with other code.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlkernel import records
from rlkernel.run import lifeline, nodes
from rlkernel.run.bounded import BoundedStore
from tests.run.launching import ROOT, Marked, wait_for

pytestmark = pytest.mark.skipif(not lifeline.supported(), reason="the kernel has no death signal")
WORDS = ("--batch-size 2 --tokens 4 --dim 16 --k 2 --no-compile --warmup 1 --overlap kernel "
         "--device cpu --peer-timeout 4 --timeout 100").split()  # fmt: skip
LONG = ("--num-tests", "1000000")


class Pair:
    """Two nodes of a rank each, by the script that starts one of several machines."""

    def __init__(self, home: Path, trees=(ROOT, ROOT), words=LONG, agents=(None, None)) -> None:
        self.marks, self.homes = [Marked(), Marked()], [home / "node0", home / "node1"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        where |= {"NNODES": "2", "NPROC": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHON": sys.executable}
        self.nodes, self.ended = [], {}
        for number, (tree, agent) in enumerate(zip(trees, agents)):
            own = {"NODE_RANK": str(number), "RLKERNEL_RESULTS": str(self.homes[number])}
            if agent is not None:
                own |= {**agent.env, "MASTER_ADDR": "10.99.0.1"}
            env = self.marks[number].environment(**(where | own | {"PYTHONPATH": ""}))
            script = ["bash", str(tree / "env" / "run_prod_cross.sh"), *WORDS, *words]
            self.nodes.append(subprocess.Popen(
                [*(agent.prefix if agent else ()), *script], env=env, cwd=home, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            ))  # fmt: skip

    def underway(self, seconds: float) -> None:
        """Until a rank of node 1 runs its case, and so many seconds more."""
        logs = lambda: [*self.homes[1].glob("a2a-ffn/*/log/rank1.txt")]  # noqa: E731
        wait_for(lambda: any("case 1 of 1" in log.read_text() for log in logs()), 80)
        time.sleep(seconds)

    def end(self, within_s: float) -> None:
        """(exit code, seconds, what it said) of each node, from now on."""
        since = time.monotonic()
        while len(self.ended) < 2 and time.monotonic() - since < within_s:
            for number, node in enumerate(self.nodes):
                if node.poll() is not None and number not in self.ended:
                    self.ended[number] = node.returncode, time.monotonic() - since
            time.sleep(0.1)
        for mark in self.marks:
            for pid in mark.alive():
                os.kill(pid, signal.SIGKILL)
        self.said = [node.communicate(timeout=20)[1] for node in self.nodes]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    home = tmp_path_factory.mktemp("nodes")
    for name in ("killed", "cut", "other"):
        (home / name).mkdir()
    other = home / "tree"
    for part in ("rlkernel", "env"):
        shutil.copytree(ROOT / part, other / part, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "rlkernel" / "overlap" / "terms.py").open("a") as file:
        file.write("\nFEWEST = 6\n")
    with nodes.made(2, 2, "cpu") as emulated:
        found = {"killed": Pair(home / "killed")}
        found["other"] = Pair(home / "other", (ROOT, other), ("--num-tests", "0"))
        if emulated.how == nodes.NAMESPACES:
            found["cut"] = Pair(home / "cut", agents=emulated.agents)
        try:
            found["killed"].underway(0.5)  # while all meet behind what is called for the first time
            for pid in found["killed"].marks[1].ranks():
                os.kill(pid, signal.SIGKILL)
            if "cut" in found:
                found["cut"].underway(3.0)  # in the middle of timed calls
                far = emulated.agents[1]
                wire = ("ip", "link", "set", far.env["GLOO_SOCKET_IFNAME"], "down")
                subprocess.run([*far.prefix, *wire], check=True, timeout=10)
                found["cut"].end(60)
        finally:
            for pair in (found["killed"], found["other"]):
                pair.end(60)
            if "cut" in found and not found["cut"].ended:
                found["cut"].end(0)
    return found


def test_nodes_with_other_code_are_refused_by_name(pairs):
    pair = pairs["other"]
    assert [pair.ended[number][0] for number in (0, 1)] == [2, 2], pair.said
    assert "nodes differ in source: rank 0 has " in pair.said[0]
    (record,) = records.find("a2a-ffn", pair.homes[0])
    assert record.status == "crashed" and "Every node needs the same" in record.run["reason"]
    assert not record.rows, "nothing ran"


def test_a_node_whose_ranks_are_killed_ends_the_other(pairs):
    pair = pairs["killed"]
    assert [pair.ended[number][0] for number in (0, 1)] == [3, 3], pair.said
    assert "rank 1 of 2 did not answer its peers; it ran on another node" in pair.said[0]
    assert "rank 0: raised PeerLost" in pair.said[0]
    assert "rank 1 of 2 killed by SIGKILL" in pair.said[1]
    assert max(seconds for _, seconds in pair.ended.values()) < 60


def test_a_cable_that_is_pulled_ends_both_nodes(pairs):
    """No end of the connection is told; node 1 cannot even ask the store."""
    if "cut" not in pairs:
        pytest.skip("no network namespaces here")
    pair = pairs["cut"]
    assert [pair.ended[number][0] for number in (0, 1)] == [3, 3], (pair.ended, pair.said)
    assert "rank 1 of 2 did not answer its peers" in pair.said[0]
    assert "a peer of group [0, 1] is gone, and the store with it" in pair.said[1]


def test_a_store_that_does_not_answer():
    class Silent:
        def check(self, keys):
            time.sleep(5)

        def set(self, key, value):
            raise ValueError(key)

        def get(self, key):
            return b"here"

    store = BoundedStore(Silent(), soon_s=0.05)
    with pytest.raises(RuntimeError, match=r"did not answer within 0\.05 s"):
        store.check(["a"])
    with pytest.raises(ValueError, match="its own error"):
        store.set("its own error", "")
    assert store.get("a") == b"here"
