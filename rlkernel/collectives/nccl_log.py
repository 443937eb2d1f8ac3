"""Which transport, algorithm and protocol did NCCL choose, group by group? From its debug log.

Lines that matter (NCCL_DEBUG=INFO, subsystems INIT, COLL, P2P, NET, SHM and TUNING):

    ... comm 0x5 rank 0 nranks 2 ... commId 0xab - Init COMPLETE      who is who
    AllReduce: opCount 0 ... count 8 datatype 9 ... comm 0x5 ...       whose call comes next
    Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM                          how its peers are reached
    AllReduce: 16 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}   what was chosen (rank 0 only)

Neither of the last two names its communicator in every version, so a line belongs to the last one
that was named. Each rank reads its own file; a commId, equal on all members, joins their stories.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SUBSYSTEMS = "INIT,ENV,COLL,P2P,SHM,NET,TUNING"
_COMM = re.compile(r"\bcomm (0x[0-9a-f]+)")
_ID = re.compile(r"\bcomm (0x[0-9a-f]+) rank (\d+) n[rR]anks (\d+).*\bcommId (0x[0-9a-f]+)")
_VIA = re.compile(r"Channel \d+(?:/\d+)? ?: (\d+)\[\w+\] -> (\d+)\[\w+\].*\bvia (\S+)")
_CHOICE = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+)")
_VERSION = re.compile(r"NCCL version ([\w.+-]+)")


@dataclass
class Story:
    """What one rank's log tells of one communicator."""

    comm_id: str = ""
    rank: int = -1
    size: int = 0
    via: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)

    def to_dict(self) -> dict:
        return {"comm_id": self.comm_id, "rank": self.rank, "size": self.size,
                "via": self.via, "choices": self.choices}  # fmt: skip


def parse(text: str) -> dict:
    """{"version", "stories": [one a communicator]} of one rank's log."""
    stories: dict[str, Story] = {}
    current = Story()
    for line in text.splitlines():
        named = _COMM.search(line)
        if named:
            current = stories.setdefault(named[1], Story())
        told = _ID.search(line)
        if told:
            if current.comm_id and current.comm_id != told[4]:  # the address was used again
                stories[f"{told[1]} before {len(stories)}"] = current
                current = stories[told[1]] = Story()
            current.rank, current.size, current.comm_id = int(told[2]), int(told[3]), told[4]
        way, choice = _VIA.search(line), _CHOICE.search(line)
        if way:
            _add(current.via, way[3])
        if choice:
            _add(current.choices, f"{choice[1]} {choice[2]} B: {choice[3]}/{choice[4]}".upper())
    version = _VERSION.search(text)
    found = [story.to_dict() for story in stories.values() if story.comm_id]
    return {"version": version[1] if version else None, "stories": found}


def read(path: Path | str) -> dict:
    """`parse` of a file; nothing told where there is none."""
    try:
        return parse(Path(path).read_text(errors="replace"))
    except OSError:
        return {"version": None, "stories": []}


def groups(said: Sequence[Mapping]) -> list[dict]:
    """One parsed log a global rank -> what each group's communicators used.

    [{"ranks", "transports", "choices"}]; several communicators of the same ranks are one entry.
    """
    members: dict[str, dict[int, int]] = {}
    told: dict[str, tuple[list[str], list[str]]] = {}
    for rank, log in enumerate(said):
        for story in log["stories"]:
            members.setdefault(story["comm_id"], {})[story["rank"]] = rank
            via, choices = told.setdefault(story["comm_id"], ([], []))
            for way in story["via"]:
                _add(via, _short(way))
            for choice in story["choices"]:
                _add(choices, choice)
    found: dict[tuple[int, ...], dict] = {}
    for comm_id, by_rank in members.items():
        ranks = tuple(by_rank[r] for r in sorted(by_rank))
        entry = found.setdefault(ranks, {"ranks": list(ranks), "transports": [], "choices": []})
        for name, values in zip(("transports", "choices"), told[comm_id]):
            for value in values:
                _add(entry[name], value)
    return list(found.values())


def _short(way: str) -> str:
    """NET/Socket/0/Shared -> NET/Socket: without the device's number."""
    return re.sub(r"/\d+(\(\d+\))?(?=/|$)", "", way)


def _add(values: list[str], value: str) -> None:
    if value not in values:
        values.append(value)
