"""What do the choices in the A2A-FFN's fused GEMMs cost, where nothing is sent?

One rank of P by itself on one GPU: the flags that it would wait for are set, the results for other
ranks are stored into its own memory. What is left is what order of tiles, flags, SM budget and tile
width do to the products, beside the library's product of the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlkernel.experiments.case import Case, UsageError, check_seeds, param
from rlkernel.grid import Grid

NAME = "a2a-gemm"
SUMMARY = "the A2A-FFN's fused GEMMs on one GPU: every choice swept against the library"
QUESTION = "What do tile order, flags, SM budget and tile width cost in the fused GEMMs?"

GEMMS = ("gemm1", "gemm2", "dh", "dx")
WHAT = (*GEMMS, "layer", "pass")
SWEEPS = ("lead", "chunks", "programs", "raster", "bn")
FAULTS = ("none", "swapped-slices")
SIZES = {"cuda": (512, 64, 1280, 6), "cpu": (130, 16, 144, 2)}  # B, T, D, k
LIMIT = 1e-2  # the eager operators have about 6e-3: BF16 rounds to 4e-3
BAR = 0.75  # of the bandwidth of a copy, for the pass

COVERED = (
    "every element of each variant's output against the library's product, in poisoned outputs",
    "the four GEMMs with flags set ahead and local stores: raw samples, interleaved, hot",
    "the layer's forward and training step with nothing sent; the element-wise pass beside a copy",
)
NOT_COVERED = (
    "waiting, and stores that cross a link: these need a GPU for each rank (a2a-ffn)",
    "more tokens, other widths: each is a run of its own",
)


@dataclass(frozen=True)
class Params:
    what: tuple[str, ...] = param(
        (), "parts; by default all, and the four GEMMs on a CPU", choices=WHAT
    )
    ranks: int = param(2, "P of the layer, of which one rank is here", unit="ranks")
    batch_size: int | None = param(None, "B, of each rank; 512, on a CPU 130")
    tokens: int | None = param(None, "T; P must divide it; 64, on a CPU 16")
    dim: int | None = param(None, "D; 1280, on a CPU 144")
    k: int | None = param(None, "H = D * k; 6, on a CPU 2")
    sweep: tuple[str, ...] = param(SWEEPS, "what to vary, one at a time", choices=SWEEPS)
    lead: tuple[int, ...] = param(
        (0, 1, 2, 4, 8, 16, 32), "tokens that come apart; beyond L: all of them", unit="tokens"
    )
    chunks: tuple[int, ...] = param((1, 2, 4, 8), "flags a rank")
    programs: tuple[int, ...] = param((132, 131, 130, 128, 124, 116), "SM budget", unit="SMs")
    raster: tuple[int, ...] = param((2, 4, 8, 16, 32), "tile rows of a band", unit="tiles")
    bn: tuple[int, ...] = param((128, 256), "columns of a tile", choices=(128, 256))
    samples: int = param(40, "timed rounds, each with every variant once; 0: bits only")
    warmup: float = param(0.5, "matrix products ahead of the first sample", unit="s")
    seed: int = param(11, "of the operands")
    fault: str = param("none", "swapped-slices: no live variant may pass", choices=FAULTS)
    device: str = param("cuda", "cpu: a twin's bits, no times", choices=("cuda", "cpu"))


def cases(params: Params) -> list[Case]:
    """Raises UsageError for what cannot run."""
    check_seeds((params.seed,))
    parts = params.what or (WHAT if params.device == "cuda" else GEMMS)
    if params.device == "cpu" and not set(parts) <= set(GEMMS):
        raise UsageError(f"what={','.join(parts)} needs a GPU: a CPU has {', '.join(GEMMS)}")
    if params.fault != "none":
        if params.what and not set(parts) <= set(GEMMS):
            raise UsageError(f"fault={params.fault} breaks a GEMM: what is {', '.join(GEMMS)}")
        parts = [part for part in parts if part in GEMMS]
    given = (params.batch_size, params.tokens, params.dim, params.k)
    size = [n if n is not None else usual for n, usual in zip(given, SIZES[params.device])]
    names = ("batch", "tokens", "dim", "k")
    for name, value in zip(names, size):
        if value < 1:
            raise UsageError(f"{name}={value}: expected at least 1")
    if params.ranks < 2 or size[1] % params.ranks:
        raise UsageError(f"tokens={size[1]} on ranks={params.ranks}: two ranks or more, T % P == 0")
    if min(params.samples, params.warmup, *params.lead) < 0:
        raise UsageError("samples, warmup and lead cannot be negative")
    if min(*params.programs, *params.raster, *params.chunks) < 1:
        raise UsageError("programs, raster and chunks: expected at least 1 each")
    swept = {name: "+".join(map(str, getattr(params, name))) for name in params.sweep}
    at = {**dict(zip(names, size)), "ranks": params.ranks, "samples": params.samples,
          "warmup": params.warmup}  # fmt: skip
    return [
        Case(NAME, Grid(), "fp32" if params.device == "cpu" else "bf16", params.seed, params.fault,
             {"part": part, **at, **(swept if part in GEMMS else {})})
        for part in dict.fromkeys(parts)
    ]  # fmt: skip


# -- one part on one rank --------------------------------------------------------------------------


def run(case: Case, comm) -> dict:
    from rlkernel.kernels import a2a_gemm
    from rlkernel.kernels.stream import is_hopper
    from rlkernel.overlap.layout import Layout

    if comm.device.type == "cuda" and not is_hopper(comm.device):
        raise UsageError(f"{comm.device} is no SM90, for which the kernels are written: device=cpu")
    at = case.parameters
    layout = Layout(at["batch"], at["tokens"], at["dim"], at["dim"] * at["k"], at["ranks"])
    chunks = max(map(int, at.get("chunks", "1").split("+")))
    for wide in (2 * layout.hidden, layout.hidden):
        why = a2a_gemm.refuses(layout.batch, layout.local, layout.dim, wide, layout.ranks, chunks)
        if why is not None:
            raise UsageError(why)
    part = at["part"]
    return {"layer": _layer, "pass": _pass}.get(part, _gemm)(case, comm, layout)


def _gemm(case: Case, comm, layout) -> dict:
    from rlkernel.overlap import gemm_variants as gv

    at, name = case.parameters, case.parameters["part"]
    sweeps = {s: tuple(map(int, at[s].split("+"))) for s in SWEEPS if s in at}
    sms = gv.processors(comm.device, max(sweeps.get("programs", (1,))))
    bench = gv.Bench(name, layout, comm.device, case.seed, case.fault == "swapped-slices")
    lines, works, wrong = [], bench.library(), []
    for variant in gv.variants(name, layout, sweeps, sms):
        gemm = bench.gemm(variant)
        count = bench.differ(gemm, variant.local)
        line = {"variant": variant.name, "sweep": variant.sweep, "value": variant.value}
        lines.append({**line, "differ": count, **gv.resources(gemm)})
        if count:
            wrong.append(f"{variant.name}: {count} elements")
        else:
            works[variant.name] = bench.work(gemm)
    missed = bench.memory.missed()
    checks = [
        [f"{len(lines)} variants, bits of the library", not wrong,
         f"{len(wrong)} wrong, {wrong[0]}" if wrong else "0 wrong", "0"],
        ["every flag was there", not missed, "all" if not missed else f"word {missed}", "all"],
    ]  # fmt: skip
    chosen = gv.chosen(next(v.schedule for v in gv.variants(name, layout, {}, sms)), sms)
    base = {"library": gv.LIBRARY, "chosen": chosen, "elements": bench.wanted.numel()}
    timed = _timed(case, comm, works, {gv.LIBRARY: "speed", gv.WITH_BIAS: "speed_bias"})
    if timed:
        base |= {"flops": bench.flops, "floor_us": bench.flops / _ceilings()["flops_per_us"]}
    return _result(checks, lines, timed, base, works)


def _layer(case: Case, comm, layout) -> dict:
    from rlkernel.overlap import preset_layer as whole

    bench, checks, lines, samples = whole.Layers(layout, comm, case.seed), [], [], []
    wanted = bench.training(whole.NONE)
    for way in (whole.SET, whole.LOCAL):
        differ = {name: n for name, n in bench.differ(way, wanted).items() if n}
        said = ", ".join(f"{name}: {n}" for name, n in differ.items()) or "0 differ"
        checks.append([f"{way}: output and gradients as none", not differ, said, "0"])
    missed = bench.memory.missed()
    checks.append(["every flag was there", not missed, str(missed), "0"])
    del wanted
    flops = 6 * layout.rows * layout.local * layout.dim * layout.hidden
    for part, times in (("forward", 1), ("training", 3)):
        works = bench.variants(part)
        timed = _timed(case, comm, works, {whole.NONE: "speed"})
        floor = {"floor_us": times * flops / _ceilings()["flops_per_us"]} if timed else {}
        lines += [{"pass": part, "variant": name, **timed.get("lines", {}).get(name, {}), **floor}
                  for name in works]  # fmt: skip
        samples += [{**s, "variant": f"{part}: {s['variant']}"} for s in timed.get("samples", ())]
    return {"passed": all(c[1] for c in checks), "checks": checks, "lines": lines,
            "samples": samples}  # fmt: skip


def _pass(case: Case, comm, layout) -> dict:
    from rlkernel.overlap import preset_layer as whole

    bench = whole.Pass(layout, comm.device, case.seed)
    differ = {name: n for name, n in bench.differ().items() if n}
    checks = [["two calls in poisoned buffers: the same bits, all written", not differ,
               str(differ or "0 differ"), "0"]]  # fmt: skip
    error = bench.error()
    checks.append(["backward against FP64, relative Frobenius error of the worst of six",
                   error <= LIMIT, f"{error:.1e}", f"at most {LIMIT}"])  # fmt: skip
    works = bench.variants()
    timed = _timed(case, comm, works, {"copy": "speed"})
    lines = [{"variant": name, "bytes": bench.bytes_of(name)} for name in works]
    if timed:
        for line in lines:
            line["floor_us"] = line["bytes"] / _ceilings()["bytes_per_us"]
            speed = timed["lines"][line["variant"]]["speed"]
            more = line["bytes"] / bench.bytes_of("copy")
            line["of_copy"] = {name: more * value for name, value in speed.items()}
    return _result(checks, lines, timed, {"bar": BAR}, works)


def _timed(case: Case, comm, works: Mapping[str, Callable], bases: Mapping[str, str]) -> dict:
    """{"lines": variant -> times, "samples"}; speed: base's time over its own, paired by round.
    Nothing where there are no times.
    """
    if not _may_time(case, comm):
        return {}
    at = case.parameters
    from rlkernel.run.timing import Protocol, interleaved, medians, ratio

    samples = interleaved(works, Protocol(at["samples"], at["warmup"], graph=False))
    lines = medians(samples)
    for base, name in bases.items():
        for variant in lines if base in lines else ():
            lines[variant][name] = ratio(samples, base, variant)
    return {"lines": lines, "samples": samples}


def _may_time(case: Case, comm) -> bool:
    asked = case.parameters["samples"] and case.fault == "none"
    return bool(asked) and comm.device.type == "cuda"


def _ceilings() -> Mapping[str, float]:
    from rlkernel.run.timing import ceilings

    return ceilings()


def _result(checks: list, lines: list[dict], timed: dict, more: dict, works: Mapping) -> dict:
    known, times = {line["variant"] for line in lines}, timed.get("lines", {})
    every = [*({"variant": name} for name in works if name not in known), *lines]
    return {
        "passed": all(check[1] for check in checks), "checks": checks, **more,
        "lines": [{**line, **times.get(line["variant"], {})} for line in every],
        "samples": timed.get("samples", []),
    }  # fmt: skip


# -- what is told ----------------------------------------------------------------------------------


def verdict(params: Params, rows: Sequence[Mapping]) -> dict:
    checks = [
        {"name": f"{_part(row)}: {name}", "passed": held, "value": value, "limit": limit}
        for row in rows
        for name, held, value, limit in row["result"]["checks"]
    ]
    return {"passed": bool(checks) and all(c["passed"] for c in checks), "checks": checks}


def coverage(params: Params, rows: Sequence[Mapping]) -> tuple[list[str], list[str]]:
    """(COVERED, NOT COVERED): a twin on a CPU shows where elements lie, and neither bits nor times
    of a kernel.
    """
    if params.device == "cuda":
        return list(COVERED), list(NOT_COVERED)
    lacks = "the kernels themselves, their bits and times: needs 1 GPU (SM90)"
    return ["every variant's tiles and stores, played by a twin on exact sums"], [
        lacks, *NOT_COVERED,
    ]  # fmt: skip


def summary(params: Params, rows: Sequence[Mapping]) -> dict:
    keep = ("passed", "checks", "lines", "chosen", "floor_us")
    return {
        "passed": verdict(params, rows)["passed"],
        "parts": {
            _part(row): {k: row["result"][k] for k in keep if k in row["result"]} for row in rows
        },
    }


def table(params: Params, rows: Sequence[Mapping]) -> tuple[list[str], list[list[str]]]:
    header = ["part", "variant", "differ", "us", "p10", "p90", "floor us", "library / it",
              "with bias", "of a copy", "registers", "spills"]  # fmt: skip
    body = []
    for row in rows:
        for line in row["result"]["lines"]:
            floor = line.get("floor_us", row["result"].get("floor_us"))
            name = f"{line['pass']}: {line['variant']}" if "pass" in line else line["variant"]
            body.append([
                _part(row), name, str(line.get("differ", "-")),
                *(_number(line.get(n), ".1f") for n in ("median_us", "p10_us", "p90_us")),
                _number(floor, ".1f"),
                *(_number(line.get(n, {}).get("median"), ".3f")
                  for n in ("speed", "speed_bias", "of_copy")),
                *(str(line.get(n) if line.get(n) is not None else "-")
                  for n in ("registers", "spills")),
            ])  # fmt: skip
    return header, body or [["-"] * len(header)]


def protocol(params: Params) -> dict:
    return {
        "samples": params.samples, "warm_s": params.warmup, "graph": False, "flush L2": False,
        "order": "variants interleaved call by call in one process, hot",
        "clock": "CUDA events around each call, microseconds",
        "sent": "nothing: flags set ahead, stores into local memory",
    }  # fmt: skip


def _part(row: Mapping) -> str:
    fault = "" if row["case"]["fault"] == "none" else f" {row['case']['fault']}"
    return row["case"]["parameters"]["part"] + fault


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
