"""Which schedule computed which product of a record of ws2. Imports no torch.

`cuda_sm90` is where a product was computed, not by what: beside the package's Triton kernels there
a chain may be a library's GEMM that has been proven equal, and on a CPU the kernels' twin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rlkernel.grid import Grid

Rows = Sequence[Mapping]
HOME = Grid(cp=2, tp=2)
KERNELS = ("tile", "decode", "tokens", "hopper")  # of select.py: Triton and Gluon
OTHERS = {
    "library": "by the library's GEMM, which is taken for a chain in BF16 once it has given the "
    "chain's bits on that shape",
    "twin": "by plain torch, the kernels' twin on the CPU",
}
SOME = "products by the deterministic Triton kernels"
EVERY = "every product by the deterministic Triton kernels"
NEEDS = "needs device=cuda, or device=cpu and what=interpreted"


def lines(rows: Rows) -> Iterator[tuple[Mapping, Mapping]]:
    """(row, line) of every boundary that was looked at."""
    for row in rows:
        if row["case"]["parameters"]["part"] == "layer":
            continue
        for line in row["result"].get("lines", ()):
            if "boundary" in line:
                yield row, line


def _by(line: Mapping) -> list[str]:
    return line["schedule"].split("+")  # of all ranks


def _ours(rows: Rows) -> list[Mapping]:
    """Lines of rows that hold whose product a kernel computed on every rank."""
    return [line for row, line in lines(rows)
            if row["passed"] and all(name in KERNELS for name in _by(line))]  # fmt: skip


def some(rows: Rows) -> bool:
    return bool(_ours(rows))


def told(rows: Rows) -> str:
    """`: 54 of 67 (decode 30, hopper 18, tokens 6)`."""
    ours = _ours(rows)
    count = Counter(name for line in ours for name in dict.fromkeys(_by(line)))
    kinds = ", ".join(f"{name} {count[name]}" for name in KERNELS if name in count)
    return f": {len(ours)} of {len(list(lines(rows)))} ({kinds})"


def every(rows: Rows) -> bool:
    """Of both tracks at least, and of all that was looked at."""
    found = list(lines(rows))
    return {"forward", "backward"} <= {line["track"] for _, line in found} and len(
        _ours(rows)
    ) == len(found)


def why_not(rows: Rows) -> str:
    """How many were computed by what else, why, and which ones."""
    found = list(lines(rows))
    parts = []
    for kind in dict.fromkeys(name for _, line in found for name in _by(line)):
        if kind not in KERNELS:
            mine = [(row, line) for row, line in found if kind in _by(line)]
            why = OTHERS.get(kind, f"by {kind}")
            parts.append(f"{len(mine)} of {len(found)} {why} ({_places(mine)})")
    return "; ".join(parts) or "both tracks must be looked at, and hold"


def _places(found: Sequence[tuple[Mapping, Mapping]]) -> str:
    """`chain at M_local 1024: gate.forward, up.forward; ...`, products of the same M together."""
    tokens: dict[tuple[str, str], set[int]] = {}
    for row, line in found:
        grid = Grid(**row["case"]["grid"])
        under = line["contract"] if grid == HOME else f"{grid} {line['contract']}"
        tokens.setdefault((under, line["boundary"]), set()).add(row["case"]["parameters"]["m"])
    names: dict[tuple[str, str], list[str]] = {}
    for (under, boundary), at in tokens.items():
        names.setdefault((under, ", ".join(map(str, sorted(at)))), []).append(boundary)
    return "; ".join(
        f"{under} at M_local {at}: {', '.join(some)}" for (under, at), some in names.items()
    )
