"""Compile the decode kernels without a GPU and print what the compilers made of them, as JSON.

    python tests/kernels/compile_decode.py [sm90|gfx942] [substring of a name]

One object a kernel: name, target, registers, spills, bytes of shared memory, and how many matrix
instructions and tile copies it has. Must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlkernel.contract import ReductionTree
from rlkernel.kernels import gemm_decode, swiglu_decode
from rlkernel.kernels.gemm_decode import gemm_decode_kernel
from rlkernel.kernels.stream import PORTABLE, stages_that_fit
from rlkernel.kernels.swiglu_decode import gate_up_decode_kernel

TARGETS = {"sm90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CHAIN, TREE = ReductionTree.parse("chain"), ReductionTree(8)


def gemm(rows, config, tree=TREE, k_inner=True, even=True, out="bf16"):
    """(kernel, signature, constexprs, options) of gemm_decode for `rows` padded rows."""
    weight = (config.block_n, config.block_k) if k_inner else (config.block_k, config.block_n)
    bf16 = tree.round_to == "bf16"
    types = {
        "rows": _operand(config, (rows, config.block_k)),
        "weight": _operand(config, weight),
        "out": f"*{out}",
        "parts": "*bf16" if bf16 else "*fp32",
        "arrivals": "*i32",
    }
    types |= dict.fromkeys(
        ("M", "N", "leaf", "stride_m", "stride_n", "stride_k", "stride_out"), "i32"
    )
    constants = {"LEAVES": tree.leaves, "BF16": bf16, "GROUP": config.leaves, "BLOCK_M": rows}
    constants |= {"K_INNER": k_inner, ("stride_k" if k_inner else "stride_n"): 1}
    return gemm_decode_kernel, types, constants | _shared(config, even), _options(config, rows, 1)


def gate_up(rows, config, store=False):
    """(kernel, signature, constexprs, options) of gate_up_decode for `rows` padded rows."""
    weight = _operand(config, (config.block_n, config.block_k))
    types = {"x": _operand(config, (rows, config.block_k)), "w_gate": weight, "w_up": weight}
    types |= dict.fromkeys(("hidden", "gate", "up"), "*bf16")
    types |= dict.fromkeys(("M", "N", "H", "stride_x", "stride_w", "stride_hidden"), "i32")
    types |= dict.fromkeys(("stride_gate", "stride_up"), "i32")
    constants = {"BLOCK_M": rows, "STORE": store} | _shared(config, True)
    return gate_up_decode_kernel, types, constants, _options(config, rows, 2)


def _operand(config, block):
    return f"tensordesc<bf16[{block[0]},{block[1]}]>" if config.tma else "*bf16"


def _shared(config, even):
    constants = {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "TMA": config.tma}
    return constants | {"EVEN_K": even}


def _options(config, rows, weights):
    stages = stages_that_fit(config, rows, weights)
    return {"num_warps": config.num_warps, "num_stages": stages}


def defaults(rows, h=4096, i=12288):
    """The launches of a forward and a backward at (H, I) with `rows` padded rows, by name."""
    gate_up_config = swiglu_decode.default_config(rows, i)
    down = gemm_decode.default_config(rows, h, TREE, k_inner=True)
    dx = gemm_decode.default_config(rows, h, TREE, k_inner=False)
    dh = gemm_decode.default_config(rows, i, CHAIN, k_inner=False)
    kernels = {
        "gate_up": gate_up(rows, gate_up_config),
        "gate_up store": gate_up(rows, gate_up_config, store=True),
        "down": gemm(rows, down),
        "dx": gemm(rows, dx, k_inner=False),
        "dh": gemm(rows, dh, tree=CHAIN, k_inner=False),
    }
    if rows == 128:
        kernels |= {
            "gate_up pointers": gate_up(rows, swiglu_decode.POINTERS),
            "down pointers, tail": gemm(rows, gemm_decode.POINTERS, even=False),
            "down fp32 nodes": gemm(rows, down, tree=ReductionTree(8, "fp32"), out="fp32"),
        }
    return {f"{name} rows={rows}": build for name, build in kernels.items()}


PRODUCTION = {
    "sm90": defaults(16) | defaults(32) | defaults(64) | defaults(128),
    "gfx942": {
        f"{name} rows={rows}": build
        for rows in (128,)
        for name, build in {
            "gate_up": gate_up(rows, PORTABLE, store=True),
            "down": gemm(rows, PORTABLE, even=False),
            "dx": gemm(rows, PORTABLE, k_inner=False),
            "dh": gemm(rows, PORTABLE, tree=CHAIN, k_inner=False),
        }.items()
    },
}


def compiled(kernel, types, constants, options, target):
    """The compiled kernel; pointers and integers are multiples of 16, but for M."""
    signature = {
        name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
    }
    attributes = {
        (position,): [["tt.divisibility", 16]]
        for position, (name, kind) in enumerate(signature.items())
        if (kind == "i32" and name != "M") or kind.startswith("*")
    }
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGETS[target], options=options)


def measured(name, build, target):
    """What the compiler made of one kernel."""
    kernel = compiled(*build, target)
    row = {"name": name, "target": target, "shared": kernel.metadata.shared}
    row["block_n"] = build[2]["BLOCK_N"]
    if target == "gfx942":
        text = kernel.asm["amdgcn"]
        row["registers"] = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])
        row["spills"] = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])
        return row | {"matrix": {"mfma": text.count("v_mfma")}}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = _tool("cuobjdump", "--dump-sass", file.name)
    row["registers"] = int(re.search(r"REG:(\d+)", usage)[1])
    row["spills"] = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    row["matrix"] = {key: len(re.findall(rf"\b{key}", sass)) for key in ("HGMMA", "HMMA")}
    row["tma"] = len(re.findall(r"\bUTMALDG", sass))
    row["async_copies"] = len(re.findall(r"\bLDGSTS", sass))
    return row


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run(
        [TOOLS / name, *arguments], capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    wanted = sys.argv[1:] + ["", ""]
    rows = []
    for target, kernels in PRODUCTION.items():
        for name, build in kernels.items():
            if wanted[0] in ("", target) and wanted[1] in name:
                rows.append(measured(name, build, target))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps(rows))
