"""What a record of a2a-ffn may be quoted for: each line is decided by what its rows hold, never by
what was asked for. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rlkernel.experiments import a2a_nodes

Rows = Sequence[Mapping]
SCHEDULES = ("none", "with-sm", "sm-free", "kernel")
FUSED, CHUNKS, ONE_GEMM = "fused", "chunks", "one-gemm"  # rungs of overlap/path.py
NEVER = (
    "optional backends (fused, FP8, CuTeDSL) and other fwd_modes: not available here",
    "the environment pins torch 2.6, NCCL 2.21.5, Triton 3.2: this record's own are in it",
    "an optimizer step, or more than one block",
    "L2 and memory traffic: NOT MEASURED, hardware counters need a profiler of kernels (ncu)",
)


class Line(NamedTuple):
    """said: the statement as the rows bear it, "" where they do not; then `instead` stands."""

    said: Callable[[Rows], str]
    instead: str


def coverage(rows: Rows) -> tuple[list[str], list[str]]:
    """(COVERED, NOT COVERED): each statement is in exactly one of them."""
    nodes, apart = a2a_nodes.coverage(rows)
    told = [line.said(rows) for line in LINES]
    missing = [line.instead for line, said in zip(LINES, told) if not said]
    return [*filter(None, told), *nodes], [*apart, *_withheld(rows), *missing, *NEVER]


def _withheld(rows: Rows) -> list[str]:
    """Times and traces that were asked for and would have said something else."""
    why = dict.fromkeys(row["result"].get("withheld") for row in rows)
    return [f"times, traces, insides: NOT MEASURED, {one}" for one in why if one]


def _sound(rows: Rows) -> list[Mapping]:
    """Rows whose checks hold and in which nothing was broken on purpose."""
    return [row for row in rows if row["passed"] and row["case"]["fault"] == "none"]


def _lines(rows: Rows, schedule: str = "") -> Iterator[tuple[Mapping, Mapping]]:
    """(row, line) of sound rows."""
    for row in _sound(rows):
        for line in row["result"].get("lines", ()):
            if line["schedule"] == (schedule or line["schedule"]):
                yield row, line


def _at(row: Mapping) -> Mapping:
    return row["case"]["parameters"]


def _listed(names) -> str:
    found = list(dict.fromkeys(names))
    return ", ".join(sorted(found, key=lambda n: SCHEDULES.index(n) if n in SCHEDULES else 9))


def _checked(part: str, what: str) -> Callable[[Rows], str]:
    """Lines that hold the diagnostics of a check, which are written where it was made."""

    def said(rows: Rows) -> str:
        found = [(row, line["schedule"]) for row, line in _lines(rows) if line.get(part)]
        if not found:
            return ""
        block = {"block" if _at(row)["block"] else "layer" for row, _ in found}
        return f"{what} ({', '.join(sorted(block))}): {_listed(name for _, name in found)}"

    return said


def _gradients(part: str, what: str) -> Callable[[Rows], str]:
    of = _checked(part, what)

    def said(rows: Rows) -> str:
        mode = {_at(row)["check_correctness"] for row, line in _lines(rows) if line.get(part)}
        rule = "bit for bit" if mode == {"bitwise"} else "within the Frobenius limit"
        return of(rows).replace("gradients", f"gradients {rule}", 1)

    return said


def _rungs(rows: Rows) -> str:
    """One word a case and flag count: a matrix reads `N of M ran fused`."""
    kernels = [line for _, line in _lines(rows, "kernel")]
    if not kernels:
        return ""
    counts = {rung: sum(line["rung"] == rung for line in kernels)
              for rung in (FUSED, CHUNKS, ONE_GEMM)}  # fmt: skip
    rest = ", ".join(f"{n} as {rung}" for rung, n in counts.items() if n and rung != FUSED)
    told = f"kernel: {counts[FUSED]} of {len(kernels)} ran fused, the exchange inside the GEMMs"
    return f"{told}; {rest}" if rest else told


def _fused(rows: Rows) -> str:
    ran = [row for row, line in _lines(rows, "kernel") if line["rung"] == FUSED]
    ways = ["forward"] * bool(ran) + ["backward"] * any(_at(row)["backward"] for row in ran)
    ranks = sorted({row["case"]["grid"]["dp"] for row in ran})
    told = f"the fused kernels, {' and '.join(ways)}, on {', '.join(map(str, ranks))} ranks"
    return told if ran and max(ranks) > 1 else ""


def _timed(rows: Rows) -> str:
    found: dict[str, list[str]] = {}
    for row in _sound(rows):
        way = "forward and backward" if _at(row)["backward"] else "forward"
        for state, times in (row["result"].get("times") or {}).items():
            names = [name.partition("/")[0] for name in times.get("schedules", ())]
            found.setdefault(f"{way}, {state}", []).extend(names)
    return "" if not any(found.values()) else "times of every rank and call, ratios to none, " + (
        "hidden as an estimate with its sign: "
        + "; ".join(f"{_listed(names)} ({way})" for way, names in found.items() if names)
    )  # fmt: skip


def _others(rows: Rows) -> str:
    states = [at for row in _sound(rows) for at in (row["result"].get("times") or {}).values()]
    hows = dict.fromkeys(how for at in states for how in at.get("others", ()))
    return f"none under other settings, labelled so: {', '.join(hows)}" if hows else ""


def _held(key: str, text: str) -> Callable[[Rows], str]:
    return lambda rows: text if any(row["result"].get(key) for row in _sound(rows)) else ""


def _beside(rows: Rows) -> str:
    found = [one["beside"] for row in _sound(rows) for one in row["result"].get("sharing", ())]
    others = [name for name in dict.fromkeys(found) if name != "alone"]
    return f"what an exchange beside it costs a product: {', '.join(others)}" if others else ""


def _comp_only(rows: Rows) -> str:
    found = [one for row in _sound(rows) for one in row["result"].get("comp_paths", {}).values()]
    rungs = _listed(one.partition(":")[0] for one in found)
    alone = any(_at(row)["comp_only"] for row in _sound(rows))
    return "the layer without communication" + f": {rungs}" * bool(rungs) if alone else ""


def _scaled(name: str, what: str) -> Callable[[Rows], str]:
    def said(rows: Rows) -> str:
        scales = sorted({_at(row).get(name, 1) for row in _sound(rows)} - {1})
        return f"{what} {', '.join(map(str, scales))} times" if scales else ""

    return said


def _faults(rows: Rows) -> str:
    found = [row["case"]["fault"] for row in rows if row["case"]["fault"] != "none"]
    seen = [row["case"]["fault"] for row in rows
            if row["case"]["fault"] != "none" and not row["passed"]]  # fmt: skip
    return f"an order that was broken is seen: {_listed(seen)}" if found and seen == found else ""


LINES = (
    Line(_checked("forward", "forward bit for bit, the supplied check (min(B, 2) rows)"),
         "bits of a forward: no schedule was checked against none"),
    Line(_checked("whole batch", "forward bit for bit, the whole batch"),
         "bits of the whole batch: not checked"),
    Line(_gradients("backward", "gradients, the supplied check (min(B, 2) rows)"),
         "gradients: this record holds no backward that was checked"),
    Line(_gradients("whole batch backward", "gradients, the whole batch"),
         "gradients of the whole batch: not checked"),
    Line(_rungs, "kernel: it was not among the schedules"),
    Line(_fused, "the fused kernels between ranks: none of these rows ran them"),
    Line(_timed, "times: nothing here was timed, so nothing is said of speed or of what is hidden"),
    Line(_held("seen", "what a profiler saw run beside what"), "traces: none were taken"),
    Line(_held("inside", "inside the fused kernels: tiles, waits and flags of a live call"),
         "inside the fused kernels: no timeline was recorded"),
    Line(_beside, "what an exchange beside it costs a product: NOT MEASURED, that takes a timed "
         "and traced case over NCCL between GPUs of one host"),
    Line(_held("memory", "peak memory of each schedule, device-wide, every rank"),
         "peak memory: not taken"),
    Line(_others, "none under other settings (torch's operators between the GEMMs): not timed"),
    Line(_comp_only, "comp-only as a case of its own"),
    Line(_scaled("comm_scale", "payloads padded to"), "comm-scale: only 1"),
    Line(_scaled("compute_scale", "H enlarged"), "compute-scale: only 1"),
    Line(_faults, "faults in the order of the exchange: none was planted and seen here"),
)  # fmt: skip
