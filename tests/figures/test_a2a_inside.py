"""The figure of what SMs do inside the fused kernels, on timelines made up."""

from __future__ import annotations

import pytest

from rlkernel.figures import a2a_inside
from rlkernel.records import tiles
from tests.figures import exchanges, looks

SMS, US = 12, 1000  # ns


def simulated(name: str, own: int, arrive: bool, stall: int) -> dict:
    """20 tiles an SM of 10 us: own rows first (arriving) or last; a flag looked for at 60 us."""
    rows, places, flags = [], [], [[[0] * 8, [0] * 8] for _ in range(3)]
    for sm in range(SMS):
        for n in range(20):
            far = n >= 6 if arrive else n < 10
            late = stall if arrive and n > 6 else 0
            end = 10 * (n + 1) * US + (stall if arrive and n >= 6 else 0)
            look = (60 * US, 60 * US + stall + 50) if arrive and n == 6 else (0, 0)
            rows.append([10 * n * US + late, end, sm, *look])
            places.append([n % 4, 1 - own if far else own, 0, 0, 0])
    if not arrive:
        flags[0][1 - own][0], flags[2][1 - own][0] = 101 * US, 190 * US + stall
    return tiles.summary(tiles.gemm(name, arrive, own, rows, places, flags))


def recorded(stall: int = 0, backward: bool = False) -> dict:
    row, ranks = exchanges.row(backward=backward), []
    for own in (0, 1):
        gemms = [simulated("gemm1", own, True, stall * own) | {"start_us": 0.0},
                 simulated("gemm2", own, False, stall * own) | {"start_us": 260.0}]  # fmt: skip
        ranks.append({"rank": own, **tiles.together(gemms), "gemms": gemms})
    cost = {"plain_us": 500.0, "recording_us": 505.0, "ratio": exchanges.ratio(1.01)}
    row["result"]["inside"] = {"variant": "kernel/1", "cost": cost, "ranks": ranks}
    return row


def collections(axes, gid):
    return [one for one in axes.collections if one.get_gid() == gid]


def test_drawn_deterministic_and_told():
    looks.drawn_and_told(a2a_inside.INSIDE, [recorded(30 * US)])


def test_both_ranks_stand_above_each_other_on_one_axis():
    top, bottom = a2a_inside.inside([recorded(30 * US)]).axes
    assert top.get_xlim() == bottom.get_xlim() and bottom.get_position().y1 < top.get_position().y0
    assert [axes.get_title(loc="left") for axes in (top, bottom)] == ["rank 0", "rank 1"]
    for axes in (top, bottom):
        assert [image.get_gid() for image in axes.images] == ["gemm1", "gemm2"]
        assert len(collections(axes, "arrivals")) == 2 and len(collections(axes, "releases")) == 1
        assert len(collections(axes, "way")) == 2


def test_only_a_rank_that_waits_is_red():
    top, bottom = a2a_inside.inside([recorded(30 * US)]).axes
    red = list(a2a_inside.LOOK).index(tiles.WAIT)
    assert not (top.images[0].get_array() == red).any()
    assert (bottom.images[0].get_array() == red).any()


def test_a_stall_costs_in_figure_table_and_words():
    calm, late = (a2a_inside.inside_table([recorded(s)])[1] for s in (0, 30 * US))
    assert calm[2][:2] == ["rank 1", "gemm1"] and float(calm[2][9]) > float(late[2][9])
    assert float(late[2][6]) == pytest.approx(30.05, abs=0.01) and calm[0] == late[0]
    assert "take 1.010 times as long" in a2a_inside.inside_alt([recorded()])
    said = a2a_inside.inside([recorded(30 * US)]).axes[1].get_title(loc="right")
    assert said in a2a_inside.inside_alt([recorded(30 * US)]) and "exposed 50.0 µs" in said


def test_rows_that_differ_are_named():
    found = a2a_inside.recorded([recorded(), recorded(backward=True)])
    assert found[0][0] == "rank 0, forward, (512, 64, 1280, 6)"
    assert "forward and backward" in found[2][0]


def test_what_was_not_recorded_is_a_box_with_the_command():
    rows = [exchanges.row()]
    said = " ".join(looks.words(a2a_inside.inside(rows).axes[0]))
    for text in (said, a2a_inside.inside_alt(rows), a2a_inside.inside_table(rows)[1][0][0]):
        assert "NOT MEASURED here" in text and a2a_inside.COMMAND in text
