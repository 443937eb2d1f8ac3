"""Start the agent, wait for it, end it: nothing that was started here stays behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlkernel.experiments.case import UsageError
from rlkernel.records.scrub import REPOSITORY
from rlkernel.records.store import cannot

GRACE_S = 10.0  # for the agent to end its ranks, before both are killed
TICK_S = 0.1
THREADS = 1  # a rank, whatever the world: torchrun's own default differs between 1 rank and more

# A launch from within a rank, or from a shell that was one, must not inherit who it was.
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK")
_PREFIXES = ("TORCHELASTIC_", "LOCAL_", "ROLE_", "GROUP_")


@dataclass
class Outcome:
    """How the launch ended. code: the agent's exit code, negative for a signal that killed it."""

    code: int
    timed_out: bool = False
    signal: int | None = None


@dataclass
class Signals:
    """The signals that came while they were caught."""

    caught: list[int] = field(default_factory=list)


@contextlib.contextmanager
def catching() -> Iterator[Signals]:
    """Note INT, TERM and HUP instead of acting on them; what is ignored stays ignored.

    A flag and no exception: none can come in the middle of writing a record.
    """
    signals = Signals()
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda n, _: signals.caught.append(n))
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def require_main_thread() -> None:
    """Raises UsageError elsewhere: the kernel ends ranks with the *thread* that launched them."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "measure() must be called from the main thread: the ranks live as long as the thread "
            "that launched them, and signals reach the main thread only"
        )


def run_agent(
    folder: Path,
    world: int,
    device: str,
    signals: Signals,
    timeout_s: float,
    on_tick: Callable[[], None],
) -> Outcome:
    """Run the spec of a run folder under torchrun on this machine, until it ends or is ended.

    on_tick is called about ten times a second. When it raises, everything is ended first.
    """
    scratch = folder / "log" / "torchrun"
    with _log(folder / "log" / "agent.txt") as log:
        child = subprocess.Popen(
            _command(folder, world, scratch),
            env=_environment(device),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C at a terminal reaches us; we end the agent
        )
    try:
        return _wait(child, signals, time.monotonic() + timeout_s, on_tick)
    finally:
        end(child, signals)
        shutil.rmtree(scratch, ignore_errors=True)


def _log(path: Path):
    try:
        return open(path, "ab")
    except OSError as error:
        raise cannot("open", path, error) from error


def _wait(child, signals: Signals, deadline: float, on_tick: Callable[[], None]) -> Outcome:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return Outcome(child.wait(TICK_S))
        on_tick()
        if signals.caught:
            number = signals.caught[0]
            return Outcome(end(child, signals), signal=number)
        if time.monotonic() > deadline:
            return Outcome(end(child, signals), timed_out=True)


def end(child: subprocess.Popen, signals: Signals) -> int:
    """SIGTERM, by which the agent ends its ranks; SIGKILL after the grace or at another signal.

    The ranks of a killed agent are killed by the kernel.
    """
    if child.poll() is None:
        child.terminate()
        deadline, seen = time.monotonic() + GRACE_S, len(signals.caught)
        while child.poll() is None:
            if time.monotonic() > deadline or len(signals.caught) > seen:
                child.kill()
                break
            time.sleep(0.02)
    return child.wait()


def _command(folder: Path, world: int, scratch: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "rlkernel.run.agent", str(os.getpid())),
        str(folder / "log" / "agent.json"),
        "--nnodes=1",
        f"--nproc-per-node={world}",
        # By number: a host whose own name does not resolve would wait for it.
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        f"--rdzv-id={uuid.uuid4().hex}",
        f"--log-dir={scratch}",
        *("-m", "rlkernel.run.worker", str(folder / "spec.json")),
    ]


def _environment(device: str) -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _TORCHRUN and not name.startswith(_PREFIXES)
    }
    paths = [str(REPOSITORY), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    env["OMP_NUM_THREADS"] = str(THREADS)
    if sys.platform.startswith("linux"):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        # NVLink multicast stays off: what it adds is not the contract's order of additions.
        env.setdefault("NCCL_NVLS_ENABLE", "0")
        env.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    return env
