import sys, torch
from rlkernel.kernels import norm_gate as ng, norm_gate_forward as fw, norm_gate_backward as bw, reference
from rlkernel.run.timing import interleaved, medians, Protocol
# forward: fw.Config(hold, num_warps, registers); backward: bw.Config(num_warps, stages, halves, carried, ahead), rows a segment
DEV = torch.device("cuda"); BF = torch.bfloat16
H = 7680
F = [(0, 4, 64), (3, 4, 72), (5, 4, 80), (0, 4, 80), (8, 4, 96), (15, 4, 128), (None, 4, None)]
B = [(8, 1, True, 3, 3, 128), (8, 1, True, 3, 0, 128), (8, 1, True, 3, 2, 128), (8, 1, True, 3, 5, 128), (8, 1, True, 2, 3, 128),
     (8, 1, True, 5, 3, 128), (8, 1, True, 0, 3, 128), (8, 1, True, 0, 0, 128), (16, 1, True, 2, 3, 128), (8, 1, True, 3, 3, 64), (8, 1, True, 3, 3, 256)]
V = [("b", c) for c in B] + [("f", c) for c in F]
def tensors(N, L):
    z = torch.randn(N, L, 2 * H, device=DEV, dtype=BF); bias = torch.randn(L, 2 * H, device=DEV).to(BF)
    sc = [torch.randn(H, device=DEV).to(BF) for _ in range(4)]
    return z, bias, sc, torch.empty(N, L, H, device=DEV, dtype=BF), torch.randn(N, L, H, device=DEV).to(BF), torch.empty(4, N, L, device=DEV), torch.empty_like(z), torch.empty(L, 6, H, device=DEV)
def call(v, t):
    z, bias, sc, h, dh, st, dz, sums = t
    kind, c = v
    if kind == "f": fw.launch(z, bias, sc, 1e-5, h, st, fw.Config(*c))
    else: bw.launch(dh, z, bias, sc, st, dz, sums, bw.Config(*c[:-1]), segment=c[-1])
if sys.argv[1] == "pre":
    t = tensors(256, 16)
    t[5].fill_(1.0)
    call(V[int(sys.argv[2])], t); torch.cuda.synchronize(); sys.exit()
t = tensors(1024, 32); z, bias, sc, h, dh, st, dz, sums = t
# the twin: eager torch on 64 rows of each token (FP64 for gradients), and the default's own sums against FP64 of all N for two tokens
want = reference.norm_gate(z[:256], bias, *sc)
ng.norm_gate_forward(z, bias, sc, out=h, stats=st)
ex = reference.norm_gate_backward(dh[:64].double(), z[:64].double(), bias.double(), *[s.double() for s in sc])[0]
two = reference.norm_gate_backward(dh[:, :1].double(), z[:, :1].double(), bias[:1].double(), *[s.double() for s in sc])[1:]
two = torch.stack([two[0][0, :H], two[0][0, H:], *two[1:]])
rel = lambda a, b: float((a.double() - b).norm() / b.norm())
eager = reference.norm_gate_backward(dh[:64], z[:64], bias, *sc)[0]
print("eager autograd dz against fp64", rel(eager, ex)); del eager
work, fact = {"copy": lambda: t[6].copy_(t[0])}, {}
for v in V:
    try:
        h.fill_(float("nan")); dz.fill_(float("nan")); sums.fill_(float("nan"))
        call(v, t); torch.cuda.synchronize()
        if v[0] == "f":
            bad = int((h[:256] != want).sum()) + int(h.isnan().sum())
            fact[str(v)] = f"{bad} wrong bits"; ok = bad == 0
        else:
            errs = [rel(dz[:64], ex), *[rel(sums[0, i], two[i]) for i in range(6)]]
            ok = max(errs) < 1e-2 and not int(dz.isnan().sum()) and not int(sums.isnan().sum())
            one = dz.clone(), sums.clone(); call(v, t); torch.cuda.synchronize()
            same = torch.equal(one[0], dz) and torch.equal(one[1], sums); del one
            fact[str(v)] = f"dz {errs[0]:.2e} sums {max(errs[1:]):.2e} again {'same' if same else 'DIFFERENT'}"; ok = ok and same
        if not ok: fact[str(v)] += "  <-- WRONG"
        work[str(v)] = lambda v=v: call(v, t)
    except Exception as e: print("--", v, type(e).__name__, str(e)[:150])
r = medians(interleaved(work, Protocol(samples=15, warm_s=0.5, repeats=2)))
cp = r["copy"]["median_us"]; print("copy", cp, 2 * z.numel() * 2 / cp * 1e-6, "TB/s")
for k, x in sorted(r.items(), key=lambda p: p[1]["median_us"]):
    n = 4 if k == "copy" else 3 if k.startswith("('f'") else 5
    print(f"{x['median_us']:9.1f} us  {(n * H / (4 * H)) * cp / x['median_us']:.3f} of copy  {k}  {fact.get(k, '')}")
