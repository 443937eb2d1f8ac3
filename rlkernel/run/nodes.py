"""On how many nodes does a launch run, and how do they come about on this machine?

    one agent        an ordinary launch
    two agents       two torchrun agents on this machine stand for two nodes. Each has a network
                     namespace of its own where the machine allows it (Linux, root, `ip`), else
                     both meet over loopback. With GPUs each tells NCCL another host (NCCL_HOSTID).
    NNODES > 1       this machine is one of several real nodes, number NODE_RANK, and rank 0 of
                     them is at MASTER_ADDR; the same command runs on each.

Which of these it was stands in the record: only the last one can be several nodes. A namespace has
no name and is held by its processes, so it ends with them, whatever they die of.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rlkernel.experiments.case import UsageError

ONE, NAMESPACES, LOOPBACK, APART = (
    "one agent",
    "two agents, a network namespace each",
    "two agents over loopback",
    "agents started apart, one for each of NNODES",
)
PORT = 29500
NUMBERS = (("NNODES", 1), ("NODE_RANK", 0), ("MASTER_PORT", PORT))
STEP_S = 10  # for a command that changes the network


@dataclass(frozen=True)
class Agent:
    """One torchrun agent: in front of which words, with which variables it starts."""

    rank: int = 0
    prefix: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Nodes:
    """The agents that this process starts, of `count` in all; `why`: what was not possible."""

    how: str
    count: int
    agents: tuple[Agent, ...]
    address: str = "127.0.0.1"
    port: int = 0
    why: str = ""

    def describe(self) -> dict:
        """For the record. Agents that were started apart may share a machine: the ranks tell."""
        told: dict = {"agents": self.how}
        if self.how == APART:
            told["nodes"] = "as the ranks found them"
        return {**told, "why_not_namespaces": self.why} if self.why else told


def asked() -> tuple[int, int]:
    """(NNODES, NODE_RANK) of the environment. Raises UsageError for what cannot be."""
    try:
        count, rank, _ = (int(os.environ.get(name) or default) for name, default in NUMBERS)
    except ValueError:
        raise UsageError("NNODES, NODE_RANK and MASTER_PORT must be numbers") from None
    if count < 1 or not 0 <= rank < count:
        raise UsageError(f"NODE_RANK={rank} is not possible with NNODES={count}")
    if count > 1 and not os.environ.get("MASTER_ADDR"):
        raise UsageError("NNODES > 1 needs MASTER_ADDR, the address of node 0")
    return count, rank


def apart(run: dict) -> bool:
    """Whether the agents of this record were started apart, on as many machines or not."""
    return (run.get("topology") or {}).get("agents") == APART


def away(world: int) -> set[int]:
    """Ranks of a world that run on other machines than this one."""
    count, rank = asked()
    here = range(world // count * rank, world // count * (rank + 1))
    return set(range(world)) - set(here)


def check(worlds: Iterable[int]) -> None:
    """Raise UsageError unless each of these worlds divides over NNODES."""
    count, _ = asked()
    for world in worlds:
        if world % count:
            raise UsageError(f"{world} rank(s) do not divide over NNODES={count}")


@contextlib.contextmanager
def made(wanted: int, world: int, device: str, number: int = 0) -> Iterator[Nodes]:
    """The agents for a world of `world` ranks on `wanted` nodes; gone when the block ends.

    number: which launch of a run this is, so that two have no port in common.
    """
    count, rank = asked()
    if count > 1:
        check([world])
        address = os.environ["MASTER_ADDR"]
        port = int(os.environ.get("MASTER_PORT") or PORT) + number
        yield Nodes(APART, count, (Agent(rank),), address, port)
    elif wanted == 1:
        yield Nodes(ONE, 1, (Agent(),))
    elif device == "cuda":
        yield _loopback(wanted, world, device, "NCCL tells the nodes apart by NCCL_HOSTID")
    else:
        with _namespaces(wanted) as nodes:
            yield nodes if isinstance(nodes, Nodes) else _loopback(wanted, world, device, nodes)


def _loopback(wanted: int, world: int, device: str, why: str) -> Nodes:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = []
    for rank in range(wanted):
        env = {}
        if device == "cuda":
            env = {"NCCL_HOSTID": f"node{rank}", **_own_gpus(rank, world // wanted, world)}
        agents.append(Agent(rank, (), env))
    return Nodes(LOOPBACK, wanted, tuple(agents), port=port, why=why)


def _own_gpus(rank: int, ranks: int, world: int) -> dict[str, str]:
    """GPUs of its own for each emulated node where there are enough, else nodes share them."""
    from rlkernel.records import machine

    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(machine.environment()["gpus"])
    devices = [str(n) for n in range(present)] if shown is None else shown.split(",")
    if len(devices) < world:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[rank * ranks : (rank + 1) * ranks])}


@contextlib.contextmanager
def _namespaces(wanted: int) -> Iterator[Nodes | str]:
    """Two network namespaces joined by a pair of virtual interfaces, or why there are none."""
    with contextlib.ExitStack() as held:
        try:
            yield _joined(held, wanted)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            yield f"no network namespaces here: {said.strip().splitlines()[-1]}"


def _joined(held: contextlib.ExitStack, wanted: int) -> Nodes | str:
    tools = ("ip", "unshare", "nsenter")
    absent = [tool for tool in tools if not shutil.which(tool)]
    if not sys.platform.startswith("linux") or wanted != 2 or absent:
        return f"no network namespaces here: {', '.join(absent) or sys.platform} is missing"
    pids = [_holder(held) for _ in range(wanted)]
    names = [f"rl{os.getpid() % 100000}n{n}" for n in range(wanted)]
    first, second = names
    _do("ip", "link", "add", first, "netns", str(pids[0]), "type", "veth",
        "peer", "name", second, "netns", str(pids[1]))  # fmt: skip
    agents = []
    for rank, (pid, name) in enumerate(zip(pids, names)):
        within = ("nsenter", "-t", str(pid), "-n", "--")
        _do(*within, "ip", "addr", "add", f"10.99.0.{rank + 1}/24", "dev", name)
        for device in ("lo", name):
            _do(*within, "ip", "link", "set", device, "up")
        agents.append(Agent(rank, within, {"GLOO_SOCKET_IFNAME": name, "TP_SOCKET_IFNAME": name}))
    return Nodes(NAMESPACES, wanted, tuple(agents), "10.99.0.1", PORT)


def _holder(held: contextlib.ExitStack) -> int:
    """A process that waits in a network namespace of its own until this one ends."""
    ours = os.readlink("/proc/self/ns/net")
    child = subprocess.Popen(
        ["unshare", "-n", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    held.callback(_release, child)
    until = time.monotonic() + STEP_S
    while time.monotonic() < until:
        if child.poll() is not None:
            raise OSError(child.stderr.read() or "unshare ended at once")
        if os.readlink(f"/proc/{child.pid}/ns/net") != ours:
            return child.pid
        time.sleep(0.005)
    raise OSError("unshare made no network namespace in time")


def _release(child: subprocess.Popen) -> None:
    child.stdin.close()  # `cat` reads the end of its input: no signal is needed
    child.wait()
    child.stderr.close()


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=STEP_S)
