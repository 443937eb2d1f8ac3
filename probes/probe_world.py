"""Two GPUs, through World and Comm: re-initialisation, capture, streams, misaligned, lost peer."""
import os, sys, time, json, traceback
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"); os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch
from rlkernel.collectives.groups import World
from rlkernel.collectives.arenas import open_arena
from rlkernel.collectives.errors import PeerLost
from rlkernel.collectives.transport import ProcessGroupTransport
from rlkernel.collectives.comm import Link
from rlkernel.contract import ReductionTree
from rlkernel.grid import Grid
from rlkernel.compare import bit_report
world = World.join("symmetric", float(os.environ.get("LIMIT", "5")))
grid = Grid(tp=world.size)
dev = torch.device(world.device)
def step(name, f):
    t = time.time()
    try:
        said = f()
    except Exception:
        said = traceback.format_exc()[-1500:]
    torch.cuda.synchronize()
    print(f"rank {world.rank} {name}: {said} [{time.time()-t:.2f} s]", flush=True)
def noise(n, dtype=torch.bfloat16, seed=0):
    g = torch.Generator(dev).manual_seed(seed + world.rank)
    return (torch.randn(n, generator=g, device=dev) * torch.exp2(torch.randn(n, generator=g, device=dev) * 3)).to(dtype)
comm = world.comm(grid)
def plain():
    other = comm.unobserved()
    link = comm.links["tp"]
    other.links = {"tp": Link(link.ranks, link.index, ProcessGroupTransport(link.transport.group, 5.0), link.agreement)}
    return other
ref = plain()
def first_under_capture():
    fresh = world.comm(grid); graph = torch.cuda.CUDAGraph(); x = noise(100)
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            fresh.all_reduce(x, "captured first")
        return "NO ERROR"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
def bits():
    wrong = 0; n = 0
    for tree in (ReductionTree(8), ReductionTree(8, "fp32")):
        a, b = comm.using(contract=tree), ref.using(contract=tree)
        for dtype in (torch.bfloat16, torch.float32):
            sizes = [1, 7, 1024, 4097] + [t // 2 + d for t in (65536, 262144, 1 << 20) for d in (-1, 0, 1)]
            for count in sizes:
                for shift in (0, 1):
                    x = noise(count + shift, dtype, count)[shift:]
                    n += 1
                    wrong += bit_report(a.all_reduce(x, "s"), b.all_reduce(x, "s")).mismatches
            x = noise(64 * 96, dtype).view(64, 96)
            for d in (0, 1):
                n += 2
                wrong += bit_report(a.reduce_scatter(x, "rs", dim=d), b.reduce_scatter(x, "rs", dim=d)).mismatches
                wrong += bit_report(a.all_gather(x, "ag", dim=d), b.all_gather(x, "ag", dim=d)).mismatches
    big = noise(3_000_001)
    wrong += bit_report(comm.all_reduce(big, "big"), ref.all_reduce(big, "big")).mismatches
    return f"{wrong} elements of {n} tensors differ"
def reinit():
    torch.cuda.synchronize(); before = (torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0])
    for n in range(1000):
        c = world.comm(grid)
        if n % 50 == 0: c.all_reduce(noise(100), "r")
    torch.cuda.synchronize(); after = (torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0])
    return f"1000 seams: allocated {after[0]-before[0]} bytes, free {after[1]-before[1]}"
def arenas():
    link = comm.links["tp"]; free = []
    for n in range(12):
        a = open_arena(link.transport.group, link.ranks, link.index, dev, world.store, 5.0)
        a.close(); del a
        torch.cuda.synchronize(); free.append(torch.cuda.mem_get_info()[0] >> 20)
    return f"free MiB after each arena opened and closed: {free}"
def streams():
    side = torch.cuda.Stream(); wrong = 0; x = noise(300_000); right = ref.all_reduce(x, "st")
    for n in range(200):
        with torch.cuda.stream(side if n % 2 else torch.cuda.current_stream()):
            out = comm.all_reduce(x, "st")
        torch.cuda.synchronize() if n % 10 == 0 else None
        if n % 10 == 0: wrong += bit_report(out, right).mismatches
    return f"{wrong} differ on alternating streams"
def graphs():
    x = noise(5000); small = noise(40_000, seed=3); wrong = 0
    comm.all_reduce(x, "g1"); comm.all_reduce(small, "g2")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        a = comm.all_reduce(x, "g1"); b = comm.all_reduce(small, "g2")
    for n in range(100):
        x.copy_(noise(5000, seed=n)); small.copy_(noise(40_000, seed=7 * n))
        graph.replay()
        other = comm.all_reduce(x, "g1")   # eager between replays: the epochs go on
        wrong += bit_report(a, other).mismatches + bit_report(a, ref.all_reduce(x, "g1")).mismatches + bit_report(b, ref.all_reduce(small, "g2")).mismatches
    return f"100 replays, {wrong} differ"
def eager_us():
    found = {}
    for n in (64 * 4096, 32 * 4096, 8192):
        x = noise(n)
        for name, c in (("symmetric", comm), ("process group", ref)):
            for _ in range(20): c.all_reduce(x, "e")
            torch.cuda.synchronize(); t = time.perf_counter()
            for _ in range(200): c.all_reduce(x, "e")
            torch.cuda.synchronize(); found[f"{name} {2*n}"] = round((time.perf_counter() - t) * 5e3, 1)
    return f"us a call through Comm: {found}"
def lost():
    x = noise(100_000)
    comm.all_reduce(x, "lost")
    if world.rank == 1:
        time.sleep(world.timeout_s + 2)
    t = time.time(); said = []
    for _ in range(2):
        try:
            out = comm.all_reduce(x, "lost")
            comm.links["tp"].transport.settle()
            said.append("no error")
        except PeerLost as error:
            said.append(f"{time.time()-t:.1f} s PeerLost{error.ranks}: {error}")
    return said
for f in (first_under_capture, bits, graphs, streams, eager_us, reinit, arenas, lost):
    step(f.__name__, f)
print(comm.paths() if world.rank == 0 else "", flush=True)
os._exit(0)
