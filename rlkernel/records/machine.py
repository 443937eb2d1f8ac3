"""What ran where, told without importing torch and without telling who or on which host."""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path


def environment() -> dict:
    """Facts about this machine that can change a result or a time.

    Keys: python, platform, machine, cpu (model), cores (usable by this process), memory_gib, torch,
    triton, numpy, nccl (versions, or None where absent) and gpus, a list of {"name", "memory_mib",
    "driver"}. No host name, no user name, no path.
    """
    return copy.deepcopy(_environment())


@functools.cache
def _environment() -> dict:
    return {
        "python": platform.python_version(),
        "platform": " ".join([platform.system(), *re.findall(r"^\d+\.\d+", platform.release())]),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cores": _cores(),
        "memory_gib": _memory_gib(),
        "torch": _version("torch"),
        "triton": _version("triton") or _version("pytorch-triton-rocm"),
        "numpy": _version("numpy"),
        "nccl": _first_version("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        "gpus": _gpus(),
    }


def label(environment: dict) -> str:
    """A short name for a machine: "2x NVIDIA H200" or "2-core x86-64 CPU"."""
    gpus = environment.get("gpus") or []
    if gpus:
        names = sorted({gpu["name"] for gpu in gpus})
        return f"{len(gpus)}x {' / '.join(names)}"
    machine = str(environment.get("machine", "unknown")).replace("_", "-")
    return f"{environment.get('cores', '?')}-core {machine} CPU"


def git(root: Path) -> dict | None:
    """{"commit": 40 hex, "dirty": bool} of the repository whose top is `root`, else None."""
    if not (root / ".git").exists():
        return None

    def ask(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        dirty = bool(ask("status", "--porcelain", "--untracked-files=no"))
        return {"commit": ask("rev-parse", "HEAD"), "dirty": dirty}
    except (OSError, subprocess.SubprocessError):
        return None


def identity(pid: int | None = None) -> dict:
    """{"pid", "token"}: enough to ask later whether this very process still lives.

    A process number is used again after a while and after every boot, so the token hashes it with
    the process's start time and the boot id. Hashed, because a boot id identifies a machine.
    """
    pid = os.getpid() if pid is None else pid
    return {"pid": pid, "token": _token(pid)}


def alive(who: dict | None) -> bool:
    """Whether the process of an `identity` runs, on this machine, in this boot."""
    if not who or not isinstance(who.get("pid"), int):
        return False
    if who.get("token") is None:  # made where there is no /proc
        try:
            os.kill(who["pid"], 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    return _token(who["pid"]) == who["token"]


def _token(pid: int) -> str | None:
    """None for a process that is gone, or on a system without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # The command name may hold spaces and brackets: fields count from behind the last bracket.
    fields = stat.rpartition(")")[2].split()
    state, start = fields[0], fields[19]
    if state in "ZX":  # dead, its parent has not asked for it yet
        return None
    return hashlib.sha256(f"{boot} {pid} {start}".encode()).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _first_version(*packages: str) -> str | None:
    return next((found for found in map(_version, packages) if found), None)


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    name = found.group(1) if found else platform.processor() or platform.machine() or "unknown"
    return " ".join(name.split())


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError):
        return None


def _gpus() -> list[dict]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version"]
    try:
        answer = subprocess.run(
            [*query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return _parse_gpus(answer)


def _parse_gpus(answer: str) -> list[dict]:
    """Lines "NVIDIA H200, 143771, 580.159" -> dicts. Memory in MiB (None where it is not told)."""
    rows = [[word.strip() for word in line.split(",")] for line in answer.splitlines()]
    return [
        {"name": row[0], "memory_mib": int(row[1]) if row[1].isdigit() else None, "driver": row[2]}
        for row in rows
        if len(row) == 3
    ]
