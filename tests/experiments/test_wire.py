"""wire: what it refuses, a check that can fail, and the slowest rank of each sample."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlkernel.experiments import wire
from rlkernel.experiments.case import UsageError
from rlkernel.grid import Grid
from rlkernel.run import aligned, plan


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("2, 4 or 8", {"nproc": (3,)}),
        ("2, 4 or 8", {"nproc": (1,)}),
        ("multiple of 2", {"message": (7,)}),
        ("cannot be negative", {"samples": -1}),
        ("device=cpu has gloo only", {"device": "cpu"}),
    ],
)
def test_refused_before_anything_is_launched(words, asked):
    with pytest.raises(UsageError, match=words):
        wire.cases(wire.Params(**asked))


def test_a_case_a_size_and_group():
    found = wire.cases(wire.Params(nproc=(2, 4), message=(64, 128)))
    assert [(c.grid.tp, c.parameters["message"]) for c in found] == [
        (2, 64), (2, 128), (4, 64), (4, 128),
    ]  # fmt: skip
    assert len({case.key for case in found}) == 4


def test_the_transport_becomes_the_backend_where_there_are_gpus():
    gpus = [{"name": "H200", "memory_mib": 1, "driver": "1"}] * 2
    environment = {"torch": "2.11.0+cu130", "gpus": gpus}
    params = wire.Params()
    assert plan.place(params, wire.cases(params), environment) == ("cuda", None)
    backend = plan.Plan.backend.fget
    assert backend(SimpleNamespace(params=params, device="cuda")) == "symmetric"
    assert backend(SimpleNamespace(params=params, device="cpu")) == "gloo"


class Two:
    """Rank 0 of two that hold the same, played; `off` spoils the sum."""

    grid, rank, device = Grid(tp=2), 0, torch.device("cpu")

    def __init__(self, off: float = 0.0) -> None:
        transport = SimpleNamespace(name="played", gather=lambda x: [x, x])
        self.off, self.links = off, {"tp": SimpleNamespace(transport=transport)}

    def using(self, **_):
        return self

    def all_reduce(self, x, site):
        return 2 * x + self.off

    def collect(self, mine):
        return [mine, mine]


def test_a_sum_that_changes_between_calls_fails():
    class Moody(Two):
        def all_reduce(self, x, site):
            self.count = getattr(self, "count", 0) + 1
            return 2 * x + (self.count == 3)

    (case,) = wire.cases(wire.Params(transport="gloo", device="cpu", message=(64,), calls=4))
    result = wire.run(case, Moody())
    held = {name: held for name, held, _, _ in result["checks"]}
    assert not result["passed"] and held["the contract's bits"]
    assert not held["4 calls, a rank late at random: the same bits"]


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_a_wrong_sum_fails(off):
    (case,) = wire.cases(wire.Params(transport="gloo", device="cpu", message=(64,), calls=2))
    result = wire.run(case, Two(off))
    assert result["passed"] is (off == 0) and (result["mismatches"] == 0) is (off == 0)
    rows = [{"case": case.to_dict(), "result": result}]
    assert wire.verdict(wire.Params(), rows)["passed"] is (off == 0)
    header, body = wire.table(wire.Params(), rows)
    assert len(body) == 1 and len(body[0]) == len(header) and body[0][1] == "played"


def test_the_slowest_rank_of_each_sample_counts():
    ranks = [
        [{"variant": "a", "round": 0, "us": 1.0}, {"variant": "b", "round": 0, "us": 5.0}],
        [{"variant": "a", "round": 0, "us": 3.0}, {"variant": "b", "round": 0, "us": 4.0}],
    ]
    assert [sample["us"] for sample in aligned.slowest(ranks)] == [3.0, 5.0]
