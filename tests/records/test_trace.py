"""The trace analyser on made-up traces: what is hidden, what is not, and what cannot be said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkernel.records import intervals, perfetto, trace
from rlkernel.records.kinds import kernel_kind
from tests.records import traces
from tests.records.traces import FUSED, GEMM, LOCAL, MARK, NCCL, PACK, PEER, SILU, SPIN, Book


def says(book: Book, mark: str = MARK, **how) -> dict:
    return trace.overlap(trace.parse(book.json()), mark, **how)


# ---- the hidden fraction -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "comm, how",
    [
        (NCCL, {}),
        (PEER, {}),
        (LOCAL, {"label": "comm/dispatch"}),  # a mapping of the peer's memory
        (LOCAL, {"fromDevice": 0, "inDevice": 0, "toDevice": 1}),
        ("_store_to_peer", {"label": "comm/combine"}),
    ],
    ids=["NCCL", "copy engine", "labelled 2D copy", "between devices", "SM copy"],
)
def test_half_hidden_is_half(comm, how):
    found = says(traces.half(comm, **how))
    assert found["hidden"] == 0.5 and found["why"] == ""
    assert (found["comm_us"], found["overlap_us"], found["exposed_us"]) == (100, 50, 50)
    assert (found["comp_us"], found["span_us"]) == (150, 200)


def test_nothing_hidden_is_zero_and_all_hidden_is_one():
    one_behind_the_other = Book().run(NCCL, 9, 0, 100).run(GEMM, 7, 100, 250).mark()
    assert says(one_behind_the_other)["hidden"] == 0.0
    assert says(one_behind_the_other)["exposed_us"] == 100
    assert says(Book().run(PEER, 9, 50, 100).run(GEMM, 7, 0, 250).mark())["hidden"] == 1.0


@pytest.mark.parametrize("kernel", [SPIN, "barrier_kernel(unsigned int**)", PACK, LOCAL])
def test_what_waits_or_copies_hides_nothing(kernel):
    assert says(Book().run(NCCL, 9, 0, 100).run(kernel, 7, 0, 100).mark())["hidden"] == 0.0


def test_elementwise_work_hides_as_a_product_does():
    assert says(Book().run(NCCL, 9, 0, 100).run(SILU, 7, 75, 100).mark())["hidden"] == 0.25


def test_overlapping_kernels_of_a_kind_count_once():
    book = Book().run(NCCL, 9, 0, 60).run(PEER, 10, 40, 100)  # 100 us of communication, not 120
    book.run(GEMM, 7, 0, 40).run(GEMM, 8, 20, 50).run(SILU, 11, 50, 60).mark()
    found = says(book)
    assert (found["comm_us"], found["comp_us"], found["hidden"]) == (100, 60, 0.6)
    assert found["kinds"] == {"comm": 100, "gemm": 50, "elementwise": 10}


@pytest.mark.parametrize("name, label", [(FUSED, ""), ("_persistent", "fused/gemm1")])
def test_a_fused_kernel_is_not_visible_and_never_a_number(name, label):
    book = Book().run(PEER, 9, 0, 100).run(name, 7, 50, 200, label=label).mark()
    found = says(book, expect=("gemm", "comm"))
    assert found["why"].startswith("not visible in this trace")
    for number in ("hidden", "overlap_us", "exposed_us", "comm_us"):
        assert found[number] is None
    assert found["kinds"] == {"comm": 100, "fused": 150}


def test_without_communication_there_is_no_fraction():
    found = says(Book().run(GEMM, 7, 0, 10).mark("a2a-ffn/comp"), "a2a-ffn/comp")
    assert found["hidden"] is None and found["why"] == "no communication in this range"


def test_a_range_counts_what_was_launched_in_it():
    book = traces.half()  # the first range's kernels end long after its host side did
    book.run(NCCL, 9, 400, 500).run(GEMM, 7, 500, 600).mark("a2a-ffn/none")
    assert says(book)["hidden"] == 0.5 and says(book, "a2a-ffn/none")["hidden"] == 0.0


def test_repetitions_are_averaged():
    book = traces.half().run(NCCL, 9, 400, 500).run(GEMM, 7, 400, 500).mark()
    found = says(book)
    assert (found["repeats"], found["hidden"], found["comm_us"]) == (2, 0.75, 100)


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda p: (p[0], sum(p))))


@given(SPANS, SPANS)
def test_sets_of_time_are_sets(a, b):
    ticks = lambda spans: {t for start, end in spans for t in range(start, end)}  # noqa: E731
    x, y = intervals.union(a), intervals.union(b)
    assert ticks(x) == ticks(a) and intervals.total(x) == len(ticks(a))
    assert all(p[1] < q[0] for p, q in zip(x, x[1:]))
    assert ticks(intervals.intersection(x, y)) == ticks(a) & ticks(b)
    assert ticks(intervals.difference(x, y)) == ticks(a) - ticks(b)
    assert intervals.total(intervals.intersection(x, y)) == len(ticks(a) & ticks(b))


@pytest.mark.parametrize(
    "name, kind",
    [
        (NCCL, "comm"),
        ("ncclSymkDevKernel_AllGather_ST(ncclSymkDevWorkArgs4K)", "comm"),
        (GEMM, "gemm"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>(Params)", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams)", "gemm"),
        ("_gemm_tree", "gemm"),
        (SILU, "elementwise"),
        ("_norm_gate_forward", "elementwise"),
        ("triton_red_fused_native_layer_norm_0", "elementwise"),
        (PACK, "copy"),
        (SILU.replace("silu_kernel", "FillFunctor<float>"), "copy"),
        (SPIN, "wait"),
        ("void c10d::symmetric_memory::barrier_kernel(unsigned int**, int)", "wait"),
        ("_wait_for_flags", "wait"),
        (FUSED, "fused"),
    ],
)
def test_a_kernel_is_known_by_its_name(name, kind):
    assert kernel_kind(name, "kernel", {}, None) == kind


# ---- a trace that does not hold all of it --------------------------------------------------------


def test_the_first_kernels_missing_fails_loudly():
    book = Book().run(NCCL, 9, 0, 100, lost=True).run(PEER, 9, 100, 200).run(GEMM, 7, 100, 200)
    with pytest.raises(trace.MissingKernels) as error:
        says(book.mark())
    for word in ("rank 0", MARK, "1 launches have no kernel", "cudaLaunchKernelExC", "warm-up"):
        assert word in str(error.value)


def test_a_repetition_that_has_fewer_fails_loudly():
    """The launches of the first kernels are gone with them: only the other repetition tells."""
    book = Book().run(GEMM, 7, 0, 100).mark().run(NCCL, 9, 200, 300).run(GEMM, 7, 200, 300).mark()
    with pytest.raises(trace.MissingKernels, match="repetition 1 of 2: only 0 of 1 comm"):
        says(book)


def test_a_range_without_any_kernel_fails_loudly():
    book = traces.half()
    book.clock += 5
    with pytest.raises(trace.MissingKernels, match="nothing ran in it"):
        says(book.mark("a2a-ffn/none"), "a2a-ffn/none")
    only_launches = Book().run(NCCL, 9, 0, 100, lost=True).mark()
    with pytest.raises(trace.MissingKernels, match="have no kernel"):
        says(only_launches)


def test_a_kind_that_must_be_there():
    with pytest.raises(trace.MissingKernels, match="no gemm in the trace"):
        says(Book().run(NCCL, 9, 0, 100).run(SILU, 7, 0, 9).mark(), expect=("comm", "gemm"))


def test_what_is_lost_outside_the_range_does_not_matter():
    book = Book().run(GEMM, 7, 0, 1, lost=True).mark("warm-up")
    book.run(NCCL, 9, 100, 200).run(GEMM, 7, 150, 300).mark()
    assert says(book)["hidden"] == 0.5


def test_a_drivers_call_inside_a_runtimes_is_one_launch():
    book = traces.half()
    inner = next(e for e in book.events if e["cat" if "cat" in e else "ph"] == "cuda_runtime")
    book.add("cuda_driver", "cuLaunchKernelEx", inner["ts"] + 0.1, 0.2, 77, correlation=999)
    assert says(book)["hidden"] == 0.5


def test_a_copy_whose_launch_was_not_logged_belongs_to_the_range_before_it():
    book = Book()
    for begin in (0.0, 1000.0):
        book.clock = book.closed = begin
        book.run(GEMM, 7, begin + 150, begin + 300)
        book.add("gpu_memcpy", PEER, begin + 100, 100, 9, stream=9, correlation=9000 + begin)
        book.mark("none" if begin == 0 else "sm-free/4")
    for name in ("none", "sm-free/4"):
        found = says(book, name)
        assert (found["hidden"], found["comm_us"]) == (0.5, 100)


def test_an_unknown_range_names_the_known_ones():
    with pytest.raises(trace.TraceError, match=r"no range 'a2a-ffn/kernel'.*there are a2a"):
        says(traces.half(), "a2a-ffn/kernel")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"traceEvents": []}', b"\x1f\x8bnothing"])
def test_a_file_that_is_no_trace(tmp_path, data):
    (tmp_path / "rank0.json").write_bytes(data)
    with pytest.raises(trace.TraceError, match="rank0.json is no chrome trace"):
        trace.read(tmp_path / "rank0.json")
    with pytest.raises(trace.TraceError, match="absent.json is no chrome trace"):
        trace.read(tmp_path / "absent.json")


# ---- the schedule --------------------------------------------------------------------------------


def test_the_critical_path_goes_through_what_ended_last():
    found = says(traces.chunks())  # pack, exchange 0, product 0, (exchange 1 is hidden), product 1
    assert found["critical"] == {
        "comm": 40, "gemm": 120, "elementwise": 17, "copy": 20, "idle": 3,
    }  # fmt: skip
    assert sum(found["critical"].values()) == found["span_us"] == 200
    late = says(traces.chunks(late=40))  # now product 1 has to wait for exchange 1
    assert late["critical"]["comm"] == 40 + 80 and late["critical"]["gemm"] == 20


def test_who_starts_right_behind_its_stream_waited_for_no_other():
    book = Book().run(NCCL, 9, 0, 101).run(GEMM, 7, 0, 100).run(GEMM, 7, 102, 200).mark()
    assert says(book)["critical"] == {"gemm": 198, "idle": 2}
    waited = Book().run(NCCL, 9, 0, 140).run(GEMM, 7, 0, 100).run(GEMM, 7, 142, 200).mark()
    assert says(waited)["critical"] == {"comm": 140, "gemm": 58, "idle": 2}


def test_the_timeline_starts_at_zero_and_joins_neighbours():
    assert says(traces.chunks())["timeline"] == [
        ["stream 7", "copy", 0, 20], ["stream 7", "gemm", 61, 121], ["stream 7", "gemm", 122, 182],
        ["stream 7", "elementwise", 183, 200],
        ["stream 9", "comm", 20, 60], ["stream 9", "comm", 61, 101],
    ]  # fmt: skip
    many = Book()
    for n in range(1000):
        many.run((GEMM, NCCL)[n % 2], 7 + n % 2, 10 * n, 10 * n + 9)
    assert len(says(many.mark())["timeline"]) <= 160


# ---- files ---------------------------------------------------------------------------------------


def test_gzip_or_plain_is_the_same(tmp_path):
    book = traces.chunks(rank=3)
    one = trace.read(book.write(tmp_path / "a.json.gz"))
    assert one == trace.read(book.write(tmp_path / "b.json", plain=True))
    assert (one.rank, one.device) == (3, "cuda")


# ---- a CPU ---------------------------------------------------------------------------------------


def cpu(*ranges: tuple[str, str, float, float, int]) -> Book:
    book = Book()
    for cat, name, start, end, tid in ranges:
        book.add(cat, name, start, end - start, tid)
    book.add("user_annotation", MARK, 0, 1000, 1)
    return book


def test_on_a_cpu_gloo_runs_beside_operators():
    note, op = "user_annotation", "cpu_op"
    found = says(
        cpu(
            (op, "c10d::alltoall_base_", 0, 30, 1), (note, "gloo:all_to_all", 10, 110, 2),
            (op, "aten::matmul", 50, 150, 1), (op, "aten::bmm", 60, 140, 1),
            (op, "aten::view", 150, 160, 1), (note, "wait/exchange", 100, 100, 1),
        )
    )  # fmt: skip
    assert (found["comm_us"], found["comp_us"], found["hidden"]) == (100, 100, 0.6)
    assert [bar[:2] for bar in found["timeline"]] == [["gloo", "comm"], ["thread 0", "gemm"]]


def test_the_busiest_thread_is_the_first():
    found = says(cpu(("cpu_op", "aten::bmm", 0, 5, 10), ("cpu_op", "aten::bmm", 0, 90, 9)))
    assert found["timeline"] == [["thread 0", "gemm", 0, 90], ["thread 1", "gemm", 0, 5]]


def test_the_innermost_range_says_what_a_thread_does():
    note, op = "user_annotation", "cpu_op"
    found = says(
        cpu(
            (note, "comm/dispatch", 0, 100, 1), (op, "aten::copy_", 10, 30, 1),
            (note, "wait/exchange", 100, 140, 1), (note, "comp/gemm1", 140, 200, 1),
            (op, "aten::silu", 150, 160, 1),
        )
    )  # fmt: skip
    assert found["kinds"] == {"comm": 80, "gemm": 50, "elementwise": 10, "copy": 20, "wait": 40}
    assert found["hidden"] == 0.0


def test_a_trace_of_this_torch_reads(tmp_path):
    """The format is torch's to change: this is a real one."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    a = torch.randn(2, 64, 64)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            with record_function(MARK):
                with record_function("comm/dispatch"):
                    x = a.transpose(1, 2).contiguous()
                torch.nn.functional.silu(torch.bmm(x, a))
    profiler.export_chrome_trace(str(tmp_path / "t.json.gz"))
    found = trace.overlap(trace.read(tmp_path / "t.json.gz"), MARK, expect=("comm", "gemm"))
    assert (found["rank"], found["repeats"], found["hidden"]) == (0, 2, 0.0)
    assert set(found["kinds"]) == {"comm", "gemm", "elementwise", "copy"}
    slim = perfetto.merge(tmp_path / "slim.json.gz", {0: tmp_path / "t.json.gz"})
    assert trace.overlap(trace.read(slim), MARK) == found
