"""What one case of a2a-ffn does on a rank: build, check, time, trace; a row comes back."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from rlkernel.collectives import exchange
from rlkernel.collectives.comm import Comm
from rlkernel.collectives.transport import StagedTransport
from rlkernel.overlap import (
    checks,
    copy_engine,
    faults,
    inside,
    judge,
    nodes,
    path,
    patience,
    seen,
    sharing,
    terms,
)
from rlkernel.overlap.chunks import Messages
from rlkernel.overlap.clock import Clock, interleaved
from rlkernel.overlap.layer import A2AFFN, RankMixer, with_ep
from rlkernel.overlap.layout import layout_of
from rlkernel.overlap.memory import Memory
from rlkernel.overlap.settled import settled
from rlkernel.overlap.stage import stage_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TRACED, TRACED_APART = 3, 9  # calls of each variant in a trace: on one node, on several
Work = Callable[[], object]


class Bench:
    """One workload on one rank: the block (or the layer alone), its inputs, its fixed gradient."""

    def __init__(self, case, comm: Comm) -> None:
        at = case.parameters
        self.at, self.comm, self.seed = at, with_ep(comm), case.seed
        watching = faults.observer(case.fault)
        self.layer = A2AFFN(
            at["dim"], at["tokens"], at["k"], self.comm, dtype=DTYPES[case.dtype], seed=case.seed,
            elementwise=at["elementwise"], compiled=at["compile"],
            comm_scale=at["comm_scale"], compute_scale=at["compute_scale"],
            gemm_backend=at["gemm_backend"],
        )  # fmt: skip
        if watching:  # `none` stays right: it is what the others are compared with
            self.layer.fault, self.layer.faulty = case.fault, self.comm.using(observers=[watching])
        self.block = RankMixer(self.layer, at["tokens"], at["dim"]) if at["block"] else self.layer
        device, self.mine = self.comm.device, case.seed + self.layer.ep_index
        random = torch.Generator(device).manual_seed(self.mine)
        shape = (at["batch"], at["tokens"], at["dim"])
        draw = partial(torch.randn, shape, generator=random, device=device)
        self.x = draw().to(DTYPES[case.dtype])
        self.dy = draw().to(DTYPES[case.dtype]) if at["backward"] else None
        self.layout = layout_of(self.layer, self.x)
        self.nodes = len(nodes.of(self.comm).sizes)

    # -- what is called ----------------------------------------------------------------------------

    def through(
        self, overlap: str, chunks: int = 1, comp_only: bool = False, rows: int | None = None
    ) -> Tensor:
        """Forward, and backward where it is asked for; the output. rows: only the first ones."""
        self.layer.chunks = chunks
        x = self.x[:rows]
        if self.dy is None:
            with torch.no_grad():
                return self.block(x, overlap, comp_only)
        leaves = [x.detach().requires_grad_(), *self.block.parameters()]
        out = self.block(leaves[0], overlap, comp_only)
        torch.autograd.grad(out, leaves, self.dy[:rows])
        return out

    def prepare(self) -> None:
        """Everything is called once with nobody beside, as it will be, so that what is compiled for
        it is there; chunks follow in their ladder. Then all ranks meet.
        """
        checked = self.at["check_correctness"] != "off" and not self.at["comp_only"]
        with patience.meeting(self.comm, "what is compiled"):
            for rows in {len(self.x), min(len(self.x), checks.SLICE)} if checked else {len(self.x)}:
                for overlap in ("none", *self.overlapped()):
                    self.through(overlap, comp_only=True, rows=rows)
                    if self.dy is not None and checked:
                        with torch.no_grad():
                            self.block(self.x[:rows], overlap, True)
            for how in self.others():
                self.other(how, comp_only=True)

    def watched(self, overlap: str, chunks: int = 1, comp_only: bool = False) -> dict[str, Tensor]:
        """`through`, and what came out of the layer on the way: whose output -> the output."""
        kept: dict[str, Tensor] = {}
        hook = self.layer.register_forward_hook(lambda _, given, out: kept.update(layer=out))
        try:
            return {"block": self.through(overlap, chunks, comp_only), **kept}
        finally:
            hook.remove()

    def preset(self, overlap: str, chunks: int) -> Tensor:
        """The same kernels with nothing sent and nothing waited for."""
        if overlap == "sm-free":
            forward = partial(copy_engine.forward_ffn, preset=True)
            with inside.replaced(self.layer, forward):
                return self.through(overlap, chunks)
        return self.through(overlap, chunks, comp_only=True)

    def comm_only(self) -> None:
        """none's pack, exchange and unpack, there and back; twice with backward."""
        for direction in ("forward", "backward")[: 1 if self.dy is None else 2]:
            route = Messages(self.comm, self.layout, self.layout.slices(1), self.x, direction,
                             name="none", scale=self.at["comm_scale"], beside=False)  # fmt: skip
            for _, _, part in route.dispatch(self.x):
                route.results[0] = part
            route.send(0)
            route.collect()

    def wire_only(self) -> None:
        """The exchange alone: as many all-to-alls of what was packed before."""
        for _ in range(2 if self.dy is None else 4):
            exchange.start(self.comm, self.packed, "wire", "ep").take()

    @property
    def packed(self) -> Tensor:
        if not hasattr(self, "_packed"):
            parts = torch.stack(self.x.chunk(self.layout.ranks, 1))
            self._packed = parts.repeat(1, self.at["comm_scale"], 1, 1)
        return self._packed

    def variants(self) -> dict[str, Work]:
        """Name -> call. The overlapped ones as "sm-free/4": schedule and chunks; comp_only:
        without communication, and nothing else.
        """
        found: dict[str, Work] = {"comp": partial(self.through, "none", comp_only=True)}
        if self.at["comp_only"]:
            for overlap in self.overlapped():
                for chunks in self.chunk_counts():
                    name = f"{overlap}/{chunks} comp"
                    found[name] = partial(self.through, overlap, chunks, comp_only=True)
            return found
        found["none"] = partial(self.through, "none")
        found |= {f"{terms.OTHER}{how}": partial(self.other, how) for how in self.others()}
        found |= {"comm": self.comm_only, "wire": self.wire_only}
        for overlap in self.overlapped():
            for chunks in self.chunk_counts():
                name = f"{overlap}/{chunks}"
                found[name] = partial(self.through, overlap, chunks)
                found[name + terms.PRESET] = partial(self.preset, overlap, chunks)
        return found

    def other(self, how: str, comp_only: bool = False) -> Tensor:
        """`none` with torch's operators between the GEMMs, "eager" or "compiled"."""
        layer = self.layer
        kept = layer.elementwise, layer.compiled
        layer.elementwise, layer.compiled = "torch", how == "compiled"
        try:
            return self.through("none", comp_only=comp_only)
        finally:
            layer.elementwise, layer.compiled = kept

    def others(self) -> list[str]:
        return [how for how in self.at.get("other_none", "").split("+") if how]

    def overlapped(self) -> list[str]:
        return [name for name in self.at["overlap"].split("+") if name != "none"]

    def chunk_counts(self) -> list[int]:
        return [int(count) for count in self.at["chunks"].split("+")]


