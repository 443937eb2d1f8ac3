"""The files of interpreted/ in one process that has TRITON_INTERPRET=1 from its start.

By hand: TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).with_name("interpreted")
ROOT = FOLDER.parents[2]

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="collected directly"),
    pytest.mark.timeout(1500),  # a minute of work, but ranks of other tests may hold the cores
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(exit code, file name -> how each of its tests ended, what was printed)."""
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    ended: dict[str, list[set[str]]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        said = {child.tag for child in case} & {"failure", "error", "skipped"}
        ended.setdefault(Path(case.get("file", "")).name, []).append(said)
    return done.returncode, ended, done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_interpreted(ran, name):
    code, ended, said = ran
    assert name in ended, f"nothing of it was run: exit code {code}\n{said}"
    assert not any(ended[name]), said


def test_all_of_them_ran(ran):
    assert ran[0] == 0, ran[2]
