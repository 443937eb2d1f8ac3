"""norm_gate_backward for wide rows on Hopper: the same gradients in one pass, BF16 only.

    z [N, L, 2H], d_h [N, L, H] -> d_z [N, L, 2H], sums FP32 [L, 6, H]

A program has a segment of SEGMENT rows of a token, as there; three of the six sums a column are in
shared memory, three in registers, and each column of everything belongs to one thread. Other bits
than norm_gate_backward's: dv and da are not rounded on their own, and the bias' gradient sums d_z
before it is rounded. As there, nothing depends on the order in which programs end, nor on L.

At H = 7680 a row costs 57 instructions a warp and column of U and of G, without a spill, and 48
bytes of shared memory a column. At three quarters of a copy's rate there is time for 75 (at 1470
MHz, with 256 rows an SM) and for 75 bytes; what counts is that its eight warps seldom wait.

Floor: 5 H elements a row, 3 H of them read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.kernels.hopper_norm_gate_columns import plan
from rlkernel.kernels.hopper_norm_gate_kernel import backward_kernel
from rlkernel.kernels.norm_gate_backward import SEGMENT
from rlkernel.kernels.ordered_sum import ordered_sum

NARROW = 4096  # up to here norm_gate_backward has all sums of a row in one program as well
WIDEST = 7680  # beyond it, sums, parameters and a row do not fit into an SM's shared memory


def takes(d_h: Tensor, z: Tensor, bias: Tensor, scales: tuple[Tensor, ...], d_z: Tensor) -> bool:
    """Can launch do it? The same answer for any slice of the tokens."""
    try:
        check({"d_h": d_h, "z": z, "bias": bias, "d_z": d_z}, scales, d_h.shape[-1])
    except (TypeError, ValueError):
        return False
    return True


def launch(
    d_h: Tensor,
    z: Tensor,
    bias: Tensor,
    scales: tuple[Tensor, Tensor, Tensor, Tensor],
    stats: Tensor,
    d_z: Tensor,
    sums: Tensor,
    segment: int = SEGMENT,
) -> None:
    """As norm_gate_backward.launch: write d_z[N, L, 2H], and to sums FP32 [L, 6, H] what is summed
    over N. The caller has checked all shapes.

    Raises TypeError for anything but BF16, ValueError for H up to 4096, above 7680 or no multiple
    of 16, for rows that do not begin at multiples of 16 bytes, and for a GPU other than Hopper.
    """
    n, length, width = d_h.shape
    check({"d_h": d_h, "z": z, "bias": bias, "d_z": d_z}, scales, width)
    if not d_h.numel():
        sums.zero_()
        return
    config = plan(width)
    segments = -(-n // segment)
    parts = sums if segments == 1 else sums.new_empty(segments, *sums.shape)
    outer = (*d_h.stride()[:2], *z.stride()[:2], bias.stride(0), *d_z.stride()[:2])
    kernel = backward_kernel[(length * segments,)](
        d_h,
        z,
        bias,
        *scales,
        stats,
        d_z,
        parts,
        n,
        length,
        *(stride // 8 for stride in outer),
        SEGMENT=segment,
        P=config,
        num_warps=config.WARPS,
    )
    if kernel.metadata.shared != config.BYTES:  # then PTX has looked for it in the wrong place
        raise RuntimeError(
            f"{kernel.metadata.shared} bytes of shared memory where {config.BYTES} were expected: "
            "this Triton keeps something else there; use norm_gate_backward"
        )
    if segments > 1:
        ordered_sum(parts.flatten(1), sums.view(-1))


def check(rows: dict[str, Tensor], scales: tuple[Tensor, ...], width: int) -> None:
    """Raises as launch does."""
    for name, x in rows.items():
        if x.dtype != torch.bfloat16:
            raise TypeError(f"{name} is {x.dtype}: expected bfloat16; use norm_gate_backward")
    if width % 16 or not NARROW < width <= WIDEST:
        raise ValueError(
            f"H = {width}: expected a multiple of 16 above {NARROW}, up to {WIDEST}; use "
            "norm_gate_backward"
        )
    names = ("gamma_x", "beta_x", "gamma_gate", "beta_gate")
    for name, x in (*rows.items(), *zip(names, scales)):
        if x.data_ptr() % 16 or any(stride % 8 for stride in x.stride()[:-1]):
            raise ValueError(
                f"{name} begins at {x.data_ptr():#x} with strides {x.stride()}: expected each row "
                "at a multiple of 16 bytes; make it contiguous, or use norm_gate_backward"
            )
    device = rows["z"].device
    if not is_hopper(device):
        raise ValueError(f"{device} is no Hopper GPU (sm_90): use norm_gate_backward")


def is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9
