"""The fused layer's kernels and CUDA calls, played on the host (played.py)."""

from __future__ import annotations

import types

import pytest
import torch

from rlkernel.kernels import a2a_reference
from rlkernel.overlap import fused_kernel, fused_memory, fused_rung
from tests.overlap.played import Driver, Memory, Stream


@pytest.fixture
def played(monkeypatch):
    """.shared: what ranks have mapped; .runtime; the twin instead of the kernels."""
    runtime, shared = Driver(), {}
    cuda = types.SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    for module in (fused_memory, fused_rung):
        monkeypatch.setattr(module, "driver", lambda: (runtime, cuda))
    monkeypatch.setattr(fused_memory, "PeerMemory", lambda *at: Memory(*at, shared))
    monkeypatch.setattr(fused_kernel, "A2AGemm", a2a_reference.A2AGemm)
    return types.SimpleNamespace(runtime=runtime, shared=shared)
