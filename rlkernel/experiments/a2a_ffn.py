"""How much of its All-to-All does an FFN hide behind its GEMMs, and are the bits kept?

One case is one workload on one number of ranks. All schedules and chunk counts of it run in that
case, interleaved call by call, beside `none`, which they must equal bit for bit and try to beat.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlkernel.experiments import a2a_coverage, a2a_nodes, matrix
from rlkernel.experiments.case import TARGETS, Case, UsageError, check_seeds, param
from rlkernel.grid import Grid, is_power_of_two
from rlkernel.records import machine

NAME = "a2a-ffn"
SUMMARY = "A2A-FFN: four schedules, bit for bit, and how much communication each hides"
QUESTION = "How much All-to-All is hidden behind the GEMMs, with which bits and at what cost?"
OVERLAPS = ("none", "with-sm", "sm-free", "kernel")
LAPTOP = {"batch_size": 4, "tokens": 16, "dim": 128, "k": 2, "compile": False, "warmup": 5}
LAPTOP |= {"num_tests": 20}
PLUGIN = "A2A_FFN_KERNEL_PLUGIN"
FAULTS = ("none", "swapped-slices", "early-chunk")
PAUSE_MS = 60_000

COVERED = NOT_COVERED = ()  # both lists follow from the rows: coverage()


@dataclass(frozen=True)
class Params:
    overlap: tuple[str, ...] = param(("none",), "schedules, beside none", choices=OVERLAPS)
    nproc: tuple[int, ...] = param((), "ranks; by default 2, or those of the matrix", unit="ranks")
    nodes: int = param(
        1, "agents on this machine that stand for so many nodes; real ones: NNODES", unit="nodes"
    )
    batch_size: int = param(512, "B, of each rank")
    tokens: int = param(64, "T; P must divide it")
    dim: int = param(1280, "D; T must divide it for the block")
    k: int = param(6, "H = D * k")
    dtype: str = param("bf16", "of everything", choices=("bf16", "fp16", "fp32"))
    gemm_backend: str = param("bmm", "only bmm is available here")
    fwd_mode: str = param("dense_v2", "only dense_v2 is available here")
    compile: bool = param(True, "torch.compile for the torch operators around the GEMMs")
    elementwise: str = param(
        "norm-gate", "between the GEMMs: one pass, or the torch operators",
        choices=("norm-gate", "torch"),
    )  # fmt: skip
    other_none: tuple[str, ...] = param(
        ("off",), "none with torch's operators between the GEMMs, timed beside: other settings",
        choices=("off", "eager", "compiled"),
    )  # fmt: skip
    block: bool = param(True, "the RankMixer block; false: the layer alone")
    backward: bool = param(False, "forward and backward")
    check_correctness: str = param(
        "approx", "forward by torch.equal in either; backward bitwise, or by Frobenius error",
        choices=("off", "bitwise", "approx"),
    )  # fmt: skip
    whole_batch: bool = param(True, "check the whole batch beside the supplied check")
    comp_only: bool = param(False, "without communication, on the rank's own slices")
    comm_scale: int = param(1, "payloads padded to so many times their size")
    compute_scale: int = param(1, "H times so much")
    chunks: tuple[int, ...] = param(
        (4,), "token slices of an overlapped schedule; fused: flags a rank, at most 8"
    )
    warmup: int = param(50, "calls of each variant ahead of the first timed one")
    num_tests: int = param(50, "timed calls of each variant, the first dropped; 0: no timing")
    prewarm_ms: float = param(10.0, "pause ahead of the first timed call", unit="ms")
    flush: bool = param(True, "overwrite L2 ahead of each timed call")
    protocol: tuple[str, ...] = param(
        ("documented",), "hot: a matrix product ahead of each start event",
        choices=("documented", "hot"),
    )  # fmt: skip
    seed: tuple[int, ...] = param((42,), "of inputs and weights, plus the rank; a case each")
    trace: bool = param(False, "a chrome trace of every rank and schedule")
    matrix: str = param(
        "off", "the regression matrix, or what a CPU does of it", choices=("off", "small", "full")
    )
    demo: bool = param(
        False, "sequential beside with-sm and the plugin, forward and then with gradients; on a "
        "CPU what is left at its default is small: (4, 16, 128, 2), not compiled, 20 tests"
    )  # fmt: skip
    fault: str = param("none", "break the order of the exchange", choices=FAULTS)
    device: str = param("auto", "where to compute", choices=TARGETS)
    transport: str = param(
        "auto", "between GPUs: nccl, or gloo through the host, whose ranks may share a GPU",
        choices=("auto", "nccl", "gloo"),
    )  # fmt: skip


def cases(params: Params) -> list[Case]:
    """Raises UsageError for what cannot run, before anything is launched."""
    if params.demo:
        shown = replace(_fitting(params), overlap=("none", "with-sm", "kernel"), demo=False)
        ways = (replace(shown, backward=backward) for backward in (False, True))
        return [case for way in ways for case in cases(way)]
    check_seeds(params.seed)
    _check_modes(params)
    if params.matrix != "off":
        wanted = matrix.SETS[params.matrix]
        known = sorted({c.ranks for c in wanted})
        if params.nproc and not set(params.nproc) <= set(known):
            raise UsageError(f"nproc={params.nproc} is not of the matrix, which has {known}")
        picked = [c for c in wanted if not params.nproc or c.ranks in params.nproc]
    else:
        picked = [
            matrix.Configuration(
                ranks, params.batch_size, params.tokens, params.dim, params.k, params.block
            )
            for ranks in params.nproc or (2,)
        ]
    plugin = _plugin() if "kernel" in params.overlap else {}
    return [_case(params, one, seed, plugin) for one in picked for seed in params.seed]


def _fitting(params: Params) -> Params:
    """What a demo runs: the default workload wants GPUs, and a CPU shows the same on less."""
    needed = 1 if params.transport == "gloo" else max(params.nproc or (2,))
    gpus = params.device != "cpu" and len(machine.environment()["gpus"]) >= needed
    if not params.demo or gpus or params.device == "cuda":
        return params
    less = {n: small for n, small in LAPTOP.items() if getattr(params, n) == getattr(Params, n)}
    return replace(params, **less)


def _case(params: Params, one: matrix.Configuration, seed: int, plugin: dict) -> Case:
    _check_shape(params, one)
    parameters = {
        "batch": one.batch, "tokens": one.tokens, "dim": one.dim, "k": one.k, "block": one.block,
        "overlap": "+".join(dict.fromkeys(params.overlap)),
        "chunks": "+".join(str(c) for c in dict.fromkeys(params.chunks)),
        "backward": params.backward, "check_correctness": params.check_correctness,
        "whole_batch": params.whole_batch, "comp_only": params.comp_only,
        "comm_scale": params.comm_scale, "compute_scale": params.compute_scale,
        "compile": params.compile, "elementwise": params.elementwise,
        "gemm_backend": params.gemm_backend, "warmup": params.warmup, "tests": params.num_tests,
        "prewarm_ms": params.prewarm_ms, "flush": params.flush,
        "protocol": "+".join(dict.fromkeys(params.protocol)), "trace": params.trace,
        "transport": params.transport, **plugin,
    }  # fmt: skip
    if params.nodes > 1:
        parameters["nodes"] = params.nodes
    others = [how for how in dict.fromkeys(params.other_none) if how != "off"]
    if others:
        parameters["other_none"] = "+".join(others)
    return Case(NAME, Grid(dp=one.ranks), params.dtype, seed, params.fault, parameters)


def _check_modes(params: Params) -> None:
    for name, here in (("gemm_backend", "bmm"), ("fwd_mode", "dense_v2")):
        if getattr(params, name) != here:
            raise UsageError(f"{name}={getattr(params, name)} is not available here: use {here}")
    if "sm-free" in params.overlap and (params.device == "cpu" or params.transport == "gloo"):
        raise UsageError("overlap=sm-free copies between GPUs of one host: a CPU, and gloo, have "
                         "with-sm and kernel")  # fmt: skip
    if params.transport == "nccl" and params.device == "cpu":
        raise UsageError("transport=nccl moves GPU tensors: device=cpu has gloo only")
    if params.fault != "none" and set(params.overlap) == {"none"}:
        raise UsageError(f"fault={params.fault} breaks an overlapped schedule: name one in overlap")
    if set(params.other_none) != {"off"} and (params.elementwise == "torch" or params.comp_only):
        raise UsageError("other_none times none with torch's operators beside the one pass: "
                         "elementwise=norm-gate, without comp_only")  # fmt: skip
    if params.fault != "none" and (params.comp_only or params.check_correctness == "off"):
        raise UsageError(f"fault={params.fault} would pass unseen: comp_only and "
                         "check_correctness=off check nothing")  # fmt: skip
    if params.nodes not in (1, 2):
        raise UsageError(f"nodes={params.nodes}: expected 1 or 2 here; real ones: NNODES")
    for name, least in (("comm_scale", 1), ("compute_scale", 1), ("batch_size", 1), ("dim", 1),
                        ("k", 1), ("warmup", 0), ("num_tests", 0)):  # fmt: skip
        if getattr(params, name) < least:
            raise UsageError(f"{name}={getattr(params, name)}: expected at least {least}")
    if not 0 <= params.prewarm_ms <= PAUSE_MS:  # NaN neither
        raise UsageError(f"prewarm_ms={params.prewarm_ms}: expected from 0 to {PAUSE_MS} ms")
    if min(params.chunks) < 1 or max(params.chunks) > 64:
        raise UsageError("chunks must be from 1 to 64")


def _check_shape(params: Params, one: matrix.Configuration) -> None:
    if not is_power_of_two(one.ranks):
        raise UsageError(f"nproc={one.ranks} is not possible: a grid has 1, 2, 4, 8, ... ranks")
    if one.ranks % params.nodes:
        raise UsageError(f"nproc={one.ranks} does not divide over nodes={params.nodes}")
    if one.tokens < 1 or one.tokens % one.ranks:
        raise UsageError(f"tokens={one.tokens} does not divide over {one.ranks} ranks: T % P")
    if one.block and one.dim % one.tokens:
        raise UsageError(
            f"dim={one.dim} does not divide into tokens={one.tokens} heads: D % T must be 0 for "
            "the block (--no-block measures the layer alone)"
        )
    if params.fault != "none" and one.ranks == 1:
        raise UsageError(f"fault={params.fault} cannot show on one rank: nothing is exchanged")


def _plugin() -> dict[str, str]:
    """What `kernel` will run, and its source's hash: another plugin is another case."""
    name = os.environ.get(PLUGIN) or "rlkernel.plugin"
    found, why = None, "it must name a module on the path"
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        pass
    except (Exception, SystemExit) as error:  # the packages that it lies in are somebody's code
        why = f"{name.rpartition('.')[0]} raised {type(error).__name__}: {error}"
    if found is None:
        raise UsageError(f"{PLUGIN}={name} cannot be found: {why}")
    try:
        with open(found.origin or "", "rb") as file:
            source = hashlib.sha256(file.read()).hexdigest()[:8]
    except OSError:
        source = "unknown"
    return {"plugin": name, "plugin_source": source}


