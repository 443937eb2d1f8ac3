"""SMs that the library's products leave to messages beside them.

A product of many tiles is persistent: as many blocks as there are SMs, each there until the last
tile is given out. NCCL's next kernel waits that long, with nothing on the wire. Told of fewer SMs,
cuBLAS leaves some free all the time; on those a kernel of NCCL's would have run anyway.

It may pick another kernel then, with another order of additions: ladder.py looks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch

from rlkernel.collectives.comm import Comm
from rlkernel.overlap import nodes

FEW = 4  # a product of 128 blocks on 132 SMs lets a message over sockets start at once


def between(comm: Comm, silent: bool = False) -> int:
    """How many SMs: none unless NCCL moves the messages of axis "ep", some of them to other nodes.
    silent: as of nodes.of.
    """
    if getattr(comm.links["ep"].transport, "backend", "") != "nccl" or torch.version.hip:
        return 0
    where = nodes.of(comm, silent)
    return FEW if where is not None and len(where.sizes) > 1 else 0


@contextlib.contextmanager
def sms(count: int) -> Iterator[None]:
    """Products of this thread on the current device leave `count` SMs free; 0: whatever they do.
    Raises RuntimeError where cuBLAS is not to be found, or refuses.
    """
    if not count:
        yield
        return
    handle = torch.cuda.current_blas_handle()
    _tell(handle, torch.cuda.get_device_properties().multi_processor_count - count)
    try:
        yield
    finally:
        _tell(handle, 0)


def _tell(handle: int, count: int) -> None:
    """How many SMs there are for it; 0: all."""
    status = _library().cublasSetSmCountTarget(ctypes.c_void_p(handle), count)
    if status:
        raise RuntimeError(f"cublasSetSmCountTarget({count}) returned {status}, not 0")


@functools.cache
def _library() -> ctypes.CDLL:
    """The cuBLAS of this process; torch has loaded it."""
    with open("/proc/self/maps") as maps:
        files = [line.split()[-1] for line in maps if "/libcublas.so" in line]
    if not files:
        raise RuntimeError("torch has loaded no libcublas.so: products cannot be told of fewer SMs")
    return ctypes.CDLL(files[0])
