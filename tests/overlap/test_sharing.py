"""What an exchange costs a product, without a GPU: when it is measured, what is called in which
order, where pushes land, and the lines of a row from samples. Streams and events are played.
"""

from __future__ import annotations

import contextlib
import time
import types

import pytest
import torch

from rlkernel.collectives.groups import alone
from rlkernel.experiments import a2a_ffn
from rlkernel.overlap import measure, sharing
from rlkernel.overlap.layer import exact, with_ep
from rlkernel.overlap.layout import layout_of
from rlkernel.run import timing
from tests.overlap.inputs import drawn, layer
from tests.overlap.played import rank_of
from tests.overlap.test_copy_engine import Memory

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
NCCL, GLOO, STAGED = (
    types.SimpleNamespace(name=f"process-group/{name}")
    for name in ("nccl", "gloo", "gloo, staged through the host")
)


def topology(gpus=2, ranks=2, nodes=1, hosts=1):
    return {"gpus": gpus, "nodes": nodes, "hosts": hosts, "ranks": [{}] * ranks}


def test_it_takes_nccl_between_gpus_of_one_host():
    assert sharing.measurable(topology(), CUDA, NCCL)
    for at in (topology(gpus=1), topology(nodes=2), topology(nodes=2, hosts=2)):
        assert not sharing.measurable(at, CUDA, NCCL)
    assert not sharing.measurable(topology(1, 1), CUDA, None)
    assert not sharing.measurable(topology(), CPU, GLOO)
    assert not sharing.measurable(topology(), CUDA, STAGED)


def sample(variant, number, us, **more):
    return {"variant": variant, "round": number, "us": us, "dropped": number == 0, **more}


def test_lines_are_of_the_slowest_rank_and_say_how_much_moved():
    def rank(*us, left):
        beside = {"exchange_us": 50.0, "left_us": left}
        return [
            s for n, (own, other) in enumerate(us)
            for s in (sample("gemm1, alone", n, own), sample("gemm1, NCCL", n, other, **beside))
        ]  # fmt: skip

    samples = [
        rank((1.0, 9.0), (10.0, 11.0), (10.0, 12.0), left=40.0),
        rank((1.0, 9.0), (9.0, 12.0), (20.0, 25.0), left=20.0),
    ]
    one, beside = sharing.lines(samples, {"gemm1, alone": 0, "gemm1, NCCL": 50_000})
    assert (one["gemm"], one["beside"], one["median_us"]) == ("gemm1", "alone", 15.0)
    assert one["ratio"]["median"] == 1 and "lasted" not in one
    assert beside["median_us"] == 18.5 and beside["ratio"]["median"] == (1.2 + 1.25) / 2
    assert beside["lasted"] == 20 / 25 and beside["gb_per_s"] == 1.0
    assert beside["sent_bytes"] == 12_000, "of 11, 12, 12 and 20 (not 25) us at 1000 bytes a us"


def test_blocks_of_nccl_are_those_of_its_largest_kernel():
    def kernel(name, **args):
        return {"cat": "kernel", "name": name, "args": args}

    events = [
        kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", grid=[16, 1, 1]),
        kernel("ncclDevKernel_SendRecv", grid=[8, 2, 1]), kernel("fill", grid=[999, 1, 1]),
        kernel("ncclDevKernel_SendRecv"), {"ph": "M", "name": "nccl"},
    ]  # fmt: skip
    assert sharing.blocks(events) == 16 and sharing.blocks(events[2:]) is None


@pytest.mark.parametrize("tests, trace", [(2, True), (0, True), (2, False)])
def test_a_row_that_is_timed_and_traced_holds_it(monkeypatch, tests, trace):
    line, raw = {"gemm": "gemm1", "beside": "alone"}, sample("gemm1, alone", 0, 1.0)
    monkeypatch.setattr(sharing, "measurable", lambda topology, device, transport: True)
    monkeypatch.setattr(sharing, "sharing", lambda bench, comm: ([line], [raw]))
    params = a2a_ffn.Params(
        device="cpu", nproc=(1,), batch_size=2, tokens=4, dim=16, k=1, compile=False,
        overlap=("with-sm",), warmup=0, num_tests=tests, trace=trace,
    )  # fmt: skip
    (case,) = a2a_ffn.cases(params)
    result = measure.row(case, alone())
    wanted = tests > 0 and trace
    assert result.get("sharing") == ([line] if wanted else None)
    assert (raw in result.get("samples", ())) == wanted


# -- played ----------------------------------------------------------------------------------------


class Stream:
    def __init__(self, *_, **__): ...

    def wait_stream(self, other): ...

    def record_event(self):
        return Event()


class Event:
    def __init__(self, **_): ...

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3

    def synchronize(self): ...