def run(case: Case, comm) -> dict:
    from rlkernel.overlap import measure, schedules

    try:
        return measure.row(case, comm)
    except schedules.PluginError as error:
        raise UsageError(str(error)) from error


def verdict(params: Params, rows: Sequence[Mapping]) -> dict:
    checks = [
        {"name": f"{_label(row)}: {name}", "passed": held, "value": value, "limit": limit}
        for row in rows
        for name, held, value, limit in row["result"]["checks"]
    ]
    if params.matrix != "off" and "kernel" in params.overlap:
        lines = [line for row in rows for line in row["result"]["lines"]]
        kernels = [line for line in lines if line["schedule"] == "kernel"]
        rungs = {rung: sum(x["rung"] == rung for x in kernels) for rung in ("fused", "chunks",
                 "one-gemm")}  # fmt: skip
        said = ", ".join(f"{count} {rung}" for rung, count in rungs.items())
        checks.append({"name": "kernel: none of the matrix ran as none", "value": said,
                       "passed": sum(rungs.values()) == len(kernels), "limit": "0"})  # fmt: skip
    return {"passed": bool(checks) and all(c["passed"] for c in checks), "checks": checks}


def summary(params: Params, rows: Sequence[Mapping]) -> dict:
    return {
        "passed": verdict(params, rows)["passed"],
        "cases": [
            {"case": _label(row), "passed": row["passed"],
             "paths": {line["variant"]: line["path"] for line in row["result"]["lines"]},
             **{name: row["result"][name] for name in ("lines", "times") if name in row["result"]}}
            for row in rows
        ],
    }  # fmt: skip


