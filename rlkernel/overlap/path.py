"""Which way did a call go? Every schedule notes it; whoever wants to know listens.

What a plugin did shows here too: one that hands the work to `none` leaves nothing but `none`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

NONE, ONE_GEMM, CHUNKS, FUSED = "none", "one-gemm", "chunks", "fused"
_listening: list[list[str]] = []


def note(rung: str, schedule: str, how: str) -> None:
    """`chunks: with-sm, 4 token slices by process-group/nccl`"""
    for heard in _listening:
        heard.append(f"{rung}: {schedule}, {how}")


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """Collects what is noted within, by all calls, in order."""
    heard: list[str] = []
    _listening.append(heard)
    try:
        yield heard
    finally:
        _listening.remove(heard)


def rung(noted: str) -> str:
    return noted.partition(": ")[0]


def schedule(noted: str) -> str:
    return noted.partition(": ")[2].partition(", ")[0]
