"""What an event of a trace is, by its name.

    comm         NCCL kernels, copies to a peer (the copy engine), gloo's spans
    gemm         products            } these two are compute
    elementwise  every other kernel  }
    copy         memory moved within a device, packing among it: it neither is communication nor
                 hides any
    wait         kernels that spin, signal or stand at a barrier: neither
    fused        a kernel that exchanges and multiplies; a trace does not show its inside

A name decides where it can. Where it cannot, the innermost `record_function` range around the
launch does whose first word is a kind: "comm/dispatch", "fused/gemm1"; "comp/..." is compute.
On a CPU there are no kernels: a thread does what its innermost operator or such range says.

Two things that a span of communication holds besides: an NCCL kernel waits for its peers inside,
and gloo's send and receive last until somebody takes what came.
"""

from __future__ import annotations

import re

KINDS = ("comm", "gemm", "elementwise", "copy", "wait", "fused")
COMPUTE = ("gemm", "elementwise")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
TILE = "tile"  # from inside a kernel (records/tiles.py): for the eye, the analysis leaves it out
RUNTIME = ("cuda_runtime", "cuda_driver")
LAUNCH = re.compile(r"Launch(Cooperative)?Kernel|GraphLaunch|Memcpy\w*Async|Memset\w*Async")
NCCL = re.compile(r"nccl\w*Kernel", re.I)
FUSED = re.compile(r"a2a_gemm", re.I)
WAIT = re.compile(r"(^|[_:])(spin|wait|barrier|signal|put_signal)", re.I)
COPY = re.compile(
    r"direct_copy_kernel|FillFunctor|CatArrayBatchedCopy|(^|[_:])(pack|unpack)_", re.I
)
GEMM = re.compile(r"gemm|cutlass|cublas|nvjet|xmma|bmm|matmul|wgmma|aten::(mm|addmm|linear)", re.I)
MOVES = re.compile(r"aten::(copy_|_to_copy|to|clone|contiguous|cat|_cat|stack|fill_|zero_)$")
# Views and allocations are no work; c10d's operators only hand work over to another thread.
NOTHING = re.compile(
    r"aten::(view|_unsafe_view|reshape|_reshape_alias|transpose|t|permute|narrow|slice|select|split\w*"
    r"|chunk|expand|squeeze|unsqueeze|as_strided|detach|alias|unbind|unflatten|empty\w*|resize_"
    r"|resolve_\w+|is_\w+|result_type|lift_fresh)$"
)


def is_launch(event: dict) -> bool:
    """Whether an event of the host put work on a device."""
    return event.get("cat") in RUNTIME and bool(LAUNCH.search(event["name"]))


def label(name: str) -> str | None:
    """The kind that a range's name gives to what is inside it."""
    word, slash, rest = name.partition("/")
    if not slash:
        return None
    if word == "comp":
        return "gemm" if GEMM.search(rest) else "elementwise"
    return word if word in KINDS else None


def kernel_kind(name: str, category: str, args: dict, labelled: str | None) -> str:
    """What an event of a device is; `labelled`: by the range around its launch."""
    if category == "gpu_memset":
        return "copy"
    if category == "gpu_memcpy":
        ends = args.get("fromDevice"), args.get("toDevice")
        if "PtoP" in name or ends[0] != ends[1]:
            return "comm"
        # Through a mapping of the peer's memory a copy shows as one within the device.
        return "comm" if labelled == "comm" and "DtoD" in name else "copy"
    own = re.split(r"[<(]", name.removeprefix("void ").replace("(anonymous namespace)::", ""))[0]
    if NCCL.search(own):
        return "comm"
    if FUSED.search(own):  # such a kernel waits, too, but not only
        return "fused"
    if WAIT.search(own):
        return "wait"
    if labelled == "fused":
        return "fused"
    if COPY.search(name):
        return "copy"
    return "gemm" if GEMM.search(name) else labelled or "elementwise"


def cpu_kind(event: dict) -> str | None:
    """What an operator or a labelled range of a CPU does; None for what is no work by itself."""
    name = event["name"]
    if event.get("cat") == "user_annotation":
        return label(name)
    if event.get("cat") != "cpu_op" or not name.startswith("aten::") or NOTHING.match(name):
        return None
    return "copy" if MOVES.match(name) else "gemm" if GEMM.search(name) else "elementwise"
