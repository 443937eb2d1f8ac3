"""PTX as Triton prints it -> instructions one after another, each block's own names made unique.

    {.reg .pred p; setp.ne.b32 p, %r1, 0; @p bra COLD; COLD: trap;}

is inline assembly's way to have a register and a label of its own: they become p.3 and COLD.3 in
the third such block.
"""

from __future__ import annotations

import re
from typing import NamedTuple

Operand = str | tuple[str, ...]  # a name, number or [address]; or a vector of them


class Instruction(NamedTuple):
    """guard: the predicate register that must be as wanted, or an empty word."""

    guard: str
    wanted: bool
    opcode: str
    operands: tuple[Operand, ...]
    text: str


class Program(NamedTuple):
    """One kernel. labels: the number of the instruction behind each."""

    threads: int
    instructions: list[Instruction]
    labels: dict[str, int]


def read(ptx: str) -> Program:
    """The only kernel of a module. Raises ValueError for text that is no instruction."""
    ptx = re.sub(r"//[^\n]*|^\s*\.loc\b[^\n]*$", "", ptx, flags=re.MULTILINE)
    entry = ptx[ptx.index(".entry") :]
    threads = re.search(r"\.reqntid (\d+)", entry)
    if not threads:
        raise ValueError("no .reqntid: expected a kernel of one size of blocks")
    entry = entry[: entry.find(".section") if ".section" in entry else None]
    body = entry[entry.index("{") + 1 : entry.rindex("}")]
    body = re.sub(r"\{([^{};]+)\}", r"<\1>", body)  # braces of a vector are no block's
    blocks = iter(range(1, body.count("{") + 1))
    body = re.sub(r"\{([^{}]*)\}", lambda block: _with_own_names(block[1], next(blocks)), body)
    instructions, labels = [], {}
    for statement in body.split(";"):
        statement = " ".join(statement.split())
        while label := re.match(r"([$\w.]+): ?", statement):
            labels[label[1]] = len(instructions)
            statement = statement[label.end() :]
        if statement and not statement.startswith((".reg ", ".pragma ")):
            instructions.append(_instruction(statement))
    return Program(int(threads[1]), instructions, labels)


def _with_own_names(block: str, number: int) -> str:
    names = re.findall(r"(\w+):", block)
    for declared in re.findall(r"\.reg \.\w+ ([^;]*);", block):
        for name, count in re.findall(r"(\w+)(?:<(\d+)>)?", declared):
            names += [f"{name}{i}" for i in range(int(count))] if count else [name]
    if not names:
        return block + ";"
    return re.sub(rf"(?<![\w.%$])({'|'.join(names)})(?![\w.])", rf"\1.{number}", block) + ";"


def _instruction(text: str) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)([%\w.]+) )?([a-z][\w.:]*) ?(.*)", text)
    if not found:
        raise ValueError(f"no instruction: {text!r}")
    unless, guard, opcode, operands = found.groups()
    # A comma inside a vector parts no operands.
    parts = [part.replace(" ", "") for part in re.split(r",(?![^<]*>)", operands) if part]
    vectors = [tuple(part[1:-1].split(",")) if part[0] == "<" else part for part in parts]
    return Instruction(guard or "", not unless, opcode, tuple(vectors), text)
