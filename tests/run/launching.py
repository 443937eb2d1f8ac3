"""For tests that launch real processes: a mark on all of them, and a look at who is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOY = "tests.run.toy"
MARK = "RLKERNEL_TEST_MARK"


class Marked:
    """Every process that inherits the mark can be found, whatever session or parent it has."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex

    def environment(self, **more: str) -> dict[str, str]:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        # Torch's log is silenced on purpose: what the agent tells must not depend on it.
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "LOGLEVEL": "ERROR"}
        return env | {MARK: self.mark} | more

    def start(self, *words: object, **popen) -> subprocess.Popen:
        """`python -m rlkernel WORDS` with the mark."""
        command = [sys.executable, "-m", "rlkernel", *map(str, words)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=ROOT, env=self.environment(), **(pipes | popen))

    def alive(self) -> dict[int, str]:
        """pid -> command line of every marked process but this one."""
        wanted = f"{MARK}={self.mark}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    found[int(entry.name)] = b" ".join(words).decode().strip()
        return {pid: line for pid, line in found.items() if line}

    def ranks(self) -> list[int]:
        agents = self.agents()  # their command line names the worker too
        alive = self.alive().items()
        return [p for p, line in alive if "rlkernel.run.worker" in line and p not in agents]

    def agents(self) -> list[int]:
        return [p for p, line in self.alive().items() if "rlkernel.run.agent" in line]

    def assert_nobody_left(self, within_s: float = 10.0) -> None:
        with suppress(TimeoutError):
            wait_for(lambda: not self.alive(), within_s)
        left = self.alive()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"left behind: {left}"


def wait_for(condition: Callable[[], object], within_s: float = 40.0) -> object:
    """Poll until `condition()` is true and return it; TimeoutError after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise TimeoutError(f"not within {within_s} s")


def folders(root: Path, experiment: str = "toy") -> list[Path]:
    return sorted(path for path in (root / experiment).glob("[!.]*"))  # not one in the making
