"""The gate's backward for Hopper, played from its PTX on the CPU: right against FP64, the same bits
whichever warp runs first and whenever copies land; and every step that is left out is missed.

The bits are the player's: a GPU's are held by gpu_norm_gate.py.
"""

from __future__ import annotations

import json
import re
from functools import cache

import numpy as np
import pytest
import torch

from rlkernel.compare import bit_report
from rlkernel.kernels import reference
from rlkernel.kernels.hopper_norm_gate_columns import WARPS, plan
from rlkernel.kernels.norm_gate import order_sensitive
from rlkernel.kernels.norm_gate_backward import SEGMENT
from tests.kernels.ptx_player import ONES, Fault, Memory, play
from tests.kernels.ptx_text import read
from tests.kernels.tritons import run_script, tritons

pytestmark = pytest.mark.timeout(600)  # seconds of work, on cores that others use as well
COMPILES = ("compile_norm_gate.py",)
LIMIT = 5e-3  # of a row or a sum: that of BF16, and half of what a column of nought would make
NAN = float("nan")
AT = 1 << 40  # where global memory begins; beyond 32 bits
GUARD = 256  # bytes ahead of every tensor, at least, that nobody may touch
ONE_BY_ONE = [range(32 * warp, 32 * warp + 32) for warp in range(WARPS)]
ORDERS = {"together": None, "first to last": ONE_BY_ONE, "last to first": ONE_BY_ONE[::-1]}


@pytest.fixture(scope="module", params=tritons())
def kernels(request):
    """PTX by width."""
    return json.loads(run_script(request.param, COMPILES))["ptx"]


def apart(x):
    """The same values, with NaN behind each row."""
    room = x.new_full((x.shape[0], x.shape[1] + 1, x.shape[2] + 16), NAN)
    return room[:, : x.shape[1], : x.shape[2]].copy_(x)


def drawn(n: int, length: int, width: int):
    """d_h, z, bias, scales and the forward's statistics."""
    random = torch.Generator().manual_seed(1)
    z, bias, *scales = order_sensitive(n, length, width, torch.bfloat16)
    d_h = torch.randn(n, length, width, generator=random).to(torch.bfloat16)
    halves = (z + bias).double().unflatten(-1, (2, width))
    rstd = (halves.var(-1, correction=0) + 1e-5).rsqrt()
    stats = torch.stack([halves.mean(-1), rstd], -1).flatten(-2).permute(2, 0, 1).float()
    return apart(d_h), apart(z), bias, tuple(scales), stats.contiguous()


