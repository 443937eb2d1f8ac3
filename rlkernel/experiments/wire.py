"""What does a sum over ranks cost, by who moves the bytes, and are its bits the contract's?

A tree all-reduce of BF16 messages over the transport that was asked for, over the process group
with the additions in torch, and NCCL's own all-reduce, whose order nobody promises: interleaved,
as CUDA graphs and as plain calls, beside the time that the bytes take at the rate of the link. On
the CPU bits are compared and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlkernel.experiments.case import TARGETS, Case, UsageError, param
from rlkernel.grid import Grid, is_power_of_two

NAME = "wire"
SUMMARY = "what a sum over ranks costs, by transport and message size, beside NCCL and the link"
QUESTION = "What does a sum over ranks cost when its order is fixed?"

CONTRACT = "tree8.bf16"
OURS, GROUP, LIBRARY, WORD = "this transport", "process group", "library", "one word"
REPEATED_UP_TO = 1 << 20  # bytes; what waits and what is written twice does not depend on more
COVERED = (
    "bits of the tree all-reduce against the contract's fold of what the ranks gave, every size",
    "a thousand calls in a row with a rank delayed at random, up to 1 MiB",
    "wall time of one all-reduce, slowest rank, graphs and plain calls, interleaved and hot",
)
NOT_COVERED = (
    "sums that run beside matrix products and share the chip with them",
    "a network between hosts, unless the record's topology shows several",
)


@dataclass(frozen=True)
class Params:
    nproc: tuple[int, ...] = param((2,), "group sizes", unit="ranks")
    message: tuple[int, ...] = param(
        tuple(1 << n for n in range(14, 27, 2)), "message sizes, BF16", unit="bytes"
    )
    transport: str = param(
        "symmetric",
        "of the tree, between GPUs; on the CPU it is gloo",
        choices=("symmetric", "nccl", "gloo"),
    )
    calls: int = param(1000, "all-reduces in a row whose bits must be equal, a rank late at random")
    samples: int = param(30, "timed rounds, each with every variant once; 0: no timing")
    warmup: float = param(0.5, "matrix products ahead of the first sample", unit="s")
    device: str = param("auto", "where to compute", choices=TARGETS)
    seed: int = param(11, "seed of the messages")


def cases(params: Params) -> list[Case]:
    """Raises UsageError for what cannot run."""
    for tp in params.nproc:
        if not (is_power_of_two(tp) and 2 <= tp <= 8):
            raise UsageError(f"nproc={tp} is not possible: the tree takes 2, 4 or 8 ranks")
    if any(size < 2 or size % 2 for size in params.message):
        raise UsageError("each message must be a positive multiple of 2 bytes (BF16)")
    if min(params.samples, params.warmup, params.calls) < 0:
        raise UsageError("calls, samples and warmup cannot be negative")
    if params.transport != "gloo" and params.device == "cpu":
        raise UsageError(
            f"transport={params.transport} moves GPU tensors: device=cpu has gloo only"
        )
    more = {"transport": params.transport, "calls": params.calls}
    more |= {"samples": params.samples, "warmup": params.warmup}
    return [
        Case(NAME, Grid(tp=tp), "bf16", params.seed, parameters={"message": size, **more})
        for tp in params.nproc
        for size in params.message
    ]


def run(case: Case, comm) -> dict:
    """One message size on one group: bits, then times where there are GPUs."""
    import torch

    from rlkernel import compare
    from rlkernel.contract import ReductionTree

    tree, at = ReductionTree.parse(CONTRACT), case.parameters
    comm = comm.using(contract=tree)
    random = torch.Generator(comm.device).manual_seed(case.seed + 1000 * comm.rank)
    scale = torch.exp2(torch.randn(at["message"] // 2, generator=random, device=comm.device) * 3)
    noise = torch.randn(scale.shape, generator=random, device=comm.device)
    x = (noise * scale).bfloat16()
    total = comm.all_reduce(x, "wire")
    right = tree.fold([tree.round(part) for part in _parts(comm, x)])
    report = compare.bit_report(total, right)
    calls = at["calls"] if at["message"] <= REPEATED_UP_TO else 0
    changed = _repeated(comm, x, total, calls, case.seed)
    samples = _timed(case, comm, x) if x.is_cuda and at["samples"] else []
    said = {"wrong": report.mismatches, "changed": changed, "samples": samples}
    seen = comm.collect(said | {"digest": compare.digest(total)[:16]})
    wrong, changed = (sum(rank[name] for rank in seen) for name in ("wrong", "changed"))
    elements, same = x.numel() * len(seen), len({rank["digest"] for rank in seen}) == 1
    checks = [
        ["the contract's bits", not wrong, f"{wrong} / {elements} elements", "0"],
        ["the same bits on every rank", same, "yes" if same else "no", "yes"],
    ]
    if calls:
        name = f"{calls} calls, a rank late at random: the same bits"
        checks.append([name, not changed, f"{changed} / {elements * calls} elements", "0"])
    return {
        "passed": all(held for _, held, _, _ in checks),
        "checks": checks,
        "mismatches": wrong,
        "elements": elements,
        "transport": comm.links["tp"].transport.name,
        "lines": _lines(case, comm, [rank["samples"] for rank in seen]) if samples else [],
        "samples": samples,
    }


def _repeated(comm, x, total, calls: int, seed: int) -> int:
    """Elements that differ from `total` over that many calls; memory comes and goes between."""
    import random
    import time

    import torch

    late, wrong = random.Random(seed + comm.rank), 0
    bits = total.view(torch.int16)
    for number in range(calls):
        if late.random() < 0.1:
            time.sleep(late.random() * 1e-3)
        again = comm.all_reduce(x, "wire")
        wrong = wrong + (again.view(torch.int16) != bits).sum()
        if x.is_cuda and number % 100 == 0:
            torch.cuda.empty_cache()
    return int(wrong)


def _parts(comm, x):
    """Every rank's x, by another way than the sum went."""
    from rlkernel.collectives.transport import ProcessGroupTransport

    transport = comm.links["tp"].transport
    if x.is_cuda and hasattr(transport, "tree_all_reduce"):
        transport = ProcessGroupTransport(transport.group, 60.0)
    return transport.gather(x)


