"""Rows of det-ffn as a GPU would leave them, made up: plausible times, every bit as asked for."""

from __future__ import annotations

FAMILIES = ("normal", "cancellation", "subnormal", "residual", "integers", "signed zeros")
LAYOUTS = ("a[M,K] w[N,K]", "a[M,K] b[K,N]", "a[K,M] b[K,N]", "a[K,M] w[N,K]", "a misaligned")
CONTRACTS = ("tree8.bf16", "tree8.fp32", "tree2.bf16", "chain")
OPERATORS = {
    "gate forward": (4096, 12288), "down forward": (12288, 4096), "down dX": (4096, 12288),
    "gate dX": (12288, 4096), "gate dW": (0, 4096), "down dW": (0, 12288),
}  # fmt: skip
ERROR = {"tree8.bf16": 3.4e-3, "tree8.fp32": 1.67e-3, "tree2.bf16": 2.4e-3, "chain": 1.68e-3}
SLOWER = {"tree8.bf16": 0.97, "tree8.fp32": 0.99, "tree2.bf16": 0.95, "chain": 0.93}
BATCHES = [1, 2, 17, 31, 32, 33, 64, 65]
SIZE = {"hidden": 4096, "intermediate": 12288}


def row(what: str, m: int, result: dict, contracts=CONTRACTS, seed: int = 11, **size: int) -> dict:
    case = {
        "experiment": "det-ffn", "grid": {"dp": 1, "cp": 1, "tp": 1}, "dtype": "bf16",
        "seed": seed, "fault": "none",
        "parameters": {"what": what, "m": m, "contracts": "+".join(contracts), **SIZE, **size},
    }  # fmt: skip
    result = {"passed": True, "checks": []} | result
    return {"key": f"{what}{m}{seed}", "case": case, "result": result, "passed": result["passed"]}


def census(m: int = 33, wrong=(), moved: int = 0, contracts=CONTRACTS, configs: int = 3) -> dict:
    """wrong: (contract, schedule, family) whose first configuration differs in five elements."""
    found = [
        {
            "contract": contract, "schedule": schedule, "family": family, "layout": layout,
            "config": f"c{n}", "elements": 24 * m, "first": "",
            "mismatches": 5 if n == 0 and (contract, schedule, family) in wrong else 0,
        }
        for contract in contracts
        for schedule in ("tile", "decode", "hopper")
        for family in FAMILIES
        for layout in (LAYOUTS if family == "normal" else LAYOUTS[:1])
        for n in range(configs)
    ]  # fmt: skip
    anchors = [
        {"contract": c, "batches": BATCHES, "mismatches": moved if i == 0 else 0, "elements": 504}
        for i, c in enumerate(contracts)
    ]
    refused = {f"{s} under {c}": f"{f} data: 5 / {24 * m} elements" for c, s, f in wrong}
    return row("census", m, {"census": found, "anchors": anchors, "refused": refused}, contracts)


def drift(scale: float) -> dict:
    curve = [scale * (i / 20) ** 2 for i in range(21)]
    return {
        "max_abs": 5 * scale, "p95": curve[19], "p99": 1.1 * scale, "mean_abs": scale / 3,
        "rel_l2": scale, "ecdf": [*curve[:-1], 5 * scale],
    }  # fmt: skip


def line(operator: str, m: int, contract: str, us: float, floor: float, timed: bool, **more):
    found = {
        "operator": operator, "m": m, "contract": contract, "schedule": "hopper", "mismatches": 0,
        "elements": 4096 * m, "first": "", "drift": drift(ERROR[contract]), **more,
    }  # fmt: skip
    if timed:
        found |= {
            "median_us": us, "p10_us": 0.99 * us, "p90_us": 1.02 * us, "floor_us": floor,
            "tflops": 500.0,
        }  # fmt: skip
    return found


def against(of_line: dict, **baselines: float) -> dict:
    """With the paired ratio to each baseline: name -> its time in microseconds."""
    for name, us in baselines.items():
        name, ratio = name.replace("_", " "), of_line["median_us"] / us
        of_line[f"{name}_us"] = us
        paired = {"median": ratio, "p10": 0.985 * ratio, "p90": 1.02 * ratio}
        of_line.setdefault("ratios", {})[name] = paired
    of_line["ratio"] = next(iter(of_line["ratios"].values()))
    return of_line


def gemm(m: int = 1024, timed: bool = True, contracts=CONTRACTS) -> dict:
    lines = []
    for operator, (k, n) in OPERATORS.items():
        floor = max(4096 * 12288 * 2 / 4.2e6, 2 * m * 4096 * 12288 / 7e8)
        for contract in contracts:
            us = 1.12 * floor * SLOWER[contract] * (1 + 0.3 / m**0.5)
            found = line(operator, m, contract, us, floor, timed, k=k or m, n=n)
            lines.append(against(found, library=1.1 * floor) if timed else found)
    return row("gemm", m, {"lines": lines}, contracts)


def ffn(m: int = 1024, timed: bool = True, contracts=CONTRACTS) -> dict:
    floor, lines = max(3 * 4096 * 12288 * 2 / 4.2e6, 6 * m * 4096 * 12288 / 7e8), []
    for contract in contracts:
        us = 1.12 * floor * SLOWER[contract] * (1 - 0.1 / m**0.5)
        found = line("forward", m, contract, us, floor, timed, differ_from_official=1000 * m)
        if timed:
            against(found, official=1.18 * floor, official_compiled=1.13 * floor)
        lines.append(found)
    peak = dict.fromkeys((*contracts, "official"), (3 << 25) + m * 57344 if timed else None)
    if timed:
        peak["official"] += 2 * m * 12288 * 2
    more = {"official": "transformers", "peak_bytes": peak}
    return row("ffn", m, {"lines": lines, **more}, contracts)


def fp16(**result) -> dict:
    return row("fp16", 8, result or {"drift": drift(4.5e-4)})


MS = (1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192)


def gpu() -> list[dict]:
    """A whole record of the qwen3 size."""
    rows = [census(m) for m in (1, 32, 200)]
    return [*rows, *map(gemm, MS), *map(ffn, MS), fp16()]


def cpu() -> list[dict]:
    """A whole record of a machine without a GPU: nothing was timed."""
    rows = [census(m, configs=2) for m in (1, 33)]
    rows += [made(m, timed=False) for made in (gemm, ffn) for m in (1, 17, 33)]
    return [*rows, fp16()]


def look(contract="tree8.bf16", m=33, ours=0, library=61) -> list[dict]:
    """What rlkernel.ffn.look returns."""
    batches = [
        {"m": size, "ours": ours * (size > 1), "library": library * (size > 2), "elements": 64}
        for size in (1, 2, 8, m)
    ]
    far = {"0": 1400, "1": 600, "2": 90, "<=4": 20, "<=16": 2, "<=256": 0, "<=65536": 0, "more": 0}
    others = {name: far for name in CONTRACTS if name != contract}
    case = {"experiment": "look", "seed": 11, "parameters": {"m": m, "contract": contract}}
    return [{"case": case, "passed": not ours, "result": {"batches": batches, "others": others}}]
