"""Traces for a person: one process a rank, one track a stream, small, and the same analysis."""

from __future__ import annotations

import gzip
import json

import pytest

from rlkernel.records import perfetto, trace
from tests.records import traces
from tests.records.traces import MARK, Book


@pytest.fixture
def merged(tmp_path):
    sources = {}
    for rank in (0, 1):
        book = traces.chunks(rank, late=9.0 * rank)
        book.base += 250_000 * rank  # the second rank's clock starts 250 us later
        for n in range(300):  # what nobody needs to see
            book.add("python_function", f"/home/somebody/site.py({n}): f", n, 1.0, 77)
            book.add("cpu_op", "aten::silu", n, 1.0, 77)
        sources[rank] = book.write(tmp_path / f"rank{rank}.json.gz")
    return sources, perfetto.merge(tmp_path / "trace" / "all.json.gz", sources)


def test_what_is_written_gives_the_same_analysis(merged):
    sources, path = merged
    for rank, source in sources.items():
        expected = trace.overlap(trace.read(source), MARK)
        assert trace.overlap(trace.read(path, rank), MARK) == expected
    with pytest.raises(trace.TraceError, match="ranks 0, 1; asked for 2"):
        trace.read(path, 2)
    with pytest.raises(trace.TraceError, match="ranks 0, 1"):
        trace.read(path)


def test_one_process_a_rank_and_one_track_a_stream(merged):
    _, path = merged
    book = json.loads(gzip.decompress(path.read_bytes()))
    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in book["traceEvents"]
        if e["name"] == "thread_name"
    }  # fmt: skip
    for rank in (0, 1):
        mine = [name for (pid, _), name in names.items() if pid == rank]
        assert mine == ["stream 7: gemm, copy", "stream 9: comm", "launches 1"]
    spans = [e for e in book["traceEvents"] if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in spans} == set(names)
    first = {p: min(e["ts"] for e in spans if e["pid"] == p and e["tid"] == 7) for p in (0, 1)}
    assert first[1] - first[0] == 250  # on one clock
    for track in names:
        own = sorted((e["ts"], e["dur"]) for e in spans if (e["pid"], e["tid"]) == track)
        if track[1] < perfetto.HOST_TRACK:
            assert all(a[0] + a[1] <= b[0] for a, b in zip(own, own[1:]))


def test_what_is_written_is_small_and_tells_of_no_machine(merged, tmp_path):
    sources, path = merged
    text = gzip.decompress(path.read_bytes()).decode()
    assert not any(word in text for word in ("secret", "somebody", "/home", "python", 'silu"'))
    assert len(text) < sum(len(gzip.decompress(p.read_bytes())) for p in sources.values()) / 10
    assert perfetto.merge(tmp_path / "again.json.gz", sources).read_bytes() == path.read_bytes()


def test_spans_that_overlap_on_one_stream_get_a_second_track(tmp_path):
    book = Book()
    for name, start in (("gloo:send", 0), ("gloo:recv", 5)):
        book.add("user_annotation", name, start, 10, 77)
    book.add("cpu_op", "aten::bmm", 2, 4, 77)
    book.clock = 20.0
    path = perfetto.merge(tmp_path / "t.json.gz", {0: book.mark().write(tmp_path / "r.json.gz")})
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["gloo: comm", "gloo: comm (2)", "host: gemm"]
