"""A dead and a late rank become PeerLost on every other rank, with the guilty rank's number."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("lost_peer.py")
ROOT = PROGRAM.parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


MANNERS = ("killed", "late", "unposted", "collect", "shared killed")


@pytest.fixture(scope="module")
def spoken():
    """{manner: {rank: (stdout, stderr)}} of the survivors; the worlds run at once, mostly idle."""
    worlds = {manner: start(manner) for manner in MANNERS}
    try:
        yield {
            manner: {rank: ranks[rank].communicate(timeout=250) for rank in (0, 1, 3)}
            for manner, ranks in worlds.items()
        }
    finally:
        for process in (p for ranks in worlds.values() for p in ranks):
            process.kill()
            process.wait()


def start(manner: str) -> list[subprocess.Popen]:
    shared = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "4"}
    shared |= {"TRITON_INTERPRET": "1"}  # for what goes through shared memory
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), manner],
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]


@pytest.mark.parametrize("manner", MANNERS)
def test_every_survivor_names_the_lost_rank(spoken, manner):
    for rank, (out, err) in spoken[manner].items():
        assert out.strip(), f"rank {rank} said nothing: {err[-2000:]}"
        said = json.loads(out.strip().splitlines()[-1])
        assert said["error"] == "PeerLost", said
        assert said["ranks"] == [2] and said["site"] in ("down.forward", manner), said
        assert "rank 2 did not" in said["message"], said
        assert said["seconds"] < 30
