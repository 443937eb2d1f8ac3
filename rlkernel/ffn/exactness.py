"""Does a layout give the bits of one rank? Every rank's slice of every result, bit for bit.

A variant is a contract, a way to sum dX and a route of dW. For each, every rank runs the layer over
its tokens and features, forward without gradients and `repeats` training steps, and compares what
it holds with its slice of the same layer on a single rank. Then the results are gathered and
hashed: equal bits have equal digests, whatever the layout, process or machine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from itertools import product

import torch
from torch import Tensor

from rlkernel import compare
from rlkernel.collectives.comm import Call, Comm, Observer, Proceed
from rlkernel.collectives.faults import ArrivalOrder, exchanged, left_fold
from rlkernel.contract import LayerContract, ReductionTree
from rlkernel.ffn.module import NAMES, DeterministicFFN
from rlkernel.kernels import reference, select

GRADIENTS = dict(zip(("dW gate", "dW up", "dW down"), NAMES))
WHAT = ("forward", "training output", "dX", *GRADIENTS, "no-grad", "repeat")
Results = dict[str, Tensor]


def layer_row(case, comm: Comm) -> dict:
    """All variants of one layout. The same on every rank."""
    at = case.parameters
    tensors = full(at["m"], at["hidden"], at["intermediate"], case.seed, comm.device)
    mine = [{**variant, **_measure(case, comm, tensors, variant)} for variant in variants(at, comm)]
    ranks = comm.collect(mine)
    lines = [
        _line(what, [rank[number] for rank in ranks])
        for number in range(len(mine))
        for what in WHAT
    ]
    checks = [_check(what, [line for line in lines if line["operator"] == what]) for what in WHAT]
    alike = sum(len({rank[n]["reference"] for rank in ranks}) == 1 for n in range(len(mine)))
    checks.append(
        ["one rank: the same on every rank", alike == len(mine), f"{alike} of {len(mine)}", "all"]
    )
    whole = sum(variant["digest"] == variant["reference"] for variant in ranks[0])
    checks.append(
        ["gathered: one rank's digest", whole == len(mine), f"{whole} of {len(mine)}", "all"]
    )
    wrong = sum(line["mismatches"] for line in lines)
    return {
        "passed": all(held for _, held, _, _ in checks),
        "checks": checks,
        "lines": lines,
        "caught": wrong > 0 if case.fault != "none" else None,
        "mismatches": wrong,
        "elements": sum(line["elements"] for line in lines),
        "digest": {name_of(variant): variant["digest"] for variant in ranks[0]},
        "ranks": comm.grid.size,
    }


def variants(at: Mapping, comm: Comm) -> Iterator[dict[str, str]]:
    """What `+` joins in the case's parameters, every combination; no routes in a single lane."""
    routes = at["dw"].split("+") if comm.grid.axis_size("grad") > 1 else ["local"]
    for contract, dx, dw in product(at["contracts"].split("+"), at["dx"].split("+"), routes):
        yield {"contract": contract, "dx": dx, "dw": dw}


@functools.lru_cache(maxsize=2)
def full(m: int, hidden: int, intermediate: int, seed: int, device: torch.device) -> Results:
    """The layer's whole weights, input and upstream gradient in BF16; output RMS about 0.6."""
    random = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, std: float) -> Tensor:
        x = torch.randn(rows, columns, generator=random, device=device)
        return (x * std).bfloat16()

    return {
        "gate": normal(intermediate, hidden, hidden**-0.5),
        "up": normal(intermediate, hidden, hidden**-0.5),
        "down": normal(hidden, intermediate, intermediate**-0.5),
        "x": normal(m, hidden, 1.0),
        "dy": normal(m, hidden, 1.0),
    }


@functools.lru_cache(maxsize=8)
def single(
    m: int, hidden: int, intermediate: int, seed: int, device: torch.device, contract: str, dx: str
) -> tuple[Results, str]:
    """What one rank gets from all of it, and its digest."""
    tensors = full(m, hidden, intermediate, seed, device)
    layer = DeterministicFFN(*_weights(tensors), contract=contract, dx=dx)
    results = step(layer, tensors["x"], tensors["dy"])
    return results, compare.digest(*results.values())[:16]


def step(layer: DeterministicFFN, x: Tensor, dy: Tensor) -> Results:
    """Forward without gradients, a training forward and its backward, on this rank's tokens."""
    with torch.no_grad():
        forward = layer(x)
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    output = layer(x)
    output.backward(dy)
    found = layer.gradients()
    grads = {what: found[name] for what, name in GRADIENTS.items()}
    return {"forward": forward, "training output": output.detach(), "dX": x.grad, **grads}


