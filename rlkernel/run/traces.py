"""Traces that the ranks of a case leave in the run's folder, one file a rank."""

from __future__ import annotations

import shutil
from pathlib import Path


def name(case, rank: int, alone: bool) -> str:
    """Where a rank's trace lies; alone: the run has no other case."""
    return f"trace/rank{rank}.json.gz" if alone else f"trace/{case.key}/rank{rank}.json.gz"


def keep(made: str | None, folder: Path, name: str) -> None:
    """Move the trace that a rank has made into the run folder of its node."""
    if made is None:
        return
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.move(made, folder / name)


def hand_over(store, folder: Path, name: str) -> None:
    """A rank of another node than rank 0's: its trace goes there through the store."""
    if (folder / name).exists():
        store.set(name, (folder / name).read_bytes())


def take_over(store, case, folder: Path, alone: bool) -> None:
    """On rank 0: the traces that other nodes have handed over. All ranks have come by then."""
    for rank in range(case.grid.size):
        at = name(case, rank, alone)
        if store.check([at]):
            (folder / at).write_bytes(store.get(at))
            store.delete_key(at)


def of(case, folder: Path, alone: bool) -> dict[str, list[str]]:
    """{"traces": [file of each rank]} where rank 0 has left one."""
    names = [name(case, rank, alone) for rank in range(case.grid.size)]
    return {"traces": names} if (folder / names[0]).exists() else {}


def copied(row: dict, origin: Path, home: Path) -> dict[str, list[str]]:
    """Traces of a known row, under names that no other row's can have; those that are there."""
    there = [name for name in row.get("traces", []) if (origin / name).is_file()]
    if not there:
        return {"traces": []} if "traces" in row else {}
    names = [f"trace/{row['key']}/{Path(name).name}" for name in there]
    (home / "trace" / row["key"]).mkdir(parents=True, exist_ok=True)
    for file, new in zip(there, names, strict=True):
        shutil.copyfile(origin / file, home / new)
    return {"traces": names}
