"""What is called a node: machines only by their boots, everything else by what it is."""

from __future__ import annotations

import torch

from rlkernel.collectives import topology
from rlkernel.grid import Grid

HOME = Grid(cp=2, tp=2)


def places(**differs):
    """Four places; `name=(a, b)` gives ranks 0, 1 one value and ranks 2, 3 the other."""
    usual = {"boot": "b", "network": "n", "hostid": None, "agent": "0", "gpu": None}
    return [usual | {n: v[r // 2] for n, v in differs.items()} for r in range(4)]


def described(**differs):
    return topology.described(places(**differs), HOME)


def test_kinds():
    agents = {"agent": ("0", "1")}
    assert described()["kind"] == topology.SINGLE
    assert described(**agents)["kind"] == topology.LOOPBACK
    assert described(**agents, network=("n", "m"))["kind"] == topology.NAMESPACES
    emulated = {**agents, "network": ("n", "m"), "hostid": ("node0", "node1")}
    assert described(**emulated)["kind"] == topology.EMULATED
    assert described(**emulated, boot=("b", "c"))["kind"] == topology.REAL


def test_emulated_nodes_are_one_host():
    found = described(agent=("0", "1"), hostid=("node0", "node1"))
    assert (found["hosts"], found["nodes"]) == (1, 2)
    by_axis = {tuple(g["ranks"]): g for g in found["groups"]}
    assert [by_axis[g]["crosses_nodes"] for g in ((0, 1), (2, 3), (0, 2), (1, 3))] == [
        False, False, True, True,
    ]  # fmt: skip
    assert not any(g["crosses_hosts"] for g in found["groups"])
    assert [rank["node"] for rank in found["ranks"]] == [0, 0, 1, 1]
    assert [(rank["cp"], rank["tp"]) for rank in found["ranks"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_gpus_that_ranks_share_are_counted_once():
    shared = places(hostid=("node0", "node1"))
    for rank, place in enumerate(shared):
        place["gpu"] = f"gpu{rank % 2}"
    found = topology.described(shared, HOME)
    assert found["gpus"] == 2 and [r["gpu"] for r in found["ranks"]] == [0, 1, 0, 1]
    for rank, place in enumerate(shared):
        place["boot"] = f"boot{rank // 2}"
    assert topology.described(shared, HOME)["gpus"] == 4, "the same number on another machine"


def test_a_place_tells_nothing_of_the_machine(monkeypatch):
    monkeypatch.setenv("NCCL_HOSTID", "node1")
    found = topology.place(torch.device("cpu"))
    assert found["hostid"] == "node1" and found["gpu"] is None
    assert len(found["boot"]) == len(found["network"]) == 12
    assert found == topology.place(torch.device("cpu"))
