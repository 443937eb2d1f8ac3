"""Plays a kernel's PTX on the CPU, for tests of what was written by hand in PTX.

Threads go in step, all of a block or a warp at a time; a warp that waits at a barrier lets the next
one go, in the order that the caller wants. Asynchronous copies land as early as they may (at once)
or as late (at the wait that covers them). So a barrier or a wait too few shows in the result. What
threads of one warp do to each other does not, nor what needs an order that was not played.

Every access has to be aligned, and inside of what the caller lets it read or write. Shared memory
is NaN at first. An unknown instruction raises before anything is played.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np

from tests.kernels.ptx_arithmetic import KINDS, TABLE
from tests.kernels.ptx_text import Instruction, Program

SHARED_AT = 1024  # where a block's shared memory begins; not at 0, so that a missing base shows
ONES = 2**32 - 1


class Fault(RuntimeError):
    """What a GPU would refuse, or would do in no defined way."""


class Memory:
    """Words of 32 bits from an address on, uint32 [n]; which of them may be read and written."""

    def __init__(self, words, at: int, readable=True, writable=True):
        self.words, self.at = words, at
        self.readable = np.broadcast_to(readable, words.shape)
        self.writable = np.broadcast_to(writable, words.shape)

    def load(self, at, count: int):
        """`count` words from each address on -> [addresses, count]."""
        return self.words[self._places(at, count, self.readable, "read")]

    def store(self, at, values) -> None:
        self.words[self._places(at, values.shape[1], self.writable, "written")] = values

    def _places(self, at, count: int, allowed, done: str):
        if (at % (4 * count)).any():
            raise Fault(f"an address is no multiple of {4 * count} bytes")
        places = ((at - self.at) // 4)[:, None] + np.arange(count)
        inside = (places >= 0) & (places < len(self.words))
        if not inside.all() or not allowed[places].all():
            raise Fault(f"memory is {done} that is not the kernel's")
        return places


class Threads:
    """Some warps of a block, in step. numbers: of these threads, int [threads]; early: whether
    asynchronous copies land at once.
    """

    def __init__(self, numbers, block: int, arguments, memory: Memory, shared: Memory, early: bool):
        self.arguments, self.memory, self.shared, self.early = arguments, memory, shared, early
        self.registers = {
            "%tid.x": numbers.astype(np.uint32),
            "%ctaid.x": np.full(len(numbers), block, np.uint32),
            "global_smem": np.full(len(numbers), shared.at, np.uint32),
        }
        self.all = self.active = np.ones(len(numbers), bool)
        self.called: list[Callable] = []  # copies of no group yet
        self.groups: list[list[Callable]] = []  # those of committed groups, the oldest first

    def run(self, program: Program, acts: list[Callable]) -> Iterator[str]:
        """Up to the next barrier, whose name comes out."""
        at = 0
        while True:
            instruction, act = program.instructions[at], acts[at]
            at += 1
            self.active = self.all
            if instruction.guard:
                self.active = self.read(instruction.guard, "pred") == instruction.wanted
            if act is not None:
                try:
                    act(self)
                except Fault as error:
                    raise Fault(f"{instruction.text}: {error}") from error
                continue
            taken = bool(self.active[0])
            if (self.active != taken).any():
                raise Fault(f"{instruction.text}: threads that go in step part here")
            if taken and instruction.opcode == "ret":
                if self.called or any(self.groups):
                    raise Fault("asynchronous copies are still on their way at the end")
                return
            if taken and instruction.opcode == "trap":
                raise Fault("a trap")
            if taken and instruction.opcode == "bar.sync":
                yield instruction.text
            elif taken:
                at = program.labels[instruction.operands[0]]

    def read(self, name: str, kind: str):
        """A register, [threads], or a number, [1]."""
        if name not in self.registers:
            return _number(name, kind)
        value = self.registers[name]
        if value.itemsize != np.dtype(KINDS[kind]).itemsize:
            raise Fault(f"{name} is of {8 * value.itemsize} bits: expected {kind}")
        return value.view(KINDS[kind])

    def write(self, name: str, kind: str, value) -> None:
        value = np.asarray(value).astype(KINDS[kind], copy=False)
        if value.shape != self.all.shape:
            value = np.broadcast_to(value, self.all.shape)
        if self.active is not self.all:
            value = np.where(self.active, value, self.read(name, kind))
        self.registers[name] = np.ascontiguousarray(value)

    def addresses(self, operand: str, kind: str):
        """[register + offset] of the threads that are active."""
        name, offset = _address(operand)
        return (self.read(name, kind).astype(np.int64) + offset)[self.active]

    def in_space(self, space: str, operand: str):
        """(memory, addresses)"""
        if space == "shared":
            return self.shared, self.addresses(operand, "u32")
        return self.memory, self.addresses(operand, "u64")


@cache
def _address(operand: str) -> tuple[str, int]:
    name, offset = re.fullmatch(r"\[([^+\]]+)\+?(-?\d+)?\]", operand).groups()
    return name, int(offset or 0)


@cache
def _number(text: str, kind: str):
    if text.startswith("0f"):
        return np.array([int(text[2:], 16)], np.uint32).view(KINDS[kind])
    if not re.match(r"-?\d", text):
        raise Fault(f"{text} is no number, and no register that was written")
    size = np.dtype(KINDS[kind]).itemsize
    return np.array([int(text, 0) % 256**size], f"u{size}").view(KINDS[kind])


# -- instructions: (what the opcode's pattern found, operands, threads) ----------------------------


def _compute(operation, operands, t: Threads) -> None:
    given = [t.read(name, kind) for name, kind in zip(operands[1:], operation.operands)]
    t.write(operands[0], operation.result, operation.compute(*given))


def _argument(found, operands, t: Threads) -> None:
    """LLVM calls registers of 64 bits %rd, and a narrower argument is extended to them."""
    name, kind = operands[0], found[1]
    value = t.arguments[int(re.search(r"_param_(\d+)\]", operands[1])[1])]
    t.write(name, f"{kind[0]}64" if name.startswith("%rd") else kind, np.array([value]))


def _load(found, operands, t: Threads) -> None:
    names = operands[0] if isinstance(operands[0], tuple) else operands[:1]
    memory, at = t.in_space(found[1], operands[1])
    for name, loaded in zip(names, memory.load(at, int(found[2] or 1)).T):
        value = np.zeros(t.all.shape, np.uint32)
        value[t.active] = loaded
        t.write(name, "b32", value)


def _store(found, operands, t: Threads) -> None:
    names = operands[1] if isinstance(operands[1], tuple) else operands[1:]
    values = [np.broadcast_to(t.read(name, "b32"), t.all.shape)[t.active] for name in names]
    memory, at = t.in_space(found[1], operands[0])
    memory.store(at, np.stack(values, 1))


def _store_matrix(found, operands, t: Threads) -> None:
    """A warp's first eight lanes have the addresses of eight rows; four lanes have a row."""
    _, at = t.in_space("shared", operands[0])
    words = t.read(operands[1][0], "b32").reshape(-1, 4)
    t.shared.store(at.reshape(-1, 32)[:, :8].ravel(), words)


