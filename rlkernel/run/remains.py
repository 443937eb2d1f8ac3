"""What a launch leaves in its folder for whoever asks how it ended: reports, stacks, last words."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from rlkernel.run import watch


def report(folder: Path) -> dict:
    """What the agents tell, together: a failure of a rank counts more than the signal behind it."""
    found: dict = {}
    failures: list[dict] = []
    for path in watch.reports(folder):
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(path.read_text())
            failures += told.get("failures", [])
            found |= told
    return {"failures": failures} if failures else found


def stack(folder: Path, rank: int, lines: int = 60) -> str:
    """Where a rank stood when a signal came, from its log."""
    path = folder / "log" / f"rank{rank}.txt"
    text = path.read_text(errors="replace") if path.exists() else ""
    found = re.search(r"^(Fatal Python error|Current thread 0x|Stack \(most)", text, re.M)
    if not found:
        return ""
    stack = text[found.start() :].partition("\nExtension modules:")[0]
    return "\n".join(stack.rstrip().splitlines()[:lines])


def tail(path: Path, lines: int = 30) -> str:
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-lines:])
