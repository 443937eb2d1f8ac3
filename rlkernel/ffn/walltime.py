"""What a layout costs: the layer over its ranks, against the official layer on every one of them.

A sample is the wall time from one start of all ranks to the end of the slowest (run/aligned.py);
ours and theirs are interleaved call by call. Each rank runs the official layer whole, on all
tokens, as a single GPU would. Plain calls on both sides, and CUDA graphs on both sides where the
transport can be captured. What is timed is compared with one rank first, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlkernel import compare
from rlkernel.collectives.comm import Comm
from rlkernel.collectives.transport import StagedTransport
from rlkernel.ffn import exactness, memory
from rlkernel.ffn.module import DeterministicFFN
from rlkernel.ffn.opponents import PLAIN, opponents
from rlkernel.ffn.training import step_of

KINDS = ("forward", "step")  # a step: forward, dX and all three dW
RESULTS = ("training output", "dX", *exactness.GRADIENTS)
FEW = 512  # rows up to which a call is so short that a graph holds several
Work = Callable[[], object]


def time_row(case, comm: Comm) -> dict:
    """All variants of one layout, timed. The same on every rank but for its samples."""
    at, device = case.parameters, comm.device
    tensors = exactness.full(at["m"], at["hidden"], at["intermediate"], case.seed, device)
    found = [_ours(case, comm, tensors, v) for v in exactness.variants(at, comm)]
    counts = comm.collect([one["counts"] for one in found])
    rivals, said = opponents(
        (tensors["gate"], tensors["up"], tensors["down"]),
        lambda layer: _calls(layer, tensors["x"], tensors["dy"])["step"](),
        comm.collect,
    )
    work = _work(found, rivals, tensors)
    held = {one["name"]: one["bytes"] for one in found}
    held |= dict.fromkeys(rivals, 2 * sum(tensors[n].numel() for n in ("gate", "up", "down")))
    peaks = {kind: {n: memory.peak(call, held[n], device) for n, call in calls.items()}
             for kind, calls in work.items()}  # fmt: skip
    lines = [
        _line(one, kind, [rank[number] for rank in counts])
        for kind in KINDS
        for number, one in enumerate(found)
        if one["name"] in work[kind]
    ]
    result = _judged(lines) | {
        "opponents": said,
        "official": said[PLAIN],
        "ranks": comm.grid.size,
        "peak_bytes": _most(comm.collect(peaks)),
        "beside_bytes": max(comm.collect(memory.beside(device) or 0)) or None,
        "not_captured": _not_captured(comm),
    }
    return result | _timed(case, comm, work, lines, tuple(rivals))


def _timed(case, comm: Comm, work: Mapping, lines: list[dict], rivals: tuple[str, ...]) -> dict:
    """Samples of this rank; times of the slowest into every line."""
    at, device = case.parameters, comm.device
    if not at["samples"]:
        return {"not_measured": "no samples were asked for"}
    if _shared(comm):
        return {"not_measured": "ranks share a GPU: a time of theirs says nothing"}
    from rlkernel.run.aligned import aligned, one_host, slowest, told
    from rlkernel.run.timing import Protocol, ceilings

    most = ceilings() if device.type == "cuda" else None
    modes = [False, True] if at["graph"] and not _not_captured(comm) else [False]
    samples, made, how = [], [], {}
    for kind in KINDS:
        for graph in modes:
            repeats = 8 if graph and at["m"] <= FEW else 1
            mode = "graph" if graph else "eager"
            protocol = Protocol(at["samples"], at["warmup"], graph, repeats)
            how[mode] = told(protocol, one_host(comm.collect))
            mine = aligned(work[kind], protocol, comm.collect, device)
            whole = slowest(comm.collect(mine))
            samples += [{"operator": kind, **sample} for sample in mine]
            for line in (line for line in lines if line["operator"] == kind):
                floor = _floor(at, comm, kind, most)
                timed = line | _times(whole, line["variant"], rivals)
                made.append(timed | {"mode": mode, "floor_us": floor})
    late = [sample["late_us"] for sample in samples if sample["late_us"] is not None]
    return {
        "lines": made,
        "samples": samples,
        "ceilings": most and dict(most),
        "latest_us": max(comm.collect(max(late, default=0.0))),
        "protocol": how,
    }


# -- what is called --------------------------------------------------------------------------------


def _calls(layer: torch.nn.Module, x: Tensor, dy: Tensor) -> dict[str, Work]:
    def forward() -> Tensor:
        with torch.no_grad():
            return layer(x)

    return {"forward": forward, "step": step_of(layer, x, dy)}


def _work(found: list[dict], rivals: Mapping, tensors: Mapping[str, Tensor]) -> dict:
    """kind -> name -> what is timed under it: our variants first, on every rank in one order."""
    first: dict[str, str] = {}  # without gradients a contract is one variant, named by its first
    for one in found:
        first.setdefault(one["line"]["contract"], one["name"])
    timed = {"forward": set(first.values()), "step": {one["name"] for one in found}}
    work = {
        kind: {one["name"]: one["calls"][kind] for one in found if one["name"] in timed[kind]}
        for kind in KINDS
    }
    for name, layer in rivals.items():
        for kind, call in _calls(layer, tensors["x"], tensors["dy"]).items():
            work[kind][name] = call
    return work


def _ours(case, comm: Comm, tensors: dict[str, Tensor], variant: Mapping) -> dict:
    """One variant: what is called, this rank's mismatches with one rank, bytes of its weights."""
    at = case.parameters
    layer = exactness.build("none", comm, tensors, at["sequence_parallel"], variant)
    tokens = exactness.own_tokens(layer, at["m"])
    calls = _calls(layer, tensors["x"][tokens], tensors["dy"][tokens])
    return {
        "name": exactness.name_of(variant),
        "calls": calls,
        "counts": _counts(case, layer, calls, variant, tokens),
        "bytes": 2 * sum(weight.numel() for weight in layer.parameters()),
        "line": {
            **variant,
            "dw": layer.dw_route(at["m"] // layer.lanes),
            "schedule": exactness.path(layer, tensors["x"][tokens]),
        },
    }


def _counts(case, layer: DeterministicFFN, calls, variant: Mapping, tokens: slice) -> dict:
    """kind -> [mismatches, elements] of this rank's results against its part of one rank's."""
    at = case.parameters
    key = (at["m"], at["hidden"], at["intermediate"], case.seed, layer.comm.device)
    right, _ = exactness.single(*key, variant["contract"], variant["dx"])
    y, dx, d_gate_up, d_down = calls["step"]()
    results = dict(zip(RESULTS, (y, dx, *d_gate_up.chunk(2), d_down)))
    counted = {"forward": {"forward": calls["forward"]()}, "step": results}
    found = {}
    for kind, values in counted.items():
        reports = [
            compare.bit_report(value, exactness.own_part(layer, what, right[what], tokens))
            for what, value in values.items()
        ]
        found[kind] = [sum(r.mismatches for r in reports), sum(r.elements for r in reports)]
    return found


# -- where it ran ----------------------------------------------------------------------------------


def _not_captured(comm: Comm) -> str:
    """Why there is no CUDA graph of it; "" where there is."""
    if comm.device.type != "cuda":
        return "a CUDA graph needs a GPU"
    if any(isinstance(link.transport, StagedTransport) for link in comm.links.values()):
        return "what is staged through the host cannot be captured"
    return ""


def _shared(comm: Comm) -> bool:
    """Whether two ranks compute on one GPU."""
    if comm.device.type != "cuda":
        return False
    chip = str(torch.cuda.get_device_properties(comm.device).uuid)
    return len(set(comm.collect(chip))) < comm.grid.size


def _floor(at: Mapping, comm: Comm, kind: str, most: Mapping | None) -> float | None:
    """Microseconds in which a rank's device could do its share; what ranks say is not counted."""
    if most is None:
        return None
    grid, h, i = comm.grid, at["hidden"], at["intermediate"]
    times = 3 if kind == "step" else 1
    flops = times * 6 * at["m"] * h * i / grid.size
    moved = 2 * (times * 3 * h * i / grid.tp + (5 if times == 3 else 2) * at["m"] * h / grid.cp)
    return max(flops / most["flops_per_us"], moved / most["bytes_per_us"])


# -- what is written down --------------------------------------------------------------------------


def _line(one: Mapping, kind: str, ranks: list[Mapping]) -> dict:
    wrong, elements = (sum(rank[kind][place] for rank in ranks) for place in (0, 1))
    same = {} if kind == "step" else {"dx": "-", "dw": "-"}  # forward has neither
    line = {"operator": kind, "variant": one["name"], **one["line"], **same}
    return line | {"mismatches": wrong, "elements": elements, "first": ""}


def _judged(lines: list[dict]) -> dict:
    wrong, elements = (sum(line[name] for line in lines) for name in ("mismatches", "elements"))
    count = f"{wrong} / {elements} elements"
    name = f"what is timed: one rank's bits, {len(lines)} variants"
    checks = [[name, not wrong, count, "0"]]
    return {"passed": not wrong, "checks": checks, "lines": lines,
            "mismatches": wrong, "elements": elements}  # fmt: skip


def _times(samples: list[dict], variant: str, rivals: tuple[str, ...]) -> dict:
    """Median, spread, and the paired ratio to each opponent; `ratio` is that to the faster one."""
    from rlkernel.run.timing import medians, ratio

    found = medians(samples)
    best = min(rivals, key=lambda name: found[name]["median_us"], default=None)
    ratios = {name: ratio(samples, variant, name) for name in rivals}
    theirs = {f"{name}_us": found[name]["median_us"] for name in rivals}
    told = {**found[variant], **theirs, "ratios": ratios}
    return told | ({"ratio": ratios[best], "against": best} if best else {})


def _most(ranks: list[dict]) -> dict:
    """The largest peak of any rank, kind by kind and variant by variant."""
    return {
        kind: {name: max((rank[kind][name] or 0) for rank in ranks) or None for name in calls}
        for kind, calls in ranks[0].items()
    }