def _shuffle(found, operands, t: Threads) -> None:
    if operands[3:] != ("31", "-1"):
        raise NotImplementedError(f"a shuffle of a part of a warp: {operands}")
    here, by = np.arange(len(t.all)), t.read(operands[2], "u32").astype(np.int64)
    there = here ^ by if found[1] == "bfly" else here // 32 * 32 + by
    t.write(operands[0], "b32", t.read(operands[1], "b32")[there])


def _copy(found, operands, t: Threads) -> None:
    count = int(operands[2]) // 4
    (shared, at), (memory, source) = (t.in_space(*x) for x in zip(("shared", "global"), operands))

    def land():
        shared.store(at, memory.load(source, count))

    land() if t.early else t.called.append(land)


def _commit(found, operands, t: Threads) -> None:
    t.groups.append(t.called)
    t.called = []


def _wait(found, operands, t: Threads) -> None:
    if not operands:
        _commit(found, operands, t)
    while len(t.groups) > int(operands[0] if operands else 0):
        for land in t.groups.pop(0):
            land()


def _prefetch(found, operands, t: Threads) -> None:
    """Changes nothing, but must ask for what is there."""
    at, size = t.addresses(operands[0], "u64"), int(operands[1])
    if (at % 16).any() or size % 16:
        raise Fault("expected multiples of 16 bytes")
    t.memory.load((at[:, None] + np.arange(0, size, 16)).ravel(), 4)


ACTS = {
    r"ld\.param\.(\w+)": _argument,
    r"ld\.(shared|global)(?:\.v([24]))?\.[bf]32": _load,
    r"st\.(shared|global)(?:\.v([24]))?\.[bf]32": _store,
    r"stmatrix\.sync\.aligned\.m8n8\.x1\.shared\.b16": _store_matrix,
    r"shfl\.sync\.(bfly|idx)\.b32": _shuffle,
    r"cp\.async\.c[ag]\.shared\.global": _copy,
    r"cp\.async\.commit_group": _commit,
    r"cp\.async\.wait_(group|all)": _wait,
    r"cp\.async\.bulk\.prefetch\.L2\.global": _prefetch,
}
FLOW = ("bra", "bra.uni", "bar.sync", "ret", "trap")


def act(instruction: Instruction) -> Callable | None:
    """What it does to Threads; None for what decides which instruction is next."""
    if instruction.opcode in FLOW:
        return None
    if instruction.opcode in TABLE:
        return partial(_compute, TABLE[instruction.opcode], instruction.operands)
    for pattern, does in ACTS.items():
        if found := re.fullmatch(pattern, instruction.opcode):
            return partial(does, found, instruction.operands)
    raise NotImplementedError(f"{instruction.opcode} is not among what is played: add it")


def play(
    program: Program,
    memory: Memory,
    arguments: Sequence[int],
    blocks: int,
    shared: int,
    turns: Sequence[range] | None = None,
    early: bool = False,
) -> None:
    """Blocks one after another, with so many bytes of shared memory. turns: threads that go in
    step, whole warps, in the order in which they run up to each barrier; all at once by default.

    Raises NotImplementedError for an unknown instruction, Fault for what must not happen.
    """
    acts = [act(instruction) for instruction in program.instructions]
    for block in range(blocks):
        own = Memory(np.full(shared // 4, ONES, np.uint32), SHARED_AT)
        running = [
            Threads(np.array(numbers), block, arguments, memory, own, early).run(program, acts)
            for numbers in turns or [range(program.threads)]
        ]
        reached: set[str | None] = set()
        while reached != {None}:
            with np.errstate(all="ignore"):
                reached = {next(threads, None) for threads in running}
            if len(reached) > 1:
                raise Fault(f"threads wait at {reached}")
