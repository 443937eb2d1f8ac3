"""What ranks may do while a CUDA graph is captured, as far as no GPU is needed to tell."""

import datetime
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlkernel.collectives import transport
from rlkernel.collectives.agreement import StoreAgreement
from rlkernel.collectives.errors import Disagreement
from rlkernel.collectives.symmetric import SymmetricTransport


@pytest.fixture
def capturing(monkeypatch):
    """Whether a graph is captured: a list that is empty or not."""
    now = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(now))
    return now


def test_a_site_is_agreed_on_before_the_capture(capturing):
    """Then, and under the same signature only, it passes inside: M = 1 says nothing of M = 512."""
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=1))
    one = StoreAgreement(store, (0,), 0, 1.0)
    capturing.append(True)
    with pytest.raises(Disagreement, match="'down.forward' was first used under graph capture"):
        one.check("down.forward", "bf16[1x8]")
    capturing.clear()
    one.check("down.forward", "bf16[1x8]")
    capturing.append(True)
    one.check("down.forward", "bf16[1x8]")
    with pytest.raises(Disagreement, match="run it once before capturing"):
        one.check("down.forward", "bf16[512x8]")


def test_a_message_through_the_host_is_refused(capturing):
    capturing.append(True)
    x = SimpleNamespace(is_cuda=True)
    with pytest.raises(ValueError, match="staged through the host cannot be captured"):
        transport._on_host(x)
    capturing.clear()
    x.cpu = lambda: "on the host"
    assert transport._on_host(x) == "on the host"


def test_calls_wait_for_each_other_outside_a_capture_only(capturing, monkeypatch):
    """A graph that waited for a stream outside it could not be captured."""
    waits = []
    stream = SimpleNamespace(wait_stream=waits.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    ours = SymmetricTransport(None, (0, 1), 0, torch.device("cuda", 0), None)
    ours._stream = other = SimpleNamespace()
    capturing.append(True)
    ours._follow()
    assert waits == [] and ours._stream is other
    capturing.clear()
    ours._follow()
    assert waits == [other] and ours._stream is stream
