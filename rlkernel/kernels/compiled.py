"""What the compiler made of the package's Triton kernels in this process: registers and spills."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from triton.runtime.jit import JITFunction

HOME = f"{__package__}."


def resources() -> list[dict]:
    """One entry a binary that was launched: kernel, registers and spills a thread, bytes of shared
    memory. Empty where nothing is compiled: on the CPU, and in the interpreter.
    """
    return [
        {"kernel": name, "registers": binary.n_regs, "spills": binary.n_spills,
         "shared": binary.metadata.shared}
        for name, binary in _binaries()
        if getattr(binary, "n_regs", None) is not None
    ]  # fmt: skip


def _binaries() -> Iterator[tuple[str, object]]:
    """(module.function, binary) of every specialisation; a function counts where it was defined."""
    for home, module in sorted(sys.modules.items()):
        if not home.startswith(HOME):
            continue
        for name, found in vars(module).items():
            if isinstance(found, JITFunction) and found.fn.__module__ == home:
                full = f"{home.removeprefix(HOME)}.{name}"
                for known, *_ in found.device_caches.values():
                    yield from ((full, binary) for binary in known.values())
