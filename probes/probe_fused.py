"""Two GPUs: bits, late ranks, graphs and times of the fused A2A-FFN against the sequential layer.

    torchrun --nproc-per-node 2 probe_fused.py [OUT.json]
"""

import dataclasses
import datetime
import json
import os
import random
import statistics
import sys
import time
import traceback
from types import SimpleNamespace

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "probe_base"))
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rlkernel.overlap.layout import Layout  # noqa: E402

from rlkernel.collectives.groups import comm_of  # noqa: E402
from rlkernel.overlap import fused_kernel as fk  # noqa: E402
from rlkernel.overlap import fused_memory as fm  # noqa: E402
from rlkernel.overlap import stage as stages  # noqa: E402

BEGAN = time.monotonic()
BUDGET = float(os.environ.get("PROBE_S", "80"))
BF16 = torch.bfloat16
LOG = []


def at_s():
    return round(time.monotonic() - BEGAN, 1)


def agreed(ok):
    vote = torch.tensor([int(ok)])
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=CPU)
    return bool(vote.item())


class Problem:
    """One shape: weights, input, upstream gradient, and the sequential layer."""

    def __init__(self, B, T, D, k, seed=0):
        P, r = dist.get_world_size(), dist.get_rank()
        self.at = Layout(B, T, D, D * k, P)
        self.stage = stages.Fused(1e-5)
        g = torch.Generator(DEV).manual_seed(1000 + 31 * seed + r)
        L, H = T // P, D * k

        def noise(*shape, scale=1.0):
            return (torch.randn(shape, generator=g, device=DEV) * scale).to(BF16)

        self.x, self.dy = noise(B, T, D), noise(B, T, D)
        self.w1, self.b1 = noise(L, D, 2 * H, scale=D**-0.5), noise(L, 2 * H, scale=0.1)
        self.wout, self.bout = noise(L, H, D, scale=H**-0.5), noise(L, D, scale=0.1)
        g.manual_seed(7)
        self.norms = [noise(H) for _ in range(4)]

    def exchange(self, x):
        """[B, T, D] -> [N, L, D] by pack + NCCL."""
        at = self.at
        p = x.view(at.batch, at.ranks, at.local, at.dim).transpose(0, 1).contiguous()
        out = torch.empty_like(p)
        dist.all_to_all_single(out, p)
        return out.view(at.rows, at.local, at.dim)

    def back(self, y):
        at = self.at
        out = torch.empty_like(y)
        dist.all_to_all_single(out, y)
        parts = out.view(at.ranks, at.batch, at.local, at.dim)
        return parts.transpose(0, 1).reshape(at.batch, at.tokens, at.dim)

    def none(self, training=False, x=None):
        at = self.at
        part = self.exchange(self.x if x is None else x)
        z = part.new_empty(at.local, at.rows, 2 * at.hidden)
        torch.bmm(part.transpose(0, 1), self.w1, out=z)
        h, stats = self.stage.forward(z, self.b1, self.norms, training)
        y = torch.bmm(h, self.wout)
        out = part.new_empty(at.rows, at.local, at.dim)
        torch.add(y.transpose(0, 1), self.bout, out=out)
        return self.back(out), z, h, stats, part

    def none_back(self, saved):
        at = self.at
        _, z, h, stats, part = saved
        dys = self.exchange(self.dy).transpose(0, 1)
        dh = z.new_empty(at.local, at.rows, at.hidden)
        torch.bmm(dys, self.wout.transpose(1, 2), out=dh)
        dz, sums = torch.empty_like(z), self.stage.sums(at.local, at.hidden, DEV)
        self.stage.backward(dh, z, self.b1, self.norms, stats, dz, sums)
        db1, *dnorms = self.stage.finish(sums, BF16)
        out = z.new_empty(at.rows, at.local, at.dim)
        torch.bmm(dz, self.w1.transpose(1, 2), out=out.transpose(0, 1))
        dwout, dw1 = torch.empty_like(self.wout), torch.empty_like(self.w1)
        torch.bmm(h.transpose(1, 2), dys, out=dwout)
        torch.bmm(part.permute(1, 2, 0), dz, out=dw1)
        return self.back(out), dw1, db1, dwout, torch.sum(dys, 1), *dnorms

    def comm(self):
        """none's pack, exchange, unpack, there and back, no bias."""
        return self.back(self.exchange(self.x))

    def fused(self, memory, choice=None, local=False):
        return fk.Fused(COMM, self.at, self.stage, BF16, local=local, memory=memory,
                        choice=choice)

    def forward(self, f, training=False, x=None):
        return f.forward(self.x if x is None else x, self.w1, self.b1, self.wout, self.bout,
                         self.norms, training)

    def backward(self, f, saved):
        y, z, h, stats, xlocal = saved
        return f.backward(self.dy, z, h, stats, xlocal, self.w1, self.b1, self.wout, self.norms)


