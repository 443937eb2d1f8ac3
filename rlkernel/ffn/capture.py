"""Does the layer keep its bits inside a CUDA graph? Captured once, replayed with other data.

A training step is captured on buffers that stay. Then input, upstream gradient and weights change
in place, as an optimizer changes them, and each replay is compared with an eager call on the same
values, bit for bit. Under NCCL the ranks' sums are captured with it, side stream included; what is
staged through the host cannot be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel import compare
from rlkernel.collectives.comm import Comm
from rlkernel.ffn import exactness
from rlkernel.ffn.module import DeterministicFFN

REPLAYS = 3
OPERATORS = ("output", "dX", "d gate_up", "d down")


def graph_row(case, comm: Comm) -> dict:
    """All variants of one layout: replays against eager calls. The same on every rank."""
    if comm.device.type != "cuda":
        return {"passed": True, "checks": [], "not_measured": "a CUDA graph needs a GPU"}
    at = case.parameters
    tensors = exactness.full(at["m"], at["hidden"], at["intermediate"], case.seed, comm.device)
    variants = list(exactness.variants(at, comm))
    ranks = comm.collect([_replayed(case, comm, tensors, variant) for variant in variants])
    lines = []
    for number, variant in enumerate(variants):
        for operator in OPERATORS:
            counts = [rank[number][operator] for rank in ranks]
            wrong, elements = (sum(column) for column in zip(*counts))
            line = {"operator": operator, **variant, "schedule": "CUDA graph"}
            lines.append(line | {"mismatches": wrong, "elements": elements, "first": ""})
    wrong, elements = (sum(line[name] for line in lines) for name in ("mismatches", "elements"))
    name = f"{REPLAYS} replays: the eager call's bits, {len(variants)} variants"
    return {
        "passed": not wrong,
        "checks": [[name, not wrong, f"{wrong} / {elements} elements", "0"]],
        "lines": lines,
        "mismatches": wrong,
        "elements": elements,
        "ranks": comm.grid.size,
    }


def _replayed(case, comm: Comm, tensors: dict[str, Tensor], variant: dict) -> dict:
    """operator -> (mismatches, elements) over all replays of this rank."""
    split = case.parameters["sequence_parallel"]
    layer = exactness.build("none", comm, tensors, split, variant)
    tokens = exactness.own_tokens(layer, case.parameters["m"])
    x = tensors["x"][tokens].clone().requires_grad_()
    dy = tensors["dy"][tokens].clone()
    warm = torch.cuda.Stream()  # compiles, proves shapes and agrees with the peers, outside capture
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(2):
            _step(layer, x, dy)
    torch.cuda.current_stream().wait_stream(warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events in a thread of its own, which must not end the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = _step(layer, x, dy)
    counts = {operator: [0, 0] for operator in OPERATORS}
    for number in range(REPLAYS):
        if number:
            _change(layer, x, dy, number)
        graph.replay()
        for operator, left, right in zip(OPERATORS, captured, _step(layer, x, dy)):
            report = compare.bit_report(left, right)
            counts[operator][0] += report.mismatches
            counts[operator][1] += report.elements
    del captured, graph
    return counts


def _step(layer: DeterministicFFN, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    y = layer(x)
    return y, *torch.autograd.grad(y, (x, layer.gate_up, layer.down), dy)


def _change(layer: DeterministicFFN, x: Tensor, dy: Tensor, number: int) -> None:
    """Other data and other weights in the same memory, the same on all ranks that share them."""
    with torch.no_grad():
        x.copy_(x.flip(0) * (1 + number / 8))
        dy.neg_()
        for weight in (layer.gate_up, layer.down):
            weight.mul_(1 - number / 16)
