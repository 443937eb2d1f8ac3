"""Compile the A2A GEMMs for sm_90a without a GPU and print what ptxas made of them, as JSON.

    python tests/kernels/compile_a2a.py [substring of a name ...]      every kernel without one

As compile_hopper.py, and what the text of the kernel synchronises with and stores by.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from rlkernel.kernels.a2a_gemm_kernel import Exchange, a2a_gemm_kernel
from rlkernel.kernels.hopper_pipeline import REGISTERS
from rlkernel.kernels.hopper_plan import Tiling
from rlkernel.kernels.hopper_tma import operand_box, out_box
from tests.kernels.compile_hopper import descriptor
from tests.kernels.compile_hopper import report as compiled

POINTERS = {
    **{"out": "*bf16", "owners": "*i64", "bias": "*bf16", "order": "*i64", "halves": "*i32"},
    **{"bases": "*i64", "counters": "*i32", "words": "*i32", "times": "*i64"},
}
COUNTS = ("pitch", "N", "K", "tiles", "batch", "tokens", "own")
NUMBERS = {"limit_ns": "i64", **dict.fromkeys(COUNTS, "i32")}


def source(exchange: Exchange, tiling: Tiling) -> GluonASTSource:
    a, b = operand_box(64, tiling.bk, True), operand_box(tiling.bn, tiling.bk, tiling.b_k_major)
    signature = {
        "own_desc": descriptor(a, "bf16"), "came_desc": descriptor(a, "bf16"),
        "b_desc": descriptor(b, "bf16"), "out_desc": descriptor(out_box(False, 16), "bf16"),
        **POINTERS, **NUMBERS, "E": "constexpr", "T": "constexpr",
    }  # fmt: skip
    names = list(signature)
    divisible = (*POINTERS, "pitch", "N", "K")
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    return GluonASTSource(a2a_gemm_kernel, signature, {"E": exchange, "T": tiling}, attrs)


def production() -> Iterator[tuple[str, GluonASTSource]]:
    for bn, stages in ((256, 4), (128, 6)):
        for b_k in (False, True):
            tiling = Tiling(bn, 64, stages, 2, True, b_k)
            way = f"{'backward' if b_k else 'forward'}/{bn}"
            for boxes in (True, False):
                name = f"arriving/{way}/{'boxes' if boxes else 'pointers'}"
                yield name, source(Exchange(2, True, 4, False, boxes), tiling)
            yield f"leaving/{way}", source(Exchange(2, False, 1, not b_k, False), tiling)
            if bn == 256 and not b_k:
                yield (
                    f"arriving/{way}/timeline",
                    source(Exchange(2, True, 4, False, True, False, True), tiling),
                )
                yield (
                    f"leaving/{way}/timeline",
                    source(Exchange(2, False, 1, True, False, False, True), tiling),
                )
                local = Exchange(2, True, 1, False, True, True)
                yield f"arriving/{way}/local", source(local, tiling)
                local = Exchange(2, False, 1, True, False, True)
                yield f"leaving/{way}/local", source(local, tiling)
                yield f"leaving/{way}/8 ranks", source(Exchange(8, False, 1, True, False), tiling)
    for bk in (32, 16):  # widths that 64 does not divide
        for bn, stages in ((256, 4), (128, 6)):
            for b_k in (False, True):
                tiling = Tiling(bn, bk, stages * 64 // bk, 2, True, b_k)
                way = f"{'backward' if b_k else 'forward'}/{bn}/{bk}"
                yield f"arriving/{way}", source(Exchange(2, True, 1, False, False), tiling)
                yield f"leaving/{way}", source(Exchange(2, False, 1, not b_k, False), tiling)


def report(source: GluonASTSource) -> dict:
    """compile_hopper's report, and how often the text of the kernel synchronises and stores."""
    found = compiled(source)
    options = {"num_warps": 4, "maxnreg": REGISTERS}  # the same once more: from the cache
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    words = {
        "acquires": r"ld\.acquire\.sys",
        "proxy_fences": r"fence\.proxy\.async;",
        "counts": r"atom\.global\.sys\.acq_rel\.add|atom\.global\.acq_rel\.sys\.add",
        "releases": r"atom\.global\.(?:sys\.release|release\.sys)\.exch",
        "wide_stores": r"st\.global\.v4\.b32",
        "narrow_stores": r"st\.global\.(?:b16|u16)",
    }
    return found | {n: len(re.findall(text, kernel.asm["ptx"])) for n, text in words.items()}


def main(wanted: list[str]) -> None:
    """A first "=" means: whole names."""
    known = dict(production())
    if wanted[:1] == ["="]:
        chosen = {name: known[name] for name in wanted[1:]}
    else:
        chosen = {n: s for n, s in known.items() if not wanted or any(w in n for w in wanted)}
    if not chosen:
        raise SystemExit(f"no kernel is called like {wanted}; known: {', '.join(known)}")
    print(json.dumps({name: report(source) for name, source in chosen.items()}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