def _variants(comm, x) -> dict:
    """name -> one all-reduce of x; `one word` is what a message costs that has no size."""
    import dataclasses

    import torch.distributed as dist

    from rlkernel.collectives.transport import ProcessGroupTransport

    link, few, scratch = comm.links["tp"], x[:2].clone(), x.clone()
    found = {OURS: lambda: comm.all_reduce(x, "wire"), WORD: lambda: comm.all_reduce(few, "word")}
    if hasattr(link.transport, "tree_all_reduce"):
        other = comm.unobserved()
        plain = ProcessGroupTransport(link.transport.group, 60.0)
        other.links = {"tp": dataclasses.replace(link, transport=plain)}
        found[GROUP] = lambda: other.all_reduce(x, "wire over the process group")
    # NCCL sums in place: over and over the values grow, which costs no time.
    found[LIBRARY] = lambda: dist.all_reduce(scratch, group=link.transport.group)
    return found


def _timed(case: Case, comm, x) -> list[dict]:
    """This rank's raw samples: CUDA graphs, and plain calls."""
    from rlkernel.run.aligned import aligned
    from rlkernel.run.timing import Protocol

    at, found, staged = case.parameters, [], comm.links["tp"].transport.name
    repeats = 50 if at["message"] <= 1 << 20 else 8
    for graph in (True, False) if "staged" not in staged else (False,):
        protocol = Protocol(at["samples"], at["warmup"], graph, repeats)
        found += aligned(_variants(comm, x), protocol, comm.collect, comm.device)
    return found


def _lines(case: Case, comm, ranks: list[list[dict]]) -> list[dict]:
    """One line a variant and way to call it: time of the slowest rank, ratio to the library."""
    from rlkernel.run.aligned import slowest
    from rlkernel.run.timing import medians, ratio

    found, rate = [], _link_rate(comm)
    size, moved = comm.grid.tp, case.parameters["message"]
    for graph in (True, False):
        samples = slowest([[s for s in rank if s["graph"] is graph] for rank in ranks])
        for name, times in medians(samples).items():
            line = {"variant": name, "graph": graph, "message": moved, **times}
            if rate:
                line["floor_us"] = 2 * (size - 1) / size * moved / rate
            if name != LIBRARY:
                line["ratio"] = ratio(samples, name, LIBRARY)
            found.append(line)
    return found


def _link_rate(comm) -> float | None:
    """Bytes a microsecond from this rank to the next one, by copy engine, all ranks at once."""
    import torch

    reach = getattr(comm.links["tp"].transport, "reach", None)
    if reach is None:
        return None
    theirs = reach((comm.links["tp"].index + 1) % comm.grid.tp)
    zeros, taken = torch.zeros(theirs.shape, dtype=theirs.dtype, device=comm.device), []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):
        comm.collect(None)
        begin.record()
        for _ in range(10):
            theirs.copy_(zeros)
        end.record()
        end.synchronize()
        taken.append(10 * zeros.numel() / (begin.elapsed_time(end) * 1e3))
    return min(comm.collect(sorted(taken)[2]))


def verdict(params: Params, rows: Sequence[Mapping]) -> dict:
    checks = [
        {"name": f"{_label(row)}: {name}", "passed": held, "value": value, "limit": limit}
        for row in rows
        for name, held, value, limit in row["result"]["checks"]
    ]
    return {"passed": bool(checks) and all(check["passed"] for check in checks), "checks": checks}


def summary(params: Params, rows: Sequence[Mapping]) -> dict:
    keep = ("passed", "mismatches", "elements", "transport", "lines")
    return {
        "passed": verdict(params, rows)["passed"],
        "cases": [{"case": _label(row), **{k: row["result"][k] for k in keep}} for row in rows],
    }


def table(params: Params, rows: Sequence[Mapping]) -> tuple[list[str], list[list[str]]]:
    header = ["case", "variant", "called as", "differ", "us", "/ library", "floor us"]
    body = []
    for row in rows:
        result = row["result"]
        differ = f"{result['mismatches']} / {result['elements']}"
        for line in result["lines"] or [{"variant": OURS}]:
            name = result["transport"] if line["variant"] == OURS else line["variant"]
            ratio = line.get("ratio")
            body.append([
                _label(row),
                name,
                {True: "graph", False: "plain", None: "-"}[line.get("graph")],
                differ if line["variant"] == OURS else "-",
                f"{line['median_us']:.1f}" if "median_us" in line else "-",
                f"{ratio['median']:.3f}" if ratio else "-",
                f"{line['floor_us']:.1f}" if "floor_us" in line else "-",
            ])  # fmt: skip
    return header, body


def protocol(params: Params) -> dict:
    return {
        "samples": params.samples,
        "warm_s": params.warmup,
        "order": "variants interleaved call by call, hot",
        "clock": "host clock behind a device synchronize, microseconds a call",
        "start": "an instant of the host's clock that all ranks wait for",
        "of each sample": "the slowest rank",
    }


def _label(row: Mapping) -> str:
    size = row["case"]["parameters"]["message"]
    text = f"{size / 2**20:g} MiB" if size >= 1 << 20 else f"{size / 1024:g} KiB"
    return f"P={row['case']['grid']['tp']} {text}"
