"""One notebook, one kernel: the truth about how it ended, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import nbformat
import pytest

from rlkernel.pages import report

FIRST = "import os, sys\nprint('pid', os.getpid())"


def said(path) -> str:
    book = nbformat.read(path, as_version=4)
    outputs = [o for cell in book.cells for o in cell.get("outputs", ())]
    return "".join(o.get("text", "") + o.get("evalue", "") for o in outputs)


def kernel_pid(path) -> int:
    return int(re.search(r"pid (\d+)", said(path)).group(1))


def test_braces_blanks_new_folder_foreign_kernel(notebook, tmp_path, ends):
    """A notebook of a kernel that is not here, into `a {b}/c d {x}.ipynb`: runs in this Python."""
    book = notebook(
        "# parameters\nn: int = 1\nshape: tuple[int, ...] = (1,)",
        FIRST,
        "import rlkernel\nprint(n, shape, sys.executable, os.getcwd())",
        kernel="somebody-elses",
        name="a {n} b.ipynb",
    )
    output = tmp_path / "new folder {n}" / "deep" / "c d {x}.ipynb"
    outcome = report.execute(book, output, {"n": "7", "shape": "[4,16]"})
    assert (outcome.error, outcome.exit_code) == (None, 0)
    assert f"7 [4, 16] {sys.executable} {book.parent}" in said(output)
    assert output.with_suffix(".html").exists()
    assert sorted(p.name for p in output.parent.iterdir()) == ["c d {x}.html", "c d {x}.ipynb"]
    assert ends(kernel_pid(output))


def test_what_a_cell_left_running_ends_with_the_notebook(notebook, tmp_path, ends):
    """Also when the kernel was killed and could not clean up behind itself."""
    child = "import os, subprocess\nprint('pid', subprocess.Popen(['sleep', '300']).pid)"
    outcome = report.execute(notebook(child, "os.kill(os.getpid(), 9)"), tmp_path / "out.ipynb")
    assert outcome.exit_code == 3 and ends(kernel_pid(outcome.path))


def test_an_error_keeps_what_was_shown(notebook, tmp_path, ends):
    book = notebook("#md # A title", FIRST, "raise ValueError('no <b>good</b>')", "print('never')")
    outcome = report.execute(book, tmp_path / "out.ipynb")
    assert outcome.exit_code == 1 and outcome.error == "ValueError: no <b>good</b>"
    assert "pid" in said(outcome.path) and "never" not in said(outcome.path)
    page = outcome.path.with_suffix(".html").read_text()
    assert "This notebook failed." in page and "no &lt;b&gt;good&lt;/b&gt;" in page
    assert "An Exception was encountered" not in page  # papermill's own remark
    assert ends(kernel_pid(outcome.path))


def test_a_traceback_on_a_page_tells_no_place(notebook, tmp_path):
    book = notebook("from rlkernel.records import read\nread('nothing')")
    outcome = report.execute(book, tmp_path / "out.ipynb")
    page = outcome.path.with_suffix(".html").read_text()
    assert "rlkernel/records/store.py" in page and "RecordError" in page
    assert str(report.ROOT) not in page and str(tmp_path) not in page


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["KILL", "TERM"])
def test_a_kernel_that_dies_is_no_success(notebook, tmp_path, number):
    book = notebook(FIRST, f"os.kill(os.getpid(), {int(number)}); import time; time.sleep(60)", "1")
    outcome = report.execute(book, tmp_path / "out.ipynb")
    assert outcome.exit_code == 3 and outcome.error == "the kernel died"
    statuses = [c.metadata.papermill.status for c in nbformat.read(outcome.path, 4).cells]
    assert statuses == ["completed", "failed", "pending"]
    assert "the kernel died" in outcome.path.with_suffix(".html").read_text()


def test_out_of_time(notebook, tmp_path, ends):
    book = notebook(FIRST, "import time; time.sleep(60)")
    start = time.monotonic()
    outcome = report.execute(book, tmp_path / "out.ipynb", timeout=3)
    assert outcome.exit_code == 4 and outcome.error == "longer than 3 s"
    assert time.monotonic() - start < 14
    assert ends(kernel_pid(outcome.path))


# A rank, as a launcher starts one: in a session of its own, and told when its parent dies.
RANK = """
import ctypes, subprocess, sys
def told():
    ctypes.CDLL(None).prctl(1, 9)
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"],
                        start_new_session=True, preexec_fn=told)
print("rank", rank.pid, flush=True)
open({flag!r}, "w").write(str(rank.pid))
import time
{sleep}
"""
PATIENT = "time.sleep(300)"
STUBBORN = """
while True:
    try:
        time.sleep(300)
    except KeyboardInterrupt:
        pass
"""


@pytest.mark.parametrize(
    "number, sleep, code",
    [
        (signal.SIGTERM, PATIENT, 143),
        (signal.SIGINT, PATIENT, 130),
        (signal.SIGTERM, STUBBORN, 143),
    ],
    ids=["TERM", "INT", "TERM-stubborn"],
)
def test_a_signal_leaves_a_partial_notebook_and_no_process(
    notebook, tmp_path, ends, environment, number, sleep, code
):
    flag, output = tmp_path / "flag", tmp_path / "out.ipynb"
    book = notebook(FIRST, RANK.format(flag=str(flag), sleep=sleep), "print('never')")
    command = [sys.executable, "-m", "rlkernel", "notebook", str(book), "-o", str(output)]
    process = subprocess.Popen(
        command, env=environment | {"RLKERNEL_GRACE_S": "1"}, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 40
    while not (flag.exists() and flag.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert "never" not in said(output) and output.with_suffix(".html").exists()
    assert ends(kernel_pid(output)) and ends(int(flag.read_text()))
    assert not list(tmp_path.glob("*.running*"))


def test_a_full_disk_is_named_and_earlier_pages_stay(notebook, tmp_path, capsys, monkeypatch):
    """The device /dev/full takes no byte; the page of an earlier run is as it was."""
    book, output = notebook("print('first')"), tmp_path / "out.ipynb"
    assert report.notebook([str(book), "-o", str(output)]) == 0
    before = output.read_bytes(), output.with_suffix(".html").read_bytes()
    (tmp_path / "out.running.ipynb").symlink_to("/dev/full")
    assert report.notebook([str(book), "-o", str(output)]) == 3
    assert "No space left on device; earlier results are intact" in capsys.readouterr().err
    assert (output.read_bytes(), output.with_suffix(".html").read_bytes()) == before


def test_widgets_are_stored_without_a_crash(notebook, tmp_path):
    """A notebook that makes widgets, executed as a front end would: no error, nothing to fetch."""
    book = notebook("import ipywidgets\nipywidgets.interact(lambda n: print(n), n=(1, 3));")
    outcome = report.execute(book, tmp_path / "out.ipynb", env={"RLKERNEL_HEADLESS": ""})
    assert outcome.error is None
    page = outcome.path.with_suffix(".html").read_text()
    assert "<script" not in page and "http" not in page.split("</style>", 1)[1]
