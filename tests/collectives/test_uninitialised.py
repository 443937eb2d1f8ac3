"""Without torch.distributed a Comm is refused by name, before anything else is looked at."""

import pytest

from rlkernel.collectives.groups import comm_over
from rlkernel.contract import ReductionTree
from rlkernel.grid import Grid


def test_an_uninitialised_world_is_refused_by_name():
    with pytest.raises(ValueError, match="torch.distributed is not initialised"):
        comm_over(Grid(tp=2), {}, store=None, contract=ReductionTree())
