"""Twin and dense block, seed by seed: how far apart each signal ends, ours beside torch's."""

from __future__ import annotations

from matplotlib.lines import Line2D

from . import Plot, Rows, Table, style
from . import rows as of

COLOUR = {"ours": style.RANKS[0], "torch": style.RANKS[1]}
NAME = {"ours": "this package's twin", "torch": "torch's parallelize_module"}


def _correct(rows: Rows) -> dict[tuple[int, str], list[dict]]:
    """Correct rows by (P, whose twin), ours first."""
    right = [r for r in rows if r["case"]["fault"] == "none" and r["result"].get("signals")]
    key = lambda r: (of.ranks(r), of.option(r, "twin", "ours"))  # noqa: E731
    return dict(sorted(of.grouped(right, key).items()))


def _gap(row: dict, name: str) -> float:
    return row["result"]["signals"][name]["max_abs"]


def _limit(rows: Rows, name: str) -> float:
    return min(row["result"]["signals"][name]["bound"] for row in rows)


@style.styled
def seeds(rows: Rows):
    """Largest |difference| to the dense block (logarithmic) of each signal, a dot a seed.

    Panels: P. Colour: whose tensor parallelism. A red tick: the limit. Left gutter: equal bits.
    """
    series, names = _correct(rows), of.signals(rows)
    sizes, twins = sorted({p for p, _ in series}), list(dict.fromkeys(t for _, t in series))
    figure = style.canvas(style.WIDTH, 0.95 + 0.36 * len(names))
    grid = figure.subplots(1, len(sizes), sharex=True, sharey=True, squeeze=False)[0]
    gaps = [_gap(r, n) for found in series.values() for r in found for n in names]
    least = min((g for g in gaps if g > 0), default=1e-9)
    gutter = least / 8
    for axes, size in zip(grid, sizes, strict=True):
        for place, twin in enumerate(t for t in twins if (size, t) in series):
            _dots(axes, series[size, twin], names, gutter, place, twin)
        _finish(axes, names, gutter, least, f"P = {size}")
    grid[0].set_yticks(range(len(names)), [of.label(n) for n in names], color=style.INK)
    grid[0].set_ylim(len(names) - 0.5, -0.5)
    figure.supxlabel("largest |difference| to the dense block", fontsize=9, color=style.MUTED)
    _key(figure, twins)
    return figure


def _dots(axes, found: Rows, names, gutter: float, place: int, twin: str) -> None:
    for line, name in enumerate(names):
        y = line + 0.17 * (2 * place - 1)
        xs = [_gap(row, name) or gutter for row in found]
        axes.plot(
            xs, [y] * len(xs), ls="none", marker="o", markersize=6, alpha=0.75, mec="none",
            color=COLOUR.get(twin, style.MUTED),
        )  # fmt: skip
        axes.plot([_limit(found, name)] * 2, [y - 0.15, y + 0.15], color=style.LIMIT, lw=2)


def _finish(axes, names, gutter: float, least: float, title: str) -> None:
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_title(title)
    axes.axvline(least / 3, color=style.FAINT, lw=1)
    low, high = axes.get_xlim()
    powers = [p for p in range(-12, 3) if least / 3 < 10.0**p < high * 1.01]
    ticks = [gutter, *(10.0**p for p in powers)]
    axes.set_xticks(ticks, ["0", *(f"$10^{{{p}}}$" for p in powers)])
    axes.set_xlim(gutter / 2, high)
    for line in range(len(names) - 1):
        axes.axhline(line + 0.5, color=style.FAINT, lw=0.6)


def _key(figure, twins) -> None:
    dot = {"ls": "none", "marker": "o", "markersize": 6, "mec": "none"}
    lines = [Line2D([], [], color=COLOUR.get(t, style.MUTED), label=NAME[t], **dot) for t in twins]
    lines.append(Line2D([], [], color=style.LIMIT, lw=2, label="limit"))
    figure.legend(
        handles=lines, loc="outside upper right", ncols=len(lines), frameon=False, fontsize=8.5
    )


def seeds_alt(rows: Rows) -> str:
    parts = []
    for (size, twin), found in _correct(rows).items():
        told = ", ".join(
            f"{of.label(n)} {style.number(max(_gap(r, n) for r in found), 2)}"
            for n in of.signals(rows)
        )
        parts.append(f"{NAME[twin]} at P = {size}, worst of {len(found)} seeds: {told}")
    return "Largest difference to the dense block, signal by signal. " + "; ".join(parts) + "."


def seeds_table(rows: Rows) -> Table:
    """One line a signal; for each P and twin the first seed, the largest of all, the limit."""
    series, names = _correct(rows), of.signals(rows)
    header, columns = ["signal"], []
    for (size, twin), found in series.items():
        who = f"P={size}" + (" torch" if twin == "torch" else "")
        header += [f"{who}: seed {found[0]['case']['seed']}", f"largest of {len(found)}", "limit"]
        for read in (lambda f, n: _gap(f[0], n), _worst, _limit):
            columns.append([style.number(read(found, n)) for n in names])
    return header, [list(line) for line in zip(map(of.label, names), *columns, strict=True)]


def _worst(found: Rows, name: str) -> float:
    return max(_gap(row, name) for row in found)


SEEDS = Plot(
    "Signal by signal, seed by seed",
    seeds,
    seeds_alt,
    seeds_table,
    "A dot a seed; in the left gutter every element is equal. A red tick is the limit of that "
    "signal: the fixture's own for our twin, a rounding bound for torch's.",
)
