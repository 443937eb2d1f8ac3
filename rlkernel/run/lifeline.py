"""A child that does not outlive its parent (Linux), whatever the parent dies of.

torchrun starts each rank in a session of its own, so no signal to a process group reaches them, and
a parent that is killed by SIGKILL can tell nobody. The kernel can.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def supported() -> bool:
    return sys.platform.startswith("linux")


def describe() -> str:
    """For the record: what ends the ranks when a process above them is killed."""
    if supported():
        return "death signal from the kernel"
    return f"none on {sys.platform}: a killed launcher leaves its ranks to their timeouts"


def die_with_parent(death: signal.Signals, parent: int | None) -> None:
    """Ask the kernel for `death` when the parent's thread that started this process ends.

    parent: the process number that must still be the parent (None: any but init). Where it is gone
    already this process ends at once, with exit code 1: the request would come too late.
    """
    if not supported():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(death), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    now = os.getppid()
    if now != parent if parent is not None else now == 1:
        os._exit(1)
