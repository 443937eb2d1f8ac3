"""Whose columns are whose in hopper_norm_gate_kernel, and where they lie in memory.

A row is cut into pieces; of a piece each thread has the same number of neighbouring words, a word
being two BF16 columns. Tensors are [threads, words a thread] all the way.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rlkernel.kernels.hopper_norm_gate_words import put, put_pairs, store_pairs

# What lies where in shared memory, PADDED columns each: three sums in FP32, parameters of U and G,
# and behind these six a row of U, of G and of the gradient of h.
BIAS_G, GAMMA_U, GAMMA_G = (gl.constexpr(k) for k in range(3))
BIAS, GAMMA, BETA = (gl.constexpr(k) for k in range(3, 6))
ROW_U, ROW_G, ROW_DH = (gl.constexpr(24 + 2 * k) for k in range(3))  # bytes a column ahead of it

WARPS = 8
MOST = 4  # words of a piece, which are computed side by side
EXCHANGE, RING = 256, 128  # bytes of what warps leave for each other, and of rows' statistics


@dataclass(frozen=True)
class Plan:
    """Whose columns are whose. Piece i: WORDS[i] words (two columns each) a thread, neighbours,
    from column FIRST[i] of PADDED on. BYTES: shared memory, from LEFT on what warps leave for each
    other, from RING on the statistics of rows to come.
    """

    H: int
    WARPS: int
    WORDS: tuple[int, ...]
    FIRST: tuple[int, ...]
    PADDED: int
    LEFT: int
    RING: int
    BYTES: int


def plan(width: int) -> Plan:
    """As few columns beyond the width as may be, and 16 bytes an access where possible."""
    threads = 32 * WARPS
    words = -(-width // (2 * threads))
    pieces = [MOST] * (words // MOST) + [n for n in (2, 1) if words % MOST & n]
    first = [2 * threads * sum(pieces[:i]) for i in range(len(pieces))]
    padded = 2 * threads * words
    left = 30 * padded
    ring = left + EXCHANGE
    return Plan(width, WARPS, tuple(pieces), tuple(first), padded, left, ring, ring + RING)


@gluon.constexpr_function
def words_layout(words: int, warps: int):
    return gl.BlockedLayout([1, words], [32, 1], [warps, 1], [1, 0])


@gluon.constexpr_function
def lanes_layout(warps: int):
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def words(pointer):
    """BF16 two by two."""
    return pointer.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def columns(PIECE: gl.constexpr, P: gl.constexpr):
    """A piece's words of a row: their numbers [threads, words a thread]."""
    C: gl.constexpr = P.WORDS[PIECE]
    LAYOUT: gl.constexpr = words_layout(C, P.WARPS)
    t = gl.arange(0, 32 * P.WARPS, layout=gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, C, layout=gl.SliceLayout(0, LAYOUT))
    return P.FIRST[PIECE] // 2 + gl.expand_dims(t * C, 1) + gl.expand_dims(j, 0)


@gluon.jit
def load(pointer, PIECE: gl.constexpr, P: gl.constexpr):
    """Words of a piece; none beyond the row."""
    at = columns(PIECE, P)
    if P.FIRST[PIECE] + 2 * 32 * P.WARPS * P.WORDS[PIECE] <= P.H:
        return gl.load(pointer + at)
    else:
        return gl.load(pointer + at, mask=at < P.H // 2, other=0)


@gluon.jit
def store(pointer, x, PIECE: gl.constexpr, P: gl.constexpr):
    at = columns(PIECE, P)
    if P.FIRST[PIECE] + 2 * 32 * P.WARPS * P.WORDS[PIECE] <= P.H:
        gl.store(pointer + at, x)
    else:
        gl.store(pointer + at, x, mask=at < P.H // 2)


@gluon.jit
def place_of(base, WHAT: gl.constexpr, PIECE: gl.constexpr, P: gl.constexpr):
    """Addresses of a sum or of two parameters of a piece: 16 bytes a thread for two words (four
    columns), then all threads' next two; 8 bytes for a single word.
    """
    C: gl.constexpr = P.WORDS[PIECE]
    LAYOUT: gl.constexpr = words_layout(C, P.WARPS)
    EACH: gl.constexpr = 16 if C > 1 else 8
    t = gl.arange(0, 32 * P.WARPS, layout=gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, C, layout=gl.SliceLayout(0, LAYOUT)) // 2 * (32 * P.WARPS * 16)
    START: gl.constexpr = 4 * (WHAT * P.PADDED + P.FIRST[PIECE])
    return base + (gl.expand_dims(t * EACH, 1) + gl.expand_dims(j, 0) + START)


@gluon.jit
def to_lanes(x, P: gl.constexpr):
    return gl.convert_layout(x, lanes_layout(P.WARPS), assert_trivial=True)


@gluon.jit
def to_words(x, PIECE: gl.constexpr, P: gl.constexpr):
    LAYOUT: gl.constexpr = gl.SliceLayout(1, words_layout(P.WORDS[PIECE], P.WARPS))
    return gl.expand_dims(gl.convert_layout(x, LAYOUT, assert_trivial=True), 1)


@gluon.jit
def nothing(P: gl.constexpr):
    """Sums of nought in registers, two for both columns of each word."""
    pieces = ()
    for i in gl.static_range(len(P.WORDS)):
        zero = (columns(i, P) * 0).to(gl.float32)
        pieces += ((zero, zero),)
    return pieces


@gluon.jit
def prepare(of_u, of_g, base, WHAT: gl.constexpr, P: gl.constexpr):
    """A parameter of both halves into shared memory."""
    for i in gl.static_range(len(P.WORDS)):
        put_pairs(place_of(base, WHAT, i, P), load(of_u, i, P), load(of_g, i, P))


@gluon.jit
def clear(base, P: gl.constexpr):
    """Sums and rows of nought in shared memory: what no row fills, beyond H, stays so."""
    for i in gl.static_range(len(P.WORDS)):
        for k in gl.static_range(3):
            at = place_of(base, k, i, P)
            put_pairs(at, at * 0, at * 0)
    t = gl.arange(0, 32 * P.WARPS, layout=lanes_layout(P.WARPS))
    for i in gl.static_range(6 * P.PADDED // (128 * P.WARPS)):
        put(base + (ROW_U * P.PADDED + i * 128 * P.WARPS) + t * 4, (t * 0).to(gl.float32))


@gluon.jit
def leave(parts, x, y, K: gl.constexpr, PIECE: gl.constexpr, P: gl.constexpr):
    """A piece of one sum. H is a multiple of 16, so a thread's words are in the row or not."""
    at = columns(PIECE, P)
    place = (parts + K * P.H + 2 * at).to(gl.int64)
    store_pairs(place, x, y, (at < P.H // 2).to(gl.int32))
