"""What the rows of a reconstruction say: checks, JSON summary, printed table. Imports no torch.

A row's result holds `signals`, in the order in which a wrong one would appear, each with its
largest difference, its limits and its `excess` over them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence


def worst_by_signal(rows: Sequence[Mapping], signals: Sequence[str]) -> dict[str, Mapping]:
    """For each signal the report that comes closest to its bound, or leaves it by most, over all
    rows.
    """
    reports = {s: [row["result"]["signals"][s] for row in rows] for s in signals}
    return {s: max(found, key=lambda r: r["excess"]) for s, found in reports.items()}


def earliest(rows: Sequence[Mapping], signals: Sequence[str]) -> str | None:
    """The earliest first wrong signal of any row."""
    seen = {row["result"]["first_wrong"] for row in rows}
    return next((s for s in signals if s in seen), None)


def groups(rows: Sequence[Mapping]) -> list[tuple[Mapping, list[Mapping]]]:
    """Rows that differ in nothing but the seed, in the order of the record: (the case they share,
    rows).
    """

    def shared(row: Mapping) -> dict:
        return {name: value for name, value in row["case"].items() if name != "seed"}

    return [(case, list(found)) for case, found in itertools.groupby(rows, key=shared)]


def checks(rows: Sequence[Mapping], signals: Sequence[str], *, catalogue: bool) -> dict:
    """One check a group of seeds. In a catalogue a fault must be caught at the predicted signal by
    every seed; elsewhere every signal must stay within its bound, whatever fault was injected.
    """
    found_checks = []
    for case, found in groups(rows):
        if not found[0]["result"].get("signals"):
            continue
        name = _label(case)
        if catalogue and case["fault"] != "none":
            expected = found[0]["result"]["expected_first_wrong"]
            seen = [row["result"]["first_wrong"] or "nothing" for row in found]
            value = ", ".join(sorted(set(seen)))
            found_checks.append(
                {
                    "name": f"{name}: caught",
                    "passed": set(seen) == {expected},
                    "value": f"first wrong {value}",
                    "limit": f"first wrong {expected}",
                }
            )
            continue
        top = worst_by_signal(found, signals)
        signal = max(top, key=lambda s: top[s]["excess"])
        found_checks.append(
            {
                "name": f"{name}: equivalent",
                "passed": all(row["passed"] for row in found),
                "excess": top[signal]["excess"],
                "value": f"{signal} {top[signal]['max_abs']:.2e}",
                "limit": f"{top[signal]['bound']:.2e}" + _l2_limit(top[signal]),
            }
        )
    return {"passed": all(check["passed"] for check in found_checks), "checks": found_checks}


def summary(mode: str, rows: Sequence[Mapping], keys: Mapping[str, str], passed: bool) -> dict:
    """The largest differences of all rows under the article's keys, then one entry a case."""
    top = _peaks(rows, keys)
    sizes = sorted({_ranks(row["case"]) for row in rows})
    return {
        "mode": mode,
        "world_size": sizes[0] if len(sizes) == 1 else sizes,
        **top,
        "first_wrong": earliest(rows, list(keys)),
        "passed": passed,
        "cases": [
            {
                "seed": row["case"]["seed"],
                "world_size": _ranks(row["case"]),
                "dtype": row["case"]["dtype"],
                "fault": row["case"]["fault"],
                **row["case"]["parameters"],
                **_peaks([row], keys),
                "first_wrong": row["result"]["first_wrong"],
                "passed": row["passed"],
            }
            for row in rows
        ],
    }


def table(rows: Sequence[Mapping], signals: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """One line a group of seeds: the largest difference of each signal, `!` behind those that left
    their bound.
    """
    header = ["case", "seeds", *signals, "first wrong"]
    body = []
    for case, found in groups(rows):
        top = worst_by_signal(found, signals)
        cells = [_cell(top[s]) for s in signals]
        body.append([_label(case), str(len(found)), *cells, earliest(found, signals) or "-"])
    return header, body


def shape_table(shapes: Sequence[Mapping]) -> tuple[list[str], list[list[str]]]:
    """Dense and rank-local shapes of each case, one line a tensor."""
    return ["where", "tensor", "shape"], [
        [where, name, str(shape)]
        for case in shapes
        for where, held in case.items()
        for name, shape in held.items()
    ]


def _cell(report: Mapping) -> str:
    return f"{report['max_abs']:.1e}" + ("!" if report["excess"] > 1 else "")


def _l2_limit(report: Mapping) -> str:
    return "" if report["rel_l2_bound"] is None else f", relative L2 {report['rel_l2_bound']:.1e}"


def _peaks(rows: Sequence[Mapping], keys: Mapping[str, str]) -> dict[str, float]:
    return {
        key: max(row["result"]["signals"][s]["max_abs"] for row in rows) for s, key in keys.items()
    }


def _ranks(case: Mapping) -> int:
    grid = case["grid"]
    return grid["dp"] * grid["cp"] * grid["tp"]


def _label(case: Mapping) -> str:
    grid, options = case["grid"], case["parameters"]
    parts = [f"P={grid['tp']}"]
    if _ranks(case) > grid["tp"]:
        parts.append(f"dp={grid['dp']}")
    parts.append(case["dtype"])
    if options.get("sequence_parallel") == "on":
        parts.append("SP")
    if options.get("twin", "ours") != "ours":
        parts.append(options["twin"])
    if case["fault"] != "none":
        parts.append(case["fault"])
    return " ".join(parts)
