"""The ground that the boundaries stand on: are the ranks alike, where are they, what moves bytes?

`start_row` comes first in every launch. Settings and libraries are compared over the control group
before any collective; then each group adds once, by the backend and by the tree, and the log of
NCCL, where there is one, tells which transport, algorithm and protocol it chose.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

from rlkernel import compare
from rlkernel.collectives import nccl_log, settings, topology
from rlkernel.collectives.backend_sum import all_reduce_in_place
from rlkernel.collectives.comm import Comm
from rlkernel.collectives.errors import CommError
from rlkernel.contract import ReductionTree
from rlkernel.ffn import parallel_ops
from rlkernel.records import machine
from rlkernel.records.source import source_hash

ODD_RANK = 3  # the rank that --fault nccl-settings starts differently
ODD = ("NCCL_PROTO", "LL128")
PATTERN = 1024  # values; the same ones inside messages of any size
WARMUP = 3


def start_row(case, comm: Comm) -> dict:
    """Ranks alike, groups right, every group's sum exact. The same on every rank."""
    if case.fault == "nccl-settings" and comm.rank == ODD_RANK:
        os.environ[ODD[0]] = ODD[1]
    said = comm.collect({**settings.of_this_rank(), **_libraries()})
    try:
        settings.require_equal(said)
        told, alike = "all alike", True
    except settings.SettingsDiffer as error:
        told, alike = str(error), False
    checks = [["the ranks' settings and libraries", alike, told, "all alike"]]
    places = comm.collect(topology.place(comm.device))
    found = {
        "alike": alike,
        "topology": topology.described(places, comm.grid),
        "settings": said[0],
        "versions": _versions(),
        "backend": parallel_ops.require_backend(comm.device),
        "ranks": comm.grid.size,
    }
    if alike:
        checks += _sums(comm)
        found["nccl"] = told_by_nccl(comm)
        if comm.device.type == "cuda" and found["nccl"] is not None:
            checks += _transports(found["topology"], found["nccl"])
    return {"passed": all(held for _, held, _, _ in checks), "checks": checks, **found}


def _libraries() -> dict[str, object]:
    """What must be the same on every node: versions, and the code itself."""
    versions = _versions()
    source = source_hash("rlkernel.experiments.ws2")[:8]
    return {"source": source, **{n: versions[n] for n in ("torch", "triton", "nccl", "cuda")}}


def _versions() -> dict[str, object]:
    here = machine.environment()
    nccl = None
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "torch": torch.__version__,
        "triton": here["triton"],
        "cuda": torch.version.cuda,
        "nccl": nccl or here["nccl"],
        "python": here["python"],
    }


def _sums(comm: Comm) -> list[list]:
    """Each group adds small integers, exact in any order, both ways."""
    checks = []
    for axis in ("tp", "cp"):
        size = comm.grid.axis_size(axis)
        if size == 1:
            continue
        mine = torch.arange(PATTERN, device=comm.device) % 61 + comm.rank
        right = sum(mine - comm.rank + r for r in comm.links[axis].ranks).bfloat16()
        for way, add in ways(comm, axis).items():
            held = comm.collect(bool(compare.bit_report(add(mine.bfloat16()), right)))
            told = f"{sum(held)} of {len(held)} ranks"
            checks.append([f"{axis}: exact sum by {way}", all(held), told, "all"])
    return checks


def ways(comm: Comm, axis: str) -> dict[str, Callable]:
    """Every way in which a group of this axis may be summed."""
    seam = comm.using(contract=ReductionTree(comm.grid.axis_size(axis), "bf16"))
    found = {"tree": lambda x: seam.all_reduce(x, f"{axis}.tree", axis)}
    if comm.grid.axis_size(axis) == 2:
        found["backend"] = lambda x: all_reduce_in_place(seam, x.clone(), f"{axis}.backend", axis)
    return found


def told_by_nccl(comm: Comm) -> list[dict] | None:
    """What every group's communicators used, from all ranks' logs; None without NCCL."""
    pattern = os.environ.get("NCCL_DEBUG_FILE", "")
    log = nccl_log.read(pattern.replace("%p", str(os.getpid()))) if pattern else None
    said = comm.collect(log if comm.device.type == "cuda" else None)
    return None if any(one is None for one in said) else nccl_log.groups(said)


