"""What one case of det-ffn measures: census, products, the whole forward, FP16 against FP32.

Each function takes the case (its parameters, seed and fault) and a device, and returns a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlkernel import compare
from rlkernel.contract import ReductionTree
from rlkernel.ffn import ops
from rlkernel.ffn.official import NotInstalled, official_mlp, official_version
from rlkernel.kernels import census, reference, select

CENSUS_COLUMNS = {"cpu": 24, "cuda": 520}  # not a multiple of any tile
ANCHORS = (1, 2, 17, 31, 32, 33, 64, 65, 128, 257, 1024)  # batches that one row is put into
Work = Callable[[], object]


def census_row(case, device: torch.device) -> dict:
    """Every legal schedule on every family of data; and one row inside batches of other sizes."""
    at = case.parameters
    rows, checks = [], []
    for tree in trees(at):
        found = [
            {"contract": tree.name, **row}
            for row in census.census(
                at["m"],
                at["intermediate"],
                CENSUS_COLUMNS[device.type],
                tree,
                seed=case.seed,
                device=device,
                run_as=_planted(case, tree),
            )
        ]
        right = sum(not row["mismatches"] for row in found)
        checks.append(
            check(f"{tree.name}: all schedules agree", right == len(found),
                   f"{right} of {len(found)}", "all, bit for bit")
        )  # fmt: skip
        rows += found
    fused = census.gate_up_census(
        at["m"], at["hidden"], CENSUS_COLUMNS[device.type], seed=case.seed, device=device
    )
    right = sum(not row["mismatches"] for row in fused)
    checks.append(
        check("gate/up: all schedules agree", right == len(fused), f"{right} of {len(fused)}",
              "all, bit for bit")
    )  # fmt: skip
    moved = [_anchor_row(tree, at, case.seed, device) for tree in trees(at)]
    for line in moved:
        checks.append(_bits(f"{line['contract']}: a row keeps its bits in any batch", line))
    found = {"census": rows, "gate_up": fused, "anchors": moved, "refused": select.refused()}
    return _result(checks, rows + fused + moved, **found)


def gemm_row(case, device: torch.device) -> dict:
    """The products of a training step under every contract: oracle, FP64 and the library's time."""
    lines, samples, checks = [], [], []
    for operator, (a, b) in _products(case, device).items():
        own, work, exact = [], {}, reference.exact(a[: _some(b.shape[1])], b)
        for tree in trees(case.parameters):
            out = torch.full((a.shape[0], b.shape[1]), float("nan"), device=device).bfloat16()
            choice = select.gemm(a, b, out, _planted(case, tree))
            report = compare.bit_report(out, reference.gemm(a, b, tree, torch.bfloat16))
            line = {"operator": operator, "m": a.shape[0], "k": a.shape[1], "n": b.shape[1]}
            line |= _line(tree, str(choice), report, out, exact)
            own.append(line)
            checks.append(_bits(f"{operator} {tree.name}: the oracle's bits", line))
            work[tree.name] = _into(out, a, b, tree)
        out = torch.empty_like(out)
        work["library"] = lambda a=a, b=b, out=out: torch.mm(a, b, out=out)
        taken = timed(case, device, work)
        flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
        moved = 2 * (a.numel() + b.numel() + out.numel())
        add_times(own, taken, ("library",), flops, moved)
        samples += [{"operator": operator, **sample} for sample in taken]
        lines += own
    return _result(checks, lines, lines=lines, samples=samples)


