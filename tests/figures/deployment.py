"""Rows of ws2, made up: four ranks on two emulated nodes, every boundary as asked for."""

from __future__ import annotations

KIND = "emulated nodes on one host (NCCL_HOSTID)"
OVER = {"gate.forward": None, "up.forward": None, "down.forward": "tp", "gate.dx": "tp",
        "up.dx": "tp", "down.dh": None, "gate.dw": "cp", "up.dw": "cp", "down.dw": "cp",
        "gate_up.dx": "tp"}  # fmt: skip
GROUPS = {"tp": [[0, 1], [2, 3]], "cp": [[0, 2], [1, 3]], None: []}


def row(part: str, m: int = 16, nccl: str = "default", **result) -> dict:
    case = {"grid": {"dp": 1, "cp": 2, "tp": 2}, "seed": 11, "fault": "none",
            "parameters": {"part": part, "m": m, "nccl": nccl}}  # fmt: skip
    return {"case": case, "passed": True, "result": {"checks": [], **result}}


def topology(gpus: int = 2) -> dict:
    ranks = [
        {"rank": r, "dp": 0, "cp": r // 2, "tp": r % 2, "host": 0, "node": r // 2,
         "gpu": r % 2 if gpus else None}
        for r in range(4)
    ]  # fmt: skip
    groups = [
        {"axis": axis, "ranks": members, "crosses_nodes": axis == "cp", "crosses_hosts": False}
        for axis in ("tp", "cp") for members in GROUPS[axis]
    ]  # fmt: skip
    return {"kind": KIND, "hosts": 1, "nodes": 2, "gpus": gpus, "ranks": ranks, "groups": groups}


def start(setting: str = "default") -> dict:
    made = row("start", nccl=setting, topology=topology())
    made["result"]["nccl"] = [
        {"ranks": group["ranks"], "choices": ["ALLREDUCE 2048 B: RING/LL"],
         "transports": ["NET/Socket" if group["crosses_nodes"] else "P2P/CUMEM"]}
        for group in topology()["groups"]
    ]  # fmt: skip
    return made


def side(wrong: int = 0, worst: float = 8e-3) -> dict:
    drift = {"max_abs": worst, "p95": worst / 4, "p99": worst / 2, "mean_abs": worst / 8}
    return {"mismatches": wrong, "elements": 4096, "outside": 0, "drift": drift}


def line(name: str, contract: str = "tree2.bf16", wrong: int = 0) -> dict:
    over = OVER[name]
    sides = {"local": side(wrong)}
    if over:
        first = 0.0 if contract == "tree2.fp32" else 4e-3
        sides = {"pre_reduce": side(wrong, first), "post_reduce": side(wrong, 1e-2)}
    return {
        "boundary": name, "over": over, "groups": GROUPS[over],
        "contract": contract if over else "chain", "wire": contract[-4:] if over else None,
        "schedule": "hopper", "sides": sides, "one_rank": [wrong, 4096], "repeats": 100,
        "repeats_that_differ": 0,
    }  # fmt: skip


def tracks(wrong: str = "") -> list[dict]:
    """Both tracks and the packed product under both contracts; one boundary wrong where asked."""
    found = []
    for contract in ("tree2.bf16", "tree2.fp32"):
        for part, names in (
            ("forward", [n for n in OVER if n.endswith("forward")]),
            ("backward", [n for n in OVER if n.endswith(("dx", "dh", "dw")) and "_" not in n]),
            ("packed", ["gate_up.dx"]),
        ):
            names = [n for n in names if OVER[n] or contract == "tree2.bf16"]
            lines = [line(n, contract, 7 if n == wrong else 0) for n in names]
            found.append(row(part, lines=lines))
    return found


def latency(gpus: int = 2) -> dict:
    lines = [
        {"axis": axis, "way": way, "bytes": size, "median_us": size / 100 + cost,
         "fastest_us": size / 200 + cost, "slowest_us": size / 50 + cost}
        for axis, cost in (("tp", 20), ("cp", 90)) for way in ("tree", "backend")
        for size in (8192, 262144)
    ]  # fmt: skip
    return row("latency", lines=lines, topology=topology(gpus), shared_gpus=gpus == 2)


def rows() -> list[dict]:
    return [start(), *tracks(), latency()]
