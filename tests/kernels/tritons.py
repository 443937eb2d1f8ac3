"""Compile-only scripts under every Triton that kernels have to pass: this Python's, and 3.6.

`make test` puts Triton 3.6 into .venv/triton36. Where that folder is missing its tests are skipped,
or fail if RLKERNEL_REQUIRE_TRITON36 is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OLDER = ROOT / ".venv" / "triton36"


def tritons():
    """Parameters of a fixture: the folder that goes first on PYTHONPATH, or an empty word."""
    missing = not (OLDER / "triton").is_dir() and not os.environ.get("RLKERNEL_REQUIRE_TRITON36")
    skip = pytest.mark.skipif(missing, reason="no Triton 3.6 in .venv/triton36: make test")
    return [pytest.param("", id="here"), pytest.param(str(OLDER), id="triton-3.6", marks=skip)]


def run_script(name: str, folder: str, cache: Path, *arguments: str) -> str:
    """What a script of this folder prints; fails with its output. No GPU, no interpreter."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": folder, "PYTHONSAFEPATH": "1"}
    script = [sys.executable, str(HERE / name), *arguments]
    check = "import triton; print(triton.__version__)"
    version = subprocess.run(
        [sys.executable, "-c", check], env=env, capture_output=True, text=True
    ).stdout
    assert version.startswith("3.6.") == bool(folder), f"Triton {version} from {folder!r}"
    done = subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