def ffn_row(case, device: torch.device) -> dict:
    """The whole forward of every contract beside the official layer, on the same weights."""
    at = case.parameters
    x, gate, up, down = layer_inputs(case, device)
    exact = reference.exact_mlp(x[: _some(x.shape[1])], gate, up, down)
    lines, checks, work, memory = [], [], {}, {}
    for tree in trees(at):

        def forward(tree=tree):
            return ops.mlp_forward(x, gate, up, down, tree)

        memory[tree.name], out = _peak(
            lambda t=tree: ops.mlp_forward(x, gate, up, down, _planted(case, t)), device
        )
        report = compare.bit_report(out, reference.mlp(x, gate, up, down, tree))
        path = select.path(x, gate, down, tree)
        line = {"operator": "forward", "m": at["m"]} | _line(tree, path, report, out, exact)
        lines.append(line)
        checks.append(_bits(f"forward {tree.name}: the oracle's bits", line))
        work[tree.name] = forward
    try:
        official = official_mlp(gate, up, down)
    except NotInstalled as error:
        baselines, why = {}, str(error)
    else:
        with torch.no_grad():
            memory["official"], out = _peak(lambda: official(x), device)
        for line, tree in zip(lines, trees(at)):
            ours = ops.mlp_forward(x, gate, up, down, tree)
            line["differ_from_official"] = compare.bit_report(ours, out).mismatches
        baselines, why = {"official": _no_grad(official, x)}, ""
        if device.type == "cuda":
            compiled = torch.compile(official, dynamic=False)
            baselines["official compiled"] = _no_grad(compiled, x)
    taken = timed(case, device, work | baselines)
    flops = 6 * at["m"] * at["hidden"] * at["intermediate"]
    moved = 2 * (3 * gate.numel() + 2 * x.numel())
    add_times(lines, taken, tuple(baselines), flops, moved)
    weights = 2 * 3 * gate.numel() + 2 * x.numel()
    peak = {name: more and weights + more for name, more in memory.items()}
    return _result(checks, lines, lines=lines, samples=taken, official=why or official_version(),
                   peak_bytes=peak)  # fmt: skip


def fp16_row(case, device: torch.device) -> dict:
    """The official layer in FP16 against itself in FP32: an observation, nothing is judged."""
    x, *weights = (tensor.float() for tensor in layer_inputs(case, device))
    try:
        with torch.no_grad():
            single = official_mlp(*weights)(x)
            half = official_mlp(*(weight.half() for weight in weights))(x.half())
    except NotInstalled as error:
        return {"passed": True, "checks": [], "not_measured": str(error)}
    return {"passed": True, "checks": [], "drift": compare.drift(half, single).to_dict()}


# -- what is computed ------------------------------------------------------------------------------


def trees(at: Mapping) -> list[ReductionTree]:
    return [ReductionTree.parse(name) for name in at["contracts"].split("+")]


def _planted(case, tree: ReductionTree) -> ReductionTree:
    """The contract, or under the fault extra-rounding one whose leaves are halved and rounded."""
    if case.fault == "extra-rounding":
        return ReductionTree(2 * tree.leaves, "bf16")
    return tree


