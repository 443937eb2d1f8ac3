"""What every test shares: a results folder of its own, hypothesis settings, the browser rule.

No test may write into the tree's results/, nor leave anything that `git status` shows. So
RLKERNEL_RESULTS and RLKERNEL_PUBLISHED point to a temporary folder before the first import of
rlkernel, and every subprocess inherits them. The committed evidence is still reached by its path
(`published`).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
_RESULTS = pytest.StashKey[tempfile.TemporaryDirectory]()

# Derandomised: a red run can be repeated by anybody. No deadline: two cores are shared by ranks.
hypothesis.settings.register_profile("house", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("house")


def pytest_configure(config):
    config.stash[_RESULTS] = tempfile.TemporaryDirectory(
        prefix="rlkernel-test-", ignore_cleanup_errors=True
    )
    for name in ("RLKERNEL_RESULTS", "RLKERNEL_PUBLISHED"):
        os.environ[name] = config.stash[_RESULTS].name


def pytest_unconfigure(config):
    folder = config.stash.get(_RESULTS, None)
    if folder is not None:
        folder.cleanup()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Under RLKERNEL_REQUIRE_BROWSER=1 a browser test that skips itself has failed."""
    report = yield
    required = os.environ.get("RLKERNEL_REQUIRE_BROWSER", "") not in ("", "0")
    if required and report.skipped and item.get_closest_marker("browser"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and a browser is required: {call.excinfo}"
    return report


@pytest.fixture
def root() -> Path:
    """The root of the tree that is being tested."""
    return ROOT


@pytest.fixture
def published() -> Path:
    """The committed evidence, whatever the environment says."""
    return ROOT / "results" / "published"


@pytest.fixture(scope="session")
def shared_results(tmp_path_factory) -> Path:
    """Where launches go whose rows others want too: nothing in it is measured twice a session.

    The report's notebooks (tests/pages) ask for much of what the tests of an experiment and of the
    audit have launched before; what they ask for first, they launch.
    """
    return tmp_path_factory.mktemp("shared") / "results"


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """An empty results folder for this test alone; subprocesses see it too."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setenv("RLKERNEL_RESULTS", str(folder))
    monkeypatch.setenv("RLKERNEL_PUBLISHED", str(folder))
    return folder
