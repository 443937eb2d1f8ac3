"""One product by hand: does a row keep its bits in a batch, and how far apart are the contracts?

Rows come from rlkernel.ffn.look: `row["result"]` holds "batches", one line a batch size with the
elements that differ from the row alone, under the contract and in the library; and "others",
contract -> elements by distance in units in the last place (ULP).
"""

from __future__ import annotations

from matplotlib.lines import Line2D

from . import Plot, Rows, Table, contracts, style
from . import rows as of

# ULP classes from equal to far: one hue, light to dark; equal bits are the ground.
SHADES = ("#e8edf2", *style.STEPS, "#071d36")


def _one(rows: Rows) -> tuple[dict, str]:
    return rows[0]["result"], of.option(rows[0], "contract")


def classes(rows: Rows) -> list[str]:
    """The ULP classes that any contract has elements in, the equal ones first."""
    result, _ = _one(rows)
    found = [list(counts.items()) for counts in result["others"].values()]
    return list(dict.fromkeys(n for counts in found for n, c in counts if c or n == "0"))


@style.styled
def by_hand(rows: Rows):
    """Left: elements of a row that differ from the row alone, by batch size, under the contract
    (bars up) and in the library. Right: elements (%) by ULP from every other contract."""
    result, contract = _one(rows)
    figure = style.canvas(style.WIDTH, 3.4)
    left, right = figure.subplots(1, 2, width_ratios=[1.1, 1])
    _bars(left, result, contract)
    _shares(right, result, classes(rows))
    right.set_title(f"every other contract against {contract}, in ULP")
    return figure


def _bars(axes, result, contract) -> None:
    looks = {"ours": contracts.look(contract)["color"], "library": style.MUTED}
    for shift, (who, colour) in zip((-0.2, 0.2), looks.items()):
        for place, line in enumerate(result["batches"]):
            count = line[who]
            axes.bar([place + shift], [count], width=0.36, color=colour, gid=who)
            axes.text(place + shift, count, f"{count}", ha="center", va="bottom", fontsize=8.5)
    elements = result["batches"][0]["elements"]
    axes.set_xticks(range(len(result["batches"])), [f"M = {b['m']}" for b in result["batches"]])
    axes.set_ylim(0, elements * 1.15)
    axes.set_yticks([0, elements], ["0", f"{elements}"])
    axes.set_title(f"elements of one row that differ from the row alone, of {elements}")
    keys = (contract, "the library's torch.mm, FP32")
    marks = [Line2D([], [], lw=6, color=c, label=k) for c, k in zip(looks.values(), keys)]
    axes.legend(handles=marks, loc="upper left", frameon=False, fontsize=8.5)


def _shares(axes, result, names) -> None:
    others = result["others"]
    for line, counts in enumerate(others.values()):
        start, total = 0.0, sum(counts.values())
        for shade, name in zip(SHADES, names):
            share = 100 * counts.get(name, 0) / total
            axes.barh([line], [share], left=start, height=0.66, color=shade)
            if share > 12:
                axes.text(
                    start + share / 2, line, f"{share:.0f} %", ha="center", va="center",
                    fontsize=8.5, color=style.PAPER if shade in SHADES[2:] else style.INK,
                )  # fmt: skip
            start += share
    axes.set_yticks(range(len(others)), others, color=style.INK)
    axes.set_ylim(len(others) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    marks = [
        Line2D([], [], lw=6, color=shade, label=_class(name)) for shade, name in zip(SHADES, names)
    ]
    axes.legend(handles=marks, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=len(marks),
                frameon=False, fontsize=8.5)  # fmt: skip


def _class(name: str) -> str:
    return "same bits" if name == "0" else f"{name.replace('<=', '≤ ')} ULP"


def by_hand_alt(rows: Rows) -> str:
    result, contract = _one(rows)
    last = result["batches"][-1]
    ours, library = (sum(line[who] for line in result["batches"]) for who in ("ours", "library"))
    elements = sum(line["elements"] for line in result["batches"])
    apart = "; ".join(
        f"{name} {counts['0']:,} / {sum(counts.values()):,} with the same bits"
        for name, counts in result["others"].items()
    )
    return (
        f"One row in batches of up to M = {last['m']} against the row alone: {contract} "
        f"{ours} / {elements} elements differ, the library in FP32 {library} / {elements}. "
        f"Against {contract}: {apart}."
    )


def by_hand_table(rows: Rows) -> Table:
    """One line a batch size, then one line another contract."""
    result, contract = _one(rows)
    body = [
        [f"row in M = {line['m']}", who, f"{line[key]} / {line['elements']}", "-"]
        for line in result["batches"]
        for key, who in (("ours", contract), ("library", "torch.mm, FP32"))
    ]
    for name, counts in result["others"].items():
        total = sum(counts.values())
        far = ", ".join(f"{n} ULP: {c:,}" for n, c in counts.items() if c and n != "0")
        body.append([
            f"whole batch against {contract}", name, f"{total - counts['0']:,} / {total:,}",
            far or "-",
        ])  # fmt: skip
    return ["compared", "contract", "elements that differ", "how far"], body


BITS = Plot(
    "Bits by hand",
    by_hand,
    by_hand_alt,
    by_hand_table,
    "Contracts are different answers to the same question: each keeps its own bits, none the "
    "other's. The library may pick another order of additions for another M.",
)
