"""Two GPUs: bits and times of every form of the peer-memory all-reduce against NCCL.

    torchrun --nproc-per-node 2 probe_symm.py [OUT.json]
"""

import dataclasses
import datetime
import json
import os
import random
import statistics
import sys
import time

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm
import triton
import triton.language as tl

from rlkernel.contract import ReductionTree
from rlkernel.kernels import peer_memory as pm
from rlkernel.kernels import peer_reduce as pr
from rlkernel.kernels.peer_gather import all_gather
from rlkernel.kernels.peer_shot import KINDS, Shot, launch
from rlkernel.run.timing import heat

BF16, FP32 = torch.bfloat16, torch.float32
BEGAN = time.monotonic()
BUDGET = float(os.environ.get("PROBE_S", "75"))


@triton.jit
def all_reduce_pull(
    x, out, count, bases, epochs, limit_ns,
    RANK: tl.constexpr, SIZE: tl.constexpr, WIRE: tl.constexpr, NODE_BF16: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):
    lane = tl.program_id(0)
    epoch = tl.load(epochs + lane)
    came = pm.begun(bases, RANK)
    at = tl.arange(0, BLOCK)
    PEER: tl.constexpr = 1 - RANK
    for start in range(lane * BLOCK, count, tl.num_programs(0) * BLOCK):
        epoch += 1
        keep = start + at < count
        mine = pr.to_wire(tl.load(x + start + at, mask=keep), WIRE == tl.bfloat16)
        tl.store(pm.slot(bases, RANK, lane, epoch, RANK, WIRE, SIZE, DEPTH, SLOTS, CHUNK) + at, mine)
        came = came & pm.meet(bases, lane, epoch, limit_ns, RANK, SIZE)
        place = pm.slot(bases, PEER, lane, epoch, PEER, WIRE, SIZE, DEPTH, SLOTS, CHUNK)
        theirs = tl.load(place + at, volatile=True)
        root = pr.joint(pr.to_node(mine, NODE_BF16), pr.to_node(theirs, NODE_BF16))
        root = pm.spoiled(pr.narrowed(root, out.dtype.element_ty == tl.bfloat16), came)
        tl.store(out + start + at, root, mask=keep)
    pm.ended(bases, epochs, lane, epoch, came, RANK, SIZE)


class Memory:
    def __init__(self, arena, device):
        self.arena, self.rank, self.size = arena, dist.get_rank(), dist.get_world_size()
        self.buffer = symm.empty(arena.bytes, dtype=torch.uint8, device=device)
        self.handle = symm.rendezvous(self.buffer, dist.group.WORLD)
        self.host = torch.zeros(1, dtype=torch.int32).pin_memory()
        table = [*(int(p) for p in self.handle.buffer_ptrs), self.host.data_ptr()]
        self.bases = torch.tensor(table, dtype=torch.int64, device=device)
        self.epochs = torch.zeros(arena.lanes, dtype=torch.int32, device=device)
        self.peers = pm.Peers(arena, self.rank, self.bases, self.epochs, int(3e9))
        self.reset()

    def reset(self):
        torch.cuda.synchronize()
        dist.barrier(group=CPU)
        self.buffer.zero_(), self.epochs.zero_(), self.host.zero_()
        torch.cuda.synchronize()
        dist.barrier(group=CPU)

    def call(self, kind, x, out, tree, block_bytes, lanes, warps):
        cut = Shot(kind, block_bytes, lanes, warps)
        if kind == "pull":
            wire = pr.wire(x, tree)
            launch(all_reduce_pull, x, out, x.numel(), self.peers, cut, wire.itemsize,
                       WIRE=KINDS[wire], NODE_BF16=tree.dtype == BF16)
            return out
        return pr.all_reduce(x, out, tree, self.peers, chosen=cut)


def wanted(x, tree):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return tree.fold([tree.round(p) for p in parts]).to(x.dtype)


def differ(a, b):
    kind = torch.int16 if a.dtype == BF16 else torch.int32
    return int((a.view(kind) != b.view(kind)).sum())


def data(count, dtype, seed, device, shift=0):
    g = torch.Generator(device).manual_seed(seed)
    whole = torch.randn(count + shift, generator=g, device=device)
    whole = whole * torch.exp2(torch.randn(count + shift, generator=g, device=device) * 3)
    return whole.to(dtype)[shift:]


def bits(memory, device, log):
    rank = memory.rank
    kinds = ["words", "once", "twice"] + (["pull"] if memory.size == 2 else [])
    for name in ("tree8.bf16", "tree8.fp32"):
        tree = ReductionTree.parse(name)
        for dtype in (BF16, FP32):
            for kind in kinds:
                for count, shift in ((100_003, 1), (1, 0), (4097, 1)):
                    x = data(count, dtype, 7 * rank + count, device, shift)
                    out = torch.full_like(x, float("nan"))
                    line = {"bits": kind, "tree": name, "dtype": str(dtype), "count": count}
                    try:
                        memory.call(kind, x, out, tree, 4096, 16, 4)
                        torch.cuda.synchronize()
                        line["differ"] = differ(out, wanted(x, tree))
                        line["lost"] = int(memory.host[0])
                    except Exception as error:
                        line["error"] = repr(error)[:300]
                    log.append(line)


