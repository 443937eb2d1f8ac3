"""The steps of hopper_norm_gate_kernel that are spelled in PTX: packed BF16, and shared memory by
address, so that no barrier comes between what one thread alone reads and writes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _update(n: int, factors: bool) -> str:
    """sums[address] += addends (* factors) of n words' columns; n unused words come out."""
    sums = ", ".join(f"s{i}" for i in range(2 * n))
    steps = ""
    for i in range(2 * n):  # operands: n outputs, n addresses, then n a half of each
        at = 2 * n + i % 2 * n + i // 2
        words = f"${at}, ${at + 2 * n}, s{i}" if factors else f"${at}, s{i}"
        steps += f"{'fma' if factors else 'add'}.rn.f32 s{i}, {words}; "
    return (
        f"{{.reg .f32 s<{2 * n}>; ld.shared.v{2 * n}.f32 {{{sums}}}, [${n}]; {steps}"
        f"st.shared.v{2 * n}.f32 [${n}], {{{sums}}};}}"
    )


@gluon.constexpr_function
def operands(n: int, kinds: str) -> str:
    """Constraints of one output and of each of `kinds`, n times."""
    return ",".join(n * ["=r"] + [kind for kind in kinds for _ in range(n)])


@gluon.constexpr_function
def _at_most(x: int, y: int) -> int:
    return min(x, y)


@gluon.jit
def home(offset):
    """The address of that byte of the program's shared memory, int32."""
    return gl.inline_asm_elementwise(
        "{.reg .b32 b; mov.b32 b, global_smem; add.s32 $0, b, $1;}",
        "=r,r", [offset], gl.int32, True, 1,
    )  # fmt: skip


@gluon.jit
def add_to(at, x, y):
    """FP32 sums of the words' columns += x (the first of each word) and y. Two words at a time, or
    one: 16 or 8 bytes at the address of the first.
    """
    N: gl.constexpr = _at_most(x.shape[1], 2)
    TEXT: gl.constexpr = _update(N, False)
    KINDS: gl.constexpr = operands(N, "rff")
    gl.inline_asm_elementwise(TEXT, KINDS, [at, x, y], gl.int32, False, N)


@gluon.jit
def add_products_to(at, x, y, of_x, of_y):
    """The same += x * of_x and y * of_y."""
    N: gl.constexpr = _at_most(x.shape[1], 2)
    TEXT: gl.constexpr = _update(N, True)
    KINDS: gl.constexpr = operands(N, "rffff")
    gl.inline_asm_elementwise(TEXT, KINDS, [at, x, y, of_x, of_y], gl.int32, False, N)


@gluon.jit
def get(at):
    """FP32 at these addresses of shared memory."""
    return gl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=f,r", [at], gl.float32, False, 1)


@gluon.jit
def put(at, x):
    gl.inline_asm_elementwise("st.shared.b32 [$1], $2;", "=r,r,f", [at, x], gl.int32, False, 1)


@gluon.constexpr_function
def _pairs(n: int, load: bool) -> str:
    """The sums that _update takes, as they are."""
    at = 0 if load else 2 * n
    words = ", ".join(f"${at + i % 2 * n + i // 2}" for i in range(2 * n))
    if load:
        return f"ld.shared.v{2 * n}.b32 {{{words}}}, [${2 * n}];"
    return f"st.shared.v{2 * n}.b32 [${n}], {{{words}}};"


@gluon.jit
def get_pairs(at):
    """The sums at these addresses -> (x, y) of add_to."""
    N: gl.constexpr = _at_most(at.shape[1], 2)
    TEXT: gl.constexpr = _pairs(N, True)
    KINDS: gl.constexpr = "=r,=r,=r,=r,r,r" if N == 2 else "=r,=r,r"
    return gl.inline_asm_elementwise(TEXT, KINDS, [at], (gl.int32, gl.int32), False, N)


@gluon.jit
def put_pairs(at, x, y):
    N: gl.constexpr = _at_most(at.shape[1], 2)
    TEXT: gl.constexpr = _pairs(N, False)
    KINDS: gl.constexpr = operands(N, "rrr")
    gl.inline_asm_elementwise(TEXT, KINDS, [at, x, y], gl.int32, False, N)


@gluon.constexpr_function
def _stored(n: int) -> str:
    words = ", ".join(f"${2 * n + i % 2 * n + i // 2}" for i in range(2 * n))
    return (
        f"{{.reg .pred there; setp.ne.b32 there, ${4 * n}, 0; "
        f"@there st.global.v{2 * n}.b32 [${n}], {{{words}}};}}"
    )


