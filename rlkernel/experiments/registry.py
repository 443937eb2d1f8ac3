"""All experiments by name: those that `rlkernel.experiments` lists, and those that came later.

That list lies in the import closure of every experiment (records/source.py), so a name added there
makes all evidence stale, of measurements that have nothing to do with it. This one lies in none.
"""

from __future__ import annotations

import difflib
from types import ModuleType

from rlkernel import experiments

NAMES = (*experiments.NAMES, "exchange", "a2a-gemm", "counters")


def load(name: str) -> ModuleType:
    """The module of an experiment; a dotted path names a module outside this package. ValueError if
    there is none.
    """
    if "." in name or name in experiments.NAMES:
        return experiments.load(name)
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, 1)
        hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(NAMES)}"
        raise ValueError(f"unknown experiment {name}{hint}")
    return experiments.load(f"{experiments.__name__}.{name.replace('-', '_')}")
