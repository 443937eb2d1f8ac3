"""The Hopper kernels compile for sm_90a: wgmma, no spills, nothing serialised. No GPU needed."""

from __future__ import annotations

import json

import pytest

from tests.kernels.tritons import run_script, tritons

pytestmark = pytest.mark.timeout(1500)  # seconds of work, on cores that others use as well
SHARED_MEMORY = 232448  # bytes a block may have on an H100 or H200
# One of each kind: every way to keep pending sums, all operand layouts, all kernels of gate/up.
HANDFUL = (
    "tree8.bf16>16/kk/128/1",
    "tree8.bf16>16/mn/128/1",
    "tree8.bf16>16/kn/128/4",
    "tree8.fp32>32/kk/128/1",
    "tree2.fp32>16/kk/128/1",
    "chain>16/mk/256/1",
    "chain>32/kk/128/1",
    "gate_up",
    "gate_up+keep",
    "gate_up few",
    "gate_up few+keep",
)
COMPILES = ("compile_hopper.py", *HANDFUL)


@pytest.fixture(scope="module", params=tritons())
def kernels(request):
    return json.loads(run_script(request.param, COMPILES))


def test_the_handful_is_what_was_compiled(kernels):
    assert set(kernels) == set(HANDFUL)


@pytest.mark.parametrize("name", HANDFUL)
def test_kernel_is_fit_for_the_device(kernels, name):
    kernel = kernels[name]
    assert kernel["hgmma"] > 0
    assert kernel["spills"] == 0 and kernel["local"] == 0
    assert kernel["warnings"] == []
    assert kernel["registers"] <= 168
    assert kernel["smem"] <= SHARED_MEMORY
