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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlkernel.experiments.case import UsageError
from rlkernel.records.scrub import REPOSITORY
from rlkernel.records.store import cannot
from rlkernel.run.nodes import ONE, Agent, Nodes

SINGLE = Nodes(ONE, 1, (Agent(),))
GRACE_S = 10.0  # for the agent to end its ranks, before both are killed
TICK_S = 0.1
LINGER_S = 40.0  # for the other agents, once one has failed: their ranks miss a peer and say so
THREADS = 1  # a rank, whatever the world: torchrun's own default differs between 1 rank and more
# NVLink multicast, whatever the shell says: what it adds is not the contract's order of additions.
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

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
    nodes: Nodes = SINGLE,
    more: Mapping[str, str] | None = None,
) -> Outcome:
    """Run the spec of a run folder under torchrun on this machine, until it ends or is ended.

    on_tick is called about ten times a second. When it raises, everything is ended first. nodes:
    the agents to start. more: variables for all ranks.
    """
    scratch = folder / "log" / "torchrun"
    children: list[subprocess.Popen] = []
    try:
        for agent in nodes.agents:
            with _log(_named(folder, "agent.txt", agent.rank)) as log:
                children.append(subprocess.Popen(
                    [*agent.prefix, *_command(folder, world, scratch, nodes, agent.rank)],
                    env=_environment(device, nodes) | dict(more or {}) | agent.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C at a terminal reaches us; we end the agent
                ))  # fmt: skip
        return _wait(children, signals, time.monotonic() + timeout_s, on_tick)
    finally:
        _end_all(children, signals)
        shutil.rmtree(scratch, ignore_errors=True)


def reports(folder: Path) -> list[Path]:
    """Where the agents of a launch leave their reports."""
    return sorted((folder / "log").glob("agent*.json"))


def _named(folder: Path, name: str, node: int) -> Path:
    """log/agent.txt of node 0, log/agent1.txt of node 1."""
    stem, _, kind = name.partition(".")
    return folder / "log" / f"{stem}{node or ''}.{kind}"


def _log(path: Path):
    try:
        return open(path, "ab")
    except OSError as error:
        raise cannot("open", path, error) from error


def _wait(children, signals: Signals, deadline: float, on_tick: Callable[[], None]) -> Outcome:
    failed_at: float | None = None
    while True:
        running = next((child for child in children if child.poll() is None), None)
        if running is None:
            return Outcome(_first_failure(children))
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(TICK_S)
        on_tick()
        if signals.caught:
            number = signals.caught[0]
            return Outcome(_end_all(children, signals), signal=number)
        if time.monotonic() > deadline:
            return Outcome(_end_all(children, signals), timed_out=True)
        if failed_at is None and _first_failure(children):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + LINGER_S:
            return Outcome(_end_all(children, signals))


def _first_failure(children) -> int:
    """The first exit code that is not 0, of those that have ended."""
    return next((child.returncode for child in children if child.returncode), 0)


def _end_all(children, signals: Signals) -> int:
    failed = _first_failure(children)
    codes = [end(child, signals) for child in children]
    return failed or next(filter(None, codes), 0)


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


def _command(folder: Path, world: int, scratch: Path, nodes: Nodes, node: int) -> list[str]:
    # By number: a host whose own name does not resolve would wait for it.
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    meeting.append(f"--rdzv-id={uuid.uuid4().hex}")
    if nodes.count > 1:  # a node's number must be its own, or ranks land anywhere
        meeting = [f"--node-rank={node}", f"--master-addr={nodes.address}"]
        meeting.append(f"--master-port={nodes.port}")
    return [
        *(sys.executable, "-m", "rlkernel.run.agent", str(os.getpid())),
        str(_named(folder, "agent.json", node)),
        f"--nnodes={nodes.count}",
        f"--nproc-per-node={world // nodes.count}",
        *meeting,
        f"--log-dir={scratch}",
        *("-m", "rlkernel.run.worker", str(folder / "spec.json")),
    ]


def _environment(device: str, nodes: Nodes = SINGLE) -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _TORCHRUN and not name.startswith(_PREFIXES)
    }
    paths = [str(REPOSITORY), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    env["OMP_NUM_THREADS"] = str(THREADS)
    if sys.platform.startswith("linux") and nodes.address.startswith("127."):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        env |= MULTICAST_OFF
    return env
