"""Compile the Hopper kernels for sm_90a without a GPU and print what ptxas made of them, as JSON.

    python tests/kernels/compile_hopper.py [substring of a name ...]      every kernel without one

One object a kernel: registers (at launch), spills (bytes), local (memory instructions), smem, hgmma
(instructions in SASS), warnings (ptxas C75xx: serialised wgmma). A script of its own because
compiling for a GPU and interpreting do not mix in one process.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import triton  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from rlkernel.contract import ReductionTree  # noqa: E402
from rlkernel.kernels.hopper_gemm import gemm_kernel  # noqa: E402
from rlkernel.kernels.hopper_pipeline import REGISTERS  # noqa: E402
from rlkernel.kernels.hopper_plan import Config, is_wide, shapes  # noqa: E402
from rlkernel.kernels.hopper_silu import SWIGLU  # noqa: E402
from rlkernel.kernels.hopper_swiglu_few import LEFT, RIGHT, gate_up_few_kernel  # noqa: E402
from rlkernel.kernels.hopper_swiglu_kernel import NARROW, WIDE, gate_up_kernel  # noqa: E402
from rlkernel.kernels.hopper_tma import operand_box, out_box  # noqa: E402

TOOLS = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin"
NUMBERS = dict.fromkeys(("M", "N", "K", "group"), "i32")


def descriptor(box, dtype: str) -> str:
    shape, layout = box
    return f"tensordesc<{dtype}{list(shape)},{layout!r}>"


def gemm(name: str, out_bits: int, config: Config, layout: str) -> GluonASTSource:
    """The source of one GEMM kernel. layout "kn": A runs along K in memory, B along N."""
    tree = ReductionTree.parse(name)
    a_k, b_k = layout[0] == "k", layout[1] == "k"
    fold, tiling = shapes(tree.leaves * 512, tree, out_bits, config, a_k, b_k)
    word = "*fp32" if is_wide(tree, out_bits) else "*i32"
    signature = {
        "a_desc": descriptor(operand_box(64, tiling.bk, a_k), "bf16"),
        "b_desc": descriptor(operand_box(tiling.bn, tiling.bk, b_k), "bf16"),
        "out_desc": descriptor(out_box(fold.wide, out_bits), "bf16" if out_bits == 16 else "fp32"),
        "partials": word,
        "counters": "*i32",
        **NUMBERS,
        "F": "constexpr",
        "T": "constexpr",
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i in (3, 4)}
    return GluonASTSource(gemm_kernel, signature, {"F": fold, "T": tiling}, aligned)


def gate_up(keep: bool, arithmetic: str = SWIGLU) -> GluonASTSource:
    """The source of one gate/up kernel; keep: does it store gate and up, too?"""
    operands, outs = descriptor(operand_box(64, 64, True), "bf16"), out_box(False, 16, 32)
    signature = {
        **dict.fromkeys(("x_desc", "gate_weight_desc", "up_weight_desc"), operands),
        **dict.fromkeys(("hidden_desc", "gate_desc", "up_desc"), descriptor(outs, "bf16")),
        **dict.fromkeys(("wide", "M", "width", "K", "group"), "i32"),
        **dict.fromkeys(("KEEP", "TEXT", "W", "N"), "constexpr"),
    }
    constants = {"KEEP": keep, "TEXT": arithmetic, "W": WIDE, "N": NARROW}
    return GluonASTSource(gate_up_kernel, signature, constants)


def gate_up_few(keep: bool, arithmetic: str = SWIGLU) -> GluonASTSource:
    """The same for at most 128 rows."""
    operands, outs = descriptor(operand_box(32, 64, True), "bf16"), out_box(False, 16, 32)
    signature = {
        "x_desc": descriptor(operand_box(64, 64, True), "bf16"),
        **dict.fromkeys(("gate_weight_desc", "up_weight_desc"), operands),
        **dict.fromkeys(("hidden_desc", "gate_desc", "up_desc"), descriptor(outs, "bf16")),
        "K": "i32",
        **dict.fromkeys(("KEEP", "TEXT", "L", "R"), "constexpr"),
    }
    constants = {"KEEP": keep, "TEXT": arithmetic, "L": LEFT, "R": RIGHT}
    return GluonASTSource(gate_up_few_kernel, signature, constants)


def production() -> Iterator[tuple[str, GluonASTSource]]:
    """Every kernel that the wrappers can launch, by name: tree>bits/layout/bn/split."""
    trees = (
        "chain",
        "tree2.bf16",
        "tree4.bf16",
        "tree8.bf16",
        "tree2.fp32",
        "tree4.fp32",
        "tree8.fp32",
    )
    for tree, bits, layout, bn, split in product(
        trees, (16, 32), ("kk", "kn", "mk", "mn"), (256, 128), (1, 2, 4, 8)
    ):
        if bits == 32 and tree.endswith(".bf16"):
            continue
        try:
            source = gemm(tree, bits, Config(bn, split), layout)
        except ValueError:
            continue
        yield f"{tree}>{bits}/{layout}/{bn}/{split}", source
    for keep in (False, True):
        yield f"gate_up{'+keep' if keep else ''}", gate_up(keep)
        yield f"gate_up few{'+keep' if keep else ''}", gate_up_few(keep)


def report(source: GluonASTSource) -> dict:
    """Compile with the options of a launch and listen to ptxas, which speaks to no cache."""
    options = {"num_warps": 4, "maxnreg": REGISTERS}
    with knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as said:
        knobs.nvidia.dump_ptxas_log = True
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    words = said.getvalue()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        sass = _run(TOOLS / "cuobjdump", "--dump-sass", file.name).stdout
    return {
        "registers": int(re.search(r"Used (\d+) registers", words)[1]),
        "spills": sum(int(n) for n in re.findall(r"(\d+) bytes spill", words)),
        "local": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "smem": kernel.metadata.shared,
        "hgmma": len(re.findall(r"\bHGMMA", sass)),
        "warnings": re.findall(r"\(C75\d+\)[^\n]*", words),
    }


def _run(*command) -> subprocess.CompletedProcess:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True)


def main(wanted: list[str]) -> None:
    known = dict(production())
    chosen = {n: s for n, s in known.items() if not wanted or any(w in n for w in wanted)}
    if not chosen:
        raise SystemExit(f"no kernel is called like {wanted}; known: {', '.join(known)}")
    print(json.dumps({name: report(source) for name, source in chosen.items()}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
