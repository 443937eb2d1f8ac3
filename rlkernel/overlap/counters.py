"""Windows of hardware counters around work on a GPU: what was read, written, and kept busy.

    with Counters(device, interval_ns) as counters:
        counters.start()
        ...                          # launch, synchronise; note time.time_ns() ahead and behind
        window = counters.stop().between(ahead, behind)

CUPTI's timestamps are those of the host's clock, so a window is cut by time.time_ns().
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from rlkernel.overlap.sampler import METRICS

PATIENCE_S = 60.0
LIBRARY = "cupti"  # of cupti-python
BESIDE = Path(sys.prefix, "counters")  # where `make counters` puts it
MISSING = (
    "needs cupti-python (env/requirements-counters.txt), which reads the hardware counters; "
    "`make counters` installs it beside the packages of .venv and measures"
)


class CountersError(RuntimeError):
    """The sampler's process ended, was silent for too long, or says why it cannot count."""


def missing() -> str | None:
    """Why nothing can be counted here, as far as that is known without a GPU."""
    found = importlib.util.find_spec(LIBRARY) or (BESIDE / LIBRARY).is_dir()
    return None if found else MISSING


@dataclass(frozen=True)
class Window:
    """ns: ends of the intervals on the host's clock. values: name of METRICS -> one an interval."""

    ns: tuple[int, ...]
    values: dict[str, tuple[float, ...]]

    def between(self, begin: int, end: int) -> Window:
        """The intervals that end in (begin, end]."""
        kept = [n for n, ns in enumerate(self.ns) if begin < ns <= end]
        values = {name: tuple(each[n] for n in kept) for name, each in self.values.items()}
        return Window(tuple(self.ns[n] for n in kept), values)

    def total(self, name: str) -> float:
        return sum(self.values[name])

    def share(self, name: str) -> float:
        """Of all cycles, those in which `name` counted: 0 to 1; 0 of no cycle."""
        cycles = self.total("cycles")
        return self.total(name) / cycles if cycles else 0.0

    def mhz(self) -> float:
        """The SM clock, from the cycles of all intervals but the first, whose begin is unknown."""
        ns = self.ns[-1] - self.ns[0] if self.ns else 0
        return 1e3 * sum(self.values["cycles"][1:]) / ns if ns else 0.0

    def longest_gap(self) -> int:
        """Nanoseconds between two ends: an interval, unless samples were lost."""
        return max((b - a for a, b in zip(self.ns, self.ns[1:])), default=0)


class Counters:
    """The sampler of one GPU. device: its number as this process sees it. CountersError from
    everything that fails.
    """

    def __init__(self, device: int, interval_ns: int) -> None:
        self.said = tempfile.TemporaryFile("w+")
        command = [sys.executable, "-m", "rlkernel.overlap.sampler", str(device), str(interval_ns)]
        pipe = subprocess.PIPE
        path = filter(None, (str(BESIDE), os.environ.get("PYTHONPATH")))
        self.child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.said, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )  # fmt: skip
        try:
            self._answer()
        except CountersError:
            self.close()
            raise

    def __enter__(self) -> Counters:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self.child.stdin.close()  # which ends it
        try:
            self.child.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        self.child.stdout.close()
        self.said.close()

    def start(self) -> None:
        self._ask("start")

    def stop(self) -> Window:
        """All intervals since start; the device should be idle, or the last ones are missing."""
        told = self._ask("stop")
        values = {name: tuple(told[name]) for name in METRICS}
        return Window(tuple(told["ns"]), values)

    def _ask(self, word: str) -> dict:
        try:
            self.child.stdin.write(f"{word}\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: what it said is read below
        return self._answer()

    def _answer(self) -> dict:
        late = threading.Timer(PATIENCE_S, self.child.kill)
        late.start()
        line = self.child.stdout.readline()
        late.cancel()
        if not line:
            self.child.wait()
            self.said.seek(0)
            last = self.said.read().strip().splitlines()[-1:] or ["it said nothing"]
            raise CountersError(
                f"the counters' process ended with {self.child.returncode}: {last[0]}"
            )
        told = json.loads(line)
        if "error" in told:
            raise CountersError(f"the counters cannot be read: {told['error']}")
        return told