def layer_inputs(case, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x[M, H], w_gate[I, H], w_up[I, H], w_down[H, I] in BF16; output RMS about 0.6."""
    at = case.parameters
    random = torch.Generator(device).manual_seed(case.seed)
    h, i = at["hidden"], at["intermediate"]

    def normal(rows: int, columns: int, std: float) -> Tensor:
        x = torch.randn(rows, columns, generator=random, device=device)
        return (x * std).bfloat16()

    weights = (normal(i, h, h**-0.5), normal(i, h, h**-0.5), normal(h, i, i**-0.5))
    return normal(at["m"], h, 1.0), *weights


def _products(case, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """What a training step multiplies: operator -> (a, b), in the layouts it has them in."""
    x, gate, up, down = layer_inputs(case, device)
    hidden = reference.gate_up(x, gate, up)[0]
    return {
        "gate forward": (x, gate.t()),
        "down forward": (hidden, down.t()),
        "down dX": (x, down),  # a gradient of the output has the shape of x
        "gate dX": (hidden, gate),  # a gradient of gate has the shape of hidden
        "gate dW": (hidden.t(), x),
        "down dW": (x.t(), hidden),
    }


def _anchor_row(tree: ReductionTree, at: Mapping, seed: int, device: torch.device) -> dict:
    """One row at the first, middle and last place of batches: differences from the row alone."""
    k, n = at["intermediate"], CENSUS_COLUMNS[device.type]
    a, b = census.operands("normal", max(ANCHORS), k, n, seed=seed, device=device)
    b = b.t().contiguous().t()
    alone = ops.det_gemm_fwd(a[:1], b, tree)
    wrong, sizes = 0, [m for m in ANCHORS if device.type == "cuda" or m <= 65]
    for m in sizes:
        for place in sorted({0, m // 2, m - 1}):
            batch = a[:m].clone()
            batch[[0, place]] = batch[[place, 0]]
            out = ops.det_gemm_fwd(batch, b, tree)
            wrong += compare.bit_report(out[place : place + 1], alone).mismatches
    return {
        "contract": tree.name,
        "batches": sizes,
        "mismatches": wrong,
        "elements": n * sum(len({0, m // 2, m - 1}) for m in sizes),
    }


def _into(out: Tensor, a: Tensor, b: Tensor, tree: ReductionTree) -> Work:
    return lambda: select.gemm(a, b, out, tree)


def _no_grad(layer: torch.nn.Module, x: Tensor) -> Work:
    def call() -> Tensor:
        with torch.no_grad():
            return layer(x)

    return call


# -- what is written down --------------------------------------------------------------------------


def _line(tree: ReductionTree, schedule: str, report, out: Tensor, exact: Tensor) -> dict:
    return {
        "contract": tree.name,
        "schedule": schedule,
        "mismatches": report.mismatches,
        "elements": report.elements,
        "first": "" if report else str(report),
        "drift": compare.drift(out[: len(exact)], exact).to_dict(),
    }


def _some(columns: int) -> int:
    """Rows whose drift is judged: about a million elements say as much as all of them."""
    return max(1, (1 << 20) // columns)


def check(name: str, held: bool, value: str, limit: str) -> list:
    return [name, held, value, limit]


def _bits(name: str, line: Mapping) -> list:
    value = f"{line['mismatches']} / {line['elements']} elements"
    return check(name, not line["mismatches"], value, "0")


def _result(checks: list, counted: list[dict], **more: object) -> dict:
    return {
        "passed": all(held for _, held, _, _ in checks),
        "checks": checks,
        "mismatches": sum(line["mismatches"] for line in counted),
        "elements": sum(line["elements"] for line in counted),
        **more,
    }


def _peak(work: Work, device: torch.device) -> tuple[int | None, Tensor]:
    """(bytes that `work` took at most beside what was there: workspaces, output; its result)."""
    if device.type != "cuda":
        return None, work()
    work()  # compiles, and allocates what stays
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, out


def timed(case, device: torch.device, work: dict[str, Work]) -> list[dict]:
    """Raw samples of every variant, none where there is no GPU or none were asked for."""
    at = case.parameters
    if device.type != "cuda" or not at["samples"] or case.fault != "none":
        return []
    from rlkernel.run.timing import Protocol, interleaved

    repeats = 8 if at["m"] <= 512 else 1  # a lone eager call measures a cold interpreter
    return interleaved(work, Protocol(at["samples"], at["warmup"], at["graph"], repeats))


def add_times(
    lines: list[dict], samples: list[dict], against: tuple[str, ...], flops: int, moved: int
) -> None:
    """Median, floor and the paired ratio to each baseline, into every line that was timed."""
    if not samples:
        return
    from rlkernel.run.timing import ceilings, medians, ratio

    most, found = ceilings(), medians(samples)
    floor = max(flops / most["flops_per_us"], moved / most["bytes_per_us"])
    for line in lines:
        line |= found[line["contract"]]
        line |= {"floor_us": floor, "tflops": flops / found[line["contract"]]["median_us"] / 1e6}
        for name in against:
            line[f"{name}_us"] = found[name]["median_us"]
            line.setdefault("ratios", {})[name] = ratio(samples, line["contract"], name)
        if against:
            line["ratio"] = line["ratios"][against[0]]
