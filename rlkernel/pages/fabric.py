"""What the page about several nodes computes from records: the model's fit, its error on every
measured point, and what it says of fabrics that nobody has measured here. Models, all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlkernel.figures import cross_node, schedules
from rlkernel.figures.exchange import where
from rlkernel.pages import bars, show
from rlkernel.pages.evidence import Evidence
from rlkernel.records import alpha_beta, overlap_model
from rlkernel.records.alpha_beta import Fabric, LinkCost, NotEnough, Point
from rlkernel.records.overlap_model import FLAT, STEPS, Placement, Terms

PLACEMENTS = (Placement(1, 8), Placement(2, 4), Placement(2, 8))
COUNTS = (1, 2, 4, 8)  # chunks


def links(exchanges: Sequence[Evidence]) -> list[Point]:
    """The timed exchanges of the process group; as CUDA graphs where there are any, since a layer's
    host is ahead of its device. NotEnough where there is none.
    """
    rows = [row for one in exchanges for row in show.rows(one)]
    found = alpha_beta.points(rows, graph=True) or alpha_beta.points(rows)
    if not found:
        raise NotEnough(f"no exchange was timed: {exchanges[0].command}")
    return found


def check(exchanges: Sequence[Evidence], layers: Sequence[Evidence]) -> None:
    """The model beside every measured point: exchanges, then times of the layer."""
    try:
        points = links(exchanges)
        fabric = alpha_beta.fabric(points)
    except NotEnough as error:
        return show.no_model(str(error))
    found = [_row("exchange", error) for error in alpha_beta.errors(points)]
    for row in (row for one in layers for row in show.rows(one)):
        try:
            errors = overlap_model.errors(overlap_model.terms([row]), fabric, _placement(row))
        except NotEnough as error:
            show.no_model(f"A2A-FFN, {where(row)}: {error}")
        else:
            found += [_row(f"A2A-FFN, {where(row)}", error) for error in errors]
    show.model(cross_node.CHECK, found, [*exchanges, *layers], describe(fabric))


def predict(
    exchanges: Sequence[Evidence], layer: Evidence, nvlink: LinkCost | None, nic: LinkCost | None
) -> None:
    """P = 8 and 16 for the workload of `layer`'s record. nvlink, nic: given by whoever asks; None:
    as fitted to the exchanges inside a node and between nodes.
    """
    try:
        given = {"intra": nvlink, "inter": nic}
        if None in given.values():
            fitted = alpha_beta.fabric(links(exchanges)).links
        costs = {name: cost or fitted.get(name) for name, cost in given.items()}
        fabric = Fabric({name: cost for name, cost in costs.items() if cost})
        told = overlap_model.terms(show.rows(layer))
        if not told:
            raise NotEnough(f"no timed forward of the layer on GPUs: {layer.command}")
        origin = {name: "as given" if given[name] else "as fitted" for name in given}
        found = [one for each in told for one in _predicted(each, fabric, describe(fabric, origin))]
    except NotEnough as error:
        return show.no_model(str(error))
    show.model(cross_node.PREDICTED, found, [*exchanges, layer], describe(fabric, origin))


def reached(found: Sequence[Evidence]) -> None:
    """How much of what communication and compute allow was hidden, a table of each record: hidden
    over min(1, T comp / T comm), by times and by traces, or why that is no measurement.
    """
    header = ["direction", "schedule", "state", "T comp / T comm", "none / it (p10, p90)",
              "by times", "by traces"]  # fmt: skip
    for one in found:
        show.missing(one)
        body = []
        for line in schedules.lines(show.rows(one), every=True):
            if line.speedup and line.balance:
                body.append([
                    line.direction, line.variant, line.state, f"{line.balance:.2f}",
                    schedules.spread(line.speedup, "{:.3f}".format),
                    *(schedules.reached(line, way) for way in ("time", "trace")),
                ])  # fmt: skip
        show.table(one, header, body, f"Of what could be hidden; the bar is {bars.REACHED[0]:.2f}.")


def given(start_us: float, gb_s: float | None) -> LinkCost | None:
    """A link that somebody gives: microseconds once an exchange, GB/s of a GPU each way. None
    where no bandwidth is given. ValueError for what no link can have.
    """
    if gb_s is None:
        return None
    if gb_s <= 0 or start_us < 0:
        raise ValueError(f"no link has {gb_s} GB/s and {start_us} µs: give positive numbers")
    return LinkCost(start_us, 0.0, gb_s)


def describe(fabric: Fabric, origin: dict[str, str] | None = None) -> str:
    """`intra, as fitted: 20 µs + 0 µs a message + bytes / 380 GB/s; ...; both at once`."""
    parts = []
    for name, cost in fabric.links.items():
        how = f", {origin[name]}" if origin else ""
        start, message, rate = map(_plain, (cost.start_us, cost.message_us, cost.gb_s))
        parts.append(f"{name}{how}: {start} µs + {message} µs a message + bytes / {rate} GB/s")
    both = ["both at once" if fabric.at_once else "one after the other"] * (len(parts) > 1)
    return "; ".join(parts + both)


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _predicted(told: Terms, fabric: Fabric, said: str) -> list[dict]:
    """One row a placement, order of the exchange and chunk count; compute as measured in as many
    chunks where that was done, by the schedule that it slows least.
    """
    alone: dict[int, float] = {}
    for chunks, us, _ in told.chunked.values():
        alone[chunks] = min(us, alone.get(chunks, us))
    found = []
    for place in PLACEMENTS:
        for order in (FLAT, STEPS)[: 1 if place.nodes == 1 else 2]:
            for count in overlap_model.fitting(told, place, COUNTS):
                one = overlap_model.predict(
                    told, fabric, place, count, order=order, comp_us=alone.get(count)
                )
                names = ("serial_us", "overlap_us", "comp_us", "comm_us", "wire_us", "exposed_us",
                         "hidden", "of_what_can_be")  # fmt: skip
                found.append({
                    "placement": str(place), "ranks": place.ranks, "order": order,
                    "chunks": count, "workload": told.label, "links": said,
                    **{name: getattr(one, name) for name in names},
                })  # fmt: skip
    return found


def _placement(row: dict) -> Placement:
    nodes = (row["result"].get("topology") or {"nodes": 1})["nodes"]
    return Placement(nodes, row["case"]["grid"]["dp"] // nodes)


def _row(kind: str, error: alpha_beta.Error) -> dict:
    return {"kind": kind, "label": error.label, "measured_us": error.measured_us,
            "model_us": error.model_us, "relative": error.relative,
            "left_out": error.left_out}  # fmt: skip
