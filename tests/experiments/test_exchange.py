"""exchange: what it refuses, faults that no element survives, real ranks on one and two nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from rlkernel import __main__ as command_line
from rlkernel import records
from rlkernel.experiments import exchange
from rlkernel.experiments.case import UsageError
from rlkernel.records import alpha_beta
from rlkernel.run import plan
from tests.experiments.launched import measure, select

# As the page across nodes asks, which then launches neither again.
ASKED = {"device": "cpu", "nproc": (4,), "message": (1024, 16384, 131072, 1048576), "samples": 12}
BROKEN = {"device": "cpu", "message": (4096,), "samples": 4}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "says, asked",
    [
        ("expected 2, 4, 8", {"nproc": (3,)}),
        ("expected 2, 4, 8", {"nproc": (1,)}),
        ("does not divide nproc=2", {"nodes": 4}),
        ("does not divide nproc=4", {"nproc": (4,), "nodes": 3}),
        ("multiple of 8 bytes", {"message": (1022,)}),
        ("multiple of 16 bytes", {"nproc": (4,), "message": (8,)}),
        ("cannot be negative", {"samples": -1}),
        ("seed=-1", {"seed": -1}),
    ],
)
def test_refused_before_anything_is_launched(says, asked, capsys):
    with pytest.raises(UsageError, match=says):
        exchange.cases(exchange.Params(**asked))
    words = [f"--{name}={','.join(map(str, v)) if isinstance(v, tuple) else v}"
             for name, v in asked.items()]  # fmt: skip
    assert command_line.main(["exchange", *words]) == 2
    assert says in capsys.readouterr().err


def test_real_nodes_are_told_by_the_environment(monkeypatch):
    grid = lambda **asked: exchange.cases(exchange.Params(nproc=(4,), **asked))[0].grid  # noqa: E731
    assert (grid().cp, grid().tp) == (1, 4) and (grid(nodes=2).cp, grid(nodes=2).tp) == (2, 2)
    monkeypatch.setenv("NNODES", "2")
    assert (grid().cp, grid().tp) == (2, 2) and grid(nodes=2) == grid()
    with pytest.raises(UsageError, match="nodes=4, but NNODES=2 are started"):
        grid(nodes=4)
    monkeypatch.setenv("NNODES", "two")
    with pytest.raises(UsageError, match="NNODES must be a number"):
        grid()


def test_ranks_of_emulated_nodes_may_share_a_gpu():
    environment = {"torch": "2.11.0+cu130", "gpus": [{"name": "H200"}]}
    params = exchange.Params(nproc=(2,), nodes=2)
    assert plan.nodes_of(exchange, params) == 2
    assert plan.place(params, exchange.cases(params), environment, 2) == ("cuda", None)
    assert plan.place(exchange.Params(), exchange.cases(params), environment)[0] == "cpu"


@pytest.fixture(scope="module")
def one_node(shared_results):
    return measure("exchange", shared_results, **ASKED)


@pytest.fixture(scope="module")
def two_agents(shared_results):
    return measure("exchange", shared_results, nodes=2, **ASKED)


def test_one_node(one_node):
    assert one_node.passed and [row["case"]["grid"]["tp"] for row in one_node.rows] == [4] * 4
    for row, message in zip(one_node.rows, ASKED["message"], strict=True):
        (line,) = row["result"]["lines"]
        assert line["sent"] == {"intra": message * 3 // 4, "inter": 0} and line["graph"] is False
        assert line["p10_us"] <= line["median_us"] <= line["p90_us"] and line["floor_us"] > 0
        assert line["gb_s"] == pytest.approx(message * 3 / 4 / line["median_us"] / 1e3)
        assert row["paths"] == {
            "group by process group": "all_to_all over world by process-group/gloo"
        }
    assert {check["name"] for check in one_node.run["verdict"]["checks"]} == {
        f"P=1x4 {size}: {what}" for size in ("1 KiB", "16 KiB", "128 KiB", "1 MiB")
        for what in ("group by process group: what arrives", "nodes")
    }  # fmt: skip
    assert exchange.MISSING in one_node.run["not_covered"]
    samples = records.store.read_lines(one_node.path / "samples.jsonl")
    assert len(samples) == 4 * 4 * 12 and {s["rank"] for s in samples} == {0, 1, 2, 3}


def test_two_agents_exchange_inside_and_across(two_agents):
    assert two_agents.passed and "two agents" in two_agents.run["topology"]["agents"]
    (row,) = select(two_agents, message=131072)
    at = row["result"]["topology"]
    assert at["nodes"] == 2 and at["hosts"] == 1 and at["kind"] != exchange.REAL
    found = {line["scope"]: line for line in row["result"]["lines"]}
    assert found["group"]["peers"] == {"intra": 1, "inter": 2}
    assert found["group"]["sent"] == {"intra": 32768, "inter": 65536}
    assert found["inside"]["sent"] == {"intra": 65536, "inter": 0}
    assert found["across"]["sent"] == {"intra": 0, "inter": 65536}
    assert set(row["result"]["rates"]) == {"intra", "inter"}
    assert exchange.MISSING in two_agents.run["not_covered"]
    assert any(line.startswith("agents on one host") for line in two_agents.run["covered"])
    header, body = exchange.table(exchange.Params(), two_agents.rows)
    assert len(body) == 12 and all(len(line) == len(header) for line in body)


def test_the_model_takes_what_real_ranks_have_left(one_node, two_agents):
    points = alpha_beta.points([*one_node.rows, *two_agents.rows])
    assert len(points) == 4 + 12 and {p.links for p in points} == {
        ("intra",), ("inter",), ("intra", "inter"),
    }  # fmt: skip


@pytest.mark.parametrize("fault", exchange.FAULTS[1:])
def test_a_broken_exchange_fails(fault, tmp_path):
    found = measure("exchange", tmp_path, fault=fault, **BROKEN)
    (row,) = found.rows
    assert not found.passed and found.exit_code == 1 and row["result"]["lines"] == []
    wrong = {name: value for name, held, value, _ in row["result"]["checks"] if not held}
    elements = 2 * 1024 * exchange.CHECKED
    assert wrong == {"group by process group: what arrives": f"{elements} wrong elements"}


def test_the_same_command_on_two_nodes(tmp_path):
    """Started apart, as on two machines; node 0 keeps the record."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = "exchange --device cpu --message 4096 --samples 2 --json".split()
    env = {
        "NNODES": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "rlkernel", *words, "--results", str(tmp_path / str(rank))],
            env=os.environ | env | {"NODE_RANK": str(rank)}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [node.communicate(timeout=250) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    (record,) = records.find("exchange", tmp_path / "0")
    assert record.passed and "started apart" in record.run["topology"]["agents"]
    (row,) = record.rows
    assert row["result"]["topology"]["nodes"] == 2 and row["case"]["grid"]["cp"] == 2
    assert row["result"]["lines"][0]["peers"] == {"intra": 0, "inter": 1}
