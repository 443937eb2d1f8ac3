"""Memory of a group that all of its ranks can write: where symmetric transports meet.

On GPUs of one host it is torch's symmetric memory: every rank allocates an arena and gets the
addresses of the others' (NVLink multicast is never used). On a CPU its stand-in is host memory that
the processes share, so that the very same kernels, interpreted, run the very same protocol.

Opening is collective over the group, once; it cannot happen while a CUDA graph is captured.
"""

from __future__ import annotations

import ctypes
import datetime
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rlkernel.collectives.errors import PeerLost
from rlkernel.kernels.bf16 import INTERPRETED
from rlkernel.kernels.peer_memory import Arena, Peers

STAND_IN = {"lanes": 2, "chunk": 8192, "words": 8192}  # an interpreter's lane is no faster for more


class OpenArena:
    """One rank's end of a group's memory. `peers` is what the kernels take; bytes: this rank's."""

    def __init__(
        self,
        peers: Peers,
        word: ctypes.c_int32,
        reach: Callable[[int], torch.Tensor],
        keep: object,
    ) -> None:
        self.peers, self._word, self._keep = peers, word, keep
        self.reach = reach  # a rank's slots as bytes, for who measures the link
        self.bytes = peers.arena.bytes

    def missing(self) -> int | None:
        """The position in the group of the rank that did not come, once this rank knows of it."""
        return self._word.value - 1 if self._word.value else None

    def close(self) -> None:
        """Give the memory back. The group must not use it any more."""
        self._keep = self.reach = None


def open_arena(
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    index: int,
    device: torch.device,
    store: dist.Store,
    timeout_s: float,
) -> OpenArena:
    """The group's memory on this device. All ranks of the group must call it, in the same order.

    Raises ValueError under graph capture, for GPUs that cannot reach each other, and on a CPU
    without Triton's interpreter; PeerLost when a rank does not come.
    """
    if device.type == "cuda":
        return _on_gpus(group, len(ranks), index, device, timeout_s)
    return _on_host(ranks, index, store, timeout_s)


def host_id() -> str:
    """Equal for the ranks that may share memory; an emulated node is a host of its own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.exists() else os.uname().nodename
    return f"{name} {os.environ.get('NCCL_HOSTID', '')}"


def _on_gpus(group, size: int, index: int, device: torch.device, timeout_s: float) -> OpenArena:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "symmetric memory cannot be opened while a CUDA graph is captured: "
            "make the call once before capturing it"
        )
    if torch.version.hip or torch.cuda.get_device_capability(device)[0] < 9:
        raise ValueError(
            f"{torch.cuda.get_device_name(device)}: symmetric memory is for NVIDIA's SM90 and "
            "later here; use the nccl transport"
        )
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric

    arena = Arena(size)
    buffer = symmetric.empty(arena.bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(buffer, group)
    host = torch.zeros(1, dtype=torch.int32).pin_memory()
    bases = torch.tensor([*handle.buffer_ptrs, host.data_ptr()], dtype=torch.int64, device=device)
    epochs = torch.zeros(arena.lanes, dtype=torch.int32, device=device)
    buffer.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group, device_ids=[device.index])  # nobody writes before everybody is zero
    torch.cuda.synchronize(device)
    word = ctypes.c_int32.from_address(host.data_ptr())
    peers = Peers(arena, index, bases, epochs, int(timeout_s * 1e9))
    size, first = arena.word_slots - arena.slots, arena.slots

    def reach(place: int) -> torch.Tensor:
        return handle.get_buffer(place, (size,), torch.uint8, first)

    return OpenArena(peers, word, reach, (buffer, handle, host))


def _on_host(ranks: Sequence[int], index: int, store: dist.Store, timeout_s: float) -> OpenArena:
    if not INTERPRETED:
        raise ValueError(
            "symmetric memory on a CPU is a stand-in whose kernels are interpreted: set "
            "TRITON_INTERPRET=1 before the start, or use the gloo transport"
        )
    arena = Arena(len(ranks), **STAND_IN)
    own = os.memfd_create("rlkernel-arena")
    os.ftruncate(own, arena.bytes)
    group = "-".join(map(str, ranks))
    prefix = f"arena/{group}/{store.add(f'arena/opened/{group}/{index}', 1)}"
    store.set(f"{prefix}/{index}", f"/proc/{os.getpid()}/fd/{own}")
    maps = []
    for place, rank in enumerate(ranks):
        _wait(store, f"{prefix}/{place}", rank, timeout_s)
        with open(store.get(f"{prefix}/{place}").decode(), "r+b") as file:
            maps.append(mmap.mmap(file.fileno(), arena.bytes))
    store.set(f"{prefix}/{index}/mapped", "yes")
    for place, rank in enumerate(ranks):  # until then the others open this rank's file
        _wait(store, f"{prefix}/{place}/mapped", rank, timeout_s)
    os.close(own)
    host = torch.zeros(1, dtype=torch.int32)
    views = [ctypes.c_char.from_buffer(view) for view in maps]
    addresses = [ctypes.addressof(view) for view in views]
    bases = torch.tensor([*addresses, host.data_ptr()], dtype=torch.int64)
    peers = Peers(
        arena, index, bases, torch.zeros(arena.lanes, dtype=torch.int32), int(timeout_s * 1e9)
    )

    def reach(place: int) -> torch.Tensor:
        return torch.frombuffer(maps[place], dtype=torch.uint8)[arena.slots : arena.word_slots]

    word = ctypes.c_int32.from_address(host.data_ptr())
    return OpenArena(peers, word, reach, (views, maps, host))


def _wait(store: dist.Store, key: str, rank: int, timeout_s: float) -> None:
    try:
        store.wait([key], datetime.timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerLost(
            f"rank {rank} did not share its memory within {timeout_s:g} s", ranks=(rank,)
        ) from error