def _measure(case, comm: Comm, tensors: Results, variant: Mapping) -> dict:
    """Mismatches, elements and first difference of each result of this rank; and the digest."""
    at, device = case.parameters, comm.device
    key = (at["m"], at["hidden"], at["intermediate"], case.seed, device)
    right, digest = single(*key, variant["contract"], variant["dx"])
    layer = build(case.fault, comm, tensors, at["sequence_parallel"], variant)
    tokens = own_tokens(layer, at["m"])
    x, dy = tensors["x"][tokens], tensors["dy"][tokens]
    first = step(layer, x, dy)
    reports = {
        what: compare.bit_report(value, own_part(layer, what, right[what], tokens))
        for what, value in first.items()
    }
    wrong = elements = 0
    for _ in range(at["repeats"] - 1):
        for what, value in step(layer, x, dy).items():
            report = compare.bit_report(value, first[what])
            wrong, elements = wrong + report.mismatches, elements + report.elements
    reports["no-grad"] = compare.bit_report(first["forward"], first["training output"])
    counts = {what: [r.mismatches, r.elements, str(r)] for what, r in reports.items()}
    whole = _whole(layer, first)
    return {
        "counts": {**counts, "repeat": [wrong, elements, f"{wrong} of {elements} elements"]},
        "reference": digest,
        "digest": compare.digest(*whole.values())[:16] if comm.rank == 0 else None,
        "route": layer.dw_route(at["m"] // layer.lanes),
        "schedule": path(layer, x),
    }


def path(layer: DeterministicFFN, x: Tensor) -> str:
    """The schedules of its forward, which sees the tokens of all of TP."""
    gate, _, down = layer.local().values()
    rows = x.shape[0] * (layer.tp if layer.sequence_parallel else 1)
    tree = layer.contract.weight.subtree(layer.tp)
    return select.path(x.new_empty(rows, x.shape[1]), gate, down, tree)


def own_part(layer: DeterministicFFN, what: str, whole: Tensor, tokens: slice) -> Tensor:
    """What this rank holds of one rank's result."""
    return layer.shard(GRADIENTS[what], whole) if what in GRADIENTS else whole[tokens]


def own_tokens(layer: DeterministicFFN, m: int) -> slice:
    """This rank's tokens outside the layer: its lane's, under sequence parallel its share."""
    grid, rank = layer.comm.grid, layer.comm.rank
    lane = grid.shard(m, layer.token_axis, rank, "tokens M")
    if not layer.sequence_parallel:
        return lane
    own = grid.shard(lane.stop - lane.start, "tp", rank, "a lane's tokens")
    return slice(lane.start + own.start, lane.start + own.stop)


def _whole(layer: DeterministicFFN, mine: Results) -> Results:
    """All ranks' results put together, on every rank."""
    comm = layer.comm.unobserved()
    weights = layer.whole({name: mine[what] for what, name in GRADIENTS.items()})
    found = {}
    for what, x in mine.items():
        if what in GRADIENTS:
            found[what] = weights[GRADIENTS[what]]
            continue
        if layer.sequence_parallel:
            x = comm.all_gather(x, f"{what} of TP")
        found[what] = comm.all_gather(x, f"{what} of CP", layer.token_axis)
    return found


# -- negative controls -----------------------------------------------------------------------------


def build(
    fault: str, comm: Comm, tensors: Results, split: bool, variant: Mapping
) -> DeterministicFFN:
    """This rank's layer, with the order of additions changed where a fault asks for it."""
    kind, contract = DeterministicFFN, LayerContract.parse(variant["contract"])
    if fault == "leaves16":
        contract = ReductionTree(16, contract.weight.round_to)
    elif fault == "local-left-fold":
        kind = _LocalLeftFold
    elif fault != "none":
        comm = comm.using(observers=[_OnSums(_OBSERVERS[fault]())])
    dw = "auto" if variant["dw"] == "local" else variant["dw"]
    options = {"contract": contract, "sequence_parallel": split, "dx": variant["dx"], "dw": dw}
    return kind(*_weights(tensors), comm, **options)


_OBSERVERS = {
    "left-fold": lambda: left_fold,
    "exchanged": lambda: exchanged,
    "arrival-order": ArrivalOrder,
}


class _OnSums:
    """An observer for the sums of at least four ranks; with two the orders are the same."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def __call__(self, call: Call, x: Tensor, proceed: Proceed) -> Tensor:
        if call.kind == "all_gather" or call.span < 4:
            return proceed(x)
        return self.observer(call, x, proceed)


class _LeftFold(ReductionTree):
    """((l0 + l1) + l2) + ... over the leaves."""

    def fold(self, nodes):
        first, *rest = [node for node in nodes if node is not None]
        return functools.reduce(self.joint, rest, first)


class _LocalLeftFold(DeterministicFFN):
    """Each rank folds its leaves from the left; the ranks' roots meet in the tree."""

    def product(self, a, b, out, tree):
        return out.copy_(reference.gemm(a, b, _LeftFold(tree.leaves, tree.round_to), out.dtype))


# -- what is written down --------------------------------------------------------------------------


def _line(what: str, ranks: list[Mapping]) -> dict:
    """One result of one variant over all ranks; `first`: the first difference on the first rank
    that has one.
    """
    counts = [rank["counts"][what] for rank in ranks]
    differ = [f"rank {number}: {text}" for number, (n, _, text) in enumerate(counts) if n]
    one = ranks[0]
    return {
        "operator": what,
        **{name: one[name] for name in ("contract", "dx", "schedule")},
        "dw": one["route"],
        "mismatches": sum(n for n, _, _ in counts),
        "elements": sum(n for _, n, _ in counts),
        "first": differ[0] if differ else "",
    }


_SAME = {
    "repeat": "repeats: the first one's bits",
    "no-grad": "no-grad: the training forward's bits",
}


def _check(what: str, lines: list[Mapping]) -> list:
    wrong, elements = (sum(line[name] for line in lines) for name in ("mismatches", "elements"))
    name = _SAME.get(what, f"{what}: one rank's bits")
    return [f"{name}, {len(lines)} variants", not wrong, f"{wrong} / {elements} elements", "0"]


def name_of(variant: Mapping) -> str:
    return f"{variant['contract']} dx {variant['dx']} dw {variant['dw']}"


def _weights(tensors: Results) -> tuple[Tensor, Tensor, Tensor]:
    return tensors["gate"], tensors["up"], tensors["down"]
