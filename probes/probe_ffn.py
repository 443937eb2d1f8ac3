"""Two GPUs: the layer over TP2 and TP2+SP by symmetric memory and by NCCL, beside the official one."""
import os, sys, json, traceback
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"); os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch
from rlkernel.collectives.comm import Link
from rlkernel.collectives.groups import World
from rlkernel.collectives.transport import ProcessGroupTransport
from rlkernel.ffn.module import DeterministicFFN
from rlkernel.ffn.official import official_mlp
from rlkernel.grid import Grid
from rlkernel.run.timing import Protocol, medians, ratio
from rlkernel.run.wall import slowest, together
world = World.join("symmetric", 20.0)
comm = world.comm(Grid(tp=world.size))
plain = comm.unobserved()
link = comm.links["tp"]
plain.links = {a: (Link(l.ranks, l.index, ProcessGroupTransport(l.transport.group, 20.0), l.agreement) if l.size > 1 else l) for a, l in comm.links.items()}
dev = torch.device(world.device); H, I = 4096, 12288
g = torch.Generator(dev).manual_seed(5)
def normal(r, c, s): return (torch.randn(r, c, generator=g, device=dev) * s).bfloat16()
gate, up, down = normal(I, H, H**-0.5), normal(I, H, H**-0.5), normal(H, I, I**-0.5)
official = official_mlp(gate, up, down).requires_grad_()
def step(layer, x, dy, params):
    y = layer(x)
    return torch.autograd.grad(y, (x, *params), dy)
def forward(layer, x):
    with torch.no_grad():
        return layer(x)
for m in (32, 4096, 1024):
    x, dy = normal(m, H, 1.0), normal(m, H, 1.0)
    work = {"fwd official": lambda: forward(official, x)}
    xo = x.clone().requires_grad_()
    work["f+b official"] = lambda: step(official, xo, dy, list(official.parameters()))
    for name, c in (("symmetric", comm), ("nccl", plain)):
        for split in (False, True):
            layer = DeterministicFFN(gate, up, down, c, sequence_parallel=split)
            rows = m // world.size if split else m
            at = slice(world.rank * rows, (world.rank + 1) * rows) if split else slice(None)
            mine, grad = x[at].clone(), dy[at].clone()
            xg = mine.clone().requires_grad_()
            label = f"{name}{' SP' if split else ''}"
            work[f"fwd {label}"] = lambda l=layer, a=mine: forward(l, a)
            work[f"f+b {label}"] = lambda l=layer, a=xg, d=grad: step(l, a, d, [l.gate_up, l.down])
    for graph in (True, False):
        try:
            repeats = 16 if m <= 1024 else 2
            got = together(work, Protocol(12, 0.5, graph, repeats), lambda: comm.collect(None))
            samples = slowest(comm.collect(got))
            if world.rank == 0:
                for name, t in medians(samples).items():
                    base = f"{name[:3]} official"
                    print(f"M={m} {'graph' if graph else 'eager'} {name}: {t['median_us']:.1f} us, / official {ratio(samples, name, base)['median']:.3f}", flush=True)
        except Exception:
            print(traceback.format_exc()[-1500:], flush=True)
            break
os._exit(0)
