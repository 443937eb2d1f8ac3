"""Rows of det-ffn's layer, made up: a training step, a layout compared, hashed and timed."""

from __future__ import annotations

from tests.figures import products

RESULTS = ("forward", "training output", "dX", "dW gate", "dW up", "dW down", "no-grad", "repeat")
STEP = ("training output", "dX", "gate dW", "up dW", "down dW")
NCCL = {"down.forward": "all_reduce tree8.bf16 over tp by process-group/nccl"}
MOST = {"flops_per_us": 700e6, "bytes_per_us": 4.2e6}


def train(m: int, *, timed: bool = True, graph: bool = True, same=(), contracts=None) -> dict:
    """same: results in which the chain has the official layer's bits."""
    contracts = contracts or products.CONTRACTS
    flops, moved = 18 * m * 4096 * 12288, 2 * (9 * 4096 * 12288 + 5 * m * 4096)
    floor = max(flops / MOST["flops_per_us"], moved / MOST["bytes_per_us"])
    lines = []
    for contract in contracts:
        us = 1.3 * floor * products.SLOWER[contract]
        line = products.line("step", m, contract, us, floor, timed)
        lines.append(products.against(line, official=1.4 * floor) if timed else line)
    for contract in contracts:
        for name in STEP:
            wrong = 0 if contract == "chain" and name in same else 40 * m
            more = {"differ_from_official": wrong}
            lines.append(products.line(name, m, contract, 0, 0, False, **more))
    peak = dict.fromkeys((*contracts, "official"), (3 << 28) + m if timed else None)
    row = products.row("train", m, {"lines": lines, "peak_bytes": peak}, contracts)
    row["case"]["parameters"]["graph"] = graph
    return row


def _split(what: str, layout: str, m: int, result: dict, contracts, fault: str, paths) -> dict:
    row = products.row(what, m, result, contracts)
    row["case"]["parameters"] |= {"layout": layout, "repeats": 100}
    row["case"]["fault"], row["paths"] = fault, paths
    row["key"] += layout + fault
    return row


def layer(layout="tp2", m=32, wrong=(), contracts=("tree8.bf16", "tree8.fp32"), fault="none"):
    """wrong: (contract, result) that differ in three elements."""
    variants = [(c, dx, "local") for c in contracts for dx in ("separate", "packed")]
    lines = [
        {"operator": what, "contract": c, "dx": dx, "dw": dw, "schedule": "decode", "first": "",
         "mismatches": 3 * ((c, what) in wrong), "elements": 5_000_000}
        for c, dx, dw in variants for what in RESULTS
    ]  # fmt: skip
    digest = {f"{c} dx {dx} dw {dw}": f"{n:016x}" for n, (c, dx, dw) in enumerate(variants)}
    result = {"lines": lines, "digest": digest, "passed": not wrong}
    return _split("layer", layout, m, result, contracts, fault, NCCL)


def hashed(differ=0) -> dict:
    line = {"operator": "dx packed", "contract": "chain", "dx": "packed", "mismatches": differ,
            "elements": 2, "digest": "0123456789abcdef"}  # fmt: skip
    return products.row("hash", 32, {"lines": [line]}, ("chain",))


def timed(layout="tp2", m=32, modes=("eager", "graph"), official=True) -> dict:
    lines = []
    for kind, base in (("forward", 100.0), ("step", 300.0)):
        for mode in modes:
            for n, contract in enumerate(("tree8.bf16", "tree8.fp32")):
                for dx in ("-",) if kind == "forward" else ("separate", "packed"):
                    us = base * (1 + n / 4) * (2 if dx == "packed" else 1)
                    line = {"operator": kind, "mode": mode, "contract": contract, "dx": dx,
                            "dw": "-", "variant": f"{contract} dx {dx}", "median_us": us,
                            "p10_us": 0.9 * us, "p90_us": 1.2 * us, "floor_us": 50.0,
                            "mismatches": 0, "elements": 9, "ratios": {}}  # fmt: skip
                    if official:
                        products.against(line, official=80.0, official_compiled=90.0)
                        line |= {"ratio": line["ratios"]["official"], "against": "official"}
                    lines.append(line)
    result = {"lines": lines, "not_captured": "", "beside_bytes": 3 << 30,
              "opponents": {"official": "transformers 5", "official compiled": "no compiler"},
              "peak_bytes": {"forward": {"tree8.bf16 dx -": 5 << 20}, "step": {}}}  # fmt: skip
    return _split("time", layout, m, result, ("tree8.bf16", "tree8.fp32"), "none", NCCL)
