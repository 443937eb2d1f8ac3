"""What the fused kernels keep between calls: mapped buffers, flags, and who moves a slice.

    x    [P*B, L, D]   what peers push: the slices of this rank's tokens, one a source rank
    out  [B, T, D]     what peers store: their tokens of this rank's batch

Peers write x by copy engine, a stream a peer: a 2D copy from the strided slice into its place, then
4 bytes that carry the number of the call from device memory into the peer's flag, in stream order
behind it. No SM is taken, no host value is baked in: a CUDA graph replays it.

When may a buffer be written again? A rank pushes x for call n+1 once its own call n has ended, that
is, once the peer's results of call n are here; the peer stores the last of them behind all that it
read of x in call n. It stores into out in call n+1 once it has seen this rank's slice of call n+1,
which this rank pushed behind all that it read of out in call n. One set of buffers is safe; there
are two, and what lies in one is left alone for a call longer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel.collectives.comm import Comm
from rlkernel.collectives.errors import PeerLost
from rlkernel.collectives.peer_memory import SETS, PeerMemory, driver
from rlkernel.kernels import a2a_signal
from rlkernel.kernels.a2a_order import chunk_slices
from rlkernel.kernels.a2a_signal import MOST_CHUNKS, Signals
from rlkernel.overlap.layout import Layout

FLAG_BY = ("copy", "write")
TIMEOUT_S = 25.0


class FusedMemory:
    """One rank's end, for one layout and dtype; every rank of the group makes it at the same time,
    outside of graph capture.
    """

    def __init__(self, comm: Comm, at: Layout, dtype: torch.dtype) -> None:
        sizes = {"x": at.rows * at.local * at.dim, "out": at.batch * at.tokens * at.dim}
        self.memory = PeerMemory(comm, sizes, dtype, 2 * MOST_CHUNKS + 1)
        self.at, self.comm, self.device = at, comm, comm.device
        self.index, self.size = self.memory.index, self.memory.size
        self.calls = 0
        timeout = comm.roll_call.timeout_s if comm.roll_call else TIMEOUT_S
        self.host = torch.zeros(1, dtype=torch.int32).pin_memory()
        flags = [self.memory.table("flags", peer).data_ptr() for peer in range(self.size)]
        self.signals = signals(
            self.device, self.index, flags + [self.host.data_ptr()], int(timeout * 1e9)
        )
        self.timeout_s = timeout
        self.owners = [
            torch.tensor(
                [self.memory.buffer("out", s, peer).data_ptr() for peer in range(self.size)],
                dtype=torch.int64, device=self.device,
            )
            for s in range(SETS)
        ]  # fmt: skip
        self.streams = [torch.cuda.Stream(self.device, priority=-1) for _ in range(self.size)]
        self._busy: set[int] = set()  # streams that the present call has given work
        self._last: torch.cuda.Event | None = None

    def begin(self) -> int:
        """The set of buffers of the next call. Raises PeerLost if an earlier one missed a rank."""
        self.check()
        self.calls += 1
        stream = torch.cuda.current_stream(self.device)
        if self._last is not None and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._last)  # calls run one behind the other, whatever their streams
        return self.calls % SETS

    def end(self) -> None:
        main = torch.cuda.current_stream(self.device)
        for index in self._busy:
            main.wait_stream(self.streams[index])
        self._busy.clear()
        if not torch.cuda.is_current_stream_capturing():
            self._last = main.record_event()

    def check(self) -> None:
        word = int(self.host[0])
        if word:
            suspect, stage = a2a_signal.missing(word)
            rank = self.comm.links["ep"].ranks[suspect]
            raise PeerLost(
                f"{stage}: rank {rank} did not come within {self.timeout_s:g} s; what the kernels "
                "computed since is void", ranks=(rank,), site=stage,
            )  # fmt: skip

    def came(self, which: int) -> Tensor:
        """[P*B, L, D]"""
        return self.memory.buffer("x", which, self.index).view(self.at.rows, self.at.local, -1)

    def push(
        self,
        x: Tensor,
        which: int,
        chunks: int,
        ready: torch.cuda.Event,
        flag_by: str = "copy",
        scale: int = 1,
        fault: str = "none",
    ) -> None:
        """Send every peer its slices of x [B, T, D], chunk by chunk, each behind its flag; none
        before `ready`. scale: each as often. fault: of faults.py, to be found by the checks.
        """
        peers = [(self.index + step) % self.size for step in range(1, self.size)]
        swapped = {0: 1, 1: 0} if fault == "swapped-slices" else {}
        for peer in peers:
            self._busy.add(peer)
            self.streams[peer].wait_event(ready)
        for chunk, tokens in enumerate(chunk_slices(self.at.local, chunks)):
            for peer in peers:
                target = self.memory.buffer("x", which, peer).data_ptr()
                stream = self.streams[peer].cuda_stream
                slices = (x, swapped.get(peer, peer), target, self.index, tokens, stream)
                for _ in range(0 if fault == "early-chunk" and chunk == 0 else scale):
                    self._copy(*slices)
                self._raise(peer, a2a_signal.there(self.index, chunk), stream, flag_by)

    def own_rows(self, x: Tensor, target: Tensor, ready: torch.cuda.Event) -> torch.cuda.Event:
        """The own slice of x into its place of target [P*B, L, D], beside the caller's stream."""
        self._busy.add(self.index)
        stream = self.streams[self.index]
        stream.wait_event(ready)
        whole = slice(0, self.at.local)
        self._copy(x, self.index, target.data_ptr(), self.index, whole, stream.cuda_stream)
        return stream.record_event()

    def _copy(
        self, x: Tensor, of: int, target: int, source: int, tokens: slice, stream: int
    ) -> None:
        """Tokens of slice `of` of x -> the rows of rank `source` of an Xlocal at `target`."""
        at, size = self.at, x.element_size()
        runtime, _ = driver()
        row, start = at.local * at.dim * size, tokens.start * at.dim * size
        _checked(runtime.cudaMemcpy2DAsync(
            target + source * at.batch * row + start, row,
            x.data_ptr() + of * row + start, at.tokens * at.dim * size,
            (tokens.stop - tokens.start) * at.dim * size, at.batch,
            runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice, stream,
        ))  # fmt: skip

    def _raise(self, peer: int, place: int, stream: int, flag_by: str) -> None:
        runtime, cuda = driver()
        at = self.signals.places[peer] + 4 * place
        if flag_by == "write":  # the host counts: not for graphs
            _checked(cuda.cuStreamWriteValue32(stream, at, self.calls, 0))
        else:
            kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
            words = self.signals.words.data_ptr()
            _checked(runtime.cudaMemcpyAsync(at, words, 4, kind, stream))


def signals(device: torch.device, rank: int, bases: list[int], limit_ns: int) -> Signals:
    """bases: addresses of every rank's flags and of the host's word. Calls are numbered from 1."""
    size = len(bases) - 1
    return Signals(
        rank,
        size,
        tuple(bases),
        torch.tensor(bases, dtype=torch.int64, device=device),
        torch.zeros(size * MOST_CHUNKS, dtype=torch.int32, device=device),
        torch.ones(2, dtype=torch.int32, device=device),
        limit_ns,
    )


def _checked(result) -> None:
    if int(result[0]):
        raise RuntimeError(f"CUDA says {result[0]!r}")
