"""A notebook whose cell launched real ranks: however it ends, no rank outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import nbformat
import pytest

from rlkernel import records
from tests.run.launching import TOY, Marked, folders, wait_for

CELL = f"""
import os
from rlkernel.run import launch
print("kernel", os.getpid(), flush=True)
launch.measure({TOY!r}, dict(fault={{fault!r}}, nproc="2"), root={{root!r}}, timeout_s=60)
"""


@pytest.fixture
def processes():
    marked = Marked()
    yield marked
    marked.assert_nobody_left()


def start(processes, notebook, tmp_path, fault):
    """`rlkernel notebook` on a cell that launches two ranks of the toy experiment."""
    book = notebook("#md # A launch", CELL.format(fault=fault, root=str(tmp_path)))
    command = [sys.executable, "-m", "rlkernel", "notebook", str(book)]
    return subprocess.Popen(
        [*command, "-o", str(tmp_path / "out.ipynb")],
        env=processes.environment(RLKERNEL_GRACE_S="2"),
        stderr=subprocess.PIPE,
        text=True,
    )


def hanging(processes) -> bool:
    return len(processes.ranks()) == 2


@pytest.mark.parametrize("who", ["kernel", "command"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["KILL", "TERM"])
def test_no_rank_outlives_a_killed_notebook(processes, notebook, tmp_path, who, number):
    command = start(processes, notebook, tmp_path, "hang")
    wait_for(lambda: hanging(processes))
    (folder,) = folders(tmp_path)
    kernel = records.read(folder).run["process"]["pid"]
    assert kernel not in (command.pid, *processes.ranks())
    os.kill(kernel if who == "kernel" else command.pid, number)
    command.communicate(timeout=40)
    assert command.returncode != 0
    processes.assert_nobody_left(within_s=15)
    assert records.read(folder).status in ("killed", "interrupted")
    if who == "kernel":
        assert (tmp_path / "out.ipynb").exists(), "what ran so far stays"


def test_a_rank_s_own_traceback_reaches_the_cell(processes, notebook, tmp_path):
    command = start(processes, notebook, tmp_path, "raise")
    command.communicate(timeout=60)
    assert command.returncode == 1
    cells = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells
    said = "".join(str(o.get("evalue", "")) for c in cells for o in c.get("outputs", ()))
    assert "rank 1" in said and "ArithmeticError: seven is not eight" in said
    (folder,) = folders(tmp_path)
    assert "seven is not eight" in (folder / "log" / "rank1.txt").read_text()
