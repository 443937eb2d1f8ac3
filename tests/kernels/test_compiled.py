"""Registers and spills are read from the binaries that Triton keeps, one entry each."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlkernel.kernels import bf16, compiled, fold, gemm_tree


@pytest.mark.skipif(bf16.INTERPRETED, reason="nothing is compiled in the interpreter")
def test_every_binary_that_was_launched(monkeypatch):
    name, kernel = next(
        (name, x) for name, x in vars(gemm_tree).items()
        if isinstance(x, compiled.JITFunction) and x.fn.__module__ == gemm_tree.__name__
    )  # fmt: skip
    shared = SimpleNamespace(shared=1024)
    binaries = {
        "one": SimpleNamespace(n_regs=168, n_spills=0, metadata=shared),
        "two": SimpleNamespace(n_regs=255, n_spills=12, metadata=shared),
        "compiled only": SimpleNamespace(n_regs=None, n_spills=None, metadata=shared),
    }
    monkeypatch.setitem(kernel.device_caches, 0, (binaries, {}, None, None, None))
    monkeypatch.setattr(fold, "borrowed", kernel, raising=False)  # imported elsewhere: counted once
    assert compiled.resources() == [
        {"kernel": f"gemm_tree.{name}", "registers": 168, "spills": 0, "shared": 1024},
        {"kernel": f"gemm_tree.{name}", "registers": 255, "spills": 12, "shared": 1024},
    ]


def test_nothing_on_a_cpu():
    assert compiled.resources() == []
