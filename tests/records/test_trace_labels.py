"""Which range around a launch gives its kernel a kind; and long traces are read in one sweep."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlkernel.records import trace
from tests.records.traces import GEMM, Book

RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(1, 2)), max_size=12)
LAUNCHES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 2)), min_size=1, max_size=12)


@given(RANGES, LAUNCHES)
def test_the_innermost_label_around_a_launch_names_its_kernel(ranges, launches):
    """Whatever the ranges: nested, crossing, begun together, of several threads."""
    book, kinds = Book(), ("comm", "fused", "copy", "wait")
    for n, (start, length, tid) in enumerate(ranges):
        book.add("user_annotation", f"{kinds[n % 4]}/{n}", start, length, tid)
    wanted = {}
    for n, (at, tid) in enumerate(launches):
        book.add("cuda_runtime", "cudaLaunchKernel", at, 0, tid, correlation=n)
        book.add("kernel", f"a_kernel_{n}", 100 + n, 1, 7, stream=7, correlation=n)
        around = [(start, -i) for i, (start, length, of) in enumerate(ranges)
                  if of == tid and start <= at <= start + length]  # fmt: skip
        wanted[f"a_kernel_{n}"] = kinds[-max(around)[1] % 4] if around else "elementwise"
    found = trace.parse(book.json())
    assert {s.name: s.kind for s in found.spans} == wanted


def test_a_long_trace_is_read_in_one_sweep():
    """Each event is looked at some times, however many there are."""

    class Event(dict):
        reads = 0

        def __getitem__(self, name):
            Event.reads += 1
            return super().__getitem__(name)

        def get(self, name, default=None):
            Event.reads += 1
            return super().get(name, default)

    looks = []
    for count in (300, 1500):
        book = Book()
        for n in range(count):
            book.run((GEMM, "a_kernel")[n % 2], 7, 10 * n, 10 * n + 9, label=f"comm/chunk {n}")
        told = book.mark().json()
        told["traceEvents"] = [Event(e) for e in told["traceEvents"]]
        Event.reads = 0
        spans = trace.parse(told).spans
        looks.append(Event.reads / len(told["traceEvents"]))
        assert [s.kind for s in spans] == ["gemm", "comm"] * (count // 2)
    assert looks[1] < 1.1 * looks[0] and looks[0] < 40
