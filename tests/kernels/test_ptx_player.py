"""The player of PTX: what it computes, what it refuses, and that the order of warps and of copies
shows where nothing keeps it out.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.ptx_arithmetic import TABLE
from tests.kernels.ptx_player import Fault, Memory, play
from tests.kernels.ptx_text import read

# Two warps: thread t has the number that thread 63 - t brought from global memory, and adds 3.
REVERSED = """
.visible .entry kernel(.param .u64 kernel_param_0, .param .u32 kernel_param_1)
.reqntid 64
{
    .reg .pred %p<2>; .reg .b32 %r<20>; .reg .b64 %rd<9>;
    .loc 1 2 0  // a line of the source
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b32 %r9, [kernel_param_1];
    mov.u32 %r1, %tid.x;
    mad.wide.u32 %rd2, %r1, 4, %rd1;
    {.reg .b32 b; mov.b32 b, global_smem; shl.b32 %r2, %r1, 2; add.s32 %r3, b, %r2;}
    cp.async.ca.shared.global [%r3], [%rd2], 4;
    cp.async.wait_all;
    bar.sync 0;
    sub.s32 %r4, 1276, %r2;  // 1024 + 4 * 63
    ld.shared.b32 %r5, [%r4];
    mov.b32 %r6, 0;
$L__again:
    add.s32 %r5, %r5, 1;
    add.s32 %r6, %r6, 1;
    {.reg .pred p; setp.lt.s32 p, %r6, %r9; @p bra COLD; bra.uni DONE; COLD: trap; DONE:}
    setp.lt.s32 %p1, %r6, 3;
    @%p1 bra $L__again;
    st.global.b32 [%rd2+256], %r5;
    ret;
}
"""
WARPS = [range(32), range(32, 64)]


def played(ptx: str, number: int = 1, **how):
    words = np.arange(128, dtype=np.uint32) * 10
    memory = Memory(words, 4096, writable=np.arange(128) >= 64)
    play(read(ptx), memory, (4096, number), blocks=1, shared=256, **how)
    return list(words[64:])


def test_a_kernel():
    assert played(REVERSED) == [10 * (63 - i) + 3 for i in range(64)]
    for turns in (WARPS, WARPS[::-1]):
        assert played(REVERSED, turns=turns) == played(REVERSED, early=True) == played(REVERSED)


@pytest.mark.parametrize("turns", [WARPS, WARPS[::-1]])
def test_a_missing_barrier_shows(turns):
    assert played(REVERSED.replace("bar.sync 0;", ""), turns=turns) != played(REVERSED)


def test_a_missing_wait_shows():
    late = REVERSED.replace("cp.async.wait_all;", "").replace("ret;", "cp.async.wait_all; ret;")
    assert played(late, early=True) == played(REVERSED)
    assert played(late) == [2] * 64  # shared memory is 2^32 - 1 at first


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("[%rd2+256]", "[%rd2+258]", "no multiple of 4"),
        ("[%rd2+256]", "[%rd2]", "is written that is not"),
        ("[%rd2+256]", "[%rd2+260]", "is written that is not"),
        ("sub.s32 %r4, 1276,", "sub.s32 %r4, 1280,", "is read that is not"),
        ("sub.s32 %r4, 1276,", "sub.s32 %r4, 252,", "is read that is not"),
        ("%r5, 1;", "%r8, 1;", "%r8 is no number, and no register"),
        ("[%rd2+256], %r5", "[%rd2+256], %rd2", "of 64 bits: expected b32"),
        ("setp.lt.s32 %p1, %r6, 3;", "setp.lt.s32 %p1, %r1, 40;", "part here"),
        ("cp.async.wait_all;", "", "still on their way"),
    ],
)
def test_what_must_not_happen(old, new, says):
    assert old in REVERSED
    with pytest.raises(Fault, match=says.replace("[", r"\[")):
        played(REVERSED.replace(old, new))


def test_a_trap_ends_it():
    with pytest.raises(Fault, match="trap"):
        played(REVERSED, number=9)


def test_a_warp_that_misses_the_barrier():
    alone = REVERSED.replace("bar.sync 0;", "setp.lt.u32 %p1, %r1, 32; @%p1 bar.sync 0;")
    with pytest.raises(Fault, match="threads wait at"):
        played(alone, turns=WARPS)


@pytest.mark.parametrize("opcode", ["add.sat.s32", "mul.hi.s32", "ld.shared.b64", "bar.arrive"])
def test_an_unknown_instruction_is_refused(opcode):
    with pytest.raises(NotImplementedError, match=f"{opcode} is not among"):
        played(REVERSED.replace("ret;", f"{opcode} %r5, %r5, %r5; ret;"))


def f32(*numbers):
    return np.array(numbers, np.float32)


def test_bf16_is_rounded_as_torch_does():
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    bits[:4] = 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7FFFFFFF  # two ties, infinity, NaN
    x = bits.view(np.float32)
    word = TABLE["cvt.rn.bf16x2.f32"].compute(x, x[::-1].copy())
    wanted = torch.from_numpy(np.stack([x[::-1], x], 1)).bfloat16()
    assert_equal(word, wanted)
    total = TABLE["add.rn.bf16x2"].compute(word, word[::-1].copy())
    assert_equal(total, wanted + wanted.flip(0))


def assert_equal(words, wanted):
    got = torch.from_numpy(words.view(np.int16).reshape(-1, 2)).view(torch.bfloat16)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "opcode, given, wanted",
    [
        ("div.s32", np.array([[-7, 7], [2, -2]], np.int32), [-3, -3]),
        (
            "prmt.b32",
            np.array([[0x44332211] * 2, [0] * 2, [0x1044, 0x3244]], np.uint32),
            [0x22110000, 0x44330000],
        ),
        ("mul.wide.s32", np.array([[-1], [2**31 - 1]], np.int32), [1 - 2**31]),
        ("mul.lo.s32", np.array([[65536], [65536]], np.int32), [0]),
        ("shl.b32", np.array([[1], [32]], np.uint32), [0]),
        ("ex2.approx.ftz.f32", f32([-127, 2]), [0, 4]),
        ("rcp.approx.ftz.f32", f32([1e-40, 2e38, 4]), [np.inf, 0, 0.25]),
        ("fma.rn.f32", f32([1 + 2**-12], [1 - 2**-12], [-1]), [-(2.0**-24)]),
    ],
)
def test_arithmetic(opcode, given, wanted):
    with np.errstate(all="ignore"):
        given = given if given.ndim == 2 else given[None]
        assert list(TABLE[opcode].compute(*given)) == wanted
