"""Compile the gate's backward for sm_90 without a GPU and print what it is made of, as JSON.

    python tests/kernels/compile_norm_gate.py

"made", one object a width: disassembly.describe, and of the loop over rows its instructions a warp
and column, spills, barriers, shared memory accesses, all of them and those of 16 bytes,
asynchronous copies, loads from far away, and additions among the last hundred. "ptx": a text a
width, to be played.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from rlkernel.kernels.hopper_norm_gate_columns import Plan, plan
from rlkernel.kernels.hopper_norm_gate_kernel import NUMBERS, backward_kernel
from tests.kernels.disassembly import describe, longest_loop

WIDTHS = (4112, 6144, 7680)
# The last piece is whole; or a word, two or four words a thread, some of them beyond the row.
PLAYED = (7680, 4112, 5104, 6128)
SCALES = ("gamma_x", "beta_x", "gamma_gate", "beta_gate")
POINTERS = {**dict.fromkeys(("d_h", "z", "bias", *SCALES), "*bf16"), "stats": "*fp32"}
POINTERS |= {"d_z": "*bf16", "parts": "*fp32"}


def compiled(config: Plan):
    signature = POINTERS | dict.fromkeys(NUMBERS, "i32") | {"SEGMENT": "constexpr"}
    signature |= {"P": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(POINTERS))}
    source = GluonASTSource(backward_kernel, signature, {"SEGMENT": 128, "P": config}, aligned)
    options = {"num_warps": config.WARPS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def report(width: int, kernel) -> dict[str, object]:
    loop = longest_loop(kernel)
    text = "\n".join(loop)
    return {
        **describe(kernel),
        "wanted": plan(width).BYTES,
        "each": len(loop) * 32 * plan(width).WARPS / width,
        "loop spills": len(re.findall(r"\b(?:LDL|STL)\b", text)),
        "wide": len(re.findall(r"\b(?:LDS|STS)\.128\b", text)),
        "accesses": len(re.findall(r"\b(?:LDS|STS)\b", text)),
        "barriers": text.count("BAR.SYNC"),
        "copies": len(re.findall(r"\bLDGSTS\b", text)),
        "loads": len(re.findall(r"\bLDG\b", text)),
        "adds at the end": sum("FADD" in line for line in loop[-100:]),
    }


if __name__ == "__main__":
    kernels = {width: compiled(plan(width)) for width in {*WIDTHS, *PLAYED}}
    made = {width: report(width, kernels[width]) for width in WIDTHS}
    ptx = {width: kernels[width].asm["ptx"] for width in PLAYED}
    print(json.dumps({"made": made, "ptx": ptx}))
