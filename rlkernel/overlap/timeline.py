"""Names for what runs: ranges in a profiler's trace, and the order of things for whoever listens.

The first word of a range says what it is: "comp/gemm1 0", "comm/dispatch 0" (records/kinds.py reads
them). Without a profiler and a listener a range costs two looks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_listening: list[list[str]] = []


@contextlib.contextmanager
def recording() -> Iterator[list[str]]:
    """Collects the names of all ranges within, in the order of their beginning."""
    names: list[str] = []
    _listening.append(names)
    try:
        yield names
    finally:
        _listening.remove(names)


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    for names in _listening:
        names.append(name)
    if not torch.autograd._profiler_enabled():
        yield
        return
    with torch.profiler.record_function(name):
        yield
