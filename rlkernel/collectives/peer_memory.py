"""Memory that other ranks of one host write into by copy engine, and flags that streams wait for.

    sender's stream     2D copy into the peer's buffer ── write flag = epoch on the peer
    receiver's stream   wait until flag >= epoch ── work that reads the buffer

Who sees what: a stream's flag write is ordered behind the copies before it on that stream, and it
makes them visible to whatever the receiving stream runs behind its wait. Neither copy nor flag nor
wait occupies an SM. Epochs only grow, so a flag is never reset.

Two sets of buffers alternate from call to call. A rank writes into a set again two calls later; by
then it has waited for flags of the call between, which their sender's stream wrote behind all that
it read in the call before. So nothing is overwritten that is still read, and nobody waits for it.

A wait that nobody answers would hang its stream for ever: `Watch` releases it after a time limit
and says who did not come. It does so by torch's kernels, which CUDA may not be able to load while a
stream hangs; overlap/watch.py needs none.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel.collectives.comm import Comm
from rlkernel.collectives.errors import PeerLost

SETS = 2
RELEASED = 1 << 30  # a flag value ahead of every epoch


def check_one_host(comm: Comm, axis: str = "ep") -> None:
    """Raise ValueError unless all ranks of the group are on one host (emulated nodes are several).

    Every rank of the group must call it.
    """
    node = f"{socket.gethostname()}/{_boot()}/{os.environ.get('NCCL_HOSTID', '')}"
    name = int.from_bytes(hashlib.sha256(node.encode()).digest()[:7], "big")
    mine = torch.tensor([name], device=comm.device)
    names = comm.all_gather(mine, "peer memory: hosts", axis).tolist()
    if len(set(names)) > 1:
        ranks = comm.links[axis].ranks
        apart = [r for r, other in zip(ranks, names) if other != name]
        raise ValueError(
            f"ranks {apart} are on another node than this one: peers' memory is mapped inside one "
            "host only. Use overlap with-sm or kernel across nodes"
        )


def driver():
    """(cuda.bindings.runtime, cuda.bindings.driver). Raises ValueError where they are not there."""
    try:
        from cuda.bindings import driver, runtime
    except ImportError as error:
        raise ValueError(
            f"copies between peers need the package cuda-bindings, which is not here: {error}"
        ) from error
    return runtime, driver


@dataclass
class PeerMemory:
    """Buffers of `sizes` (elements of `dtype`) on every rank of a group of one host, all mapped.

    buffer(name, set, peer) is that peer's, ours for our own index. Every rank of the group makes it
    at the same time, outside graph capture. flags: how many each sender has on each receiver. last:
    the end of the newest call, behind which the next one begins on whatever stream.
    """

    comm: Comm
    sizes: dict[str, int]
    dtype: torch.dtype
    flags: int
    axis: str = "ep"
    epoch: int = 0
    last: torch.cuda.Event | None = None
    _tables: dict = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "peer memory cannot be set up under graph capture: call the layer once before"
            )
        link = self.comm.links[self.axis]
        if self.comm.device.type != "cuda":
            raise ValueError(f"peer memory is that of GPUs, not of {self.comm.device}")
        driver()
        said = " ".join(f"{name}={size}" for name, size in sorted(self.sizes.items()))
        self.comm.agree(f"{said} {self.dtype} {self.flags}", f"peer memory: {said}", self.axis)
        check_one_host(self.comm, self.axis)
        self.index, self.size, self.device = link.index, link.size, self.comm.device
        group = link.transport.group
        for name, size in self.sizes.items():
            self._map(name, SETS * size, self.dtype, group)
        self._map("flags", link.size * self.flags, torch.int32, group)
        self.table("flags", link.index).zero_()
        torch.cuda.synchronize(self.device)
        self.comm.all_gather(torch.zeros(1, device=self.device), "peer memory: zeroed", self.axis)
        torch.cuda.synchronize(self.device)

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def buffer(self, name: str, which: int, peer: int) -> Tensor:
        """Set `which` (0 or 1) of a buffer on a peer, flat."""
        size = self.sizes[name]
        return self.table(name, peer)[which * size : (which + 1) * size]

    def copy_2d(
        self, to: Tensor, to_pitch: int, of: Tensor, pitch: int, width: int, rows: int, stream
    ) -> None:
        """`rows` rows of `width` elements, from the start of `of` to the start of `to`, whose rows
        lie `pitch` and `to_pitch` elements apart. By copy engine, on `stream`.
        """
        runtime, _ = driver()
        size = of.element_size()
        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        _checked(runtime.cudaMemcpy2DAsync(
            to.data_ptr(), to_pitch * size, of.data_ptr(), pitch * size, width * size, rows, kind,
            stream.cuda_stream,
        ))  # fmt: skip

    def signal(self, peer: int, flag: int, epoch: int, stream) -> None:
        """Write flag = epoch on the peer, behind everything that `stream` was given before."""
        _, cuda = driver()
        at = self.table("flags", peer)[self.index * self.flags + flag]
        _checked(cuda.cuStreamWriteValue32(stream.cuda_stream, at.data_ptr(), epoch, 0))

    def wait(self, peer: int, flag: int, epoch: int, stream) -> None:
        """Hold `stream` until the peer's flag here is at least `epoch`."""
        _, cuda = driver()
        at = self.table("flags", self.index)[peer * self.flags + flag]
        _checked(cuda.cuStreamWaitValue32(stream.cuda_stream, at.data_ptr(), epoch, 0))

    def behind(self, epoch: int, flags: range) -> list[int]:
        """Global ranks one of whose `flags` here has not reached `epoch`, read while streams
        hang.
        """
        side = torch.cuda.Stream(self.device)
        with torch.cuda.stream(side):
            here = self.table("flags", self.index).view(self.size, self.flags)
            seen = here[:, flags.start : flags.stop].cpu()
        late = [p for p in range(self.size) if p != self.index and bool((seen[p] < epoch).any())]
        return [self.comm.links[self.axis].ranks[p] for p in late]

    def release(self) -> None:
        """Let every stream go that waits for a flag here. What they compute then is void."""
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            self.table("flags", self.index).fill_(RELEASED)

    def _map(self, name: str, size: int, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        import torch.distributed._symmetric_memory as symmetric

        local = symmetric.empty(size, dtype=dtype, device=self.device)
        handle = symmetric.rendezvous(local, group.group_name)
        self._tables[name] = [
            local if peer == self.index else handle.get_buffer(peer, (size,), dtype)
            for peer in range(self.size)
        ]
        self._tables[f"{name} handle"] = handle  # the mapping lives as long as its handle

    def table(self, name: str, peer: int) -> Tensor:
        """A peer's whole buffer or its "flags", flat: set behind set, sender behind sender."""
        return self._tables[name][peer]


class Watch:
    """Host-side bound of stream waits: one thread that looks at the newest event of each call."""

    def __init__(self, memory: PeerMemory, timeout_s: float) -> None:
        self.memory, self.timeout_s = memory, timeout_s
        self.lost: PeerLost | None = None
        self._calls: list[tuple[torch.cuda.Event, float, int, str, range]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._look, daemon=True).start()

    def after(self, stream, epoch: int, stage: str, flags: range) -> None:
        """Waits for `flags` have been put on `stream`."""
        event = torch.cuda.Event()
        event.record(stream)
        with self._lock:
            until = time.monotonic() + self.timeout_s
            self._calls.append((event, until, epoch, stage, flags))

    def check(self) -> None:
        """Raise PeerLost if a wait of an earlier call had to be released."""
        if self.lost is not None:
            raise self.lost

    def _look(self) -> None:
        torch.cuda.set_device(self.memory.device)
        while self.lost is None:
            time.sleep(0.05)
            with self._lock:
                self._calls = [call for call in self._calls if not call[0].query()]
                late = [call for call in self._calls if call[1] < time.monotonic()]
            if late:
                _, _, epoch, stage, flags = late[0]
                ranks = self.memory.behind(epoch, flags)
                names = ", ".join(f"rank {r}" for r in ranks) or "no rank"
                self.lost = PeerLost(
                    f"{stage}: {names} did not send within {self.timeout_s:g} s; the waits were "
                    "released and their results are void", ranks=tuple(ranks), site=stage,
                )  # fmt: skip
                self.memory.release()


def _checked(result) -> None:
    code = result[0]
    if int(code):
        raise RuntimeError(f"CUDA says {code!r}")


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