def differ(a, b):
    kind = torch.int16 if a.dtype == BF16 else torch.int32
    return int((a.contiguous().view(kind) != b.contiguous().view(kind)).sum())


NAMES = ("dx", "dw1", "db1", "dwout", "dbout", "dgx", "dbx", "dgg", "dbg")


def bits(shape, label, backward=True):
    line = {"bits": label, "shape": shape}
    p = Problem(*shape)
    memory = fm.FusedMemory(COMM, p.at, BF16)
    f = p.fused(memory)
    saved = p.none(True)
    mine = p.forward(f, True)
    torch.cuda.synchronize()
    line["forward"] = differ(mine[0], saved[0])
    line["z"] = differ(mine[1], saved[1])
    line["xlocal"] = differ(mine[4], saved[4])
    line["elements"] = mine[0].numel()
    line["error"] = float((mine[0].float() - saved[0].float()).norm() / saved[0].float().norm())
    line["lost"] = int(memory.host[0])
    if backward:
        wanted, got = p.none_back(saved), p.backward(f, mine)
        torch.cuda.synchronize()
        line["gradients"] = {n: differ(a, b) for n, a, b in zip(NAMES, got, wanted)}
        line["lost back"] = int(memory.host[0])
    LOG.append(line)
    return p, memory


def local_bits(p):
    """The kernels without communication against the library: which of the two differs?"""
    f = p.fused(None, local=True)
    at = p.at
    y, z, *_ = p.forward(f, False)
    part = f.rows_of(p.x)
    want = torch.bmm(part.transpose(0, 1), p.w1)
    h, _ = p.stage.forward(want, p.b1, p.norms, False)
    out = torch.bmm(h, p.wout).transpose(0, 1) + p.bout
    out = out.view(at.ranks, at.batch, at.local, at.dim).transpose(0, 1).reshape(y.shape)
    LOG.append({"local": list(p.x.shape), "z": differ(z, want), "y": differ(y, out)})


def autograd():
    p = Problem(8, 16, 256, 2)
    memory = fm.FusedMemory(COMM, p.at, BF16)
    gx, bx, gg, bg = (torch.nn.Parameter(n) for n in p.norms)
    ffn = SimpleNamespace(
        w1=torch.nn.Parameter(p.w1), b1=torch.nn.Parameter(p.b1), wout=torch.nn.Parameter(p.wout),
        bout=torch.nn.Parameter(p.bout), norm_x=SimpleNamespace(weight=gx, bias=bx),
        norm_gate=SimpleNamespace(weight=gg, bias=bg))
    leaf = p.x.clone().requires_grad_()
    out = fk.run(ffn, leaf, p.fused(memory))
    out.backward(p.dy)
    wanted = p.none_back(p.none(True))
    got = (leaf.grad, ffn.w1.grad, ffn.b1.grad, ffn.wout.grad, ffn.bout.grad, gx.grad, bx.grad,
           gg.grad, bg.grad)
    LOG.append({"autograd": {n: differ(a, b) for n, a, b in zip(NAMES, got, wanted)}})


def delayed(shape, calls, late_s, choice, label):
    p = Problem(*shape)
    memory = fm.FusedMemory(COMM, p.at, BF16)
    f = p.fused(memory, choice)
    xs = [p.x * (1 + 0.125 * (i % 7)) for i in range(7)]
    wanted = [p.none(x=x)[0] for x in xs]
    rng, wrong, outs = random.Random(dist.get_rank()), 0, []
    torch.cuda.synchronize()
    for n in range(calls):
        if rng.random() < 0.3:
            time.sleep(rng.random() * late_s)
        outs.append((n % 7, p.forward(f, x=xs[n % 7])[0]))
        if len(outs) == 10:
            torch.cuda.synchronize()
            wrong += sum(differ(out, wanted[i]) for i, out in outs)
            outs = []
    torch.cuda.synchronize()
    wrong += sum(differ(out, wanted[i]) for i, out in outs)
    LOG.append({"delayed": label, "calls": calls, "differ": wrong, "lost": int(memory.host[0])})