def row(case, comm: Comm) -> dict:
    """Checks of every schedule and chunk count, the terms, raw samples, a trace."""
    bench, at = Bench(case, comm), case.parameters
    bench.prepare()
    lines, found, memory = [], [], None
    if comm.device.type == "cuda" and at["tests"] and not at["comp_only"]:
        bench.through("none")
        memory = Memory(comm.device)
    for overlap in [] if at["comp_only"] else bench.overlapped():
        for chunks in bench.chunk_counts():
            with memory.building(overlap) if memory else nullcontext():
                line, checked = judged(bench, overlap, chunks)
            lines.append(line)
            found += checked
    with path.listening() as heard:
        outs = bench.watched("none", comp_only=at["comp_only"])
    found = judge.by_all(comm, [*found, *judge.shapes("none", outs, bench.x)])
    passed = all(held for _, held, _, _ in found)
    result = {
        "lines": lines, "layer": asdict(bench.layout), "stage": stage_of(bench.layer).name,
        "device": comm.device.type, "none_path": heard[0], "topology": nodes.described(comm),
    }  # fmt: skip
    if at["comp_only"]:
        result["comp_paths"] = comp_paths(bench)
    sound = passed and case.fault == "none"
    why = nodes.withheld(result["topology"]) if sound and (at["tests"] or at["trace"]) else ""
    if why:
        result["withheld"] = why
    if sound and not why and at["tests"]:
        result |= timed(bench, comm, lines)
        if memory:
            result["memory"] = memory.peaks(bench)
    if sound and not why and at["trace"] and not at["comp_only"]:
        result["trace"], variants = traced(bench)
        line = inside.wanted(lines, result.get("times", {}), at.get("plugin", ""))
        if line is not None:
            result["inside"], more = inside.inside(bench, line, result["trace"], bench.comm)
            found += judge.by_all(comm, more)
        transport = bench.comm.links["ep"].transport
        if at["tests"] and sharing.measurable(result["topology"], comm.device, transport):
            result["sharing"], more = sharing.sharing(bench, comm)
            result["samples"] += more
        staged = isinstance(transport, StagedTransport)
        result["seen"], check = seen.seen(result["trace"], variants, comm, staged)
        found.append(check)
        passed = all(held for _, held, _, _ in found)
    if result["topology"]["nodes"] > 1:
        _add_reached(result)
    settled(comm.device)
    return {"passed": passed, "checks": found, **result}


