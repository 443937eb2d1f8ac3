"""Processes that share one import of torch: a server imports it once a session and forks each.

Importing torch takes a core more than a second, and ranks do it all at a time.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import time
from collections.abc import Iterable
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch"])  # no kernel: it is interpreted or not as a program says


def world(ranks: int) -> list[dict[str, str]]:
    """What each rank of a new world finds in its environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared |= {"PYTHONPATH": str(ROOT), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def start(program: Path, *arguments: str, said: Path, **environment: str) -> BaseProcess:
    """Run a program as a script; what it prints is in SAID.out and SAID.err."""
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # read while torch is imported
        forkserver.ensure_running()
    given = (program, arguments, os.environ | environment, said)
    process = _context.Process(target=_become, args=given, daemon=True)
    process.start()
    return process


def wait(processes: list[BaseProcess], within_s: float) -> bool:
    """Until all have ended or one has failed -> whether all are well. Nobody is left behind."""
    running, deadline = {one.sentinel: one for one in processes}, time.monotonic() + within_s
    while running and (ended := connection.wait(running, max(0, deadline - time.monotonic()))):
        if any(process.exitcode for process in map(running.pop, list(ended))):
            break
    _end(processes)
    return not any(process.exitcode for process in processes)


def survivors(program: Path, manners: Iterable[tuple[str, ...]], home: Path, **environment: str):
    """Worlds of four beside each other, none with an agent, whose rank 2 is lost in a manner ->
    {manner: {rank: (stdout, stderr)}} of the others.
    """
    files = {(how, rank): home / f"{'-'.join(how)} {rank}" for how in manners for rank in range(4)}
    ranks = {
        (how, rank): start(program, *how, said=files[how, rank], **own, **environment)
        for how in manners
        for rank, own in enumerate(world(4))
    }
    try:
        for (_, rank), process in ranks.items():
            process.join(250 if rank != 2 else 0)
    finally:
        _end(ranks.values())
    return {
        how: {r: tuple(Path(f"{files[how, r]}.{kind}").read_text() for kind in ("out", "err"))
              for r in (0, 1, 3)}
        for how in manners
    }  # fmt: skip


def _end(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


def _become(program: Path, arguments: tuple, environment: dict, said: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for stream, kind in ((sys.stdout, "out"), (sys.stderr, "err")):
        os.dup2(os.open(f"{said}.{kind}", os.O_WRONLY | os.O_CREAT), stream.fileno())
    sys.path.insert(0, str(program.parent))  # as it is for a script
    sys.argv[:] = [str(program), *arguments]
    runpy.run_path(str(program), run_name="__main__")