def delayed(memory, device, log, calls=300):
    tree, rank = ReductionTree(8), memory.rank
    rng = random.Random(rank)
    wrong = 0
    pairs = []
    for n in range(calls):
        kind = ("words", "once", "twice")[n % 3]
        count = (8192, 50_000, 300_000)[n // 3 % 3]
        x = data(count, BF16, 1000 * rank + n, device)
        out = torch.full_like(x, float("nan"))
        if rng.random() < 0.3:
            time.sleep(rng.random() * 2e-3)
        memory.call(kind, x, out, tree, 4096, 16, 4)
        pairs.append((x, out))
    torch.cuda.synchronize()
    for x, out in pairs:
        wrong += differ(out, wanted(x, tree))
    log.append({"delayed": calls, "differ": wrong, "lost": int(memory.host[0])})


def graph_of(work, reps):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(reps):
            work()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def variants(size, world):
    """(kind, bytes a program and round, programs, warps) for messages of `size` bytes."""
    if size <= 1 << 16:
        found = [("words", 512, 264, 4), ("words", 1024, 264, 4), ("words", 2048, 264, 4),
                 ("words", 1024, 264, 2), ("words", 1024, 264, 1), ("words", 512, 264, 2)]
        return found + [("once", 2048, 264, 4)]
    if size <= 1 << 18:
        return [("words", 2048, 264, 4), ("words", 4096, 264, 8), ("once", 4096, 264, 4),
                ("words", 2048, 264, 2), ("words", 4096, 264, 4)]
    found = [("once", b, n, w) for b, n, w in (
        (4096, 264, 4), (8192, 132, 8), (8192, 264, 4), (8192, 264, 8), (8192, 528, 4),
        (8192, 528, 8), (16384, 132, 8), (16384, 132, 16), (16384, 264, 8), (16384, 264, 16),
        (16384, 528, 8), (32768, 132, 16), (32768, 264, 16), (32768, 264, 8), (4096, 1056, 4),
        (4096, 528, 4))]
    if size <= 1 << 20:
        found.append(("words", 2048, 264, 4))
    else:
        found.append(("twice", 16384, 264, 8))
    return found


def moved(memory, device, log):
    """Reduce-scatter and all-gather: as they stand, against NCCL's."""
    size, tree = memory.size, ReductionTree(8)
    for count in (1 << 15, 1 << 19, 1 << 21, 1 << 23):  # elements of a rank's part
        part = data(count, BF16, memory.rank, device)
        whole = data(count * size, BF16, memory.rank + 9, device)
        got, out = torch.empty_like(whole), torch.empty_like(part)
        raw, into = part.view(torch.int32), got.view(torch.int32)
        work = {
            "ag": lambda: all_gather(raw, into, memory.peers),
            "ag nccl": lambda: dist.all_gather_into_tensor(got, part),
            "rs": lambda: pr.reduce_scatter(whole, out, tree, memory.peers),
            "rs nccl": lambda: dist.reduce_scatter_tensor(out, whole),
        }
        work["rs"]()
        right = wanted(whole, tree).view(size, -1)[memory.rank]
        line = {"part bytes": 2 * count, "rs differ": differ(out, right)}
        work["ag"]()
        mine = got.clone()
        work["ag nccl"]()
        line["ag differ"] = differ(mine, got)
        graphs = {name: graph_of(call, 4) for name, call in work.items()}
        times = {name: [] for name in graphs}
        for _ in range(12):
            for name, graph in graphs.items():
                torch.cuda.synchronize()
                dist.barrier(group=CPU)
                begin = time.perf_counter()
                graph.replay()
                torch.cuda.synchronize()
                times[name].append((time.perf_counter() - begin) * 1e6 / 4)
        log.append(line | {name: slowest(found) for name, found in times.items()})


def timed(memory, device, log, sizes):
    tree, rank = ReductionTree(8), memory.rank
    for size in sizes:
        if time.monotonic() - BEGAN > BUDGET:
            log.append({"skipped": size})
            continue
        count = size // 2
        x = data(count, BF16, 5 + rank, device)
        out = torch.empty_like(x)
        buffer = x.clone()
        correct = wanted(x, tree)
        reps = 40 if size <= 1 << 20 else 4
        ready, calls = {}, {}
        work = {"nccl": lambda b=buffer: dist.all_reduce(b)}
        for kind in variants(size, memory.size):
            work["/".join(map(str, kind))] = lambda k=kind: memory.call(k[0], x, out, tree, *k[1:])
        for name, call in work.items():
            line = {"size": size, "variant": name}
            ok = 1
            try:
                if name != "nccl":
                    out.fill_(float("nan"))
                    call()
                    torch.cuda.synchronize()
                    line["differ"], line["lost"] = differ(out, correct), int(memory.host[0])
                    ok = int(not line["lost"])
                buffer.zero_()
                graph = graph_of(call, reps) if ok else None
            except Exception as error:
                line["error"] = repr(error)[:300]
                ok = 0
            vote = torch.tensor([ok])
            dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=CPU)
            if vote.item():
                ready[name], calls[name] = graph, call
            else:
                memory.reset()
                log.append(line)
            if "differ" in line and line["differ"]:
                log.append(line)
        heat(0.3)
        graphs = {name: [] for name in ready}
        for _ in range(12):
            for name, graph in ready.items():
                torch.cuda.synchronize()
                dist.barrier(group=CPU)
                begin = time.perf_counter()
                graph.replay()
                torch.cuda.synchronize()
                graphs[name].append((time.perf_counter() - begin) * 1e6 / reps)
        eager = {name: [] for name in ready}
        for _ in range(5):
            for name, call in calls.items():
                torch.cuda.synchronize()
                dist.barrier(group=CPU)
                begin = time.perf_counter()
                for _ in range(20):
                    call()
                torch.cuda.synchronize()
                eager[name].append((time.perf_counter() - begin) * 1e6 / 20)
        for name in ready:
            log.append({"size": size, "variant": name, "graph": slowest(graphs[name]),
                        "eager": slowest(eager[name]), "lost": int(memory.host[0])})
        del ready, graphs


