"""Host time of eager calls, piece by piece; swiglu_backward against its floor."""
import cProfile, pstats, time, io, sys
import torch
from rlkernel.ffn import ops
from rlkernel.ffn.module import DeterministicFFN
from rlkernel.ffn.training import _step
from rlkernel.ffn.official import official_mlp
from rlkernel.kernels import select, launch
H, I = 4096, 12288
torch.manual_seed(0)
def w(*s): return (torch.randn(*s, device="cuda") * s[-1] ** -0.5).bfloat16()
gate, up, down = w(I, H), w(I, H), w(H, I)
off = official_mlp(gate, up, down)
layer = DeterministicFFN(gate, up, down)
def host(fn, n=200):
    for _ in range(20): fn()
    torch.cuda.synchronize(); t = time.perf_counter()
    for _ in range(n): fn()
    h = (time.perf_counter() - t) / n * 1e6
    torch.cuda.synchronize(); g = (time.perf_counter() - t) / n * 1e6
    return f"host {h:7.1f} us  wall {g:7.1f} us"
for m in (1, 8, 32):
    x = torch.randn(m, H, device="cuda").bfloat16(); dy = torch.randn_like(x)
    with torch.no_grad():
        print(m, "official forward", host(lambda: off(x)))
        print(m, "ours ops forward", host(lambda: ops.mlp_forward(x, gate, up, down)))
        print(m, "ours layer no-grad", host(lambda: layer(x)))
    so, sl = _step(off.requires_grad_(), x, dy), _step(layer, x, dy)
    print(m, "official step", host(so)); print(m, "ours step", host(sl))
x = torch.randn(32, H, device="cuda").bfloat16(); dy = torch.randn_like(x)
sl = _step(layer, x, dy)
for name, fn in (("forward", lambda: ops.mlp_forward(x, gate, up, down)), ("step", sl)):
    for _ in range(20): fn()
    torch.cuda.synchronize()
    p = cProfile.Profile(); p.enable()
    for _ in range(300): fn()
    p.disable(); torch.cuda.synchronize()
    s = io.StringIO(); pstats.Stats(p, stream=s).sort_stats("tottime").print_stats(28)
    print(name, "per call us = tottime/300"); print("\n".join(l[:150] for l in s.getvalue().splitlines()[4:]))
# pieces
out = torch.empty(32, H, device="cuda", dtype=torch.bfloat16); h = torch.randn(32, I, device="cuda").bfloat16()
tree = ops.DEFAULT
print("select.gemm", host(lambda: select.gemm(h, down.t(), out, tree)))
print("look x1", host(lambda: launch.look(h)))
print("empty", host(lambda: torch.empty(32, I, device="cuda", dtype=torch.bfloat16)))
print("mm", host(lambda: torch.mm(h, down.t(), out=out)))
# swiglu backward
from rlkernel.run.timing import interleaved, medians, Protocol
from rlkernel.kernels import swiglu
for m in (512, 2048, 4096):
    t = [torch.randn(m, I, device="cuda").bfloat16() for _ in range(6)]
    work = {"swiglu": lambda: swiglu.swiglu_backward(*t)}
    a, b, c = (torch.randn(m, H, device="cuda").bfloat16() for _ in range(3))
    work["add"] = lambda: torch.add(a, b, out=c)
    src = torch.empty(6 * m * I // 2 * 2, device="cuda", dtype=torch.uint8); dst = torch.empty_like(src)
    work["copy same bytes"] = lambda: dst.copy_(src)
    for block in (2048, 4096):
        def run(block=block):
            old, swiglu.BLOCK = swiglu.BLOCK, block
            try: swiglu.swiglu_backward(*t)
            finally: swiglu.BLOCK = old
        work[f"block{block}"] = run
    r = medians(interleaved(work, Protocol(samples=30, warm_s=0.5, repeats=4)))
    print(m, {k: round(v["median_us"], 1) for k, v in r.items()}, "floor", 12 * m * I / 4.2e6)
