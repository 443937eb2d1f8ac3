"""Every file of interpreted/ in a process that has TRITON_INTERPRET=1 from its start.

By hand: TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("interpreted")
ROOT = FOLDER.parents[2]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="collected directly")
@pytest.mark.timeout(1500)  # half a minute of work, but ranks of other tests may hold the cores
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_interpreted(name):
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    # An exit code of 5, nothing collected, is a failure as well.
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