class Room:
    """Global memory of tensors, which a kernel may read, and the last `outputs` of them write;
    nothing else, not what lies between their rows.
    """

    def __init__(self, tensors, outputs: int):
        self.tensors, self.starts, end = tensors, [], GUARD // 4
        for x in tensors:
            self.starts.append(end)
            end += -(-len(flat(x)) // (GUARD // 4)) * (GUARD // 4) + GUARD // 4
        readable, writable = np.zeros((2, end), bool)
        self.memory = Memory(np.full(end, ONES, np.uint32), AT, readable, writable)
        for i, (x, start) in enumerate(zip(tensors, self.starts)):
            own = torch.zeros(x.untyped_storage().nbytes() // x.itemsize, dtype=torch.bool)
            own.as_strided(x.shape, x.stride(), x.storage_offset())[...] = True
            part = slice(start, start + len(flat(x)))
            self.memory.words[part] = flat(x)
            readable[part] = own[:: 4 // x.itemsize]
            writable[part] = readable[part] & (i >= len(tensors) - outputs)

    def addresses(self):
        offsets = [x.storage_offset() * x.itemsize for x in self.tensors]
        return [AT + 4 * start + offset for start, offset in zip(self.starts, offsets)]

    def bring_back(self):
        """What is in memory now, into the tensors."""
        for x, start in zip(self.tensors, self.starts):
            flat(x)[:] = self.memory.words[start : start + len(flat(x))]


program = cache(read)  # most texts are played more than once


def flat(x):
    """The words of a tensor's storage, with what lies between its rows."""
    return x.new_empty(0).set_(x.untyped_storage()).view(torch.int32).numpy().view(np.uint32)


def backward(ptx: str, given, **how):
    """(d_z, sums FP32 [L, 6, H]) as hopper_norm_gate.launch makes them."""
    d_h, z, bias, scales, stats = given
    n, length, width = d_h.shape
    segments = -(-n // SEGMENT)
    d_z = apart(torch.full_like(z, NAN))
    parts = torch.full((segments, length, 6, width), NAN)
    room = Room((d_h, z, bias, *scales, stats, d_z, parts), outputs=2)
    strides = (*d_h.stride()[:2], *z.stride()[:2], bias.stride(0), *d_z.stride()[:2])
    arguments = (*room.addresses(), n, length, *(stride // 8 for stride in strides))
    play(program(ptx), room.memory, arguments, length * segments, plan(width).BYTES, **how)
    room.bring_back()
    return d_z, sum(parts[1:], parts[0])


def exact(given):
    """The same in FP64, of BF16 numbers: z + bias is rounded, as in the forward."""
    d_h, z, bias, scales, _ = given
    d_h, z, scales = d_h.double(), (z + bias).double(), [x.double() for x in scales]
    d_z, sums = [], []
    for token in range(d_h.shape[1]):
        part, none = slice(token, token + 1), bias.new_zeros(1, z.shape[-1]).double()
        of_z, of_bias, *rest = reference.norm_gate_backward(d_h[:, part], z[:, part], none, *scales)
        d_z.append(of_z)
        sums.append(torch.stack([*of_bias.view(2, -1), *rest]))
    return torch.cat(d_z, 1), torch.stack(sums)


def error(given, got) -> float:
    """The largest relative Frobenius error of all halves of rows and sums."""
    worst = []
    for x, y in zip(got, exact(given)):
        x, y = (a.double().reshape(-1, given[0].shape[-1]) for a in (x, y))
        worst.append((x - y).norm(dim=1) / y.norm(dim=1))
    return float(torch.cat(worst).nan_to_num(torch.inf).max())


def same_bits(one, other) -> bool:
    return all(bit_report(x, y) for x, y in zip(one, other))


def edited(ptx: str, pattern: str, new: str, which: int | None = None) -> str:
    """All places, or one of them, exchanged; there is at least one."""
    places = list(re.finditer(pattern, ptx))
    assert places, f"no {pattern} in the PTX"
    for place in reversed(places if which is None else [places[which]]):
        ptx = ptx[: place.start()] + place.expand(new) + ptx[place.end() :]
    return ptx


@pytest.mark.parametrize("width", ["7680", "4112", "5104", "6128"])
def test_against_fp64(kernels, width):
    given = drawn(3, 2, int(width))
    assert error(given, backward(kernels[width], given)) <= LIMIT


@pytest.mark.parametrize("n", [1, 2, SEGMENT + 2])
def test_ends_of_segments(kernels, n):
    """Rows with no other to follow them, and a second segment that is not full."""
    given = drawn(n, 1, 4112)
    assert error(given, backward(kernels["4112"], given)) <= LIMIT


@pytest.mark.parametrize("width", ["7680", "4112"])
def test_no_order_of_warps_or_copies_shows(kernels, width):
    """Five rows: once round the ring of statistics, and on."""
    given = drawn(5, 1, int(width))
    first = backward(kernels[width], given)
    for name, turns in ORDERS.items():
        for early in (False, True) if turns else (True,):  # together and late: the first
            got = backward(kernels[width], given, turns=turns, early=early)
            assert same_bits(got, first), f"{name}, copies land {'early' if early else 'late'}"


def test_a_slice_of_the_tokens_has_the_bits_of_the_whole(kernels):
    d_h, z, bias, scales, stats = drawn(3, 3, 7680)
    d_z, sums = backward(kernels["7680"], (d_h, z, bias, scales, stats))
    for part in (slice(0, 1), slice(1, 3)):
        given = (d_h[:, part], z[:, part], bias[part], scales, stats[:, :, part].contiguous())
        assert same_bits(backward(kernels["7680"], given), (d_z[:, part], sums[part]))


# -- what is wrong is seen -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "which, change",
    [
        pytest.param(0, lambda d_h: apart(d_h.roll(1, 0)), id="gradients of another row"),
        pytest.param(1, lambda z: apart(z.roll(1, 0)), id="another row"),
        pytest.param(2, lambda bias: bias.roll(2, 1), id="bias of other columns"),
        pytest.param(3, lambda scales: (scales[1], scales[0], *scales[2:]), id="beta for gamma"),
        pytest.param(4, lambda stats: stats.roll(1, 1), id="statistics of another row"),
    ],
)
def test_a_wrong_argument_is_missed(kernels, which, change):
    given = drawn(3, 1, 4112)
    wrong = [change(x) if i == which else x for i, x in enumerate(given)]
    assert error(given, backward(kernels["4112"], wrong)) > LIMIT


@pytest.mark.parametrize(
    "which, pattern, new",
    [
        # The first wait comes after a wait for all.
        *((i, r"cp\.async\.wait_group 2;", "cp.async.wait_group 3;") for i in (1, 2, 3)),
        (0, r"cp\.async\.wait_all;", ""),
    ],
)
def test_a_wait_too_few_shows_where_copies_land_late(kernels, which, pattern, new):
    given, ptx = drawn(4, 1, 4112), kernels["4112"]
    less = edited(ptx, pattern, new, which)
    assert same_bits(backward(less, given, early=True), backward(ptx, given))
    assert not same_bits(backward(less, given), backward(ptx, given))


def test_copies_may_not_outlive_the_program(kernels):
    ptx = edited(kernels["4112"], r"cp\.async\.wait_all;", "", 1)
    with pytest.raises(Fault, match="still on their way"):
        backward(ptx, drawn(1, 1, 4112))


def test_every_sum_and_every_output_is_missed(kernels):
    """Of each piece of two words or one, three sums in shared memory, six that leave, and d_z."""
    given, ptx = drawn(1, 1, 4112), kernels["4112"]
    store = r"(@[%\w]+ )?st\.(shared\.v[24]\.f32|global)[^;]*;"
    stores = (3 + 6) * (2 + 2 + 1) + 2 * 3
    assert len(re.findall(store, ptx)) == stores
    for which in range(stores):
        assert error(given, backward(edited(ptx, store, "", which), given)) > LIMIT, which


NO_BARRIER = (r"bar\.sync\s+0;", "")


@pytest.mark.parametrize(
    "which, edit",
    [
        # The first is of the buffer's declaration; nothing goes on between it and the second.
        pytest.param(1, NO_BARRIER, id="no barrier behind the zeros"),
        pytest.param(2, NO_BARRIER, id="no barrier behind the first statistics"),
        pytest.param(3, NO_BARRIER, id="no barrier in a row"),
        pytest.param(None, (r"(and\.b32\s+%r\d+, %r\d+, )48;", r"\g<1>16;"), id="a ring of two"),
        pytest.param(0, (r"sub\.s32\s+(%r\d+), %r\d+, \1;", ""), id="one place for warps' sums"),
    ],
)
def test_warps_that_are_not_kept_apart_show(kernels, which, edit):
    given, ptx = drawn(4, 1, 4112), kernels["4112"]
    wrong, first = edited(ptx, *edit, which), backward(ptx, given)
    ways = [(turns, early) for turns in (ONE_BY_ONE, ONE_BY_ONE[::-1]) for early in (True, False)]
    assert same_bits(backward(wrong, given), first), "seen without any order"
    assert not all(same_bits(backward(wrong, given, turns=x, early=y), first) for x, y in ways)


@pytest.mark.parametrize("opcode", ["st.global", "cp.async.c", "cp.async.bulk", "ld.global"])
def test_what_is_beyond_a_row_may_not_be_touched(kernels, opcode):
    ptx = edited(kernels["4112"], rf"@[%\w]+ ({re.escape(opcode)})", r"\1")
    with pytest.raises(Fault, match="not the kernel's"):
        backward(ptx, drawn(2, 1, 4112))
