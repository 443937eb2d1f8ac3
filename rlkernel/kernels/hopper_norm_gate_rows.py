"""Rows on their way into shared memory for hopper_norm_gate_kernel.

cp.async, a piece at a time. A thread copies the very bytes that it will read, so no barrier stands
between; a row's piece is called for as soon as the row before has been read from its place. The
statistics of a row, four numbers for all threads, are called two rows ahead into a ring of four
places: the barrier of the row between is the one that shows them to every thread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rlkernel.kernels.hopper_norm_gate_columns import ROW_DH, ROW_G, ROW_U, columns
from rlkernel.kernels.hopper_norm_gate_words import operands


@gluon.constexpr_function
def _copy(n: int, masked: bool) -> str:
    """n words: outputs, shared addresses, global addresses, whether they are there."""
    copy = f"cp.async.{'cg' if n == 4 else 'ca'}.shared.global [${n}], [${2 * n}], {4 * n};"
    if not masked:
        return copy
    return f"{{.reg .pred p; setp.ne.b32 p, ${3 * n}, 0; @p {copy}}}"


@gluon.constexpr_function
def _load(n: int) -> str:
    if n == 1:
        return "ld.shared.b32 $0, [$1];"
    return f"ld.shared.v{n}.b32 {{{', '.join(f'${i}' for i in range(n))}}}, [${n}];"


@gluon.constexpr_function
def _wait(n: int) -> str:
    return f"cp.async.wait_group {n}; mov.b32 $0, 0;"


@gluon.jit
def place_in_row(base, ROW: gl.constexpr, PIECE: gl.constexpr, P: gl.constexpr):
    return base + ROW * P.PADDED + columns(PIECE, P) * 4


@gluon.jit
def _call(pointer, base, ROW: gl.constexpr, PIECE: gl.constexpr, P: gl.constexpr):
    """None beyond the row."""
    C: gl.constexpr = P.WORDS[PIECE]
    at = columns(PIECE, P)
    TEXT: gl.constexpr = _copy(C, P.FIRST[PIECE] + 2 * 32 * P.WARPS * C > P.H)
    KINDS: gl.constexpr = operands(C, "rlr")
    there = (at < P.H // 2).to(gl.int32)
    gl.inline_asm_elementwise(
        TEXT, KINDS, [place_in_row(base, ROW, PIECE, P), (pointer + at).to(gl.int64), there],
        gl.int32, False, C,
    )  # fmt: skip


@gluon.jit
def call(z, d_h, base, PIECE: gl.constexpr, P: gl.constexpr):
    """A piece of a row: U, G and the gradient of h."""
    _call(z, base, ROW_U, PIECE, P)
    _call(z + P.H // 2, base, ROW_G, PIECE, P)
    _call(d_h, base, ROW_DH, PIECE, P)
    gl.inline_asm_elementwise(
        "cp.async.commit_group; mov.b32 $0, 0;", "=r,r", [0], gl.int32, False, 1
    )


@gluon.jit
def _come(base, ROW: gl.constexpr, PIECE: gl.constexpr, P: gl.constexpr):
    TEXT: gl.constexpr = _load(P.WORDS[PIECE])
    KINDS: gl.constexpr = operands(P.WORDS[PIECE], "r")
    place = place_in_row(base, ROW, PIECE, P)
    return gl.inline_asm_elementwise(TEXT, KINDS, [place], gl.int32, False, P.WORDS[PIECE])


@gluon.jit
def come(base, PIECE: gl.constexpr, P: gl.constexpr):
    """The words of U, G and the gradient of h of the piece that was called longest ago. A row's
    worth of pieces is on its way at any time.
    """
    TEXT: gl.constexpr = _wait(len(P.WORDS) - 1)
    gl.inline_asm_elementwise(TEXT, "=r,r", [0], gl.int32, False, 1)
    u, g = _come(base, ROW_U, PIECE, P), _come(base, ROW_G, PIECE, P)
    return u, g, _come(base, ROW_DH, PIECE, P)


@gluon.jit
def all_come():
    gl.inline_asm_elementwise("cp.async.wait_all; mov.b32 $0, 0;", "=r,r", [0], gl.int32, False, 1)


@gluon.jit
def call_statistics(stats, rows, base, n, there, P: gl.constexpr):
    """Row n's, which goes with the next piece that is called; four threads ask for a number."""
    gl.inline_asm_elementwise(
        """{.reg .pred p; .reg .b32 t, a; .reg .b64 g; mov.u32 t, %tid.x; setp.lt.u32 p, t, $3;
        shl.b32 a, t, 2; add.s32 a, a, $1; cvt.u64.u32 g, t; mad.lo.u64 g, g, $4, $2;
        @p cp.async.ca.shared.global [a], [g], 4; mov.b32 $0, 0;}""",
        "=r,r,l,r,l",
        [base + (P.RING + (n & 3) * 16), stats.to(gl.int64), there.to(gl.int32) * 4, rows * 4],
        gl.int32, False, 1,
    )  # fmt: skip


@gluon.jit
def statistics(base, n, P: gl.constexpr):
    """mean and rstd of U and of G of row n."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r",
        [base + (P.RING + (n & 3) * 16)],
        (gl.float32, gl.float32, gl.float32, gl.float32), False, 1,
    )  # fmt: skip
