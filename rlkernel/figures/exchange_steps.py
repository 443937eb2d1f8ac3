"""A flat All-to-All beside one in two steps: across nodes between equal places, then inside."""

from __future__ import annotations

from . import Plot, Rows, Table, style
from .exchange import gap, not_measured, size, where


def steps(rows: Rows) -> dict[str, list[tuple[int, float, float]]]:
    """where, way and call -> (message, flat µs, µs of the two steps), where both were timed."""
    found: dict[str, list] = {}
    for row in rows:
        lines = {(li["scope"], li["way"], li["graph"]): li for li in row["result"]["lines"]}
        for (scope, way, graph), line in lines.items():
            parts = [lines.get((part, way, graph)) for part in ("inside", "across")]
            if scope == "group" and all(parts):
                both = sum(part["median_us"] for part in parts)
                label = f"{where(row)}, {way}{', CUDA graph' if graph else ''}"
                found.setdefault(label, []).append((line["message"], line["median_us"], both))
    return {label: sorted(points) for label, points in found.items()}


@style.styled
def ratio(rows: Rows):
    """Time of the two steps of a hierarchical exchange over that of the flat one, against what a
    rank holds; below 1 two steps are faster."""
    found = steps(rows)
    if not found:
        return gap()
    figure = style.canvas(style.WIDTH * 0.62, 2.8)
    axes = figure.subplots()
    for number, (label, points) in enumerate(found.items()):
        axes.plot([m for m, _, _ in points], [both / flat for _, flat, both in points], marker="o",
                  markersize=4.5, color=style.RANKS[number % 8], label=label)  # fmt: skip
    every = sorted({m for points in found.values() for m, _, _ in points})
    axes.axhline(1, color=style.LIMIT, lw=1.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(every, [size(message) for message in every], fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("a rank holds")
    axes.set_title("two steps / flat")
    axes.legend(frameon=False, fontsize=8.5)
    return figure


def ratio_alt(rows: Rows) -> str:
    told = [
        f"{label}: " + ", ".join(f"{size(m)} {both / flat:.2f}" for m, flat, both in points)
        for label, points in steps(rows).items()
    ]
    return f"Two steps over a flat exchange, by message size. {'; '.join(told)}." if told else (
        not_measured()
    )  # fmt: skip


def ratio_table(rows: Rows) -> Table:
    header = ["where", "a rank holds", "flat µs", "inside + across µs", "two steps / flat"]
    body = [
        [label, size(m), f"{flat:,.1f}", f"{both:,.1f}", f"{both / flat:.3f}"]
        for label, points in steps(rows).items() for m, flat, both in points
    ]  # fmt: skip
    return header, body or [["-"] * len(header)]


STEPS = Plot(
    "A flat exchange, or one in two steps",
    ratio,
    ratio_alt,
    ratio_table,
    "Flat: every rank sends to every other one. Two steps: across nodes to the rank of the same "
    "place, all that is meant for its node, then inside; the sum of both medians. Red: even.",
)
