"""The launch scripts of the A2A-FFN: one node, two nodes by two agents, and nodes that differ."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

from rlkernel import experiments, records
from rlkernel.__main__ import asked
from rlkernel.experiments.case import UsageError
from rlkernel.run import plan, worker

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "--batch-size 2 --tokens 4 --dim 16 --k 2 --no-compile --warmup 1 --num-tests 2".split()


def run(script: str, folder: Path, *words: str, **env: str) -> subprocess.Popen:
    env = {"PYTHON": sys.executable, "RLKERNEL_RESULTS": str(folder), "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(
        ["bash", str(ROOT / "env" / script), *SHAPE, *words], env=os.environ | env, text=True,
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_two_nodes_by_two_agents(tmp_path):
    """One rank each; node 0 keeps the record, node 1 a word where it is."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"GLOO_SOCKET_IFNAME": "lo"}
    homes = [tmp_path / "node0", tmp_path / "node1"]
    for home in homes:
        home.mkdir()
    words = ("--overlap", "kernel", "--check-correctness", "bitwise", "--trace")
    nodes = [
        run("run_prod_cross.sh", home, *words, NODE_RANK=str(number), **shared)
        for number, home in enumerate(homes)
    ]
    said = [node.communicate(timeout=250) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    (away,) = records.find("a2a-ffn", homes[1])
    assert away.status == "skipped" and "node 0" in away.run["reason"] and not away.rows
    record = next(r for r in records.find("a2a-ffn", homes[0]) if r.status == "ok")
    assert record.passed and "started apart" in record.run["topology"]["agents"]
    assert record.rows[0]["result"]["lines"][0]["rung"] == "chunks"
    kept = [(home, file) for home in homes for file in sorted(home.glob("a2a-ffn/*/trace/*.gz"))]
    mine, came, theirs = (file.read_bytes() for _, file in kept)
    assert mine != came == theirs, "node 1's trace came to node 0"
    asked = record.run["parameters"]
    again = plan.make("a2a-ffn", asked, homes[0], force=False)
    assert again.complete is None and not again.done, "one machine has to measure by itself"


def test_one_node(tmp_path):
    node = run("run_prod_local.sh", tmp_path, "--overlap", "none", "--num-tests", "0", NPROC="1")
    out, errors = node.communicate(timeout=250)
    assert node.returncode == 0 and "P=1 B=2 T=4 D=16 k=2 bf16" in out, errors


def test_cross_needs_to_know_where_it_is(tmp_path):
    for missing, env in (("NODE_RANK", {}), ("MASTER_ADDR", {"NODE_RANK": "0"})):
        node = run("run_prod_cross.sh", tmp_path, **env)
        _, errors = node.communicate(timeout=20)
        assert node.returncode == 2 and missing in errors


def test_nodes_that_differ_are_refused_by_name():
    here = {}

    class World:
        rank, size, timeout_s = 0, 2, 5
        store = types.SimpleNamespace(set=here.__setitem__, get=here.__getitem__)

        def meet(self, tag, timeout_s):
            theirs = json.loads(here["node/0"])
            here["node/1"] = json.dumps(theirs | self.other)

    for other, says in (
        ({"torch": "2.6.0"}, "nodes differ in torch: rank 0 has .*, rank 1 2.6.0"),
        ({"source": "0"}, "nodes differ in source"),
        ({"seam": "0"}, "nodes differ in seam"),
        ({"what was asked for": "0"}, "nodes differ in what was asked for"),
    ):
        world = World()
        world.other = other
        with pytest.raises(UsageError, match=says):
            worker.nodes_alike(world, "rlkernel.experiments.a2a_ffn", [])
    world.other = {}
    worker.nodes_alike(world, "rlkernel.experiments.a2a_ffn", [])


def test_the_door_to_the_public_check_is_short():
    text = (ROOT / "env" / "public_check.py").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith(('"""', "import"))]
    assert len(lines) <= 5 and '"public"' in text


# ---- more GPUs than here -------------------------------------------------------------------------


def shown(gpus: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(ROOT / "env" / "run_many_gpus.sh"), gpus],
        env=os.environ | {"SHOW": "1"} | env, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("gpus, most", [("4", "tp2_cp2_sp"), ("8", "tp4_cp2_sp")])
def test_every_command_for_many_gpus_is_one_that_can_be_typed(gpus, most, device):
    done = shown(gpus, DEVICE=device)
    assert (done.returncode, done.stderr) == (0, "")
    made = []
    for line in done.stdout.splitlines():
        assert line.startswith("+ python -m rlkernel ")
        name, *words = shlex.split(line)[4:]
        made.append((name, asked(name, experiments.load(name), words)[1]))
    assert {name for name, _ in made} >= {"det-ffn", "wire", "a2a-ffn"}
    assert all(most in at.layout for name, at in made if name == "det-ffn")
    assert all(at.nproc == (int(gpus),) for name, at in made if name in ("wire", "a2a-ffn"))
    assert [at.nodes for name, at in made if name == "a2a-ffn"][-1] == 2


def test_another_number_of_gpus_is_refused():
    done = shown("3")
    assert done.returncode == 2 and not done.stdout and "expected 4 or 8" in done.stderr


def test_a_command_that_fails_does_not_stop_the_next(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$3" in wire) exit 7;; esac\n')
    python.chmod(0o755)
    done = shown("4", SHOW="0", DEVICE="cpu", PYTHON=str(python))
    assert done.returncode == 7 and "exit code 7 from: python -m rlkernel wire" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("+ python -m rlkernel a2a-ffn")
