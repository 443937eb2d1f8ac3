"""One real report for all tests of this folder: built once, with its records, then only read.

What the tests of experiments have measured in this session, it does not measure again.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlkernel.pages import report as pages
from tests.pages import browser
from tests.processes import alive

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def built(shared_results):
    """The report of this tree's notebooks -> index, folder, results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLKERNEL_RESULTS", str(shared_results))
        patch.setattr(pages, "inputs_of_package", lambda: "as built")
        index = pages.build()
    return SimpleNamespace(index=index, folder=index.parent, results=shared_results)


@pytest.fixture(scope="session")
def chromium():
    executable = browser.find()
    if executable is None:
        pytest.skip("no Chromium on PATH")
    started = browser.Browser(executable)
    yield started
    started.close()


@pytest.fixture
def beside(built, monkeypatch):
    """The session's report, with the results folder that it was built from."""
    monkeypatch.setenv("RLKERNEL_RESULTS", str(built.results))
    monkeypatch.setattr(pages, "inputs_of_package", lambda: "as built")
    return built


@pytest.fixture
def notebook(tmp_path):
    """notebook(*cells, kernel="python3", name="book.ipynb", tags=()) -> a small notebook on disk.

    A cell that starts with `# parameters` gets that tag; text after `#md ` is prose.
    """

    def write(*cells: str, kernel: str = "python3", name: str = "book.ipynb") -> Path:
        found = []
        for number, source in enumerate(cells):
            prose = source.startswith("#md ")
            cell = {"cell_type": "markdown" if prose else "code", "id": f"c{number}"}
            cell |= {"metadata": {}, "source": source.removeprefix("#md ")}
            if source.startswith("# parameters"):
                cell["metadata"] = {"tags": ["parameters"]}
            found.append(cell if prose else cell | {"outputs": [], "execution_count": None})
        spec = {"name": kernel, "display_name": kernel, "language": "python"}
        book = {"cells": found, "metadata": {"kernelspec": spec}, "nbformat": 4}
        path = tmp_path / "books" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(book | {"nbformat_minor": 5}))
        return path

    return write


@pytest.fixture
def ends():
    """ends(pid, within=10): waits until a process is gone; False when it is not."""

    def wait(pid: int, within: float = 10.0) -> bool:
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            if not alive(pid):
                return True
            time.sleep(0.05)
        return False

    return wait


@pytest.fixture
def environment():
    """This process's environment with the tree on the path, for a command line."""
    return os.environ | {"PYTHONPATH": str(ROOT)}


def pytest_collection_modifyitems(items):
    """The first of these tests waits for the whole report, beside other tests that measure."""
    for item in items:
        if {"built", "beside"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.timeout(1500))
