"""What a record of a2a-ffn may be quoted for beyond one node: measured places, never what was asked
for. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

REAL, EMULATED = "real nodes", "emulated nodes"  # as topology.described has them
MISSING = "partial milestone: two real nodes NOT COVERED"
COLUMN = "of what could be hidden"
NOT_MEASURED = "NOT MEASURED"


def told(row: Mapping) -> str:
    """"2 emulated nodes", "2 agents of one host", "2 real nodes"; "" on one node."""
    at = row["result"].get("topology") or {"nodes": 1}
    if at["nodes"] == 1:
        return ""
    if at["kind"] == REAL:
        return f"{at['nodes']} real nodes"
    emulated = at["kind"].startswith(EMULATED)
    return f"{at['nodes']} {EMULATED if emulated else 'agents of one host'}"


def coverage(rows: Sequence[Mapping]) -> tuple[list[str], list[str]]:
    """(what rows whose checks hold cover, what no row here does), of several nodes."""
    covered = []
    for row in rows:
        at = row["result"].get("topology")
        if told(row) and row["passed"]:
            sizes = [sum(rank["node"] == n for rank in at["ranks"]) for n in range(at["nodes"])]
            covered.append(f"{at['kind']}: {' + '.join(map(str, sizes))} ranks")
    real = any(line.startswith(REAL) for line in covered)
    return list(dict.fromkeys(covered)), [] if real else [MISSING]


def widened(
    header: list[str], body: list[list[str]], rows: Sequence[Mapping], label: Callable
) -> tuple[list[str], list[list[str]]]:
    """The table with one more column where rows span nodes. Its first three columns: case, state,
    variant.
    """
    if not any(map(told, rows)):
        return header, body
    known = {
        (label(row), state, name): reached(line["reached"])
        for row in rows
        for state, times in (row["result"].get("times") or {}).items()
        for name, line in times.get("schedules", {}).items()
        if "reached" in line
    }
    return [*header, COLUMN], [[*line, known.get(tuple(line[:3]), "-")] for line in body]


def reached(found: Mapping) -> str:
    """"time +0.82 ± 0.02, trace +0.80 ± 0.01", or NOT MEASURED and why."""
    said = {}
    for way, one in found.items():
        why = one["why"]
        value = f"{NOT_MEASURED}: {why}" if why else f"{one['mean']:+.2f} ± {one['ci95']:.2f}"
        said.setdefault(value, []).append(way)
    return ", ".join(f"{' and '.join(ways)} {value}" for value, ways in said.items())
