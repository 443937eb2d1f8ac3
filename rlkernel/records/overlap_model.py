"""A model of the A2A-FFN on fabrics that nobody has measured here: P = 8, P = 16, several nodes.

    exchange   alpha-beta over the links that a placement uses (alpha_beta.py)
    T_comp     as measured: at one workload a rank's FLOPs, 6 B T D H, do not depend on P
    T_local    packing, unpacking and bias: T_comm - T_wire as measured, for the same reason
    T_serial   T_comp + T_local + two exchanges
    T_overlap  c chunks through two resources that each do one thing at a time:

        links   [d0][d1][d2][d3]      [r0][r1]  [r2][r3]     d: dispatch, r: combine
        chip        [   c0   ][   c1   ][   c2   ][   c3   ]

Whatever runs beside something else runs as fast as alone: an upper bound of what overlap gives.
Everything here is a model and is labelled so wherever it is shown. Forward only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlkernel.records.alpha_beta import Error, Fabric, NotEnough

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
FLAT, STEPS = "flat", "two steps"
COMMAND = "python -m rlkernel a2a-ffn --overlap with-sm,kernel"


@dataclass(frozen=True)
class Placement:
    """P ranks on `nodes` nodes with `each` ranks."""

    nodes: int
    each: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.each

    def __str__(self) -> str:
        return f"{self.nodes} x {self.each}"

    def steps(self, message: float, order: str = FLAT) -> list[tuple[dict, dict]]:
        """(messages, bytes sent) of a rank by class of link, for each step of an exchange of
        `message` bytes a rank. FLAT: every rank to every other one. STEPS: first to the ranks of
        the same place on other nodes, all that is meant for their node; then inside each node.
        """
        far, near = self.nodes - 1, self.each - 1
        if order == STEPS and far and near:
            across = ({"inter": far}, {"inter": message * far / self.nodes})
            return [across, ({"intra": near}, {"intra": message * near / self.each})]
        part = message / self.ranks
        messages = {"intra": near, "inter": far * self.each}
        return [(messages, {name: count * part for name, count in messages.items()})]


@dataclass(frozen=True)
class Terms:
    """What a record says of one workload. message: bytes of a rank in one exchange. chunked:
    variant -> (chunks, time of its kernels with nothing sent, measured time).
    """

    label: str
    ranks: int
    tokens: int
    message: float
    comp_us: float
    local_us: float
    wire_us: float
    serial_us: float
    chunked: Mapping[str, tuple[int, float, float]]


@dataclass(frozen=True)
class Prediction:
    """Microseconds of one forward, modelled."""

    serial_us: float
    overlap_us: float
    comp_us: float
    comm_us: float
    wire_us: float

    @property
    def exposed_us(self) -> float:
        return self.overlap_us - self.comp_us

    @property
    def hidden(self) -> float:
        """(T_serial - T_overlap) / T_comm, with its sign."""
        return (self.serial_us - self.overlap_us) / self.comm_us if self.comm_us else 0.0

    @property
    def of_what_can_be(self) -> float:
        """hidden / min(1, T_comp / T_comm): 1 where all is hidden that there is compute for."""
        possible = min(1.0, self.comp_us / self.comm_us) if self.comm_us else 1.0
        return self.hidden / possible if possible else 0.0


def terms(rows: Sequence[Mapping], state: str = "") -> list[Terms]:
    """One a timed, faultless forward row of a2a-ffn. state: of the chip; "": the hot one if any."""
    found = []
    for row in rows:
        case, times = row["case"], row["result"].get("times") or {}
        at, usual = case["parameters"], "hot" if "hot" in times else next(iter(times), "")
        here = times.get(state or usual, {})
        if at["backward"] or case["fault"] != "none" or "comm" not in here.get("terms", {}):
            continue
        us = {name: term["slowest"]["median_us"] for name, term in here["terms"].items()}
        message = at["batch"] * at["tokens"] * at["dim"] * BYTES[case["dtype"]]
        sizes = f"B={at['batch']} T={at['tokens']} D={at['dim']} k={at['k']} {case['dtype']}"
        chunked = {}
        for name, line in here["schedules"].items():
            if "exposed_us" in line:
                own = line["slowest"]["median_us"]
                alone = own - line["exposed_us"]["median"]
                chunked[name] = (int(name.partition("/")[2]), alone, own)
        ranks, message = case["grid"]["dp"], message * at.get("comm_scale", 1)
        found.append(Terms(
            f"P={ranks} {sizes}", ranks, at["tokens"], message, us["comp"],
            max(0.0, us["comm"] - us["wire"]), us["wire"], us["none"], chunked,
        ))  # fmt: skip
    return found


def exchange_us(fabric: Fabric, where: Placement, message: float, order: str = FLAT) -> float:
    return sum(fabric.us(messages, sent) for messages, sent in where.steps(message, order))


def pipelined_us(chunks: int, comp_us: float, part_us: float) -> float:
    """Length of `chunks` equal dispatches, computations and combines, links and chip in order.

    It is max(2 chunks part, comp + 2 part): that of the links, or of the chip with one dispatch
    ahead and one combine behind. No order of equal chunks is shorter, so nothing is exposed up to
    T_comp / T_comm = 1 - 1 / chunks, and beyond 1 a share of 1 / chunks is.
    """
    links, chip, ends = chunks * part_us, 0.0, []
    for i in range(chunks):
        chip = max(chip, (i + 1) * part_us) + comp_us / chunks
        ends.append(chip)
    for ready in ends:
        links = max(links, ready) + part_us
    return links


def predict(
    told: Terms, fabric: Fabric, where: Placement, chunks: int, *, order: str = FLAT,
    comp_us: float | None = None,
) -> Prediction:  # fmt: skip
    """One forward on a placement. comp_us: of the chunked kernels with nothing sent, where known;
    else T_comp and T_local, as if cutting cost nothing. ValueError for chunks that the T / P tokens
    of a rank cannot be cut into.
    """
    local, rest = divmod(told.tokens, where.ranks)
    if rest or not 1 <= chunks <= local:
        raise ValueError(
            f"chunks={chunks}: the T={told.tokens} tokens over P={where.ranks} ranks "
            + ("do not divide" if rest else f"are cut into 1 to {local} chunks")
        )
    wire = 2 * exchange_us(fabric, where, told.message, order)
    comm = wire + told.local_us
    busy = told.comp_us + told.local_us if comp_us is None else comp_us
    part = exchange_us(fabric, where, told.message / chunks, order)
    return Prediction(told.comp_us + comm, pipelined_us(chunks, busy, part), busy, comm, wire)


def fitting(told: Terms, where: Placement, counts: Sequence[int]) -> list[int]:
    """Those chunk counts into which the tokens of a rank can be cut there."""
    local, rest = divmod(told.tokens, where.ranks)
    return [] if rest else [count for count in counts if 1 <= count <= local]


def errors(told: Sequence[Terms], fabric: Fabric, where: Placement) -> list[Error]:
    """The model beside what was measured on this placement: wire, serial, each schedule."""
    found = []
    for one in told:
        if one.ranks != where.ranks:
            raise NotEnough(f"{one.label} was not measured on {where}: its ranks are {one.ranks}")
        plain = predict(one, fabric, where, 1)
        found.append(Error(f"{one.label}, {where}: T wire", one.wire_us, plain.wire_us))
        found.append(Error(f"{one.label}, {where}: T serial", one.serial_us, plain.serial_us))
        for name, (chunks, alone, own) in one.chunked.items():
            model = predict(one, fabric, where, chunks, comp_us=alone).overlap_us
            found.append(Error(f"{one.label}, {where}: T overlap {name}", own, model))
    return found
