"""How a call over ranks is cut into programs and rounds: tables of sizes, and the launch.

All ranks must cut alike, so nothing but the bytes and the number of ranks decides: not the address
of a tensor, not the device, not what else runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from rlkernel.kernels.fold import check_devices
from rlkernel.kernels.peer_memory import Peers

KINDS = {
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.int32: tl.int32,
    torch.int16: tl.int16,
    torch.int8: tl.int8,
}
MOST = 1 << 30  # elements of a call: the kernels count them in 32 bits
KB, MB, ANY = 1 << 10, 1 << 20, float("inf")


@dataclass(frozen=True)
class Shot:
    """`block` bytes a program and round, `lanes` programs at most; form: see peer_reduce.py."""

    form: str
    block: int
    lanes: int
    warps: int


# Up to how many bytes which form. Between two ranks both of the flagged forms push the same bytes.
STEPS_OF_TWO = (
    (32 * KB, Shot("words", 1024, 256, 4)),
    (128 * KB, Shot("words", 2048, 256, 4)),
    (256 * KB, Shot("words", 4096, 256, 8)),
    (1 * MB, Shot("once", 8192, 256, 8)),
    (ANY, Shot("once", 16384, 256, 8)),
)
STEPS_OF_MORE = (
    (64 * KB, Shot("words", 1024, 256, 4)),
    (256 * KB, Shot("once", 4096, 256, 4)),
    (1 * MB, Shot("twice", 4096, 256, 4)),
    (ANY, Shot("twice", 8192, 256, 8)),  # larger blocks of eight ranks need too many registers
)
# Reduce-scatter and all-gather: bytes from one rank to another.
STREAM_OF_TWO = ((1 * MB, Shot("once", 8192, 256, 8)), (ANY, Shot("once", 16384, 256, 8)))
STREAM_OF_MORE = ((ANY, Shot("once", 8192, 256, 8)),)


def shot(count: int, size: int) -> Shot:
    """The form of an all-reduce of `count` bytes over `size` ranks."""
    return _step(STEPS_OF_TWO if size == 2 else STEPS_OF_MORE, count)


def stream(count: int, size: int) -> Shot:
    """The same for `count` bytes from each rank to each other one, flagged."""
    return _step(STREAM_OF_TWO if size == 2 else STREAM_OF_MORE, count)


def _step(steps: tuple[tuple[float, Shot], ...], count: int) -> Shot:
    return next(cut for up_to, cut in steps if count <= up_to)


def launch(
    kernel, x: Tensor, out: Tensor, count: int, peers: Peers, cut: Shot, itemsize: int,
    parts: int = 1, **meta,
) -> None:  # fmt: skip
    """Run a kernel of rounds over `count` elements; parts: blocks that a program takes at once."""
    block = min(cut.block, peers.arena.chunk) // itemsize
    lanes = min(cut.lanes, peers.arena.lanes, -(-count // (block * parts)))
    if count:
        kernel[(lanes,)](
            x, out, count, peers.bases, peers.epochs, peers.limit_ns,
            BLOCK=block, num_warps=cut.warps, **peers.constants(), **meta,
        )  # fmt: skip


def check(x: Tensor, out: Tensor, counts: tuple[int, int], dtypes: tuple[torch.dtype, ...]) -> None:
    """TypeError, ValueError unless a kernel can run on x and out of so many elements each."""
    if x.dtype != out.dtype or x.dtype not in dtypes:
        kinds = ", ".join(map(str, dtypes))
        raise TypeError(f"x is {x.dtype}, out is {out.dtype}: expected the same of {kinds}")
    if not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError("x and out must be contiguous: call .contiguous() on them")
    if (x.numel(), out.numel()) != counts:
        raise ValueError(f"out {tuple(out.shape)} does not fit x {tuple(x.shape)}")
    if max(counts) > MOST:
        raise ValueError(f"{max(counts)} elements are too many for one call: at most {MOST}")
    check_devices(x=x, out=out)
