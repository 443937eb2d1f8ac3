"""The Hopper kernels compile for sm_90a: wgmma, no spills, nothing serialised. No GPU needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_hopper.py")
SHARED_MEMORY = 232448  # bytes a block may have on an H100 or H200
# One of each kind: every way to keep pending sums, all operand layouts, both epilogues of gate/up.
HANDFUL = (
    "tree8.bf16>16/kk/256/1",
    "tree8.bf16>16/mn/256/1",
    "tree8.bf16>16/kn/128/2",
    "tree8.fp32>32/kk/128/1",
    "tree2.fp32>16/kk/128/1",
    "chain>16/mk/256/1",
    "gate_up/256",
    "gate_up+keep/256",
)


@pytest.fixture(scope="module")
def compiled():
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *HANDFUL], capture_output=True, text=True, timeout=110
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def test_the_handful_is_what_was_compiled(compiled):
    assert set(compiled) == set(HANDFUL)


@pytest.mark.parametrize("name", HANDFUL)
def test_kernel_is_fit_for_the_device(compiled, name):
    kernel = compiled[name]
    assert kernel["hgmma"] > 0
    assert kernel["spills"] == 0 and kernel["local"] == 0
    assert kernel["warnings"] == []
    assert kernel["registers"] <= 168
    assert kernel["smem"] <= SHARED_MEMORY
