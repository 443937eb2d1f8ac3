"""Processes that a test starts carry a mark, and none of them may outlive the test."""

from __future__ import annotations

import pytest

from tests.run.launching import MARK, Marked


@pytest.fixture
def marked(monkeypatch):
    """The mark is in this process's environment too, so that launches made in process carry it."""
    processes = Marked()
    monkeypatch.setenv(MARK, processes.mark)
    monkeypatch.setenv("LOGLEVEL", "ERROR")
    yield processes
    processes.assert_nobody_left()
