"""Which products leave SMs to messages, with cuBLAS and the device played."""

from __future__ import annotations

import types
from functools import partial

import pytest
import torch

from rlkernel.collectives.groups import alone
from rlkernel.overlap import ladder, nccl_chunks, nodes, path, spared
from rlkernel.overlap.layer import with_ep
from tests.overlap.inputs import differing, drawn, layer, trained

FEW, ALL = "99: 127", "99: 0"


@pytest.fixture
def log(monkeypatch):
    """What the library is told, and each product, in order."""
    said: list[str] = []

    def tell(handle, count):
        said.append(f"{handle.value}: {count}")
        return 7 * (count == 1)

    def bmm(*given, **out):
        said.append("product")
        return real(*given, **out)

    real, library = torch.bmm, types.SimpleNamespace(cublasSetSmCountTarget=tell)
    device = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch, "bmm", bmm)
    monkeypatch.setattr(spared, "_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 99)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    return said


def test_products_of_both_passes_leave_some_and_the_next_ones_do_not(log, monkeypatch):
    ffn, x, dy = layer(16, 32, 2), drawn(0, 3, 16, 32), drawn(1, 3, 16, 32)
    wanted = trained(ffn, ffn, x, dy)
    assert set(log) == {"product"}, "none has all SMs"
    monkeypatch.setattr(spared, "between", lambda *_: 5)
    ladder._known.clear()
    with path.listening() as heard:
        forward = partial(nccl_chunks.forward_ffn, ffn)
        forward(x)  # the ladder's try: the whole with all SMs, the chunks with few
        tried = " ".join(log).replace("product ", "")
        assert f"{FEW} {ALL} {FEW} {ALL}" in tried
        log.clear()
        assert not differing(trained(forward, ffn, x, dy), wanted)
    ladder._known.clear()
    assert "4 token slices (4 backward) by one rank, 5 SMs left to it" in heard[-1]
    passes = " ".join(log).split(f" {ALL}")
    assert [one.split()[:2] for one in passes] == [FEW.split(), FEW.split(), []]
    assert all(one.endswith("product") for one in passes[:2])


def test_all_sms_are_back_after_a_failure_and_a_refusal_is_raised(log):
    with pytest.raises(ValueError, match="inside"), spared.sms(5):
        raise ValueError("inside")
    assert log == [FEW, ALL]
    with pytest.raises(RuntimeError, match=r"cublasSetSmCountTarget\(1\) returned 7"):
        with spared.sms(131):
            pass


def test_a_process_without_cublas_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 99)
    device = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: device)
    with pytest.raises(RuntimeError, match="no libcublas.so"), spared.sms(5):
        pass


@pytest.mark.parametrize(
    "backend, where, few",
    [
        ("nccl", nodes.Nodes((0, 1), 0), spared.FEW),
        ("nccl", nodes.Nodes((0, 0), 0), 0),
        ("nccl", None, 0),
        ("gloo", nodes.Nodes((0, 1), 0), 0),
    ],
)
def test_only_where_nccl_takes_messages_to_another_node(backend, where, few, monkeypatch):
    comm = with_ep(alone())
    transport = types.SimpleNamespace(backend=backend)
    comm.links["ep"] = types.SimpleNamespace(transport=transport)
    monkeypatch.setattr(nodes, "of", lambda comm, silent: where)
    assert spared.between(comm) == few
