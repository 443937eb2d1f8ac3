"""Joints: two neighbours become one, and the roots of ranks or programs become the whole tree's.

    parts [P, ...]     p0  p1  p2  p3        every + is FP32, rounded to the tree's dtype
                         \\ /     \\ /
                          +       +
                            \\   /
                              +  -> out [...]

gemm_tree folds its leaves with the same `joint`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.contract import ReductionTree
from rlkernel.kernels.bf16 import INTERPRETED, to_bf16, to_fp32

BLOCK = 1024  # elements a program: one 16-byte vector of BF16 a thread, many programs an SM

if INTERPRETED:

    def joint(left, right):
        """The sum of two tiles of one dtype, rounded to it."""
        if left.dtype == tl.float32:
            return left + right
        return to_bf16(to_fp32(left) + to_fp32(right))

else:

    @triton.jit
    def joint(left, right):
        """The sum of two tiles of one dtype, rounded to it."""
        # A BF16 sum rounded once is the FP32 sum rounded to BF16 (24 >= 2 * 8 + 2 bits), and one
        # packed instruction for two elements where the FP32 way takes seven.
        return left + right


@triton.jit
def narrowed(root, BF16: tl.constexpr):
    """A root of either dtype as what `out` stores: BF16 to nearest even, or FP32."""
    if root.dtype == tl.bfloat16:
        if BF16:
            return root
        else:
            return to_fp32(root)
    else:
        if BF16:
            return to_bf16(root)
        else:
            return root


def fold(parts: Tensor, out: Tensor, tree: ReductionTree) -> Tensor:
    """Fold the roots of P equal shards into the root of `tree` -> out.

    parts: [P, ...] in tree.dtype, in rank order; P is a power of two and at most tree.leaves. Each
    part is contiguous; the parts may lie any distance apart. out: [...], BF16 or FP32, contiguous,
    no memory shared with parts. The root is rounded once more to out's dtype where that differs.

    Floor: (P * bytes of a part) read, the bytes of out written; P - 1 additions an element.
    Raises TypeError for a wrong dtype, ValueError for a wrong P, shape, layout or device.
    """
    _check(parts, out, tree)
    count = out.numel()
    if count:
        _fold[(triton.cdiv(count, BLOCK),)](
            parts,
            out,
            count,
            parts.stride(0),
            PARTS=parts.shape[0],
            OUT_BF16=out.dtype == torch.bfloat16,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


@triton.jit
def _fold(
    parts, out, count, stride, PARTS: tl.constexpr, OUT_BF16: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = at < count
    root = _subtree(parts + at, keep, tl.cast(stride, tl.int64), 0, PARTS)
    tl.store(out + at, narrowed(root, OUT_BF16), mask=keep)


@triton.jit
def _subtree(element, keep, stride, FIRST: tl.constexpr, COUNT: tl.constexpr):
    if COUNT == 1:
        return tl.load(element + FIRST * stride, mask=keep)
    else:
        left = _subtree(element, keep, stride, FIRST, COUNT // 2)
        return joint(left, _subtree(element, keep, stride, FIRST + COUNT // 2, COUNT // 2))


def _check(parts: Tensor, out: Tensor, tree: ReductionTree) -> None:
    if parts.dtype != tree.dtype:
        raise TypeError(
            f"parts is {parts.dtype}: {tree.name} keeps its nodes as {tree.dtype}; "
            "pass the roots as the kernels return them"
        )
    check_output(out)
    if parts.ndim < 1 or parts.shape[1:] != out.shape:
        raise ValueError(
            f"parts {tuple(parts.shape)} does not fold into out {tuple(out.shape)}: "
            "expected parts [P, *out.shape]"
        )
    tree.subtree(parts.shape[0])
    if not (parts[0].is_contiguous() and out.is_contiguous()):
        raise ValueError("each part and out must be contiguous: call .contiguous() on them")
    check_devices(parts=parts, out=out)


def check_output(out: Tensor) -> None:
    """TypeError unless a kernel can store into `out`."""
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"out is {out.dtype}: expected torch.bfloat16 or torch.float32")


def check_devices(**tensors: Tensor) -> None:
    """ValueError unless all lie on one device on which a Triton kernel can run."""
    devices = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{places}: expected one device for all; move them with .to()")
    device = next(iter(devices.values()))
    if device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"a Triton kernel cannot run on {device} tensors: expected a CUDA or ROCm device; "
            "set TRITON_INTERPRET=1 before the start or use rlkernel.kernels.reference"
        )
