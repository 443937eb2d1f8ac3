"""The gate's backward for Hopper compiles: nothing spilled, one barrier a row, few instructions;
and it refuses what it cannot do.
"""

from __future__ import annotations

import json

import pytest
import torch

from rlkernel.kernels import hopper_norm_gate, norm_gate, norm_gate_backward
from rlkernel.kernels.hopper_norm_gate import NARROW, WIDEST, launch, takes
from rlkernel.kernels.hopper_norm_gate_columns import plan
from tests.kernels.tritons import run_script, tritons

pytestmark = pytest.mark.timeout(600)  # seconds of work, on cores that others use as well
COMPILES = ("compile_norm_gate.py",)
SHARED_MEMORY = 232448  # bytes a block may have on an H100 or H200
AFFORDABLE = 60  # instructions a warp and column of U and of G, where a thread has twenty or more


@pytest.fixture(scope="module", params=tritons())
def kernels(request):
    return json.loads(run_script(request.param, COMPILES))["made"]


WIDTHS = ["4112", "6144", "7680"]


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_spilled(kernels, width):
    assert kernels[width]["spills"] == 0 and kernels[width]["stack"] == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_shared_memory_is_the_kernels_own_buffer(kernels, width):
    """What else the compiler kept there would move it from where PTX looks for it."""
    assert kernels[width]["shared"] == kernels[width]["wanted"] <= SHARED_MEMORY


@pytest.mark.parametrize("width", ["6144", "7680"])
def test_a_row_costs_what_a_copy_leaves(kernels, width):
    one = kernels[width]
    assert one["each"] <= AFFORDABLE
    assert one["barriers"] == 1
    assert one["wide"] >= 0.65 * one["accesses"]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_comes_by_copies_alone(kernels, width):
    """Three a piece, and one of statistics; nothing is loaded into registers from far away."""
    one = kernels[width]
    assert one["copies"] == 3 * len(plan(int(width)).WORDS) + 1 and one["loads"] == 0


def test_sums_in_registers_are_added_in_their_turn(kernels):
    """Not all at the end of a row, which would keep their addends alive: hence the cuts."""
    assert kernels["7680"]["adds at the end"] <= 20


def test_every_width_has_a_plan():
    for width in range(NARROW + 16, WIDEST + 1, 16):
        made = plan(width)
        assert made.BYTES <= SHARED_MEMORY and made.BYTES % 128 == 0
        assert width <= made.PADDED < width + 64 * made.WARPS
        ends = [first + 64 * made.WARPS * words for first, words in zip(made.FIRST, made.WORDS)]
        assert (0, *ends) == (*made.FIRST, made.PADDED)
        assert made.LEFT + 2 * 16 * made.WARPS <= made.RING == made.BYTES - 128


@pytest.mark.parametrize(
    "width, dtype, offset, error, words",
    [
        (4104, torch.bfloat16, 0, ValueError, "multiple of 16 above 4096, up to 7680"),
        (4096, torch.bfloat16, 0, ValueError, "multiple of 16 above 4096, up to 7680"),
        (7696, torch.bfloat16, 0, ValueError, "multiple of 16 above 4096, up to 7680"),
        (4112, torch.float16, 0, TypeError, "expected bfloat16"),
        (4112, torch.bfloat16, 1, ValueError, "multiple of 16 bytes"),
        (4112, torch.bfloat16, 0, ValueError, "no Hopper GPU"),
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
        ({"width": 7696}, "portable"),
        ({"width": 7672}, "portable"),
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
