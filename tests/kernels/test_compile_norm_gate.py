"""The gate's backward for Hopper compiles: nothing spilled, one barrier a row, few instructions;
and it refuses what it cannot do.
"""

from __future__ import annotations

import json

import pytest
import torch

from rlkernel.kernels import hopper_norm_gate, norm_gate, norm_gate_backward
from rlkernel.kernels.hopper_norm_gate import default_plan, launch, takes
from tests.kernels.tritons import run_script, tritons

pytestmark = pytest.mark.timeout(600)  # seconds of work, on cores that others use as well
COMPILES = ("compile_norm_gate.py",)
SHARED_MEMORY = 232448  # bytes a block may have on an H100 or H200
AFFORDABLE = 60  # instructions a warp and column of U and of G, where a thread has twenty or more


@pytest.fixture(scope="module", params=tritons())
def kernels(request):
    return json.loads(run_script(request.param, COMPILES))


@pytest.mark.parametrize("width", ["256", "272", "1280", "7680"])
def test_nothing_is_spilled(kernels, width):
    assert kernels[width]["spills"] == 0 and kernels[width]["stack"] == 0


def test_the_widest_rows_spill_a_few_instructions(kernels):
    assert kernels["8192"]["loop spills"] <= 20


@pytest.mark.parametrize("width", ["256", "272", "1280", "7680", "8192"])
def test_shared_memory_is_the_kernels_own_buffer(kernels, width):
    """What else the compiler kept there would move it from where PTX looks for it."""
    assert kernels[width]["shared"] == kernels[width]["wanted"] <= SHARED_MEMORY


@pytest.mark.parametrize("width", ["1280", "7680", "8192"])
def test_a_row_costs_what_a_copy_leaves(kernels, width):
    assert kernels[width]["each"] <= AFFORDABLE
    assert kernels[width]["barriers"] == 1
    assert kernels[width]["wide"] >= 0.8 * kernels[width]["accesses"]


def test_every_width_has_a_plan():
    for width in range(16, 8193, 16):
        plan = default_plan(width)
        assert plan.BYTES <= SHARED_MEMORY and plan.BYTES % 128 == 0
        assert width <= plan.PADDED < width + 64 * plan.WARPS
        ends = [first + 64 * plan.WARPS * words for first, words in zip(plan.FIRST, plan.WORDS)]
        assert (0, *ends) == (*plan.FIRST, plan.PADDED)


@pytest.mark.parametrize(
    "width, dtype, offset, error, words",
    [
        (24, torch.bfloat16, 0, ValueError, "multiple of 16 up to 8192"),
        (8208, torch.bfloat16, 0, ValueError, "multiple of 16 up to 8192"),
        (32, torch.float16, 0, TypeError, "expected bfloat16"),
        (32, torch.bfloat16, 1, ValueError, "multiple of 16 bytes"),
        (32, torch.bfloat16, 0, ValueError, "no Hopper GPU"),
    ],
)
def test_what_it_cannot_do_is_refused(width, dtype, offset, error, words):
    d_h = torch.zeros(6 * width + 8, dtype=dtype)[offset : offset + 6 * width].view(3, 2, width)
    z = torch.zeros(3, 2, 2 * width, dtype=dtype)
    scales = tuple(torch.zeros(4, width, dtype=dtype))
    sums = torch.full((2, 6, width), torch.nan)
    with pytest.raises(error, match=words):
        launch(d_h, z, z[0], scales, torch.zeros(4, 3, 2), torch.empty_like(z), sums)
    assert sums.isnan().all()


def backward_of(width: int, dtype=torch.bfloat16, offset=0):
    """Arguments of norm_gate_backward; on the CPU, whatever is said of the device."""
    d_h = torch.zeros(6 * width + 8, dtype=dtype)[offset : offset + 6 * width].view(3, 2, width)
    z = torch.zeros(3, 2, 2 * width, dtype=dtype)
    return d_h, z, z[0], tuple(torch.zeros(4, width, dtype=dtype)), torch.zeros(4, 3, 2)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(hopper_norm_gate, "is_hopper", lambda device: True)
    monkeypatch.setattr(norm_gate, "check_devices", lambda **tensors: None)


@pytest.mark.parametrize(
    "asked, way",
    [
        ({"width": 7680}, "hopper"),
        ({"width": 4112}, "hopper"),
        ({"width": 4096}, "portable"),
        ({"width": 8208}, "portable"),
        ({"width": 7688}, "portable"),
        ({"width": 7680, "dtype": torch.float32}, "portable"),
        ({"width": 7680, "offset": 1}, "portable"),
    ],
)
def test_wide_rows_go_the_way_of_hopper(on_hopper, monkeypatch, asked, way):
    went = []
    for name, module in (("hopper", hopper_norm_gate), ("portable", norm_gate_backward)):
        monkeypatch.setattr(module, "launch", lambda *given, name=name: went.append(name))
    d_h, z, bias, *more = backward_of(**asked)
    norm_gate.norm_gate_backward(d_h, z, bias, *more)
    assert went == [way]
    part = slice(1, 2)
    norm_gate.norm_gate_backward(
        d_h[:, part], z[:, part], bias[part], more[0], more[1][:, :, part].contiguous()
    )
    assert went == [way, way], "a slice of the tokens goes another way than the whole"


def test_other_devices_do_not_take_it():
    d_h, z, bias, scales, _ = backward_of(7680)
    assert not takes(d_h, z, bias, scales, z)
