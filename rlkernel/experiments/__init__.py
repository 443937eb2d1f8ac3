"""The questions that can be asked, one module each, and the contract that every one of them keeps.

NAME, SUMMARY, QUESTION      what it is called and what it answers
Params                       a frozen dataclass; the command line and the notebooks are built from
it
cases(params)                the list of cases, or UsageError; pure, imports no torch
run(case, comm)              one case on one rank -> a row's result, with "passed"; the only part
that needs torch
verdict, summary, table      (params, rows) -> checks with their limits, JSON, printed table
protocol(params)             what must be equal before two records may be compared
COVERED, NOT_COVERED         what a reader may and may not conclude

and where it has them:

NODES                        on how many nodes its ranks belong; two agents stand for them
environment(case)            variables that the ranks of a case start with, a launch for each set
coverage(params, rows)       both lists, where they follow from the rows
lacks()                      why this machine cannot measure it, beyond its GPUs

This file is part of every experiment's source, so a new one is named in registry.py.
"""

from __future__ import annotations

import difflib
import importlib
from types import ModuleType

NAMES = ("preflight", "tp-swiglu", "tp-gqa", "audit", "det-ffn", "wire", "ws2", "a2a-ffn")


def load(name: str) -> ModuleType:
    """The module of an experiment; a dotted path names a module outside this package. ValueError if
    there is none.
    """
    if "." in name:
        return importlib.import_module(name)
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, 1)
        hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(NAMES)}"
        raise ValueError(f"unknown experiment {name}{hint}")
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
