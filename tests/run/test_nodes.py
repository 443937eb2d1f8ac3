"""How the nodes of a launch come about, and that nothing of them stays behind."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from rlkernel.experiments.case import Case, UsageError
from rlkernel.grid import Grid
from rlkernel.run import nodes, watch
from rlkernel.run.plan import Plan


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def made(*asked):
    with nodes.made(*asked) as found:
        return found


def test_one_agent_is_an_ordinary_launch():
    found = made(1, 4, "cpu")
    assert (found.how, found.count, len(found.agents)) == (nodes.ONE, 1, 1)
    assert found.describe() == {"agents": nodes.ONE}


def test_two_agents_without_the_tools_meet_over_loopback(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    found = made(2, 4, "cpu")
    assert (found.how, found.count) == (nodes.LOOPBACK, 2) and found.port > 0
    assert [agent.rank for agent in found.agents] == [0, 1]
    assert "ip, unshare, nsenter is missing" in found.describe()["why_not_namespaces"]


def test_what_the_machine_forbids_is_told(monkeypatch):
    def forbidden(*words):
        raise subprocess.CalledProcessError(1, words, stderr="unshare: Operation not permitted\n")

    monkeypatch.setattr(shutil, "which", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(nodes, "_holder", forbidden)
    found = made(2, 4, "cpu")
    assert found.how == nodes.LOOPBACK
    assert found.why == "no network namespaces here: unshare: Operation not permitted"


def test_namespaces_are_joined_and_end_with_the_block():
    ours = os.readlink("/proc/self/ns/net")
    with nodes.made(2, 4, "cpu") as found:
        if found.how != nodes.NAMESPACES:
            pytest.skip(found.why)
        pids = [int(agent.prefix[2]) for agent in found.agents]
        networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
        assert len(networks | {ours}) == 3
        ping = [*found.agents[1].prefix, "bash", "-c", ": < /dev/tcp/10.99.0.1/9"]
        said = subprocess.run(ping, capture_output=True, text=True, timeout=10).stderr
        assert "refused" in said, "the other namespace is reached; nobody listens there"
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_gpus_make_emulated_hosts(monkeypatch):
    from rlkernel.records import machine

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for have, own in ((2, [None, None]), (4, ["0,1", "2,3"])):
        monkeypatch.setattr(machine, "environment", lambda have=have: {"gpus": [{}] * have})
        found = made(2, 4, "cuda")
        assert [agent.env["NCCL_HOSTID"] for agent in found.agents] == ["node0", "node1"]
        assert [agent.env.get("CUDA_VISIBLE_DEVICES") for agent in found.agents] == own


def test_one_of_several_machines(monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("NODE_RANK", "1")
    with pytest.raises(UsageError, match="needs MASTER_ADDR"):
        made(2, 4, "cpu")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    found = made(2, 4, "cuda", 3)
    assert (found.count, found.agents[0].rank) == (2, 1) and not found.agents[0].env
    assert (found.address, found.port) == ("10.0.0.7", nodes.PORT + 3)
    assert found.describe()["nodes"] == "as the ranks found them", "they may share a machine"
    assert nodes.away(8) == {0, 1, 2, 3}
    with pytest.raises(UsageError, match="3 rank\\(s\\) do not divide over NNODES=2"):
        made(2, 3, "cpu")
    for name, value, says in (("NODE_RANK", "2", "NODE_RANK=2"), ("NNODES", "two", "numbers"),
                              ("MASTER_PORT", "abc", "MASTER_PORT must be numbers")):  # fmt: skip
        monkeypatch.setenv(name, value)
        with pytest.raises(UsageError, match=says):
            nodes.asked()


def test_only_ranks_of_one_machine_meet_over_loopback(monkeypatch):
    """Across machines gloo must find the network by itself, or by what the user said."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    here, apart = nodes.Nodes(nodes.ONE, 1, ()), nodes.Nodes(nodes.APART, 2, (), "10.0.0.7")
    assert watch._environment("cpu", here)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in watch._environment("cpu", apart)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert watch._environment("cpu", apart)["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_launch_for_each_world_and_environment():
    """Only where placement counts: else one launch hosts smaller grids as subgroups."""
    cases = [Case("x", Grid(tp=tp), seed=seed) for tp in (2, 4, 2) for seed in (0, 1)]

    def worlds(**module):
        fields = dict.fromkeys(Plan.__dataclass_fields__)
        fields |= {"module": SimpleNamespace(**module), "cases": cases, "done": {}}
        plan = Plan(**fields | {"reuse": [str(n) for n in range(len(cases))]})
        return [(batch.world, len(batch.pending), batch.environment) for batch in plan.batches]

    assert worlds() == [(4, 6, {})]
    assert worlds(NODES=2) == [(2, 4, {}), (4, 2, {})]
    env = {"NCCL_ALGO": "Tree"}
    asked = worlds(environment=lambda case: env if case.seed else {})
    assert asked == [(4, 3, {}), (4, 3, env)]


def test_what_ran_apart_is_no_answer_for_one_machine():
    assert nodes.apart({"topology": nodes.Nodes(nodes.APART, 2, ()).describe()})
    assert not nodes.apart({"topology": nodes.Nodes(nodes.LOOPBACK, 2, ()).describe()})
    assert not nodes.apart({"topology": {"nodes": 1}}) and not nodes.apart({})
