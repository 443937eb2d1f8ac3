"""Where do the ranks stand, really? Measured on each, put together without naming a host.

A grid knows no placement. What counts here as a *node* is what the transport can tell apart: a
machine, a network namespace of it, or a host that NCCL was told about (NCCL_HOSTID). Only different
machines are real nodes, and that is told by their boots, never by what was asked for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rlkernel.grid import Grid

REAL = "real nodes"
EMULATED = "emulated nodes on one host (NCCL_HOSTID)"
NAMESPACES = "agents on one host, a network namespace each"
LOOPBACK = "agents on one host, over loopback"
SINGLE = "one agent on one host"


def place(device: torch.device) -> dict[str, str | None]:
    """What tells this rank's place from others'. Hashed: a boot id identifies a machine."""
    return {
        "boot": _hashed(_read("/proc/sys/kernel/random/boot_id") or os.uname().nodename),
        "network": _hashed(_link("/proc/self/ns/net")),
        "hostid": os.environ.get("NCCL_HOSTID"),
        "agent": os.environ.get("GROUP_RANK", "0"),
        "gpu": _gpu(device),
    }


def described(places: Sequence[Mapping], grid: Grid) -> dict:
    """One place a rank, in rank order -> kind, hosts, ranks (with host, node, gpu by number) and,
    of every group of tp and cp, its members and whether it crosses nodes.
    """
    hosts = _numbered(p["boot"] for p in places)
    # A namespace looks alike from inside two machines, so it only counts together with the boot.
    nodes = _numbered((p["boot"], p["network"], p["hostid"], p["agent"]) for p in places)
    gpus = _numbered((p["boot"], p["gpu"]) for p in places if p["gpu"])
    ranks = []
    for rank, p in enumerate(places):
        node = nodes[p["boot"], p["network"], p["hostid"], p["agent"]]
        at = grid.coords(rank)
        ranks.append({
            "rank": rank, "dp": at.dp, "cp": at.cp, "tp": at.tp, "host": hosts[p["boot"]],
            "node": node, "gpu": gpus.get((p["boot"], p["gpu"])),
        })  # fmt: skip
    return {
        "kind": _kind(places),
        "hosts": len(hosts),
        "nodes": len(nodes),
        "gpus": len(gpus),
        "ranks": ranks,
        "groups": [
            {"axis": axis, "ranks": list(members),
             "crosses_nodes": len({ranks[r]["node"] for r in members}) > 1,
             "crosses_hosts": len({ranks[r]["host"] for r in members}) > 1}
            for axis in ("tp", "cp") for members in grid.groups(axis)
        ],
    }  # fmt: skip


def _kind(places: Sequence[Mapping]) -> str:
    def distinct(name: str) -> int:
        return len({p[name] for p in places})

    if distinct("boot") > 1:
        return REAL
    for name, kind in (("hostid", EMULATED), ("network", NAMESPACES), ("agent", LOOPBACK)):
        if distinct(name) > 1:
            return kind
    return SINGLE


def _numbered(values) -> dict:
    return {value: number for number, value in enumerate(dict.fromkeys(values))}


def _gpu(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return _hashed(str(getattr(found, "uuid", device.index)))


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
