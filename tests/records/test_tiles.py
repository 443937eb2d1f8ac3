"""Timelines from inside a GEMM, made up: what is hidden, what is exposed, what is drawn."""

from __future__ import annotations

import gzip
import json

import pytest

from rlkernel.records import intervals, perfetto, tiles, trace
from tests.records import traces

NONE = [[0] * 8, [0] * 8]  # two ranks, eight chunks


def arriving(stall: int = 0, sms: int = 4):
    """Rank 0 of two: each SM has two own tiles of 100 ns, then two of rank 1, whose flag is looked
    for at 200 and seen `stall` ns later."""
    rows, places = [], []
    for sm in range(sms):
        for n in range(4):
            begin = 1000 + 100 * n + (stall if n > 2 else 0)
            end = 1100 + 100 * n + (stall if n > 1 else 0)
            look = (1200, 1200 + stall) if n == 2 else (0, 0)
            rows.append([begin, end, sm, *look])
            places.append([n % 2, n // 2, 0, 0, 0])
    return tiles.gemm("gemm1", True, 0, rows, places, [NONE] * 3)


def leaving(came: int, last: int = 1400):
    """Rank 0 of two, two SMs: a tile for rank 1 until 1100, own ones until `last`."""
    rows = [[1000, 1100, sm, 0, 0] for sm in (0, 1)] + [[1100, last, sm, 0, 0] for sm in (0, 1)]
    places = [[0, 1, 0, 0, 0]] * 2 + [[0, 0, 0, 0, 0]] * 2
    flags = [[[0] * 8, [at, *[0] * 7]] for at in (1110, 1350, came)]
    return tiles.gemm("gemm2", False, 0, rows, places, flags)


def test_a_flag_that_is_there_in_time_exposes_nothing():
    found = tiles.summary(arriving(0))
    assert found["on_way_us"] == [0, 0.2] and found["hidden"] == 1 and found["exposed_us"] == 0
    assert found["arrivals"] == [[1, 0, 0.2]] and found["releases"] == []


def test_a_planted_stall_is_exposed_and_what_is_hidden_falls():
    found = tiles.summary(arriving(200))
    assert found["on_way_us"] == [0, 0.4]
    assert found["hidden"] == pytest.approx(0.5)
    assert found["waited_us"] == found["exposed_us"] == found["longest_wait_us"] == 0.2
    told = [tiles.summary(arriving(stall))["hidden"] for stall in (0, 50, 100, 400)]
    assert told == sorted(told, reverse=True) and len(set(told)) == 4


def test_one_sm_of_four_that_waits_exposes_a_quarter():
    calm, late = arriving(0), arriving(200)
    some = tiles.Gemm("gemm1", True, 0, (*calm.tiles[:12], *late.tiles[12:]), {}, {(1, 0): 1400})
    found = tiles.summary(some)
    assert found["exposed_us"] == found["waited_us"] == pytest.approx(0.05)
    assert found["hidden"] == pytest.approx((3 * 400 + 200) / (4 * 400))


def test_loads_that_wait_while_the_tile_before_is_multiplied_cost_nothing():
    row = [[1000, 1100, 0, 0, 0], [1100, 1200, 0, 1020, 1090]]
    one = tiles.gemm("gemm1", True, 0, row, [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0]], [NONE] * 3)
    found = tiles.summary(one)
    assert found["exposed_us"] == 0 and found["hidden"] == 1 and found["arrivals"] == [[1, 0, 0.09]]


def test_what_leaves_is_on_its_way_until_the_peers_results_are_here():
    found = tiles.summary(leaving(came=1390))
    assert found["on_way_us"] == [0.1, 0.39] and found["tail_us"] == 0 and found["hidden"] == 1
    assert found["releases"] == [[1, 0, 0.11]] and found["arrivals"] == [[1, 0, 0.39]]
    late = tiles.summary(leaving(came=1600))
    assert late["tail_us"] == late["exposed_us"] == 0.2 and late["span_us"] == 0.6
    assert late["hidden"] == pytest.approx(300 / 500)


def test_an_uneven_last_wave_counts_against_what_is_hidden_and_is_not_exposed():
    even, uneven = leaving(came=1390), leaving(came=1390)
    short = uneven.tiles[-1].__class__(1100, 1200, 1, 0, 0, 0, 0, 0)
    uneven = tiles.Gemm("gemm2", False, 0, (*uneven.tiles[:-1], short), {}, uneven.came)
    found = tiles.summary(uneven)
    assert found["exposed_us"] == 0 and found["hidden"] < tiles.summary(even)["hidden"]


def test_without_peers_there_is_no_fraction():
    row, place = [[1000, 1100, 0, 0, 0]], [[0, 0, 0, 0, 0]]
    found = tiles.summary(tiles.gemm("gemm1", True, 0, row, place, [NONE] * 3))
    assert found["hidden"] is None and found["exposed_us"] is None
    assert tiles.together([found]) == {"on_way_us": 0, "exposed_us": 0, "hidden": None}


def test_a_call_is_the_sum_of_its_gemms():
    both = [tiles.summary(arriving(200)), tiles.summary(leaving(came=1600))]
    told = tiles.together(both)
    assert told["on_way_us"] == pytest.approx(0.9) and told["exposed_us"] == pytest.approx(0.4)
    assert told["hidden"] == pytest.approx((0.2 + 0.3) / 0.9)


def test_lanes_show_what_took_most_of_each_bin():
    (first, *rest) = tiles.lanes(arriving(200), 6)
    assert first == "oowwff" and set(rest) == {first}
    assert tiles.lanes(leaving(came=1600), 6) == ["fooo.."] * 2


def test_a_viewer_gets_a_track_an_sm_and_the_same_analysis(tmp_path):
    path = traces.chunks(1).write(tmp_path / "rank1.json.gz")
    expected = trace.overlap(trace.read(path), traces.MARK)
    perfetto.append(path, 1, tiles.stretches(arriving(200)))
    perfetto.merge(slim := tmp_path / "slim.json.gz", {1: path})
    perfetto.merge(again := tmp_path / "again.json.gz", {1: slim})
    assert again.read_bytes() == slim.read_bytes()
    assert trace.overlap(trace.read(slim), traces.MARK) == expected
    book = json.loads(gzip.decompress(slim.read_bytes()))["traceEvents"]
    names = [e["args"]["name"] for e in book if e["name"] == "thread_name"]
    assert [f"SM {n}" for n in range(4)] == [n for n in names if n.startswith("SM")]
    assert "flags" in names
    waits = [e for e in book if e["name"] == "waits for rank 1"]
    assert [e["dur"] for e in waits] == [0.2] * 4
    others = [e["ts"] + e["dur"] for e in book if e["ph"] == "X" and e["cat"] != "tile"]
    assert min(e["ts"] for e in book if e.get("cat") == "tile") > max(others)


def test_waits_outside_of_their_tile_are_empty():
    assert intervals.total(intervals.union([tiles.Tile(5, 9, 0, 1, 3, 1, 0, 0).wait])) == 0