def table(params: Params, rows: Sequence[Mapping]) -> tuple[list[str], list[list[str]]]:
    """Times of the slowest rank; ratio and hidden are `none` against that schedule, paired."""
    header = ["case", "state", "variant", "path", "median us", "tokens/s", "none / it", "at most",
              "hidden", "exposed us"]  # fmt: skip
    body = []
    for row in rows:
        label, result = _label(row), row["result"]
        paths = {line["variant"]: line["rung"] for line in result["lines"]}
        for state, times in (result.get("times") or {"-": None}).items():
            if times is None:
                body += [[label, "-", name, rung, *["-"] * 6] for name, rung in paths.items()]
                continue
            for name, term in times["terms"].items():
                rate = f"{times['none']['tokens_per_s']:.3g}" if name == "none" else "-"
                body.append([label, state, name, "-", _us(term), rate, *["-"] * 4])
            for how, other in times.get("others", {}).items():
                over = ", ".join(f"{r['median']:.3f} {v}" for v, r in other["ratio"].items())
                name = f"none, torch {how}: other settings"
                body.append([label, state, name, "-", _us(other), "-", over, *["-"] * 3])
            for name, line in times.get("schedules", {}).items():
                exposed = line.get("exposed_us")
                body.append([
                    label, state, name, paths[name], _us(line), f"{line['tokens_per_s']:.3g}",
                    f"{line['ratio']['median']:.3f}", f"{line['ceiling']:.3f}",
                    f"{line['hidden']['median']:+.2f} ± {line['hidden']['ci95']:.2f}",
                    f"{exposed['median']:.1f}" if exposed else "-",
                ])  # fmt: skip
    return a2a_nodes.widened(header, body, rows, _label)


