"""ws2 with every fault in one launch of four ranks, the deadly one last."""

from __future__ import annotations

from rlkernel.experiments import ws2
from rlkernel.experiments.ws2 import *  # noqa: F403
from rlkernel.experiments.ws2 import COVERED, NODES, NOT_COVERED, Params, run, verdict  # noqa: F401
from rlkernel.experiments.ws2_faults import HEEDED

NAME = "ws2-faults"


def cases(params):
    found = []
    for fault in ws2.FAULTS[1:]:
        given = {"fault": fault, "device": params.device}
        if "m" in HEEDED[fault]:
            given["m"] = params.m
        found += ws2.cases(Params(**given))
    return found


def coverage(params, rows):
    return [], []