@pytest.fixture
def played(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for name, kind in (("Stream", Stream), ("Event", Event)):
        monkeypatch.setattr(torch.cuda, name, kind)


def bench_of(comm, me=0, batch=3, tokens=12, dim=8):
    ffn = layer(tokens, dim, 2, comm, seed=9)
    x = drawn(me, batch, tokens, dim)
    return types.SimpleNamespace(layer=ffn, x=x, comm=comm, layout=layout_of(ffn, x),
                                 overlapped=lambda: ["with-sm", "sm-free"])  # fmt: skip


@pytest.mark.parametrize("size", [2, 3])
def test_pushes_land_where_those_of_sm_free_do(played, size):
    shared, ranks = {}, [bench_of(rank_of(size, me), me) for me in range(size)]
    at = ranks[0].layout
    for me, one in enumerate(ranks):
        memory = Memory(me, size, at, shared)
        sharing._push(at, one.x, memory, [Stream()] * size, 3)
        assert sum(memory.copied) * one.x.element_size() == 3 * sharing._bytes_sent(one)
    for me in range(size):
        got = Memory(me, size, at, shared).buffer("x", 0, me).view(size, at.batch, at.local, at.dim)
        for p, peer in enumerate(ranks):
            right = peer.x.chunk(size, 1)[me]
            assert got[p].isnan().all() if p == me else torch.equal(got[p], right)


def test_the_products_are_those_of_the_layer(played):
    bench = bench_of(rank_of(3, 1))
    at = bench.layout
    with torch.no_grad():
        products = sharing._products(bench)
        y = products["gemm2"]().transpose(0, 1) + bench.layer.bout
    mine = torch.cat(bench.x.chunk(at.ranks, 1))
    torch.testing.assert_close(y, exact(bench.layer, mine).float(), rtol=2e-5, atol=2e-5)
    z = products["gemm1"]()
    assert z.shape == (at.local, at.rows, 2 * at.hidden) and z.is_contiguous()


@pytest.mark.filterwarnings("ignore:CUDA is not available")  # the trace in which SMs are counted
def test_every_variant_is_timed_behind_its_exchange(played, monkeypatch):
    """One rank of its own: the order of calls, the samples and the lines are what is held."""
    called, bench = [], bench_of(with_ep(alone()))
    monkeypatch.setattr(sharing, "L2_BYTES", 64)
    monkeypatch.setattr(sharing, "HELD_US", 5e4)
    monkeypatch.setattr(timing, "heat", lambda seconds: called.append("heat"))
    products = {name: lambda name=name: called.append(name) or time.sleep(1e-3)
                for name in ("gemm1", "gemm2")}  # fmt: skip
    starts = {name: lambda count, name=name: lambda: called.append((name, count))
              for name in ("copy engine", "NCCL")}  # fmt: skip
    monkeypatch.setattr(sharing, "_products", lambda bench: products)
    monkeypatch.setattr(sharing, "_exchanges", lambda bench: starts)
    monkeypatch.setattr(sharing, "_counts", lambda comm, products, exchanges: {
        (gemm, name): 5 for gemm in products for name in exchanges})  # fmt: skip
    found, samples = sharing.sharing(bench, bench.comm)
    wanted = [(gemm, name) for gemm in products for name in ("alone", "copy engine", "NCCL")]
    assert [(one["gemm"], one["beside"]) for one in found] == wanted
    behind = {"alone": [], "copy engine": [("copy engine", 5)], "NCCL": [("NCCL", 5)]}
    order = [call for one in samples for gemm, name in [one["variant"].split(", ")]
             for call in (*behind[name], gemm)]  # fmt: skip
    held = called.index("heat")
    assert called[held - len(order) : held] == order
    for number in range(sharing.CLOCK.tests):
        names = [one["variant"] for one in samples if one["round"] == number]
        assert sorted(names) == sorted(f"{gemm}, {name}" for gemm, name in wanted)
    last = called[held + 1 :]
    calls = [n for n, one in enumerate(last) if one == ("NCCL", 5)]
    assert last[calls[0] : calls[0] + 4] == [("NCCL", 5), "gemm1", "gemm1", ("NCCL", 5)]
    assert {s["variant"] for s in samples if "left_us" in s} == {
        f"{gemm}, {name}" for gemm, name in wanted if name != "alone"
    }
    assert all(one["sm_mhz"] is None and one["ratio"]["median"] > 0 for one in found)


def test_an_exchange_is_as_long_as_two_products(monkeypatch):
    """And as the flush ahead of them, by the slowest rank; 600 us are those of four exchanges."""
    ranks = [
        [sample(name, 0, us) | {"dropped": False} for name, us in (("gemm1", one), ("NCCL", 600.0))]
        for one in (1650.0, 1700.0)
    ]
    monkeypatch.setattr(sharing, "interleaved", lambda variants, clock, comm: ranks[0])
    comm = types.SimpleNamespace(collect=lambda mine: ranks)
    counts = sharing._counts(comm, {"gemm1": None}, {"NCCL": lambda count: None})
    assert counts == {("gemm1", "NCCL"): 24}


def test_exchanges_of_one_rank_run(played, monkeypatch):
    bench = bench_of(with_ep(alone()))
    memory = Memory(0, 1, bench.layout, {})
    monkeypatch.setattr(sharing.copy_engine, "memory_of", lambda comm, at, dtype: (memory, None))
    made = sharing._exchanges(bench)
    assert list(made) == ["copy engine", "NCCL"]
    assert made["copy engine"](2)() is None
    came = made["NCCL"](3)()
    assert torch.equal(came, bench.x.repeat(3, 1, 1).unsqueeze(0))
    bench.overlapped = lambda: ["with-sm"]
    assert list(sharing._exchanges(bench)) == ["NCCL"]
