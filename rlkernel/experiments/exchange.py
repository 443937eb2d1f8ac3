"""What does an All-to-All cost by message size, inside a node and between nodes, and who moves it?

                     place 0    place 1       group    all ranks, in rank order
    node 0           rank 0     rank 1        inside   the ranks of a node   [0,1] [2,3]
    node 1           rank 2     rank 3        across   one rank of each node [0,2] [1,3]

`group` is what an expert-parallel layer does; `inside` and `across` are the two steps of a
hierarchical exchange, and what a link inside a node and one between nodes cost by themselves. On
one machine `nodes` agents stand for the nodes; on several the same command runs on each of them,
with NNODES, NODE_RANK and MASTER_ADDR. The record says which it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rlkernel.experiments.case import TARGETS, Case, UsageError, check_seeds, param
from rlkernel.grid import Grid, is_power_of_two

NAME = "exchange"
SUMMARY = "All-to-All: latency and bandwidth by message size, inside a node and between nodes"
QUESTION = "What does an exchange cost inside a node, and what between nodes?"

FAULTS = ("none", "swapped-slices", "nothing-sent")
DEBUG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,COLL,P2P,SHM,NET,TUNING"}
CHECKED = 3  # exchanges whose every element is looked at, ahead of the timed ones and behind them
BULK = {"cpu": 4 << 20, "cuda": 64 << 20}  # bytes of the transfer that tells a link's rate
COVERED = (
    "every element of what arrives, in poisoned buffers, ahead of the timed calls and behind them",
    "wall time of one exchange by message size, slowest rank of each sample, variants interleaved",
    "the whole group; where nodes hold several ranks each also inside the nodes and across them",
    "the time that the bytes take at the rate of one large transfer over the same links",
)
REAL = "real nodes"  # as topology.described calls them
NOT_COVERED = ("an exchange beside products that share the chip with it: that is a2a-ffn",)
MISSING = "partial milestone: two real nodes NOT COVERED"
_rates: dict[Grid, dict[str, float]] = {}  # of this launch


@dataclass(frozen=True)
class Params:
    nproc: tuple[int, ...] = param((2,), "ranks in all, over all nodes", unit="ranks")
    nodes: int = param(
        1, "agents on this machine that stand for so many nodes; real ones: NNODES", unit="nodes"
    )
    message: tuple[int, ...] = param(
        tuple(1 << n for n in range(10, 27, 2)),
        "what a rank holds for all of the group, its own share included", unit="bytes",
    )  # fmt: skip
    samples: int = param(30, "timed rounds, each with every variant once; 0: no timing")
    warmup: float = param(0.5, "matrix products ahead of the first sample, on GPUs", unit="s")
    fault: str = param("none", "break the exchange; no element may pass for right", choices=FAULTS)
    device: str = param("auto", "where the messages lie", choices=TARGETS)
    seed: int = param(11, "seed of the messages")


def cases(params: Params) -> list[Case]:
    """Raises UsageError for what cannot run."""
    check_seeds((params.seed,))
    nodes = _nodes(params)
    for ranks in params.nproc:
        if not (is_power_of_two(ranks) and ranks >= 2):
            raise UsageError(f"nproc={ranks} is not possible: expected 2, 4, 8, ... ranks")
        if not is_power_of_two(nodes) or nodes > ranks:
            raise UsageError(f"nodes={nodes} does not divide nproc={ranks}: 1, 2, 4, ... of them")
        for size in params.message:
            if size < 4 * ranks or size % (4 * ranks):
                raise UsageError(
                    f"message={size} is not possible: a multiple of {4 * ranks} bytes gives each "
                    f"of {ranks} ranks whole 4-byte words"
                )
    if min(params.samples, params.warmup) < 0:
        raise UsageError("samples and warmup cannot be negative")
    at = {"samples": params.samples, "warmup": params.warmup}
    return [
        Case(NAME, Grid(cp=nodes, tp=ranks // nodes), "int32", params.seed, params.fault,
             {"message": size, **at})
        for ranks in params.nproc
        for size in params.message
    ]  # fmt: skip


def _nodes(params: Params) -> int:
    """Real nodes, told by NNODES, or those that agents stand for."""
    try:
        real = int(os.environ.get("NNODES") or 1)
    except ValueError:
        raise UsageError("NNODES must be a number") from None
    if real > 1 and params.nodes not in (1, real):
        raise UsageError(f"nodes={params.nodes}, but NNODES={real} are started: leave nodes out")
    return real if real > 1 else params.nodes


def environment(case: Case) -> dict[str, str]:
    """What the ranks of a case start with: NCCL tells which way the bytes went."""
    return DEBUG


# -- one case on one rank --------------------------------------------------------------------------


def run(case: Case, comm) -> dict:
    """One message size on one grid: every element, then times where ranks share no GPU."""
    from rlkernel.collectives import exchange_ways, topology

    message, fault = case.parameters["message"], case.fault
    where = topology.described(comm.collect(topology.place(comm.device)), comm.grid)
    ways = exchange_ways.ways(comm, where, message, fault)
    first = 101 * case.seed
    early, late = range(first, first + CHECKED), range(first + CHECKED, first + 2 * CHECKED)
    wrong = {way.name: exchange_ways.wrong(comm, way, message, early) for way in ways}
    shared = 0 < where["gpus"] < comm.grid.size
    timed: dict = {"lines": [], "samples": []}
    if case.parameters["samples"] and fault == "none" and not shared:
        rates, samples = _link_rates(comm, where), _timed(case, comm, ways)
        for way in ways:  # what was timed still arrives
            wrong[way.name] += exchange_ways.wrong(comm, way, message, late)
        lines = _lines(case, comm, where, ways, comm.collect(samples), rates)
        timed = {"lines": lines, "samples": samples, "rates": rates}
    checks = _judged(comm, where, wrong)
    return {
        "passed": all(held for _, held, _, _ in checks),
        "checks": checks,
        "topology": where,
        "nccl": _told_by_nccl(comm),
        "not_measured": "ranks share a GPU: a time of theirs says nothing" if shared else "",
        **timed,
    }


def _judged(comm, where: Mapping, wrong: Mapping) -> list[list]:
    seen, checks = comm.collect(dict(wrong)), []
    for name in wrong:
        count = sum(rank[name] for rank in seen)
        checks.append([f"{name}: what arrives", not count, f"{count} wrong elements", "0"])
    crossing = {g["axis"]: g["crosses_nodes"] for g in where["groups"] if len(g["ranks"]) > 1}
    held = crossing.get("cp", True) and not crossing.get("tp", False)
    told = f"{where['nodes']}: {where['kind']}"
    checks.append(["nodes", held, told, str(comm.grid.cp)])
    return checks


def _told_by_nccl(comm) -> list[dict] | None:
    """What every group's communicators used, from all ranks' logs; None without NCCL."""
    from rlkernel.collectives import nccl_log

    file = os.environ.get("NCCL_DEBUG_FILE", "") if comm.device.type == "cuda" else ""
    said = comm.collect(nccl_log.read(file.replace("%p", str(os.getpid()))) if file else None)
    return None if any(one is None for one in said) else nccl_log.groups(said)


# -- times -----------------------------------------------------------------------------------------


def _link_rates(comm, where: Mapping) -> dict[str, float]:
    """Bytes a microsecond of a large transfer between neighbours, all pairs at once, slowest rank:
    "intra" inside a node, "inter" between nodes; the fastest of a few, by the best who may move it.
    Once a launch and grid.
    """
    import torch

    from rlkernel.collectives import exchange_ways

    if comm.grid in _rates:
        return _rates[comm.grid]
    size, found = BULK[comm.device.type], {}
    x = torch.zeros(size // 4, dtype=torch.int32, device=comm.device)
    for name, axis in (("intra", "tp"), ("inter", "cp")):
        link = comm.links[axis]
        if link.size == 1:
            continue
        found[name] = _rate(comm, partial(link.transport.swap, x, link.index ^ 1), size)
        if exchange_ways.may_copy(comm, where, axis):
            parts = x.view(link.size, -1)
            copies = partial(exchange_ways.PeerExchange(comm, parts, axis), parts)
            sent = size * (link.size - 1) / link.size
            found[name] = max(found[name], _rate(comm, copies, sent))
    return _rates.setdefault(comm.grid, found)


def _rate(comm, call: Callable, sent: float) -> float:
    from rlkernel.run.aligned import aligned, slowest
    from rlkernel.run.timing import Protocol

    protocol = Protocol(samples=5, warm_s=0.0, graph=False)
    mine = aligned({"bulk": call}, protocol, comm.collect, comm.device)
    return sent / min(sample["us"] for sample in slowest(comm.collect(mine)))


def _timed(case: Case, comm, ways: Sequence) -> list[dict]:
    """This rank's raw samples: plain calls, and CUDA graphs of what can be captured."""
    from rlkernel.collectives import exchange_ways
    from rlkernel.run.aligned import aligned
    from rlkernel.run.timing import Protocol

    at, samples = case.parameters, []
    most = 50 if comm.device.type == "cuda" else 20  # calls of a sample, whose start is shared
    repeats = max(1, min(most, (1 << 24) // at["message"]))
    calls = {
        way.name: partial(way.call, exchange_ways.parts(comm, way.axis, at["message"], 0))
        for way in ways
    }
    # The copy engine's epochs are the host's: a replay would find the flags of the call before.
    captured = {way.name: calls[way.name] for way in ways if way.by == exchange_ways.GROUP}
    for graph, called in ((False, calls), (True, captured if comm.device.type == "cuda" else {})):
        protocol = Protocol(at["samples"], at["warmup"], graph, repeats)
        samples += aligned(called, protocol, comm.collect, comm.device) if called else []
    return samples


def _lines(case: Case, comm, where, ways: Sequence, ranks: list, rates: Mapping) -> list[dict]:
    """One line a way and how it was called: the slowest rank's time, its floor, its bandwidth."""
    from rlkernel.collectives.exchange_ways import peers
    from rlkernel.run.aligned import slowest
    from rlkernel.run.timing import medians

    lines, message, named = [], case.parameters["message"], {way.name: way for way in ways}
    for graph in (False, True):
        times = medians(slowest([[s for s in rank if s["graph"] is graph] for rank in ranks]))
        for name, spread in times.items():
            way = named[name]
            count, size = peers(comm, where, way.axis), comm.links[way.axis].size
            sent = {link: number * message // size for link, number in count.items()}
            floors = [bytes_ / rates[link] for link, bytes_ in sent.items() if bytes_]
            lines.append({
                "scope": way.scope, "way": way.by, "graph": graph, "message": message,
                "ranks": size, "peers": count, "sent": sent, **spread, "floor_us": max(floors),
                "gb_s": sum(sent.values()) / spread["median_us"] / 1e3,
            })  # fmt: skip
    return lines


# -- what is told ----------------------------------------------------------------------------------


def verdict(params: Params, rows: Sequence[Mapping]) -> dict:
    checks = [
        {"name": f"{_label(row)}: {name}", "passed": held, "value": value, "limit": limit}
        for row in rows
        for name, held, value, limit in row["result"]["checks"]
    ]
    return {"passed": bool(checks) and all(check["passed"] for check in checks), "checks": checks}


def coverage(params: Params, rows: Sequence[Mapping]) -> tuple[list[str], list[str]]:
    """(COVERED, NOT COVERED), by where the ranks found themselves."""
    kinds = dict.fromkeys(
        f"{at['kind']}: {at['nodes']} with {len(at['ranks']) // at['nodes']} rank(s) each"
        for at in (row["result"]["topology"] for row in rows if row["passed"])
    )
    real = any(kind.startswith(REAL) for kind in kinds)
    return [*COVERED, *kinds], [*NOT_COVERED, *[MISSING] * (not real)]


def summary(params: Params, rows: Sequence[Mapping]) -> dict:
    keep = ("passed", "checks", "topology", "nccl", "lines")
    return {
        "passed": verdict(params, rows)["passed"],
        "cases": [{"case": _label(row), **{k: row["result"][k] for k in keep}} for row in rows],
    }


def table(params: Params, rows: Sequence[Mapping]) -> tuple[list[str], list[list[str]]]:
    header = ["case", "exchange", "called as", "us", "p10", "p90", "floor us", "GB/s"]
    body = []
    for row in rows:
        for line in row["result"]["lines"]:
            body.append([
                _label(row), f"{line['scope']} by {line['way']}",
                "graph" if line["graph"] else "plain",
                *(f"{line[n]:.1f}" for n in ("median_us", "p10_us", "p90_us", "floor_us")),
                f"{line['gb_s']:.3g}",
            ])  # fmt: skip
    return header, body or [["-"] * len(header)]


def protocol(params: Params) -> dict:
    return {
        "samples": params.samples,
        "warm_s": params.warmup,
        "order": "variants interleaved call by call, hot",
        "clock": "host clock behind a device synchronize, microseconds a call",
        "start": "an instant of one host's clock that all ranks wait for; a barrier across hosts",
        "of each sample": "the slowest rank",
    }


def _label(row: Mapping) -> str:
    grid, size = row["case"]["grid"], row["case"]["parameters"]["message"]
    fault = "" if row["case"]["fault"] == "none" else f" {row['case']['fault']}"
    shape = f"{grid['cp']}x{grid['tp']}"
    text = f"{size / 2**20:g} MiB" if size >= 1 << 20 else f"{size / 1024:g} KiB"
    return f"P={shape} {text}{fault}"
