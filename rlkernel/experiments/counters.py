"""What do the A2A-FFN's kernels load a chip with, and what does a GEMM pay for what runs beside it?

Hardware counters answer, read at a fixed interval while everything runs as it does: bytes of memory
and L2, SMs with a warp on them, tensor cores at work, the clock. One rank of P is by itself on one
GPU and nothing is sent. What an exchange would take is taken by bystanders: SMs without bytes,
bytes without SMs, both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlkernel.experiments.case import Case, UsageError, check_seeds, param
from rlkernel.grid import Grid

NAME = "counters"
SUMMARY = "hardware counters: what the A2A-FFN's kernels load, and what a GEMM beside others pays"
QUESTION = "What does a GEMM pay for sharing its chip: SMs, memory traffic, L2 or the clock?"

CALIBRATION, KERNELS, SHARING, TIMELINE = WHAT = ("calibration", "kernels", "sharing", "timeline")
FAULTS = ("none", "half-copy")
TOLERANCE = 0.02  # of the bytes of a copy
IDLE = 1e-3  # of the bytes that a copy moves in the same time
NUMBERS = ("dram_read", "dram_written", "l2", "sm_cycles", "tensor_cycles", "mhz", "gb_per_s")

COVERED = {
    CALIBRATION: "the counters against a copy whose bytes are known, and against an idle chip",
    KERNELS: "bytes of memory and L2, SMs, tensor cores and clock of each kernel of the layer by "
    "itself, against the bytes that it cannot do without",
    SHARING: "both products of the forward beside copies by copy engine, SMs that are held, SMs "
    "that copy; rounds in drawn order, paired with the product alone",
    TIMELINE: "the layer's forward over time with nothing sent, by library and by fused kernels",
}
NOT_COVERED = (
    "counters while a real exchange runs beside: bystanders stand for it here; its times and the "
    "power are in a2a-ffn, between two GPUs",
    "counters of a link: nothing is sent",
)


@dataclass(frozen=True)
class Params:
    what: tuple[str, ...] = param(WHAT, "parts; calibration always comes along", choices=WHAT)
    ranks: int = param(2, "P of the layer, of which one rank is here", unit="ranks")
    batch_size: int = param(512, "B, of each rank")
    tokens: int = param(64, "T; P must divide it")
    dim: int = param(1280, "D")
    k: int = param(6, "H = D * k")
    sms: int = param(32, "SMs that a bystander takes: NCCL's blocks in a trace of a2a-ffn")
    rounds: int = param(7, "each with a window of every variant, in drawn order")
    calls: int = param(30, "of a product in one window")
    interval_us: int = param(20, "between two readings of the counters", unit="µs")
    seed: int = param(11, "of the operands")
    fault: str = param("none", "half-copy: calibration must fail", choices=FAULTS)
    device: str = param("cuda", "counters are a GPU's", choices=("cuda",))


def cases(params: Params) -> list[Case]:
    """Raises UsageError for what cannot run."""
    check_seeds((params.seed,))
    size = {"batch": params.batch_size, "tokens": params.tokens, "dim": params.dim, "k": params.k}
    how = {"sms": params.sms, "rounds": params.rounds, "calls": params.calls}
    for name, value in {**size, **how, "interval_us": params.interval_us}.items():
        if value < 1:
            raise UsageError(f"{name}={value}: expected at least 1")
    if params.ranks < 2 or params.tokens % params.ranks:
        raise UsageError(
            f"tokens={params.tokens} on ranks={params.ranks}: two ranks or more, T % P == 0"
        )
    parts = dict.fromkeys((CALIBRATION, *params.what))
    if params.fault != "none":  # it breaks that copy and nothing else
        parts = (CALIBRATION,)
    at = {**size, "ranks": params.ranks, **how, "interval_us": params.interval_us}
    return [Case(NAME, Grid(), "bf16", params.seed, params.fault, {"part": part, **at})
            for part in parts]  # fmt: skip


def lacks() -> str | None:
    """Why this machine cannot measure it, beyond a GPU."""
    from rlkernel.overlap import counters

    return counters.missing()


# -- one part on one rank --------------------------------------------------------------------------


def run(case: Case, comm) -> dict:
    from rlkernel.kernels import a2a_gemm
    from rlkernel.kernels.hopper_plan import multiprocessors
    from rlkernel.kernels.stream import is_hopper
    from rlkernel.overlap.counters import Counters
    from rlkernel.overlap.layout import Layout

    if not is_hopper(comm.device):
        raise UsageError(f"{comm.device} is no SM90, for which kernels and counters' names are")
    at = case.parameters
    layout = Layout(at["batch"], at["tokens"], at["dim"], at["dim"] * at["k"], at["ranks"])
    for wide in (2 * layout.hidden, layout.hidden):
        why = a2a_gemm.refuses(layout.batch, layout.local, layout.dim, wide, layout.ranks, 1)
        if why is not None:
            raise UsageError(why)
    if at["sms"] >= (there := multiprocessors(comm.device)):
        raise UsageError(f"sms={at['sms']}: fewer than the {there} that this GPU has")
    parts = {CALIBRATION: _calibration, KERNELS: _kernels, SHARING: _sharing, TIMELINE: _timeline}
    with Counters(comm.device.index, 1000 * at["interval_us"]) as counters:
        return parts[at["part"]](case, comm, layout, counters)


def _calibration(case: Case, comm, layout, counters) -> dict:
    from rlkernel.overlap import chip_load as load

    at = case.parameters
    copy = load.copied(comm.device, half=case.fault == "half-copy")
    line = load.window(counters, copy.work, at["calls"])
    idle = load.idle(counters, at["calls"] * line["us"])
    checks = [_whole(line, at)]
    for name, right in (("dram_read", copy.read), ("dram_written", copy.written)):
        off = line[name] / right - 1
        checks.append([f"a copy's bytes, {name}", abs(off) <= TOLERANCE, f"{off:+.2%}",
                       f"within {TOLERANCE:.0%}"])  # fmt: skip
    part = max(idle[name] / (at["calls"] * copy.read) for name in ("dram_read", "dram_written"))
    checks.append(["an idle chip moves nothing", part <= IDLE, f"{part:.1e} of a copy's bytes",
                   f"at most {IDLE}"])  # fmt: skip
    works = load.products(layout, comm.device, case.seed)
    cost = load.cost(counters, works["gemm1"], at["calls"], at["rounds"])
    lines = [{"kernel": "copy", "read": copy.read, "written": copy.written, **line}]
    return _result(checks, lines, sampling_costs=cost)


def _kernels(case: Case, comm, layout, counters) -> dict:
    from rlkernel.overlap import chip_load as load

    lines = []
    for name, kernel in load.kernels(layout, comm.device, case.seed):
        line = load.window(counters, kernel.work, case.parameters["calls"])
        lines.append({"kernel": name, "read": kernel.read, "written": kernel.written, **line})
    return _result([_whole(line, case.parameters) for line in lines], lines)


def _sharing(case: Case, comm, layout, counters) -> dict:
    from rlkernel.overlap import chip_load as load
    from rlkernel.overlap.clock import order
    from rlkernel.run.timing import medians, ratio

    at, samples = case.parameters, []
    works = load.products(layout, comm.device, case.seed)
    beside = {load.ALONE: None, **load.bystanders(layout, at["sms"], comm.device)}
    alone = {name: load.window(counters, work, at["calls"])["us"]
             for name, work in works.items()}  # fmt: skip
    variants = {f"{gemm}, {name}": (gemm, name) for gemm in works for name in beside}
    for number in range(at["rounds"]):
        for variant in order(variants, number):
            gemm, name = variants[variant]
            line = load.window(counters, works[gemm], at["calls"], beside[name], alone[gemm])
            samples.append({"variant": variant, "round": number, **line})
    times, lines = medians(samples), []
    for variant, (gemm, name) in variants.items():
        own, base = [s for s in samples if s["variant"] == variant], f"{gemm}, {load.ALONE}"
        line = {"gemm": gemm, "beside": name, **times[variant],
                "ratio": ratio(samples, variant, base),
                "sms": beside[name].sms if beside[name] else 0}  # fmt: skip
        line |= {n: _median(s[n] for s in own) for n in NUMBERS if n in own[0]}
        cycles = {s["round"]: s["us"] * s["mhz"] for s in samples if s["variant"] == base}
        line["cycles_ratio"] = _median(s["us"] * s["mhz"] / cycles[s["round"]] for s in own)
        lines.append(line)
    left = [s["variant"] for s in samples if not s.get("lasted", True)]
    checks = [
        _whole(max(samples, key=lambda s: s["gap_ns"]), at),
        ["a bystander outlasts its products", not left, f"{len(left)} ended early", "0"],
    ]
    return _result(checks, lines, samples=samples)


def _timeline(case: Case, comm, layout, counters) -> dict:
    from rlkernel.overlap import chip_load as load

    found = {way: load.timeline(counters, work)
             for way, work in load.forwards(layout, comm, case.seed).items()}  # fmt: skip
    checks = [[f"{way}: the tensor cores were seen at work", max(each["tensor_cycles"]) > 0.5,
               f"{max(each['tensor_cycles']):.2f} of cycles", "over 0.5"]
              for way, each in found.items()]  # fmt: skip
    return _result(checks, [], timeline=found)


def _whole(line: Mapping, at: Mapping) -> list:
    """No interval of a window is missing."""
    most, gap = 2 * at["interval_us"], line["gap_ns"] / 1e3
    name = f"{line.get('kernel', line.get('variant', 'copy'))}: every interval is there"
    return [name, 0 < gap < most, f"{gap:.1f} µs at most between two", f"below {most} µs"]


def _result(checks: list, lines: list[dict], **more) -> dict:
    return {"passed": all(check[1] for check in checks), "checks": checks, "lines": lines, **more}


def _median(values) -> float:
    import statistics

    return statistics.median(values)


# -- what is told ----------------------------------------------------------------------------------


def verdict(params: Params, rows: Sequence[Mapping]) -> dict:
    checks = [
        {"name": f"{_part(row)}: {name}", "passed": held, "value": value, "limit": limit}
        for row in rows
        for name, held, value, limit in row["result"]["checks"]
    ]
    return {"passed": bool(checks) and all(c["passed"] for c in checks), "checks": checks}


def coverage(params: Params, rows: Sequence[Mapping]) -> tuple[list[str], list[str]]:
    """(COVERED, NOT COVERED), by the parts that ran."""
    there = {_part(row) for row in rows}
    told = [text for part, text in COVERED.items() if part in there]
    left = [f"{text}: not among the parts" for part, text in COVERED.items() if part not in there]
    return told, [*left, *NOT_COVERED]


def summary(params: Params, rows: Sequence[Mapping]) -> dict:
    keep = ("passed", "checks", "lines", "sampling_costs")
    return {
        "passed": verdict(params, rows)["passed"],
        "parts": {
            _part(row): {k: row["result"][k] for k in keep if k in row["result"]} for row in rows
        },
    }


def table(params: Params, rows: Sequence[Mapping]) -> tuple[list[str], list[list[str]]]:
    header = ["part", "what", "us", "/ alone", "cycles / alone", "read MB", "of least",
              "written MB", "of least", "L2 MB", "SMs", "tensor", "MHz"]  # fmt: skip
    body = []
    for row in rows:
        for line in row["result"]["lines"]:
            name = line.get("kernel") or f"{line['gemm']} beside {line['beside']}"
            body.append([
                _part(row), name, f"{line.get('us', line.get('median_us')):.1f}",
                f"{line['ratio']['median']:.3f}" if "ratio" in line else "-",
                f"{line['cycles_ratio']:.3f}" if "cycles_ratio" in line else "-",
                f"{line['dram_read'] / 1e6:,.0f}", _of(line, "dram_read", "read"),
                f"{line['dram_written'] / 1e6:,.0f}", _of(line, "dram_written", "written"),
                f"{line['l2'] / 1e6:,.0f}", f"{line['sm_cycles']:.0%}",
                f"{line['tensor_cycles']:.0%}", f"{line['mhz']:,.0f}",
            ])  # fmt: skip
    return header, body or [["-"] * len(header)]


def _of(line: Mapping, found: str, least: str) -> str:
    return f"{line[found] / line[least]:.3f}" if line.get(least) else "-"


def protocol(params: Params) -> dict:
    return {
        "counters": "CUPTI PM sampling, no kernel is serialised", "interval_us": params.interval_us,
        "calls": params.calls, "rounds": params.rounds, "flush L2": False, "graph": False,
        "state": "hot: the same call beside the same bystander, without a pause ahead",
        "clock": "CUDA events around all calls of a window; clock of the SMs from their cycles",
        "sent": "nothing: flags set ahead, stores into local memory",
    }  # fmt: skip


def _part(row: Mapping) -> str:
    fault = "" if row["case"]["fault"] == "none" else f" {row['case']['fault']}"
    return row["case"]["parameters"]["part"] + fault
