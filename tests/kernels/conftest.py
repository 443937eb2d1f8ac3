"""Interpreted kernels are chosen at import, so their tests run in processes of their own; and what
compiles for minutes begins as soon as it is known that it will be asked for.
"""

import os
from pathlib import Path

from tests.kernels import tritons

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]


def pytest_collection_finish(session):
    for item in () if session.config.option.collectonly else session.items:
        script = getattr(getattr(item, "module", None), "COMPILES", None)
        folder = item.callspec.params.get("kernels") if hasattr(item, "callspec") else None
        if script and folder is not None and (not folder or (Path(folder) / "triton").is_dir()):
            tritons.start(folder, script)


def pytest_sessionfinish():
    tritons.stop()
