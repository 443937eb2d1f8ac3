"""One program, one segment of rows of a token: d_z, and six FP32 sums a column.

What a thread computes it also owns: its columns of every row, of the sums and of the parameters. So
sums need no atomics and no barriers. Three of the six stay in registers, three lie in shared
memory, beside the parameters and the next row, 128 bits an access. They are reached by PTX, because
the compiler would put a barrier between the load and the store of a sum; the one buffer below is
all of the program's shared memory (the tests hold the size to that), so it begins where
`global_smem` does.

Between the two halves of a row stand its four sums (level and slope of U and of G): five shuffles,
one exchange among the warps and one barrier. Across it, two columns are kept as four words: U + b_u
and G + b_g rounded as in the forward, gamma_x dv and gamma_gate da rounded here alone. The next
row comes meanwhile (hopper_norm_gate_rows), from L2, where it is called to a row earlier.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rlkernel.kernels.hopper_norm_gate_columns import (
    BETA,
    BIAS,
    BIAS_G,
    GAMMA,
    GAMMA_G,
    GAMMA_U,
    clear,
    lanes_layout,
    leave,
    nothing,
    place_of,
    prepare,
    store,
    to_lanes,
    to_words,
    words,
)
from rlkernel.kernels.hopper_norm_gate_rows import (
    all_come,
    call,
    call_statistics,
    come,
    statistics,
)
from rlkernel.kernels.hopper_norm_gate_words import (
    across,
    add_products_to,
    add_to,
    added,
    cut,
    get,
    get_pairs,
    high,
    high_again,
    home,
    low,
    low_again,
    meet,
    of_lane,
    packed,
    plus,
    prefetch,
    put,
    sigmoid,
)
from rlkernel.kernels.hopper_pipeline import block_barrier


@gluon.jit
def one_way(u, g, dh, of_u, of_g, stats):
    """One of a word's two columns: (dv, da, normal_u, normal_g, gamma_x dv, gamma_gate da).

    silu' = sig + gate sig (1 - sig); with p = dh sig, da = value (p + p gate (1 - sig)).
    """
    gamma_u, beta_u = of_u
    gamma_g, beta_g = of_g
    rstd_u, shift_u, rstd_g, shift_g = stats
    normal_u = gl.fma(u, rstd_u, shift_u)
    normal_g = gl.fma(g, rstd_g, shift_g)
    value = gl.fma(gamma_u, normal_u, beta_u)
    gate = gl.fma(gamma_g, normal_g, beta_g)
    sig = sigmoid(gate)
    passed = dh * sig
    d_value = passed * gate
    d_gate = value * gl.fma(passed, gl.fma(-gate, sig, gate), passed)
    return d_value, d_gate, normal_u, normal_g, d_value * gamma_u, d_gate * gamma_g


@gluon.jit
def row_sums(a, b, c, d, left, P: gl.constexpr):
    """The sums over all threads of four values, in each thread. Two of them change places with two
    of the lane 16 away, one with one of the lane 8 away: a third of the shuffles of four sums.
    """
    LAYOUT: gl.constexpr = lanes_layout(P.WARPS)
    t = gl.arange(0, 32 * P.WARPS, layout=LAYOUT)
    upper = (t & 16) != 0
    x = gl.where(upper, c, a) + across(gl.where(upper, a, c), 16)
    y = gl.where(upper, d, b) + across(gl.where(upper, b, d), 16)
    upper = (t & 8) != 0
    x = gl.where(upper, y, x) + across(gl.where(upper, x, y), 8)
    x += across(x, 4)
    x += across(x, 2)
    x += across(x, 1)
    # Eight lanes store one number.
    put(left + t // 8 * 4, x)
    meet()
    x = get(left + t % 32 * 4)
    for i in gl.static_range(3):
        x += across(x, 4 << i)
    return of_lane(x, 0), of_lane(x, 1), of_lane(x, 2), of_lane(x, 3)


@gluon.jit
def first_half(row, next_z, next_d_h, stats, betas, base, left, length, P: gl.constexpr):
    """-> what is kept of a row, its four sums, and the sums of both betas with it; those of gamma
    are in shared memory. row: its first piece; the next row is called for.
    """
    mean_u, rstd_u, mean_g, rstd_g = stats
    factors = (rstd_u, -mean_u * rstd_u, rstd_g, -mean_g * rstd_g)
    kept, next_betas_x, next_betas_gate = (), (), ()
    LAYOUT: gl.constexpr = lanes_layout(P.WARPS)
    level_u = gl.zeros([32 * P.WARPS], gl.float32, LAYOUT)
    slope_u, level_g, slope_g = level_u, level_u, level_u
    us, gs, dhs = row
    for i in gl.static_range(len(P.WORDS)):
        bias_u, bias_g = get_pairs(place_of(base, BIAS, i, P))
        u, g = plus(us, bias_u), plus(gs, bias_g)
        gamma_u, gamma_g = get_pairs(place_of(base, GAMMA, i, P))
        beta_u, beta_g = get_pairs(place_of(base, BETA, i, P))
        of_u, of_g = (low(gamma_u), low(beta_u)), (low(gamma_g), low(beta_g))
        dv, da, nu, ng, su, sg = one_way(low(u), low(g), low(dhs), of_u, of_g, factors)
        of_u, of_g = (high(gamma_u), high(beta_u)), (high(gamma_g), high(beta_g))
        dv2, da2, nu2, ng2, su2, sg2 = one_way(high(u), high(g), high(dhs), of_u, of_g, factors)
        kept += ((u, g, packed(su, su2), packed(sg, sg2)),)
        call(next_z, next_d_h, base, i, P)
        if i + 1 < len(P.WORDS):
            us, gs, dhs = come(base, i + 1, P)
        level_u += to_lanes(gl.sum(su + su2, 1), P)
        slope_u += to_lanes(gl.sum(gl.fma(su, nu, su2 * nu2), 1), P)
        level_g += to_lanes(gl.sum(sg + sg2, 1), P)
        slope_g += to_lanes(gl.sum(gl.fma(sg, ng, sg2 * ng2), 1), P)
        x, y = betas[0][i]
        next_betas_x += ((added(x, dv), added(y, dv2)),)
        x, y = betas[1][i]
        next_betas_gate += ((added(x, da), added(y, da2)),)
        add_products_to(place_of(base, GAMMA_U, i, P), dv, dv2, nu, nu2)
        add_products_to(place_of(base, GAMMA_G, i, P), da, da2, ng, ng2)
        cut(length, i)
    sums = row_sums(level_u, slope_u, level_g, slope_g, left, P)
    return kept, sums, (next_betas_x, next_betas_gate)


@gluon.jit
def input_gradient(x, scaled, rstd, tilt, lift):
    """rstd (scaled - level / H - normal slope / H), the last two terms as tilt x + lift."""
    return gl.fma(scaled, rstd, gl.fma(x, tilt, lift))


@gluon.jit
def line(level, slope, mean, rstd, H: gl.constexpr):
    """(tilt, lift) of input_gradient."""
    tilt = slope * (rstd * rstd * (-1.0 / H))
    return tilt, gl.fma(level, rstd * (-1.0 / H), -mean * tilt)


@gluon.jit
def second_half(kept, sums, stats, biases, d_z, base, length, P: gl.constexpr):
    """d_z of a row, and the sums of the bias' gradient with it, before d_z is rounded."""
    level_u, slope_u, level_g, slope_g = sums
    mean_u, rstd_u, mean_g, rstd_g = stats
    tilt_u, lift_u = line(level_u, slope_u, mean_u, rstd_u, P.H)
    tilt_g, lift_g = line(level_g, slope_g, mean_g, rstd_g, P.H)
    next_biases = ()
    for i in gl.static_range(len(P.WORDS)):
        u, g, su, sg = kept[i]
        tilt, lift = to_words(tilt_u, i, P), to_words(lift_u, i, P)
        x = input_gradient(low_again(u), low_again(su), rstd_u, tilt, lift)
        y = input_gradient(high_again(u), high_again(su), rstd_u, tilt, lift)
        store(d_z, packed(x, y), i, P)
        low_sum, high_sum = biases[i]
        next_biases += ((added(low_sum, x), added(high_sum, y)),)
        tilt, lift = to_words(tilt_g, i, P), to_words(lift_g, i, P)
        x = input_gradient(low_again(g), low_again(sg), rstd_g, tilt, lift)
        y = input_gradient(high_again(g), high_again(sg), rstd_g, tilt, lift)
        store(d_z + P.H // 2, packed(x, y), i, P)
        add_to(place_of(base, BIAS_G, i, P), x, y)
        if i % 2 == 1:
            cut(length, len(P.WORDS) + i)
    return next_biases


@gluon.jit
def finish(parts, biases, betas, base, P: gl.constexpr):
    """The sums to a scratch, six times H."""
    for i in gl.static_range(len(P.WORDS)):
        leave(parts, biases[i][0], biases[i][1], 0, i, P)
        leave(parts, betas[0][i][0], betas[0][i][1], 3, i, P)
        leave(parts, betas[1][i][0], betas[1][i][1], 5, i, P)
        for k in gl.static_range(3):
            x, y = get_pairs(place_of(base, k, i, P))
            leave(parts, x, y, (1, 2, 4)[k], i, P)


NUMBERS = "n_size l_size d_h_n d_h_l z_n z_l bias_l d_z_n d_z_l".split()


@gluon.jit(do_not_specialize=NUMBERS)
def backward_kernel(
    d_h, z, bias, gamma_x, beta_x, gamma_gate, beta_gate, stats, d_z, parts,
    n_size, l_size, d_h_n, d_h_l, z_n, z_l, bias_l, d_z_n, d_z_l,
    SEGMENT: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Strides in 16 bytes, to which all pointers are aligned."""
    memory = gl.allocate_shared_memory(
        gl.int32, [P.BYTES // 128, 32], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    # The compiler declares only what it sees used. The barrier: this zero must not come late.
    memory.index(P.BYTES // 128 - 1).store(gl.zeros([32], gl.int32, lanes_layout(P.WARPS)))
    block_barrier()
    base = home(gl.to_tensor(0))
    left = base + P.LEFT
    token = (gl.program_id(0) % l_size).to(gl.int64)
    segment = gl.program_id(0) // l_size
    first = segment * SEGMENT
    last = gl.minimum(first + SEGMENT, n_size)
    at = first.to(gl.int64)
    rows = n_size.to(gl.int64) * l_size
    z = words(z) + (at * z_n + token * z_l) * 4
    d_h = words(d_h) + (at * d_h_n + token * d_h_l) * 4
    d_z = words(d_z) + (at * d_z_n + token * d_z_l) * 4
    stats += at * l_size + token
    parts += (segment.to(gl.int64) * l_size + token) * (6 * P.H)
    bias = words(bias) + token * bias_l * 4
    prepare(bias, bias + P.H // 2, base, BIAS, P)
    prepare(words(gamma_x), words(gamma_gate), base, GAMMA, P)
    prepare(words(beta_x), words(beta_gate), base, BETA, P)
    clear(base, P)
    block_barrier()
    for i in gl.static_range(len(P.WORDS)):
        call(z, d_h, base, i, P)
    call_statistics(stats, rows, base, first, first < last, P)
    stats += gl.where(first + 1 < last, l_size, 0)
    call_statistics(stats, rows, base, first + 1, first + 1 < last, P)
    all_come()
    meet()
    row, numbers = come(base, 0, P), statistics(base, first, P)
    biases, betas = nothing(P), (nothing(P), nothing(P))
    for n in range(first, last):
        # The last row is followed by itself.
        z += gl.where(n + 1 < last, z_n, 0) * 4
        d_h += gl.where(n + 1 < last, d_h_n, 0) * 4
        stats += gl.where(n + 2 < last, l_size, 0)
        prefetch(z + z_n * 4, 4 * P.H, n + 2 < last)
        prefetch(d_h + d_h_n * 4, 2 * P.H, n + 2 < last)
        call_statistics(stats, rows, base, n + 2, n + 2 < last, P)
        kept, sums, betas = first_half(row, z, d_h, numbers, betas, base, left, l_size, P)
        next_numbers = statistics(base, n + 1, P)
        biases = second_half(kept, sums, numbers, biases, d_z, base, l_size, P)
        row, numbers = come(base, 0, P), next_numbers
        d_z += d_z_n * 4
        left = 2 * (base + P.LEFT) + 16 * P.WARPS - left
    all_come()
    finish(parts, biases, betas, base, P)
    memory._keep_alive()  # so that nothing of the compiler comes to lie in it
