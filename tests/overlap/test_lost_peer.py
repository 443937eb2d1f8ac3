"""A rank dies, or is late, between dispatch and combine: PeerLost(rank, stage) on all others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import survivors

PROGRAM = Path(__file__).with_name("lost_peer.py")
FALLS = (("killed", "kernel"), ("late", "kernel"))


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """{how: {rank: (stdout, stderr)}} of the survivors; the worlds run at once, mostly idle."""
    return survivors(PROGRAM, FALLS, tmp_path_factory.mktemp("lost"))


@pytest.mark.parametrize("how", FALLS, ids="-".join)
def test_every_survivor_names_the_rank_and_the_stage(spoken, how):
    for rank, (out, err) in spoken[how].items():
        assert out.strip(), f"rank {rank} said nothing: {err[-2000:]}"
        said = json.loads(out.strip().splitlines()[-1])
        assert said["error"] == "PeerLost", said
        assert said["ranks"] == [2] and said["site"] == "combine", said
        assert said["seconds"] < 60
