"""The backend's own sum: where it may not stand for a tree it is refused before anything moves.

Its bits are held on real ranks, by tests/ffn/operators.py and by ws2.
"""

from __future__ import annotations

import pytest
import torch

from rlkernel.collectives.backend_sum import all_reduce_in_place
from rlkernel.collectives.comm import Comm, Link
from rlkernel.collectives.groups import alone
from rlkernel.contract import ReductionTree
from rlkernel.grid import Grid

TREE = ReductionTree(4, "bf16")


def of(ranks: int) -> Comm:
    """The seam of a group that nobody may reach: without a transport a message would raise."""
    link = Link(tuple(range(ranks)), 0, None, None)
    return Comm(Grid(tp=ranks), 0, {"tp": link}, TREE)


@pytest.mark.parametrize(
    "ranks, x, says",
    [
        (4, torch.zeros(2, 2, dtype=torch.bfloat16), "adds 4 ranks in an order of its own"),
        (2, torch.zeros(2, 2), "tree4.bf16 rounds to torch.bfloat16"),
        (2, torch.zeros(2, 3, dtype=torch.bfloat16).t(), "needs a contiguous partial"),
        (2, torch.zeros(2, 2, dtype=torch.float16), "cannot sum torch.float16"),
    ],
)
def test_refused(ranks, x, says):
    with pytest.raises(ValueError, match=f"a.site: .*{says}"):
        all_reduce_in_place(of(ranks), x, "a.site")


def test_one_rank_is_its_own_sum_and_the_result_is_the_argument():
    x = torch.ones(3, dtype=torch.bfloat16)
    comm = alone(contract=TREE)
    assert all_reduce_in_place(comm, x, "a.site") is x and x.tolist() == [1, 1, 1]
    assert comm.paths() == {"a.site": "backend_all_reduce over tp: one rank, nothing moves"}


def test_an_observers_result_ends_in_the_argument():
    x = torch.ones(3, dtype=torch.bfloat16)
    comm = alone(contract=TREE).using(observers=[lambda call, x, proceed: proceed(x) * 3])
    assert all_reduce_in_place(comm, x, "a.site") is x and x.tolist() == [3, 3, 3]