def _transports(where: dict, groups: list[dict]) -> list[list]:
    """The log must tell how every group's bytes went; between nodes not by peer memory."""
    by_ranks = {tuple(group["ranks"]): group for group in groups}
    checks = []
    for group in where["groups"]:
        told = by_ranks.get(tuple(group["ranks"]), {"transports": [], "choices": []})
        name, ways = f"{group['axis']} {group['ranks']}", ", ".join(told["transports"])
        checks.append([f"{name}: transport, algorithm and protocol in the log",
                       bool(told["transports"] and told["choices"]),
                       f"{ways or 'no transport'}; {', '.join(told['choices']) or 'no choice'}",
                       "told"])  # fmt: skip
        if group["crosses_nodes"]:
            held = bool(ways) and all(way.startswith("NET/") for way in told["transports"])
            checks.append([f"{name}: between nodes by the network", held, ways, "NET/..."])
    return checks


# -- latency ---------------------------------------------------------------------------------------


def latency_row(case, comm: Comm) -> dict:
    """Wall time of a sum over TP and over CP, by message size; and the same values in any size."""
    lines, checks, samples = [], [], []
    for axis in ("tp", "cp"):
        pattern = torch.randn(
            PATTERN, generator=torch.Generator().manual_seed(case.seed + comm.rank)
        )
        pattern = pattern.to(torch.bfloat16).to(comm.device)
        for way, add in ways(comm, axis).items():
            alone = add(pattern)
            for size in _sizes(case):
                x = pattern.repeat(size // (2 * PATTERN))
                total = add(x)
                wrong = compare.bit_report(total, alone.repeat(x.numel() // PATTERN)).mismatches
                mine = _timed(lambda x=x, add=add: add(x), comm, case.parameters["samples"])
                told = comm.collect([wrong, mine])
                slowest = [max(times) for times in zip(*(times for _, times in told))]
                samples += [{"axis": axis, "way": way, "bytes": size, "seconds": s} for s in mine]
                lines.append({
                    "axis": axis, "way": way, "bytes": size,
                    "median_us": statistics.median(slowest) * 1e6,
                    "fastest_us": min(slowest) * 1e6, "slowest_us": max(slowest) * 1e6,
                })  # fmt: skip
                count = sum(wrong for wrong, _ in told)
                checks.append([f"{axis} by {way}, {size} B: the bits of a small message",
                               not count, f"{count} elements differ", "0"])  # fmt: skip
    where = topology.described(comm.collect(topology.place(comm.device)), comm.grid)
    return {
        "passed": all(held for _, held, _, _ in checks), "checks": checks, "lines": lines,
        "samples": samples, "topology": where, "nccl": told_by_nccl(comm),
        "shared_gpus": 0 < where["gpus"] < comm.grid.size, "ranks": comm.grid.size,
    }  # fmt: skip


def _sizes(case) -> list[int]:
    return [int(size) for size in str(case.parameters["messages"]).split("+")]


def _timed(call: Callable, comm: Comm, samples: int) -> list[float]:
    """Seconds of each call on this rank, the device idle on both sides."""
    found = []
    for number in range(WARMUP + samples):
        _settle(comm)
        began = time.perf_counter()
        call()
        _settle(comm)
        if number >= WARMUP:
            found.append(time.perf_counter() - began)
    return found


def _settle(comm: Comm) -> None:
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)


# -- faults that show in a reduction ---------------------------------------------------------------


def wire_row(case, comm: Comm) -> dict:
    """One rank of each group brings FP32 where the others bring BF16: named on every rank."""
    from rlkernel.ffn import boundaries, shards

    here, checks = boundaries.scene(case, comm), []
    for name, odd in (("down.forward", "tp"), ("gate.dw", "cp")):
        boundary = next(b for b in shards.BOUNDARIES if b.name == name)
        if comm.links[odd].index == 1:
            here.tree = ReductionTree(here.tree.leaves, "fp32")
        try:
            boundaries.operator(boundary, here)()
            said = "nobody noticed"
        except CommError as error:
            said = str(error)
        here.tree = ReductionTree.parse(case.parameters["contract"])
        every = comm.collect(said)
        named = sum("float32" in one and "bfloat16" in one for one in every)
        checks.append([f"{name}: BF16 against FP32 on the wire, named on {named} of "
                       f"{len(every)} ranks", False, every[0], "all ranks alike"])  # fmt: skip
    return {"passed": False, "checks": checks, "first_wrong": checks[0][0], "ranks": len(every),
            "caught": all("named on 4 of 4" in check[0] for check in checks)}  # fmt: skip