@gluon.jit
def store_pairs(at, x, y, there):
    """x and y in turn from these addresses of global memory on, where they are there."""
    N: gl.constexpr = _at_most(at.shape[1], 2)
    TEXT: gl.constexpr = _stored(N)
    KINDS: gl.constexpr = operands(N, "lrrr")
    gl.inline_asm_elementwise(TEXT, KINDS, [at, x, y, there], gl.int32, False, N)


@gluon.jit
def added(x, y):
    """x + y in FP32, and not x + a * b of what y is made of, which would keep a and b."""
    return gl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], gl.float32, False, 1
    )


# -- BF16 in pairs ---------------------------------------------------------------------------------


@gluon.jit
def plus(x, y):
    """Words of two BF16 each: x + y, rounded once."""
    return gl.inline_asm_elementwise(
        "add.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.int32, True, 1
    )


@gluon.jit
def low(x):
    """The first BF16 of each word as FP32."""
    return gl.inline_asm_elementwise("shl.b32 $0, $1, 16;", "=f,r", [x], gl.float32, True, 1)


@gluon.jit
def high(x):
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, 0xffff0000;", "=f,r", [x], gl.float32, True, 1
    )


@gluon.jit
def low_again(x):
    """low by another instruction: else the compiler keeps FP32 from one half of a row for the
    other, twice the registers of words.
    """
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x1044;", "=f,r", [x], gl.float32, True, 1
    )


@gluon.jit
def high_again(x):
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x3244;", "=f,r", [x], gl.float32, True, 1
    )


@gluon.constexpr_function
def _prefetch(size: int) -> str:
    return (
        "{.reg .pred one; .reg .b32 t; mov.u32 t, %tid.x; setp.lt.u32 one, t, $2; "
        f"@one cp.async.bulk.prefetch.L2.global [$1], {size}; mov.b32 $0, 0;}}"
    )


@gluon.jit
def prefetch(pointer, BYTES: gl.constexpr, there):
    """These bytes, a multiple of 16, into L2; one thread asks, and only if they are there."""
    TEXT: gl.constexpr = _prefetch(BYTES)
    at = pointer.to(gl.int64)
    gl.inline_asm_elementwise(TEXT, "=r,l,r", [at, there.to(gl.int32)], gl.int32, False, 1)


@gluon.jit
def packed(x, y):
    """FP32 x and y -> a word of both, rounded to nearest even."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x, y], gl.int32, True, 1
    )


# -- the order of instructions ---------------------------------------------------------------------


@gluon.constexpr_function
def _cut(k: int) -> str:
    # The labels are this text's own; a trap, so that the branch is not turned into a select.
    return (
        f"{{.reg .pred p; setp.eq.s32 p, $1, {-1 - k}; @p bra COLD; bra.uni DONE; "
        "COLD: trap; DONE: mov.b32 $0, 0;}"
    )


@gluon.jit
def cut(length, K: gl.constexpr):
    """A branch that is never taken, as a length is not negative: ptxas moves no arithmetic across.
    Else it puts off the sums that stay in registers to the end of a row, and keeps their addends
    alive till then. K: another number each time, since equal branches are made one.
    """
    TEXT: gl.constexpr = _cut(K)
    gl.inline_asm_elementwise(TEXT, "=r,r", [length], gl.int32, False, 1)


# -- across a warp, and functions ------------------------------------------------------------------


@gluon.jit
def across(x, DISTANCE: gl.constexpr):
    """x of the lane whose number differs in that bit."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "=f,f,r", [x, DISTANCE], gl.float32, False, 1
    )


@gluon.jit
def of_lane(x, LANE: gl.constexpr):
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=f,f,r", [x, LANE], gl.float32, False, 1
    )


@gluon.jit
def meet():
    """All threads of the program."""
    gl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, 0;", "=r,r", [0], gl.int32, False, 1)


@gluon.jit
def sigmoid(x):
    """1 / (1 + 2^(-x log2 e)), to two units in the last place; 0 where that is below 2^-126."""
    return gl.inline_asm_elementwise(
        """{.reg .f32 t; mul.rn.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;
        add.rn.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t;}""",
        "=f,f", [x], gl.float32, True, 1,
    )  # fmt: skip
