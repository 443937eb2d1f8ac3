"""One launch of eight real ranks under torchrun, of a program that writes rankN.json for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RANKS = 8


def launch(program: Path, out: Path) -> dict[int, dict[str, str | None]]:
    """What every rank says of every check: {rank: {check: traceback or None}}."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", str(program), str(out)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110)
    found = {rank: out / f"rank{rank}.json" for rank in range(RANKS)}
    assert all(file.exists() for file in found.values()), done.stderr[-4000:]
    said = {rank: json.loads(file.read_text()) for rank, file in found.items()}
    assert done.returncode == 0 or any(any(s.values()) for s in said.values()), done.stderr[-4000:]
    return said