def comp_paths(bench: Bench) -> dict[str, str]:
    """variant -> which way it goes without communication."""
    found = {}
    for overlap in bench.overlapped():
        for chunks in bench.chunk_counts():
            with path.listening() as heard:
                bench.through(overlap, chunks, comp_only=True)
            found[f"{overlap}/{chunks}"] = heard[-1] if heard else judge.UNKNOWN
    return found


def judged(bench: Bench, overlap: str, chunks: int) -> tuple[dict, list]:
    """(what the record keeps of it, its checks)."""
    at, label = bench.at, f"{overlap}/{chunks}"
    with path.listening() as heard:
        outs = bench.watched(overlap, chunks)
    kept, found = judge.ways(overlap, label, heard)
    found = [*judge.shapes(label, outs, bench.x), *found]
    line = {"schedule": overlap, "chunks": chunks, "variant": label, **kept}
    mode = at["check_correctness"]
    if checks.applies(mode, overlap, at["comp_only"]):
        more, checked = judge.values(
            bench.block, bench.x, bench.dy, overlap, label, mode=mode, seed=bench.seed,
            whole=at["whole_batch"],
        )  # fmt: skip
        line |= more
        found += checked
    return line, found


# -- times -----------------------------------------------------------------------------------------


def timed(bench: Bench, comm: Comm, lines: list[dict]) -> dict:
    """Every variant in every round; the terms; samples of this rank under "samples"."""
    at, samples = bench.at, []
    report: dict = {}
    for state in at["protocol"].split("+"):
        clock = Clock(at["warmup"], at["tests"], at["prewarm_ms"], at["flush"], state)
        variants = bench.variants()
        mine = interleaved(variants, clock, bench.comm)
        samples += mine
        times = terms.by_rank(comm.collect(mine))
        layer = asdict(bench.layout)
        if at["comp_only"]:
            report[state] = {"terms": {name: terms.term(times[name]) for name in variants}}
            continue
        named = {name: terms.term(times[name]) for name in terms.TERMS}
        serial = terms.throughput(terms.slowest(times["none"]), layer, at["backward"])
        found = {
            line["variant"]: terms.schedule(times, line["variant"], layer, at["backward"])
            for line in lines
        }
        others = {how: terms.other(times, how, list(found)) for how in bench.others()}
        report[state] = {"terms": named, "none": serial, "schedules": found, "others": others}
        if bench.nodes > 1:
            for name, line in found.items():
                line["reached"] = {"time": terms.reached(times, name)}
    return {"times": report, "samples": samples}


def _add_reached(result: dict) -> None:
    """By traces, beside what times say."""
    for times in result.get("times", {}).values():
        for name, line in times.get("schedules", {}).items():
            ratio, shown = line["reached"]["time"]["comp_over_comm"], result.get("seen", {})
            if name in shown:
                line["reached"]["trace"] = terms.reached_in_trace(shown[name], ratio)


# -- traces ----------------------------------------------------------------------------------------


def traced(bench: Bench) -> tuple[str, list[str]]:
    """Some calls of each variant under torch.profiler, each in a range of the variant's name ->
    (path of a chrome trace, which whoever called takes away; the names).
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    device = bench.comm.device
    cuda = device.type == "cuda"
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    variants = bench.variants()
    names = [name for name in variants if name == "none" or name.partition("/")[2].isdecimal()]
    one = torch.zeros(1, device=device)

    def calls(count: int) -> None:
        for name in names:
            for _ in range(count):
                bench.comm.all_gather(one, "align", "ep")
                _synchronize(device)
                with record_function(name):
                    variants[name]()
                    _synchronize(device)

    calls(1)
    with profile(activities=kinds):  # the first kernels of a process's first trace may be lost
        calls(1)
    with profile(activities=kinds) as found:
        calls(TRACED if bench.nodes == 1 else TRACED_APART)
    file, name = tempfile.mkstemp(suffix=".json.gz", prefix="rlkernel-trace-")
    os.close(file)
    found.export_chrome_trace(name)
    return name, names


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
