"""Made-up traces in the form that torch.profiler writes: kernels on streams, their launches on the
host, ranges around the launches. Microseconds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

MARK = "a2a-ffn/with-sm"
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
PEER = "Memcpy PtoP (Device -> Device)"
LOCAL = "Memcpy DtoD (Device -> Device)"
GEMM = "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT"
SILU = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(at::TensorIterator"
    "Base&)::{lambda()#1}, std::array<char*, 2ul> >(int, at::native::silu_kernel)"
)
PACK = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const> >(int)"
)
SPIN = "(anonymous namespace)::spin_kernel(long)"
FUSED = "_a2a_gemm_kernel"
CALLS = {"gpu_memcpy": "cudaMemcpy2DAsync", "gpu_memset": "cudaMemsetAsync"}


class Book:
    """A trace under construction; launches stand in the mark that is open, 1 us apart."""

    def __init__(self, rank: int = 0, base: int = 1_700_000_000_000_000_000):
        self.events: list[dict] = [{"ph": "M", "name": "process_name", "pid": 77, "tid": 0,
                                    "args": {"name": "python"}}]  # fmt: skip
        self.rank, self.base, self.clock, self.next = rank, base, 0.0, 1

    def add(self, cat: str, name: str, start: float, length: float, tid: int, **args) -> None:
        self.events.append({
            "ph": "X", "cat": cat, "name": name, "pid": 77, "tid": tid, "ts": start, "dur": length,
            "args": args,
        })  # fmt: skip

    def run(
        self,
        name: str,
        stream: int,
        start: float,
        end: float,
        *,
        label: str = "",
        lost=False,
        **args,
    ) -> Book:
        """A kernel or a copy, with its launch. lost: the launch only."""
        cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        call = CALLS.get(cat, "cudaLaunchKernelExC")
        if label:
            self.add("user_annotation", label, self.clock, 0.9, 77)
        self.add("cuda_runtime", call, self.clock + 0.1, 0.5, 77, correlation=self.next)
        if not lost:
            more = {"device": 0, "stream": stream, "correlation": self.next, "bytes": 64, **args}
            self.add(cat, name, start, end - start, stream, **more)
        self.clock, self.next = self.clock + 1, self.next + 1
        return self

    def mark(self, name: str = MARK) -> Book:
        """Close a range of that name around everything launched since the last one."""
        begin = getattr(self, "closed", 0.0)
        self.add("user_annotation", name, begin, self.clock - begin, 77)
        self.add("gpu_user_annotation", name, begin, 5000.0, 7)
        self.closed = self.clock = self.clock + 1
        return self

    def json(self, **more) -> dict:
        head = {"schemaVersion": 1, "baseTimeNanoseconds": self.base, "host_name": "secret-host"}
        head["distributedInfo"] = {"backend": "nccl", "rank": self.rank, "world_size": 2}
        return {**head, "traceName": "/home/somebody/t.json", "traceEvents": self.events, **more}

    def write(self, path: Path, plain: bool = False) -> Path:
        data = json.dumps(self.json()).encode()
        path.write_bytes(data if plain else gzip.compress(data))
        return path


def half(comm: str = NCCL, **how) -> Book:
    """100 us of communication, half of them beside a product, a second half beside nothing."""
    return Book().run(comm, 9, 100, 200, **how).run(GEMM, 7, 150, 300).mark()


def chunks(rank: int = 0, late: float = 0.0) -> Book:
    """Two chunks: a packing, two exchanges, two products behind them, one element-wise kernel."""
    made = Book(rank)
    made.run(PACK, 7, 100, 120).run(NCCL, 9, 120, 160).run(NCCL, 9, 161, 201 + late)
    return made.run(GEMM, 7, 161, 221).run(GEMM, 7, 222 + late, 282).run(SILU, 7, 283, 300).mark()