def graphs():
    p = Problem(64, 16, 256, 2)
    memory = fm.FusedMemory(COMM, p.at, BF16)
    f = p.fused(memory)
    x = p.x.clone()
    for _ in range(2):
        p.forward(f, x=x)
    torch.cuda.synchronize()
    dist.barrier(group=CPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = p.forward(f, x=x)[0]
    wrong = 0
    for n in range(20):
        x.copy_(p.x * (1 + 0.125 * n))
        want = p.none(x=x)[0]
        graph.replay()
        torch.cuda.synchronize()
        wrong += differ(out, want)
        if n % 5 == 4:  # eager calls in between
            wrong += differ(p.forward(f, x=x)[0], want)
    LOG.append({"graph replays": 20, "differ": wrong, "lost": int(memory.host[0])})


# -- times -----------------------------------------------------------------------------------------


def interleaved(variants, rounds, flush=False):
    """name -> [us a round, slowest rank]; hot: a product ahead of each start event."""
    hot = torch.randn(8192, 8192, device=DEV).to(BF16)
    product, one = torch.empty_like(hot), torch.zeros(1, device=DEV)
    scratch = torch.empty(256 << 20, dtype=torch.uint8, device=DEV) if flush else None
    ok = {}
    for name, work in variants.items():
        good = 1
        try:
            for _ in range(2):
                work()
            torch.cuda.synchronize()
        except Exception as error:
            good = 0
            LOG.append({"variant": name, "error": repr(error)[:300]})
        if agreed(good):
            ok[name] = work
    for _ in range(200):
        torch.mm(hot, hot, out=product)
    pairs = {name: [] for name in ok}
    for _ in range(rounds):
        for name, work in ok.items():
            torch.mm(hot, hot, out=product)
            if flush:
                scratch.zero_()
            dist.all_reduce(one)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            pairs[name].append((begin, end))
        torch.cuda.synchronize()
    mine = {n: [b.elapsed_time(e) * 1e3 for b, e in v[1:]] for n, v in pairs.items()}
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine, group=CPU)
    return {n: [max(row) for row in zip(*(e[n] for e in every))] for n in mine}


def table(title, times, base):
    reference = times.get(base)
    for name, samples in times.items():
        line = {"times": title, "variant": name, "us": round(statistics.median(samples), 1)}
        if reference:
            ratios = sorted(a / b for a, b in zip(reference, samples))
            line["none/this"] = round(statistics.median(ratios), 4)
        LOG.append(line)


class BySM(fm.FusedMemory):
    """The slices pushed by a copy kernel instead of the copy engine."""

    def _copy(self, x, of, target, source, tokens, stream):
        at = self.at
        rows = x.view(at.batch, at.ranks, at.local, at.dim)[:, of, tokens]
        for which in range(fm.SETS):
            buffer = self.memory.buffer("x", which, of)
            if buffer.data_ptr() == target:
                to = buffer.view(at.ranks, at.batch, at.local, at.dim)[source][:, tokens]
                with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                    to.copy_(rows)
                return
        super()._copy(x, of, target, source, tokens, stream)


def pieces(p, memory):
    at = p.at
    f, lo = p.fused(memory), p.fused(None, local=True)
    z = p.x.new_empty(at.local, at.rows, 2 * at.hidden)
    part = lo.rows_of(p.x)
    h, _ = p.stage.forward(torch.bmm(part.transpose(0, 1), p.w1, out=z), p.b1, p.norms, False)
    y = torch.empty(at.local, at.rows, at.dim, device=DEV, dtype=BF16)
    flat = torch.empty(at.rows, at.local, at.dim, device=DEV, dtype=BF16)
    out = torch.empty_like(p.x)

    def push(chunks):
        memory.push(p.x, 0, chunks, torch.cuda.current_stream().record_event())
        for s in memory.streams:
            torch.cuda.current_stream().wait_stream(s)

    def landed():
        index = memory.index
        a, b = (t.view(at.batch, at.ranks, -1) for t in (out, memory.landed(0)))
        a[:, 1 - index].copy_(b[:, 1 - index])

    return {
        "bmm1": lambda: torch.bmm(part.transpose(0, 1), p.w1, out=z),
        "gemm1 local": lambda: lo.arriving("gemm1", p.x, p.w1, z, 0),
        "stage": lambda: p.stage.forward(z, p.b1, p.norms, False),
        "bmm2": lambda: torch.bmm(h, p.wout, out=y),
        "bmm2 + bias": lambda: torch.add(
            torch.bmm(h, p.wout, out=y).transpose(0, 1), p.bout, out=flat),
        "gemm2 local": lambda: lo.leaving("gemm2", h, p.wout, p.bout, 0),
        "push 1": lambda: push(1),
        "push 4": lambda: push(4),
        "copy landed": landed,
        "exchange + unpack": lambda: p.comm(),
    }, f


