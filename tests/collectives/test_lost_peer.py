"""A dead and a late rank become PeerLost on every other rank, with the guilty rank's number."""

import json
from pathlib import Path

import pytest

from tests.forked import survivors

PROGRAM = Path(__file__).with_name("lost_peer.py")
MANNERS = ("killed", "late", "unposted", "collect", "shared killed")


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """{manner: {rank: (stdout, stderr)}} of the survivors; the worlds run at once, mostly idle."""
    ways = [(manner,) for manner in MANNERS]  # interpreted, for what goes through shared memory
    return survivors(PROGRAM, ways, tmp_path_factory.mktemp("lost"), TRITON_INTERPRET="1")


@pytest.mark.parametrize("manner", MANNERS)
def test_every_survivor_names_the_lost_rank(spoken, manner):
    for rank, (out, err) in spoken[manner,].items():
        assert out.strip(), f"rank {rank} said nothing: {err[-2000:]}"
        said = json.loads(out.strip().splitlines()[-1])
        assert said["error"] == "PeerLost", said
        assert said["ranks"] == [2] and said["site"] in ("down.forward", manner), said
        assert "rank 2 did not" in said["message"], said
        assert said["seconds"] < 30
