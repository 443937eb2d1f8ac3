"""The gate's backward for Hopper on a GPU, by hand: against FP64, in poisoned outputs.

    python tests/kernels/gpu_norm_gate.py

Every line is a shape; the first thing that is wrong ends it with an AssertionError.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from rlkernel.compare import bit_report
from rlkernel.experiments.a2a_gemm import LIMIT
from rlkernel.kernels import hopper_norm_gate, norm_gate_backward, reference
from rlkernel.kernels.norm_gate import norm_gate_forward, order_sensitive, parameter_gradients

NAN = float("nan")
# (N, L, H): one row, a segment and a row more, many; widths with and without columns to spare.
SHAPES = [
    *((1, 1, 7680), (2, 1, 4112), (3, 2, 7680), (5, 2, 5136), (128, 1, 7680), (129, 3, 7664)),
    *((257, 2, 6160), (1024, 4, 7680)),
]


def drawn(n, length, width):
    """z, bias and scales, the gradient of h, and the forward's statistics, all with rows that lie
    apart in memory.
    """
    z, bias, *scales = (x.cuda() for x in order_sensitive(n, length, width, torch.bfloat16))
    room = z.new_full((length, n + 1, 2 * width + 16), NAN)
    z = room[:, :n, : 2 * width].transpose(0, 1).copy_(z)
    d_h = torch.randn(n, length, width, device="cuda").to(torch.bfloat16)
    stats = torch.empty(4, n, length, device="cuda")
    norm_gate_forward(z, bias, tuple(scales), stats=stats)
    return d_h, z, bias, tuple(scales), stats


def run(given, launch=hopper_norm_gate.launch):
    """(d_z, sums), and nothing written beside d_z."""
    d_h, z = given[:2]
    n, length, width = d_h.shape
    room = z.new_full((n, length + 1, 2 * width + 32), NAN)
    d_z = room[:, :length, 16 : 16 + 2 * width]
    sums = torch.full((length, 6, width), NAN, device="cuda")
    launch(*given, d_z, sums)
    assert (~room.isnan()).sum() == d_z.numel(), "d_z is not whole, or more is written"
    return d_z, sums


def errors(given, d_z, sums):
    """Relative Frobenius errors of d_z, d_bias and the four scales against FP64."""
    d_h, z, bias, scales, _ = given
    exact = reference.norm_gate_backward(*(x.double() for x in (d_h, z, bias, *scales)))
    got = (d_z, *parameter_gradients(sums, torch.bfloat16))
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(got, exact)]


def main() -> None:
    for shape in SHAPES:
        torch.manual_seed(0)
        given = drawn(*shape)
        d_h, z, bias, scales, stats = given
        first = run(given)
        for got, wanted in zip(run(given), first):
            assert bit_report(got, wanted), "two calls differ"
        found = errors(given, *first)
        other = errors(given, *run(given, norm_gate_backward.launch))
        # Sums of few rows may cancel: then no way of adding has a small relative error.
        for own, portable in zip(found, other):
            assert own <= max(LIMIT, 1.5 * portable), (found, other)
        for low, high in [(0, 1), (1, shape[1])][: shape[1]]:
            part = (d_h[:, low:high], z[:, low:high], bias[low:high], scales)
            got = run((*part, stats[:, :, low:high].contiguous()))
            for x, y in zip(got, (first[0][:, low:high], first[1][low:high])):
                assert bit_report(x, y), "a slice of the tokens has other bits than the whole"
        # Negative control: rows of another token's bias, and statistics of another row.
        wrong = (d_h, z, bias.roll(8, -1), scales, stats)
        assert max(errors(given, *run(wrong))) > 5 * LIMIT, "a wrong bias is not noticed"
        print(f"{shape}: errors {max(found):.1e} (portable {max(other):.1e})", flush=True)


if __name__ == "__main__":
    main()