def with_(choice, **changes):
    gemms = {n: dataclasses.replace(getattr(choice, n), **changes.pop(n))
             for n in ("gemm1", "gemm2", "dh", "dx") if n in changes}
    return dataclasses.replace(choice, **gemms, **changes)


def forward_variants(p, memory):
    base = fk.Choice.of(p.at)
    choices = {
        "kernel": base,
        "lead1 2": with_(base, gemm1={"lead": 2}),
        "lead1 8": with_(base, gemm1={"lead": 8}),
        "lead1 all": with_(base, gemm1={"lead": 99}),
        "lead2 0": with_(base, gemm2={"lead": 0}),
        "lead2 16": with_(base, gemm2={"lead": 16}),
        "lead2 all": with_(base, gemm2={"lead": 99}),
        "all apart": with_(base, gemm1={"lead": 99}, gemm2={"lead": 99}),
        "raster 8": with_(base, gemm1={"raster": 8}, gemm2={"raster": 8}),
        "raster 4": with_(base, gemm1={"raster": 4}, gemm2={"raster": 4}),
        "programs 130": with_(base, gemm1={"programs": 130}, gemm2={"programs": 130}),
        "chunks 4 lead 1": with_(base, gemm1={"lead": 1, "chunks": 4}),
        "chunks 2 lead 2": with_(base, gemm1={"lead": 2, "chunks": 2}),
        "chunks 8 lead 1": with_(base, gemm1={"lead": 1, "chunks": 8}),
        "back chunks 4": with_(base, gemm2={"chunks": 4}),
    }
    variants = {"none": lambda: p.none(), "comm": lambda: p.comm()}
    lo = p.fused(None, local=True)
    variants["kernel preset"] = lambda: p.forward(lo)
    part = lo.rows_of(p.x)
    z = p.x.new_empty(p.at.local, p.at.rows, 2 * p.at.hidden)

    def comp():
        torch.bmm(part.transpose(0, 1), p.w1, out=z)
        h, _ = p.stage.forward(z, p.b1, p.norms, False)
        y = torch.bmm(h, p.wout)
        return y.transpose(0, 1) + p.bout

    variants["comp"] = comp
    for name, choice in choices.items():
        f = p.fused(memory, choice)
        variants[name] = lambda f=f: p.forward(f)
    for name, kind, choice in (  # memory of their own: what fails here must not spoil the others
        ("push behind launch", fm.FusedMemory, with_(base, push_first=False)),
        ("flag write", fm.FusedMemory, with_(base, flag_by="write")),
        ("push by SM", BySM, base),
    ):
        f = p.fused(kind(COMM, p.at, BF16), choice)
        variants[name] = lambda f=f: p.forward(f)
    return variants


def backward_variants(p, memory):
    base = fk.Choice.of(p.at)
    f, lo = p.fused(memory, base), p.fused(None, local=True)

    def both(g):
        return p.backward(g, p.forward(g, True))

    variants = {"none": lambda: p.none_back(p.none(True)), "kernel": lambda: both(f),
                "kernel preset": lambda: both(lo)}
    for name, choice in {
        "apart": with_(base, dh={"lead": 99}, dx={"lead": 99}),
        "lead 4": with_(base, dh={"lead": 4}, dx={"lead": 4}),
        "lead 0/16": with_(base, dh={"lead": 2}, dx={"lead": 16}),
    }.items():
        g = p.fused(memory, choice)
        variants[name] = lambda g=g: both(g)
    return variants


def timeline(p, memory):
    base = with_(fk.Choice.of(p.at), gemm1={"timeline": True}, gemm2={"timeline": True})
    f = p.fused(memory, base)
    for _ in range(4):
        dist.all_reduce(torch.zeros(1, device=DEV))
        p.forward(f)
    torch.cuda.synchronize()
    for name in ("gemm1", "gemm2"):
        gemm = f._gemms[name]
        t = gemm.timeline()
        begin, end, sm, waited = t.unbind(1)
        span = int(end.max() - begin.min())
        far = gemm.places[:, 1] != memory.index
        programs = len(sm.unique())
        LOG.append({
            "timeline": name, "span us": span / 1e3, "programs": programs, "tiles": len(t),
            "waited us": float(waited.sum()) / programs / 1e3, "longest wait us":
            float(waited.max()) / 1e3,
            "first far tile us": float(begin[far].min() - begin.min()) / 1e3,
            "last far end before the end us": float(end.max() - end[far].max()) / 1e3,
            "tile us": float((end - begin).float().median()) / 1e3,
            "last ends spread us": float(end.max() - torch.stack(
                [end[sm == s].max() for s in sm.unique()]).min()) / 1e3,
        })
        if dist.get_rank() == 0 and len(sys.argv) > 1:
            torch.save((gemm.places.to(torch.int32), t), sys.argv[1] + f".{name}.pt")


