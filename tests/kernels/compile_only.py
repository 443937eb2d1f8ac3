"""Compile the portable kernels for machines that are not here; print one JSON object a kernel.

    python tests/kernels/compile_only.py

For sm_90 and gfx942, in the configurations that launches choose. Must run without TRITON_INTERPRET
and needs no GPU, so any Triton that can be installed can be asked what it makes of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlkernel.contract import ReductionTree
from rlkernel.kernels import bystander, fold, gemm_tokens, gemm_tree, swiglu
from rlkernel.kernels import norm_gate_backward as gate_backward
from rlkernel.kernels import norm_gate_forward as gate_forward
from tests.kernels.disassembly import describe

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
# (M, N, K), which operand is transposed in memory, contract, out: the reductions of a layer of
# hidden size 4096 and intermediate size 12288 from a token to a long prompt, and odd ones.
GEMMS = [
    ((1, 4096, 12288), "b", "tree8.bf16", "bf16"),  # down
    ((32, 4096, 12288), "b", "tree8.bf16", "bf16"),
    ((4096, 4096, 12288), "b", "tree8.bf16", "bf16"),
    ((4096, 4096, 12288), "b", "tree8.fp32", "bf16"),
    ((4096, 4096, 6144), "b", "tree4.bf16", "bf16"),  # a rank's half of it
    ((4096, 4096, 12288), "", "tree2.bf16", "bf16"),  # dX of gate and up
    ((4096, 12288, 4096), "b", "chain", "bf16"),  # gate and up
    ((12288, 4096, 4096), "a", "tree8.bf16", "bf16"),  # dW
    ((12288, 4096, 4001), "a", "tree8.bf16", "fp32"),
    ((12288, 4096, 1), "a", "tree8.bf16", "bf16"),
    ((12288, 4096, 32), "a", "tree8.bf16", "bf16"),
    ((12288, 4096, 64), "a", "tree8.fp32", "fp32"),
    ((4096, 4096, 4096), "b", "tree16.bf16", "bf16"),
    ((4096, 4096, 4096), "b", "tree16.fp32", "fp32"),
]
# (M, N, tokens), contract, out: weight gradients of few tokens, from one leaf to sixteen.
TOKENS = [
    ((12288, 4096, 1), "tree8.bf16", "bf16"),
    ((12288, 4096, 5), "tree8.bf16", "bf16"),  # absent leaves
    ((12288, 4096, 5), "tree8.fp32", "bf16"),
    ((12288, 4096, 64), "tree8.bf16", "bf16"),
    ((12288, 4096, 64), "tree8.fp32", "bf16"),
    ((12288, 4096, 64), "tree8.fp32", "fp32"),
    ((12288, 4096, 64), "tree2.bf16", "bf16"),
    ((12288, 4096, 64), "chain", "bf16"),
    ((12288, 4096, 64), "tree16.bf16", "bf16"),
    ((12288, 4096, 64), "tree16.fp32", "bf16"),
]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BF16 = "*bf16"


def compiled(fn, types: dict[str, str], constants: dict, target: GPUTarget, **options):
    """`fn` for `target`: an argument is a constant, of a type told here, or an int32 of 16s."""
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
        else:
            signature[name] = types.get(name, "i32")
            if name not in ("k_size", "units", "nought", "span"):  # what a launch specialises
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=fn, signature=signature, constexprs=values, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def gemm(shape, transposed: str, tree_name: str, out: str, config, target: GPUTarget):
    tree = ReductionTree.parse(tree_name)
    meta, options = gemm_tree.constants(shape, tree, config, DTYPES[out])
    meta |= {"ARCH": target.backend, "out_n": 1}
    meta |= {"a_m" if transposed == "a" else "a_k": 1, "b_k" if transposed == "b" else "b_n": 1}
    types = {"a_ptr": BF16, "b_ptr": BF16, "out_ptr": f"*{out}", "nought": "fp32"}
    return compiled(gemm_tree._gemm_tree, types, meta, target, **options)


def gemms(target: GPUTarget) -> Iterator[tuple[str, object, object]]:
    for shape, transposed, name, out in GEMMS:
        tree = ReductionTree.parse(name)
        config = gemm_tree.default_config(*shape, tree, hip=target.backend == "hip")
        title = f"gemm_tree {'x'.join(map(str, shape))} {name} {out}"
        yield title, config, gemm(shape, transposed, name, out, config, target)


def tokens(target: GPUTarget) -> Iterator[tuple[str, object, object]]:
    for shape, name, out in TOKENS:
        tree = ReductionTree.parse(name)
        config = gemm_tokens.default_config(*shape, tree, hip=target.backend == "hip")
        meta, options = gemm_tokens.constants(shape, tree, config, DTYPES[out])
        meta |= {"ARCH": target.backend, "a_m": 1, "b_n": 1, "out_n": 1}
        types = {"a_ptr": BF16, "b_ptr": BF16, "out_ptr": f"*{out}"}
        title = f"gemm_tokens {'x'.join(map(str, shape))} {name} {out}"
        result = compiled(gemm_tokens._gemm_tokens, types, meta, target, **options)
        yield title, config, result


def elementwise(target: GPUTarget) -> Iterator[tuple[str, object, object]]:
    rows = {f"{name}_i": 1 for name in ("d_hidden", "gate", "up", "d_gate", "d_up", "hidden")}
    pointers = dict.fromkeys(("d_hidden", "gate", "up", "d_gate", "d_up", "hidden"), BF16)
    for title, fn, more in [
        ("swiglu forward", swiglu._forward, {}),
        ("swiglu backward", swiglu._backward, {"AGAIN": False}),
        ("swiglu backward with hidden", swiglu._backward, {"AGAIN": True}),
    ]:
        options = {"num_warps": 4, **swiglu.EXACT}
        constants = {**rows, **more, "BLOCK": swiglu.BLOCK}
        yield title, None, compiled(fn, pointers, constants, target, **options)
    for parts, kind in [(8, "bf16"), (2, "fp32")]:
        types = {"parts": f"*{kind}", "out": BF16}
        constants = {"PARTS": parts, "OUT_BF16": True, "BLOCK": fold.BLOCK}
        yield f"fold {parts} {kind}", None, compiled(fold._fold, types, constants, target)


def norm_gates(target: GPUTarget) -> Iterator[tuple[str, object, object]]:
    """The default width of the A2A-FFN, and a small one."""
    hip, names = target.backend == "hip", ("gamma_x", "beta_x", "gamma_gate", "beta_gate")
    pointers = dict.fromkeys(("z", "bias", *names, "out", "d_h", "d_z"), BF16)
    pointers |= {"stats": "*fp32", "parts": "*fp32", "eps": "fp32"}
    for width in (256, 7680):
        config = gate_forward.default_config(width, hip)
        meta = gate_forward.constants(width, config, torch.bfloat16)
        meta |= {"SAVE": True, "ARCH": target.backend}
        options = {"num_warps": config.num_warps, **gate_forward.EXACT}
        options |= gate_forward.limited(config.registers) if not hip else {}
        result = compiled(gate_forward._forward, pointers, meta, target, **options)
        yield f"norm_gate forward {width}", config, result
        config = gate_backward.default_config(width, torch.bfloat16, hip)
        meta = gate_backward.constants(width, config, torch.bfloat16)
        meta |= {"SEGMENT": gate_backward.SEGMENT, "ARCH": target.backend}
        options = {"num_warps": config.num_warps}
        result = compiled(gate_backward._backward, pointers, meta, target, **options)
        yield f"norm_gate backward {width}", config, result


def bystanders(target: GPUTarget) -> Iterator[tuple[str, object, object]]:
    pointers = {"out": "*fp32", "source": BF16, "target": BF16}
    options = {"num_warps": bystander.WARPS}
    for name, fn in (("hold", bystander._hold_kernel), ("copy", bystander._copy_kernel)):
        result = compiled(fn, pointers, {"BLOCK": bystander.BLOCK}, target, **options)
        yield f"bystander {name}", None, result


def all_of(target: GPUTarget) -> Iterator[tuple[str, object, object]]:
    for kernels in (gemms, tokens, elementwise, norm_gates, bystanders):
        yield from kernels(target)


def main() -> None:
    for name, target in TARGETS.items():
        for title, config, result in all_of(target):
            facts = {"target": name, "triton": triton.__version__, "kernel": title}
            facts |= {"config": config and vars(config), **describe(result)}
            # Joints of gemm_tree and what a dot starts from, as the compiler's first stage has it.
            facts["sums"] = result.asm["ttir"].count("arith.addf")
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