def coverage(params: Params, rows: Sequence[Mapping]) -> tuple[list[str], list[str]]:
    return a2a_coverage.coverage(rows)


def protocol(params: Params) -> dict:
    """What must agree before two records may be compared."""
    params = _fitting(params)
    return {
        "warmup": params.warmup, "tests": params.num_tests, "prewarm_ms": params.prewarm_ms,
        "flush L2": params.flush, "states": list(params.protocol), "compile": params.compile,
        "graph": False, "first dropped": params.num_tests > 1,
        "order": "variants interleaved call by call, in an order drawn anew for each round (seed: "
        "its number, the same on all ranks), ranks aligned ahead of each",
        "clock": "CUDA events (perf_counter on a CPU), microseconds a call, synchronised after it",
        "of each round": "the slowest rank",
    }  # fmt: skip


def _us(term: Mapping) -> str:
    return f"{term['slowest']['median_us']:.1f}"


def _label(row: Mapping) -> str:
    case = row["case"]
    at, p = case["parameters"], case["grid"]["dp"]
    fault = "" if case["fault"] == "none" else f" {case['fault']}"
    way = " fwd+bwd" if at["backward"] else ""
    alone = "" if at["block"] else " layer"
    shape = f"B={at['batch']} T={at['tokens']} D={at['dim']} k={at['k']}"
    where = a2a_nodes.told(row)
    shape += f" on {where}" if where else ""
    for name in ("comm_scale", "compute_scale"):
        shape += f" {name}={at[name]}" if at.get(name, 1) != 1 else ""
    seed = f" seed {case['seed']}" if (case["seed"],) != Params.seed else ""
    return f"P={p} {shape} {case['dtype']}{way}{alone}{fault}{seed}"
