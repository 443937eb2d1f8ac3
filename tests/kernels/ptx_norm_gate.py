"""Compile the gate's backward for sm_90 without a GPU and print its PTX, as JSON: a text a width.

python tests/kernels/ptx_norm_gate.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlkernel.kernels.hopper_norm_gate_columns import plan
from tests.kernels.compile_norm_gate import compiled

# The last piece is whole; or a word, two or four words a thread, some of them beyond the row.
WIDTHS = (7680, 4112, 5104, 6128)

if __name__ == "__main__":
    print(json.dumps({width: compiled(plan(width)).asm["ptx"] for width in WIDTHS}))
