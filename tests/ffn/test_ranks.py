"""The checks of ranks.py, one test each, from one launch of eight real ranks under torchrun."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("ranks.py")
ROOT = PROGRAM.parents[2]
RANKS = 8
NAMES = [
    node.name
    for node in ast.parse(PROGRAM.read_text()).body
    if isinstance(node, ast.FunctionDef) and "check" in map(ast.unparse, node.decorator_list)
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What every rank says of every check: {rank: {check: traceback or None}}."""
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", str(PROGRAM), str(out)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110)
    found = {rank: out / f"rank{rank}.json" for rank in range(RANKS)}
    assert all(file.exists() for file in found.values()), done.stderr[-4000:]
    said = {rank: json.loads(file.read_text()) for rank, file in found.items()}
    assert done.returncode == 0 or any(any(s.values()) for s in said.values()), done.stderr[-4000:]
    return said


@pytest.mark.parametrize("name", NAMES)
def test_on_every_rank(reports, name):
    broken = [f"rank {rank}:\n{said[name]}" for rank, said in reports.items() if said[name]]
    assert not broken, "\n".join(broken)


def test_checks_were_found():
    assert len(NAMES) > 10