def absent():
    """Rank 1 does not call: rank 0 must end, and say so."""
    p = Problem(64, 16, 256, 2)
    memory = fm.FusedMemory(COMM, p.at, BF16)
    memory.signals = dataclasses.replace(memory.signals, limit_ns=int(4e8))
    f = p.fused(memory)
    p.forward(f)
    torch.cuda.synchronize()
    dist.barrier(group=CPU)
    line = {"absent": dist.get_rank()}
    begin = time.perf_counter()
    if dist.get_rank() == 0:
        p.forward(f)
        torch.cuda.synchronize()
    line["seconds"] = round(time.perf_counter() - begin, 2)
    dist.barrier(group=CPU)
    line["host"] = int(memory.host[0])
    line["gone"] = int(memory.memory._table("flags", memory.index)[16 * memory.size])
    try:
        memory.check()
    except Exception as error:
        line["says"] = str(error)
    LOG.append(line)


def main():
    global CPU, DEV, COMM
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    DEV = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=DEV, timeout=datetime.timedelta(seconds=60))
    CPU = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=60))
    COMM = comm_of(dist.group.WORLD, "ep", timeout_s=15.0)
    kept = {}

    def default():
        kept["p"], kept["memory"] = bits((512, 64, 1280, 6), "default")

    def times(title, make, rounds, **kw):
        variants = make(kept["p"], kept["memory"])
        variants = variants[0] if isinstance(variants, tuple) else variants
        table(title, interleaved(variants, rounds, **kw), "none")
        LOG.append({"lost": int(kept["memory"].host[0])})

    apart = with_(fk.Choice.of(Layout(128, 16, 256, 512, 2)), gemm1={"lead": 2, "chunks": 4},
                  gemm2={"chunks": 2})
    steps = (
        ("small", lambda: bits((64, 16, 256, 2), "64 rows")),
        ("local", lambda: local_bits(Problem(128, 16, 256, 2))),
        ("default", default),
        ("delayed", lambda: delayed((128, 16, 256, 2), 100, 3e-3, None, "small")),
        ("pieces", lambda: times("pieces", pieces, 10)),
        ("forward", lambda: times("forward", forward_variants, 12)),
        ("backward", lambda: times("forward + backward", backward_variants, 8)),
        ("timeline", lambda: timeline(kept["p"], kept["memory"])),
        ("odd", lambda: bits((5, 16, 144, 3), "odd")),
        ("public", lambda: bits((4, 16, 128, 2), "public")),
        ("autograd", autograd),
        ("graphs", graphs),
        ("delayed chunks", lambda: delayed((128, 16, 256, 2), 50, 3e-3, apart, "chunks")),
        ("absent", absent),
    )
    only = os.environ.get("PROBE_ONLY", "").split(",") if os.environ.get("PROBE_ONLY") else None
    for name, step in steps:
        if only and name not in only:
            continue
        if not agreed(at_s() < BUDGET):
            LOG.append({"step": name, "skipped": at_s()})
            continue
        good = True
        try:
            step()
            torch.cuda.synchronize()
        except Exception as error:
            good = False
            where = traceback.format_exc().splitlines()[-7:]
            LOG.append({"step": name, "error": repr(error)[:600], "where": where})
        LOG.append({"step": name, "at_s": at_s()})
        print(f"rank {dist.get_rank()} {LOG[-1]} ok={good}", flush=True)
        try:
            agreed(good)
        except Exception as error:
            LOG.append({"step": name, "votes": repr(error)[:200]})
            break
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, LOG, group=CPU)
    if dist.get_rank() == 0:
        if len(sys.argv) > 1:
            with open(sys.argv[1], "w") as file:
                json.dump(every, file, indent=0)
        for line in every[0]:
            print(line)
        for log in every[1:]:
            for line in log:
                if not {"times", "step"} & line.keys() or "error" in line:
                    print("other rank", line)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
