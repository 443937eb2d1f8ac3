"""Interpreted kernels are chosen at import, so their tests run in a process of their own; and what
compiles for minutes begins as soon as it is known that it will be asked for, and is asked for last.
"""

import os
from pathlib import Path

import pytest

from tests.kernels import tritons

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]


def compiles(item) -> tuple[str, ...] | None:
    """The script, with its arguments, that a test waits for."""
    return getattr(getattr(item, "module", None), "COMPILES", None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: compiles(item) is not None)


def pytest_collection_finish(session):
    for item in () if session.config.option.collectonly else session.items:
        script = compiles(item)
        folder = item.callspec.params.get("kernels") if hasattr(item, "callspec") else None
        if script and folder is not None and (not folder or (Path(folder) / "triton").is_dir()):
            tritons.start(folder, script)


def pytest_sessionfinish():
    tritons.stop()
