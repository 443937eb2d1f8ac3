"""A rank dies, or is late, between dispatch and combine: PeerLost(rank, stage) on all others."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("lost_peer.py")
ROOT = PROGRAM.parents[2]
FALLS = (("killed", "kernel"), ("late", "kernel"))


def start(*how: str) -> list[subprocess.Popen]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    shared = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "4"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), *how], env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(4)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def spoken():
    """{how: {rank: (stdout, stderr)}} of the survivors; the worlds run at once, mostly idle."""
    worlds = {how: start(*how) for how in FALLS}
    try:
        yield {
            how: {rank: ranks[rank].communicate(timeout=250) for rank in (0, 1, 3)}
            for how, ranks in worlds.items()
        }
    finally:
        for process in (p for ranks in worlds.values() for p in ranks):
            process.kill()
            process.wait()


@pytest.mark.parametrize("how", FALLS, ids="-".join)
def test_every_survivor_names_the_rank_and_the_stage(spoken, how):
    for rank, (out, err) in spoken[how].items():
        assert out.strip(), f"rank {rank} said nothing: {err[-2000:]}"
        said = json.loads(out.strip().splitlines()[-1])
        assert said["error"] == "PeerLost", said
        assert said["ranks"] == [2] and said["site"] == "combine", said
        assert said["seconds"] < 60
