"""preflight: each of its checks can fail, and its times are those of the slowest rank."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch

from rlkernel.collectives.errors import Disagreement
from rlkernel.experiments import preflight
from rlkernel.experiments.case import Case
from rlkernel.grid import Grid


class Two:
    """Rank 0 of two, played: sums are right unless `off`; `said` is what a disagreement says."""

    grid, rank, device = Grid(tp=2), 0, torch.device("cpu")

    def __init__(self, off=0.0, said="rank 0: a; rank 1: b", other=None):
        self.off, self.said, self.other = off, said, other or {}

    def using(self, observers=(), **_):
        other = copy.copy(self)
        other.observers = observers
        return other

    def all_reduce(self, x, site):
        proceed = functools.partial(self.sum, site)
        for observer in self.observers:
            proceed = functools.partial(
                observer, SimpleNamespace(site=site, kind="k"), proceed=proceed
            )
        return proceed(x)

    def sum(self, site, x):
        if site == "disagreement" and self.said:
            raise Disagreement(self.said)
        return 2 * x + 1 + self.off

    def collect(self, mine):
        return [mine, {**mine, "seconds": [s + 9 for s in mine["seconds"]], **self.other}]


@pytest.mark.parametrize(
    ("comm", "broken"),
    [
        (Two(), None),
        (Two(off=1.0), "exact sum"),
        (Two(other={"right": False}), "exact sum"),
        (Two(other={"digest": "another"}), "same bits on every rank"),
        (Two(said="rank 0: a"), "a disagreement names every rank"),
        (Two(said=None), "a disagreement names every rank"),
    ],
)
def test_a_check_that_can_fail(comm, broken):
    case = Case("preflight", Grid(tp=2), parameters={"message": 64, "iterations": 3})
    result = preflight.run(case, comm)
    failed = [name for name, held in result["checks"].items() if not held]
    assert failed == ([broken] if broken else [])
    assert result["passed"] is (broken is None)
    assert result["fastest_seconds"] >= 9, "the slowest rank of each iteration"
    assert [s["bytes"] for s in result["samples"]] == [64] * 3


def test_a_lone_rank_claims_no_disagreement():
    class One(Two):
        grid = Grid()

        def sum(self, site, x):
            return x

        def collect(self, mine):
            return [mine]

    case = Case("preflight", Grid(), parameters={"message": 64, "iterations": 1})
    checks = preflight.run(case, One())["checks"]
    assert set(checks) == {"exact sum", "same bits on every rank"} and all(checks.values())
