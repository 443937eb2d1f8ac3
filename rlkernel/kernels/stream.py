"""Weights that are read once: the operand tiles of a product with few rows.

Up to 128 rows a GEMM is as fast as its weights arrive. The product is computed transposed,

    out.T[n, m] = sum over k of weight[n, k] * rows.T[k, m]

so that the weights fill the long side of the matrix instruction and the few rows its short one.
Tiles come through TMA descriptors (one thread asks for a whole tile, and what lies outside the
tensor arrives as zeros) or through pointers with masks: the path for misaligned tensors, for other
architectures and for leaves that no tile divides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlkernel.kernels.bf16 import INTERPRETED

MOST_ROWS = 128
SHARED_BYTES = 224 * 1024  # a program's most on Hopper, less what barriers and joints need
FULL = 96  # programs that keep the memory of an H200 busy; fewer leave bandwidth unused


@dataclass(frozen=True)
class DecodeConfig:
    """How the work is cut; never what is computed.

    `block_n` weight rows a program, `block_k` of the reduction a step, `leaves` a program (a power
    of two). `tma` False takes pointer loads.
    """

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    leaves: int = 1
    tma: bool = True


PORTABLE = DecodeConfig(64, 128, num_stages=2, tma=False)  # where TMA and 227 KB are not
POINTERS = DecodeConfig(64, 128, num_stages=3, tma=False)  # tensors that TMA cannot read


@triton.jit
def weight_tile(
    weight, n, k, N, end, stride_n, stride_k,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, K_INNER: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """weight[n : n + BLOCK_N, k : k + BLOCK_K] -> [BLOCK_N, BLOCK_K]; zero from row N, column `end`
    on. K_INNER: k is the contiguous axis in memory, else n is.
    """
    if TMA:
        tile = weight.load([n, k]) if K_INNER else weight.load([k, n]).T
    else:
        rows = n + tl.arange(0, BLOCK_N)[:, None]
        columns = k + tl.arange(0, BLOCK_K)[None, :]
        mask = rows < N if EVEN_K else (rows < N) & (columns < end)
        at = weight + rows.to(tl.int64) * stride_n + columns.to(tl.int64) * stride_k
        tile = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def rows_tile(
    rows, k, M, end, stride_m,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """rows[0 : BLOCK_M, k : k + BLOCK_K].T -> [BLOCK_K, BLOCK_M]; zero from row M and column `end`
    on.
    """
    if TMA:
        tile = rows.load([0, k]).T
    else:
        m = tl.arange(0, BLOCK_M)[None, :]
        columns = k + tl.arange(0, BLOCK_K)[:, None]
        mask = m < M if EVEN_K else (m < M) & (columns < end)
        at = rows + m.to(tl.int64) * stride_m + columns
        tile = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_last")
    return tile


# -- host side -------------------------------------------------------------------------------------


def is_hopper(device: torch.device) -> bool:
    """NVIDIA's SM90. (AMD's gfx94x calls itself capability 9, too.)"""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def fits_tma(tensor: Tensor) -> bool:
    """Can TMA read this matrix on its device: Hopper or newer, 16-byte base and outer stride."""
    if not INTERPRETED and (
        torch.version.hip is not None or torch.cuda.get_device_capability(tensor.device)[0] < 9
    ):
        return False
    outer, inner = sorted(tensor.stride(), reverse=True)
    aligned = tensor.data_ptr() % 16 == 0 and outer * tensor.element_size() % 16 == 0
    return inner == 1 and aligned and tensor.numel() > 0


def descriptor(tensor: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """A TMA descriptor over a matrix: tiles of `block`, zeros outside."""
    return TensorDescriptor.from_tensor(tensor, list(block))


def padded_rows(m: int) -> int:
    """The short side of the matrix instruction for m rows: 16, 32, 64 or 128."""
    if not 1 <= m <= MOST_ROWS:
        raise ValueError(f"M={m} is not supported by a decode schedule: expected 1..{MOST_ROWS}")
    return max(16, triton.next_power_of_2(m))


def stages_that_fit(config: DecodeConfig, m: int, weights: int) -> int:
    """As many of the config's stages as shared memory holds, with tiles of `weights` weights."""
    stage = 2 * config.block_k * (weights * config.block_n + padded_rows(m))
    return max(1, min(config.num_stages, SHARED_BYTES // stage))


def portable() -> bool:
    """Does this machine take the pointer path whatever a table says: it is not NVIDIA's."""
    return not INTERPRETED and torch.version.hip is not None


def spread(config: DecodeConfig, n: int, leaves: int) -> DecodeConfig:
    """`config`, cut finer where n columns and `leaves` leaves make too few programs: fewer leaves a
    program first, then narrower tiles in more stages, so that as many bytes are under way.
    """
    config = replace(config, leaves=min(config.leaves, leaves))
    while triton.cdiv(n, config.block_n) * (leaves // config.leaves) < FULL:
        if config.leaves > 1:
            config = replace(config, leaves=config.leaves // 2)
        elif config.block_n > 32:
            half, stages = config.block_n // 2, min(8, 2 * config.num_stages)
            config = replace(config, block_n=half, num_stages=stages, num_warps=4)
        else:
            break
    return config
