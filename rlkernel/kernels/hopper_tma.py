"""How matrices meet Hopper's TMA: boxes, shared memory layouts, descriptors, and what is refused.

Descriptors clip: a box that reaches beyond the matrix reads zeros and writes nothing there, so M
and N are free. Base addresses and leading strides must be multiples of 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlkernel.kernels import stream

Box = tuple[list[int], gl.NVMMASharedLayout]


def operand_box(rows: int, block_k: int, k_major: bool) -> Box:
    """TMA box and shared memory layout of `rows` rows (of B: columns) x `block_k` of an operand.

    K-major: [rows, block_k]. Otherwise memory runs along the rows: [block_k, rows], which wgmma
    reads as it is through a permuted view.
    """
    swizzle = block_k * 2 if k_major else 128
    box = [rows, block_k] if k_major else [block_k, rows]
    return box, gl.NVMMASharedLayout(swizzle, 16, rank=2)


def out_box(wide: bool, out_bits: int, columns: int | None = None) -> Box:
    """TMA box and shared memory layout of one block of C, from FP32 words or BF16 pairs."""
    columns = columns or (32 if wide else 64)
    return [64, columns], gl.NVMMASharedLayout(columns * out_bits // 8, out_bits, rank=2)


def operand_refused(name: str, x: Tensor) -> str | None:
    """Why `x` cannot be an operand, or None."""
    if x.ndim != 2 or x.dtype != torch.bfloat16 or not stream.is_hopper(x.device):
        return (
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}: the Hopper kernels take BF16 "
            "matrices on a GPU with SM90; use a portable kernel"
        )
    if not x.numel():
        return f"{name} is {tuple(x.shape)}: it must have elements"
    return None if aligned(x, 0) or aligned(x, 1) else _misaligned(name, x)


def output_refused(name: str, out: Tensor, shape: tuple[int, int], dtypes: tuple) -> str | None:
    """Why `out` cannot receive a row-major result, or None."""
    if tuple(out.shape) != shape or out.dtype not in dtypes or not out.is_cuda:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        return (
            f"{name} is {out.dtype} {tuple(out.shape)} on {out.device}: "
            f"expected {allowed} {shape} on a CUDA device"
        )
    return None if aligned(out, 1) else _misaligned(name, out)


def operand(x: Tensor, k_dim: int, along_k: bool, box: Box) -> TensorDescriptor:
    """Descriptor of an operand that is not refused; its first axis is the one that memory does not
    run along.
    """
    return descriptor(x, k_dim if along_k else 1 - k_dim, box)


def aligned(x: Tensor, inner: int) -> bool:
    """Can TMA read or write `x` with its memory running along axis `inner`?"""
    size, outer = x.element_size(), 1 - inner
    stride = x.stride(outer) * size
    runs = x.stride(inner) == 1 or x.shape[inner] == 1
    strided = x.shape[outer] == 1 or (stride % 16 == 0 and stride >= x.shape[inner] * size)
    return runs and strided and x.data_ptr() % 16 == 0


def _misaligned(name: str, x: Tensor) -> str:
    return (
        f"{name} {x.dtype} {tuple(x.shape)} has strides {x.stride()} at address 16 n + "
        f"{x.data_ptr() % 16}: TMA needs one axis of stride 1, the other stride and the address in "
        "multiples of 16 bytes; pad its rows to 16 bytes, or use a portable kernel"
    )


def descriptor(x: Tensor, inner: int, box: Box) -> TensorDescriptor:
    """Descriptor of a matrix whose memory runs along axis `inner`."""
    outer = 1 - inner
    # The stride of an axis of length 1 says nothing: give TMA one that it accepts.
    stride = x.stride(outer) if x.shape[outer] > 1 else -(-x.shape[inner] // 8) * 8
    shape = [x.shape[outer], x.shape[inner]]
    return TensorDescriptor(x, shape, [stride, 1], box[0], box[1])
