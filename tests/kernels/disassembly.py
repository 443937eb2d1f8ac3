"""What a compiled kernel is made of, without a GPU: registers, spills, instructions by name."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import triton

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SASS = ("HGMMA", "HMMA", "UTMALDG", "LDGSTS", "HADD2", "HFMA2", "LDL", "STL")


def describe(compiled) -> dict[str, object]:
    """The facts of one result of triton.compile, for CUDA or HIP."""
    return _nvidia(compiled) if "cubin" in compiled.asm else _amd(compiled)


def longest_loop(compiled) -> list[str]:
    """The SASS instructions of a CUDA kernel's longest loop, ending with the branch back."""
    _, sass = _dumped(compiled.asm["cubin"])
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+?)\s*;", sass)
    places = {int(place, 16): i for i, (place, _) in enumerate(lines)}
    longest: list[str] = []
    for i, (_, text) in enumerate(lines):
        back = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        first = places.get(int(back[1], 16), i) if back else i
        if i - first >= len(longest):
            longest = [text for _, text in lines[first : i + 1]]
    return longest


def _nvidia(compiled) -> dict[str, object]:
    usage, sass = _dumped(compiled.asm["cubin"])
    counts = count(sass, *SASS)
    ptx = compiled.asm["ptx"]
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "spills": counts["LDL"] + counts["STL"],
        "shared": compiled.metadata.shared,
        "sass": counts,
        "ptx": {"wgmma": ptx.count("wgmma.mma_async"), "mma.sync": ptx.count("mma.sync")},
    }


def _amd(compiled) -> dict[str, object]:
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])

    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "shared": compiled.metadata.shared,
        "mfma": len(re.findall(r"\bv_mfma", text)),
        "hsaco": len(compiled.asm["hsaco"]),
    }


def count(sass: str, *names: str) -> dict[str, int]:
    """How often each instruction stands in a SASS listing, whatever its suffixes."""
    return {name: len(re.findall(rf"\b{name}\b", sass)) for name in names}


@cache
def _dumped(cubin: bytes) -> tuple[str, str]:
    """(resource usage, SASS); most of the time goes into starting the disassembler."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return tuple(
            subprocess.run([BIN / "cuobjdump", f"--dump-{what}", file.name], capture_output=True,
                           text=True, check=True).stdout
            for what in ("resource-usage", "sass")
        )  # fmt: skip
