"""shared.py by hand: a line a check, a file with what every rank said, and its exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("shared.py")
ROOT = PROGRAM.parents[2]
RUN = ("a_gather_through_shared_memory_moves_bits_of_any_dtype", "a_rank_that_died_is_named")
FEW = "a_group_that_spans_hosts_never_shares_memory"


def by_hand(*words: str, **more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    words = (str(PROGRAM), "--device", "cpu", *words)
    return subprocess.run([*command, *words], env=env, capture_output=True, text=True, timeout=250)


def test_two_ranks_run_what_they_can(tmp_path):
    out = tmp_path / "said.json"
    done = by_hand("--only", ",".join((*RUN, FEW)), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(" (")[0] for line in lines if ":" in line] == [
        f"{RUN[0]}: ok", f"{FEW}: not run: needs 4 ranks", f"{RUN[1]}: ok",
    ]  # fmt: skip
    said = json.loads(out.read_text())
    assert (said["ranks"], said["device"], said["process groups"]) == (2, "cpu", "gloo")
    assert set(said["checks"]) == set(RUN)
    assert all(one["passed"] and one["ranks"] == [None, None] for one in said["checks"].values())


def test_a_check_that_is_not_there_is_refused_by_name():
    done = by_hand("--only", "no_such_check")
    assert done.returncode == 1 and "no check is called no_such_check" in done.stderr
