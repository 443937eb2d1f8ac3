"""Compile-only scripts under every Triton that kernels have to pass: this Python's, and 3.6.

`make test` puts Triton 3.6 into .venv/triton36. Where that folder is missing its tests are skipped,
or fail if RLKERNEL_REQUIRE_TRITON36 is set.

Compiling takes minutes and no other test waits for it, so conftest.py starts the scripts as soon as
the tests are collected; they run beside the others, at a low priority.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OLDER = ROOT / ".venv" / "triton36"

_workers = ThreadPoolExecutor(2)
_started: dict[tuple[str, ...], Future[str]] = {}
_running: set[subprocess.Popen] = set()


def tritons():
    """Parameters of a fixture: the folder that goes first on PYTHONPATH, or an empty word."""
    missing = not (OLDER / "triton").is_dir() and not os.environ.get("RLKERNEL_REQUIRE_TRITON36")
    skip = pytest.mark.skipif(missing, reason="no Triton 3.6 in .venv/triton36: make test")
    return [pytest.param("", id="here"), pytest.param(str(OLDER), id="triton-3.6", marks=skip)]


def start(folder: str, script: tuple[str, ...]) -> Future[str]:
    """Run a script of this folder with its arguments once in this session."""
    key = (folder, *script)
    if key not in _started:
        env = dict(os.environ)  # as it is now: what a test sets for itself is not for these
        _started[key] = _workers.submit(_run, folder, script, env)
    return _started[key]


def run_script(folder: str, script: tuple[str, ...]) -> str:
    """What it prints; fails with its output. No GPU, no interpreter."""
    return start(folder, script).result()


def stop() -> None:
    """Nothing goes on behind the tests."""
    _workers.shutdown(wait=False, cancel_futures=True)
    for process in list(_running):
        process.kill()


def _run(folder: str, script: tuple[str, ...], env: dict[str, str]) -> str:
    env = {key: value for key, value in env.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": folder, "PYTHONSAFEPATH": "1"}
    version = _output(["-c", "import triton; print(triton.__version__)"], env)
    assert version.startswith("3.6.") == bool(folder), f"Triton {version} from {folder!r}"
    with tempfile.TemporaryDirectory() as cache:
        name, *arguments = script
        return _output([str(HERE / name), *arguments], env | {"TRITON_CACHE_DIR": cache})


def _output(command: list[str], env: dict[str, str]) -> str:
    process = subprocess.Popen(
        ["nice", "-n", "10", sys.executable, *command],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    _running.add(process)
    try:
        printed, said = process.communicate()
    finally:
        _running.discard(process)
    assert process.returncode == 0, printed + said
    return printed
