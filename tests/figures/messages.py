"""Rows of exchange as 1 x 2, 1 x 4 and 2 x 2 ranks would leave them, made up from planted links."""

from __future__ import annotations

from rlkernel.records.alpha_beta import Fabric, LinkCost

SIZES = tuple(1 << n for n in range(12, 27, 2))
NVLINK, SOCKET = LinkCost(20.0, 0.0, 360.0), LinkCost(60.0, 0.0, 1.9)
FABRIC = Fabric({"intra": NVLINK, "inter": SOCKET})
ONE, EMULATED = "one agent on one host", "emulated nodes on one host (NCCL_HOSTID)"


def row(nodes: int, each: int, message: int, *, gpus: bool = True, shared: bool = False) -> dict:
    ranks = nodes * each
    scopes = {"group": (each - 1, ranks - each)}
    if nodes > 1 and each > 1:
        scopes |= {"inside": (each - 1, 0), "across": (0, nodes - 1)}
    lines = []
    for scope, (near, far) in scopes.items():
        ways = [("process group", False, 1.0), *[("process group", True, 0.8)] * gpus]
        if gpus and not far:
            ways.append(("copy engine", False, 0.9))
        for way, graph, faster in () if shared else ways:
            lines.append(line(scope, way, graph, near, far, message, faster))
    at = [{"rank": r, "node": r // each, "host": 0, "gpu": r if gpus else None}
          for r in range(ranks)]  # fmt: skip
    topology = {"kind": ONE if nodes == 1 else EMULATED, "hosts": 1, "nodes": nodes,
                "gpus": ranks * gpus, "ranks": at}  # fmt: skip
    case = {"experiment": "exchange", "grid": {"dp": 1, "cp": nodes, "tp": each}, "dtype": "int32",
            "seed": 11, "fault": "none", "parameters": {"message": message}}  # fmt: skip
    checks = [["group by process group: what arrives", True, "0 wrong elements", "0"]]
    result = {"passed": True, "checks": checks, "topology": topology, "lines": lines, "nccl": None}
    paths = {"group by process group": "all_to_all over world by process-group/nccl"}
    key = f"{nodes}{each}{message}"
    return {"key": key, "case": case, "result": result, "passed": True, "paths": paths}


def line(scope, way, graph, near, far, message, faster) -> dict:
    ranks = near + far + 1
    peers = {"intra": near, "inter": far}
    sent = {name: count * message // ranks for name, count in peers.items()}
    us = faster * FABRIC.us(peers, sent)
    floor = max(sent[name] / (FABRIC.links[name].gb_s * 1e3) for name in peers)
    return {"scope": scope, "way": way, "graph": graph, "message": message, "ranks": ranks,
            "peers": peers, "sent": sent, "median_us": us, "p10_us": 0.95 * us, "p90_us": 1.1 * us,
            "floor_us": floor, "gb_s": sum(sent.values()) / us / 1e3}  # fmt: skip


def rows(nodes: int, each: int, **how) -> list[dict]:
    return [row(nodes, each, size, **how) for size in SIZES]