def slowest(samples):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, samples, group=CPU)
    return round(statistics.median(max(row) for row in zip(*gathered)), 2)


def link(memory, device, log):
    """What a copy engine and a kernel's stores reach, into the peer, both ways at once."""
    peer = (memory.rank + 1) % memory.size
    theirs = memory.handle.get_buffer(peer, (16 << 20,), torch.uint8)
    mine = torch.zeros(16 << 20, dtype=torch.uint8, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        theirs.copy_(mine)
    torch.cuda.synchronize()
    dist.barrier(group=CPU)
    begin.record()
    for _ in range(40):
        theirs.copy_(mine)
    end.record()
    torch.cuda.synchronize()
    log.append({"link copy GB/s": round(40 * (16 << 20) / begin.elapsed_time(end) / 1e6, 1)})
    memory.reset()


def absent(memory, log):
    """Rank 0 calls, the others do not: everybody must learn who was missing."""
    memory.reset()
    memory.peers = dataclasses.replace(memory.peers, limit_ns=int(3e8))
    x = torch.ones(40_000, device=memory.buffer.device).bfloat16()
    for kind in ("once", "words"):
        out = torch.zeros_like(x)
        begin = time.perf_counter()
        if memory.rank == 0:
            memory.call(kind, x, out, ReductionTree(8), 4096, 16, 4)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        dist.barrier(group=CPU)
        log.append({"absent": kind, "rank": memory.rank, "host": int(memory.host[0]),
                    "word": int(memory.buffer[:4].view(torch.int32)[0]),
                    "nan": bool(out.isnan().all()), "seconds": round(seconds, 3)})
        memory.reset()


def main():
    global CPU
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device, timeout=datetime.timedelta(seconds=60))
    CPU = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=60))
    log = []
    arena = pm.Arena(dist.get_world_size(), lanes=1056, chunk=32768, words=16384)
    memory = Memory(arena, device)
    log.append({"bytes": arena.bytes, "ptrs": len(memory.handle.buffer_ptrs),
                "torch": torch.__version__, "triton": triton.__version__})
    sizes = [1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]
    steps = (("link", lambda: link(memory, device, log)),
             ("bits", lambda: bits(memory, device, log)),
             ("delayed", lambda: delayed(memory, device, log)),
             ("timed", lambda: timed(memory, device, log, sizes)),
             ("moved", lambda: moved(memory, device, log)),
             ("absent", lambda: absent(memory, log)))
    for name, step in steps:
        try:
            step()
        except Exception as error:
            log.append({"step": name, "error": repr(error)[:500]})
        log.append({"step": name, "at_s": round(time.monotonic() - BEGAN, 1)})
    gathered = [None] * memory.size
    dist.all_gather_object(gathered, log, group=CPU)
    if memory.rank == 0:
        out = sys.argv[1] if len(sys.argv) > 1 else "probe_symm.json"
        with open(out, "w") as file:
            json.dump(gathered, file, indent=0)
        for line in gathered[0]:
            if "variant" not in line and not ("bits" in line and line.get("differ") == 0):
                print(line)
        print("absent on the others:", [li for log in gathered[1:] for li in log if "absent" in li])
        print("size variant graph_us eager_us graph/nccl eager/nccl")
        for size in sizes:
            rows = [li for li in gathered[0] if li.get("size") == size and "graph" in li]
            nccl = next((li for li in rows if li["variant"] == "nccl"), None)
            for li in sorted(rows, key=lambda li: li["graph"]):
                a = f"{li['graph'] / nccl['graph']:.3f}" if nccl else "-"
                b = f"{li['eager'] / nccl['eager']:.3f}" if nccl else "-"
                print(size, li["variant"], li["graph"], li["eager"], a, b)
            for li in gathered[0]:
                if li.get("size") == size and "graph" not in li:
                    print(li)
    os._exit(0)


if __name__ == "__main__":
    main()
