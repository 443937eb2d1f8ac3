"""Ranks that were started differently are named, with what differs, before any collective."""

from __future__ import annotations

import pytest

from rlkernel.collectives import settings
from rlkernel.collectives.settings import SettingsDiffer, require_equal

USUAL = {"NCCL_ALGO": "Ring", "torch": "2.11"}


def test_alike_is_fine():
    require_equal([dict(USUAL) for _ in range(4)])


@pytest.mark.parametrize(
    "odd, ranks, says",
    [
        ({3: {"NCCL_PROTO": "LL128"}}, (3,), "rank 3: NCCL_PROTO is 'LL128', not unset"),
        ({1: {"NCCL_ALGO": "Tree"}}, (1,), "rank 1: NCCL_ALGO is 'Tree', not 'Ring'"),
        ({0: {"torch": "2.12"}}, (0,), "rank 0: torch is '2.12', not '2.11'"),
        ({2: {"a": 1}, 3: {"a": 1}}, (2, 3), "rank 2: a is 1, not unset; rank 3: a is 1"),
    ],
)
def test_the_odd_rank_is_named(odd, ranks, says):
    said = [USUAL | odd.get(rank, {}) for rank in range(4)]
    with pytest.raises(SettingsDiffer, match="started differently") as raised:
        require_equal(said)
    assert raised.value.ranks == ranks and says in str(raised.value)


def test_what_is_a_ranks_own_is_not_compared(monkeypatch):
    for name in ("NCCL_HOSTID", "NCCL_DEBUG_FILE", "NCCL_BUFFSIZE", "OTHER"):
        monkeypatch.setenv(name, "x")
    found = settings.of_this_rank()
    assert found["NCCL_BUFFSIZE"] == "x"
    assert not {"NCCL_HOSTID", "NCCL_DEBUG_FILE", "OTHER"} & set(found)
