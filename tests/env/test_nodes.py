"""The scripts that start several nodes, with a Python and a Slurm that say how they are called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SAYS = """#!/bin/sh
echo "$NCCL_NVLS_ENABLE $TORCH_SYMM_MEM_DISABLE_MULTICAST" >> "$SAID-multicast"
echo "$NODE_RANK of $NNODES at $MASTER_ADDR:$MASTER_PORT ${NCCL_HOSTID:-real}: $*" >> "$SAID"
exit $((NODE_RANK == 0 ? ${FIRST:-0} : ${SECOND:-0}))
"""


@pytest.fixture
def stage(tmp_path):
    """(environment, lines said so far): `python` and Slurm's tools on the PATH are of the test."""
    tools = {"python": SAYS, "scontrol": "#!/bin/sh\necho first\necho second\n"}
    tools["srun"] = (
        '#!/bin/sh\nshift\nfor node in 0 1; do SLURM_NODEID=$node "$@" || code=$?; done\n'
        "exit ${code:-0}\n"
    )
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    said = tmp_path / "said"
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAID": str(said)}
    env |= {"PYTHON": str(tmp_path / "python"), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "x[0-1]"}
    for name in ("MASTER_ADDR", "MASTER_PORT", "NCCL_HOSTID", "SLURM_SUBMIT_DIR"):
        env.pop(name, None)
    return env, lambda: sorted(said.read_text().splitlines())


def run(root: Path, script: str, env: dict, *words: str) -> int:
    return subprocess.run(["bash", root / "env" / script, *words], env=env, timeout=20).returncode


def test_two_nodes_on_one_machine(root, stage):
    env, said = stage
    assert run(root, "two_nodes.sh", env, "--device", "cpu") == 0
    assert said() == [
        f"{n} of 2 at 127.0.0.1:29500 node{n}: -m rlkernel ws2 --device cpu" for n in (0, 1)
    ]


@pytest.mark.parametrize("first, second, code", [("1", "0", 1), ("3", "3", 3), ("0", "4", 4)])
def test_the_first_node_tells_how_it_ended(root, stage, first, second, code):
    env, _ = stage
    assert run(root, "two_nodes.sh", env | {"FIRST": first, "SECOND": second}) == code


def test_slurm_starts_the_same_command_on_every_node(root, stage):
    env, said = stage
    words = ("ws2", "--what", "forward, backward")
    assert run(root, "slurm.sbatch", env | {"MASTER_PORT": "4000"}, *words) == 0
    assert said() == [
        f"{n} of 2 at first:4000 real: -m rlkernel ws2 --what forward, backward" for n in (0, 1)
    ]


@pytest.mark.parametrize("script", ["two_nodes.sh", "run_prod_cross.sh"])
def test_multicast_is_off_whatever_the_shell_says(root, stage, tmp_path, script):
    env, _ = stage
    env |= {"NCCL_NVLS_ENABLE": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "0"}
    assert run(root, script, env | {"NODE_RANK": "0", "MASTER_ADDR": "first"}) == 0
    assert set((tmp_path / "said-multicast").read_text().splitlines()) == {"0 1"}
