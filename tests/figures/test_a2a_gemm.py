"""The fused GEMMs' sweeps, the layer with nothing sent and its pass, on made-up rows."""

from __future__ import annotations

import copy

import pytest
from matplotlib.colors import to_hex

from rlkernel.figures import a2a_gemm, style
from tests.figures import looks

CHOSEN = {"lead": 5, "chunks": 1, "programs": 132, "raster": 16, "bn": 256}
SWEPT = {"lead": (0, 8, 32), "chunks": (2, 8), "programs": (116, 131), "raster": (2,), "bn": (128,)}
SPEED = {"gemm1": 1.08, "gemm2": 0.99, "dh": 1.07, "dx": 1.01}


def ratio(median: float) -> dict:
    return {"median": median, "p10": median - 0.01, "p90": median + 0.02}


def spread(us: float) -> dict:
    return {"median_us": us, "p10_us": 0.98 * us, "p90_us": 1.05 * us}


def row(part: str, **result) -> dict:
    case = {"experiment": "a2a-gemm", "fault": "none", "parameters": {"part": part}}
    return {"case": case, "result": {"passed": True, "checks": [], **result}, "passed": True}


def line(name: str, speed: float, sweep=None, value=None, bias=False) -> dict:
    found = {"variant": name, "sweep": sweep, "value": value, "differ": 0, "registers": 168,
             "spills": 0, "speed": ratio(speed), **spread(2000 / speed)}  # fmt: skip
    return found | ({"speed_bias": ratio(1.13 * speed)} if bias else {})


def gemm(name: str) -> dict:
    speed, bias = SPEED[name], name == "gemm2"
    lines = [{"variant": "bmm", "speed": ratio(1.0), **spread(2000)}]
    lines += [line("chosen", speed, bias=bias), line("local", speed + 0.001, bias=bias)]
    for sweep, values in SWEPT.items():
        for value in values:
            lost = 0.2 if value == 116 else 0.01
            lines.append(line(f"{sweep} {value}", speed - lost, sweep, value, bias))
    return row(name, chosen=CHOSEN, floor_us=1950.0, lines=lines)


def whole() -> dict:
    lines = [{"pass": part, "variant": way, "speed": ratio(1 + 0.1 * n), "floor_us": 0.8 * us,
              **spread(us / (1 + 0.1 * n))} for part, us in (("forward", 3700), ("training", 11400))
             for n, way in enumerate(a2a_gemm.WAYS)]  # fmt: skip
    return row("layer", lines=lines)


def between() -> dict:
    lines = [{"variant": name, "floor_us": 400.0, "of_copy": ratio(share), **spread(500)}
             for name, share in (("copy", 1.0), ("forward", 0.86), ("backward", 0.71))]  # fmt: skip
    return row("pass", bar=0.75, lines=lines)


def every() -> list[dict]:
    return [*map(gemm, SPEED), whole(), between()]


def untimed() -> list[dict]:
    rows = every()
    for one in rows:
        one["result"].pop("floor_us", None)
        one["result"]["lines"] = [{"variant": "chosen", "differ": 0}]
    return rows


@pytest.mark.parametrize("plot", [a2a_gemm.SWEEPS, a2a_gemm.LAYER], ids=lambda p: p.title)
def test_drawn_deterministic_and_told(plot):
    looks.drawn_and_told(plot, every())


@pytest.mark.parametrize("plot", [a2a_gemm.SWEEPS, a2a_gemm.LAYER], ids=lambda p: p.title)
def test_nothing_timed_is_a_box_with_the_command(plot):
    for rows in (untimed(), []):
        assert "NOT MEASURED here" in " ".join(looks.words(plot.draw(rows).axes[0]))
        for told in (plot.alt(rows), plot.table(rows)[1][0][0]):
            assert "python -m rlkernel a2a-gemm" in told


# ---- sweeps --------------------------------------------------------------------------------------


def marks(axes, gid: str) -> list:
    return [one for one in axes.lines if one.get_gid() == gid]


def test_a_panel_a_parameter_and_a_curve_a_gemm():
    *panels, legend = a2a_gemm.sweeps(every()).axes
    assert [axes.get_title(loc="left") for axes in panels] == list(a2a_gemm.PANELS.values())
    lead, _, programs, *_ = panels
    assert [tick.get_text() for tick in lead.get_xticklabels()] == ["0", "5", "8", "32"]
    for name, speed in SPEED.items():
        (curve,) = marks(lead, name)
        assert list(curve.get_ydata()) == pytest.approx([speed - 0.01, speed, *[speed - 0.01] * 2])
    assert len([c for c in lead.collections if c.get_gid() == "band"]) == 4
    assert len(marks(lead, "bias")) == 1, "only GEMM2 has one"
    assert marks(programs, "dh")[0].get_ydata().min() == pytest.approx(0.87), "losers are drawn"
    assert "chosen" in [text.get_text() for text in legend.get_legend().get_texts()]


def test_the_chosen_value_has_a_ring_and_what_is_slower_is_hollow():
    lead, _, programs, *_ = a2a_gemm.sweeps(every()).axes
    rings = marks(lead, "chosen")
    assert [(r.get_xdata()[0], r.get_ydata()[0]) for r in rings] == [
        (1, speed) for speed in SPEED.values()
    ]
    hollow = marks(programs, "slower")
    assert len(hollow) == 4 + 2, "116 programs lose everywhere, GEMM2 at every value"
    assert {to_hex(one.get_markerfacecolor()) for one in hollow} == {style.PAPER}


def test_a_variant_with_other_bits_is_a_cross_without_a_time():
    rows = every()
    bad = next(li for li in rows[0]["result"]["lines"] if li["variant"] == "chunks 8")
    for name in ("speed", "median_us", "p10_us", "p90_us"):
        del bad[name]
    bad["differ"] = 7
    _, chunks, *_ = a2a_gemm.sweeps(rows).axes
    assert len(marks(chunks, "wrong")) == 1
    assert len(marks(chunks, "gemm1")[0].get_xdata()) == 2
    header, body = a2a_gemm.sweeps_table(rows)
    told = [dict(zip(header, one)) for one in body if one[:3] == ["gemm1", "chunks", "8"]]
    assert [(t["µs (p10, p90)"], t["elements that differ"]) for t in told] == [("-", "7")]
    assert "8: other bits" in a2a_gemm.sweeps_alt(rows)


def test_a_row_with_a_fault_is_not_drawn():
    rows = [copy.deepcopy(gemm("dx"))]
    rows[0]["case"]["fault"] = "swapped-slices"
    assert a2a_gemm.sweeps_table(rows)[0] == ["not measured"]


def test_one_parameter_alone_leaves_the_others_empty():
    rows = [gemm("gemm1")]
    keep = ("chunks", None)
    rows[0]["result"]["lines"] = [
        li for li in rows[0]["result"]["lines"] if li.get("sweep") in keep
    ]  # fmt: skip
    looks.drawn_and_told(a2a_gemm.SWEEPS, rows)
    assert "SM budget" not in a2a_gemm.sweeps_alt(rows)


def test_the_table_has_every_line_with_registers_and_spread():
    header, body = a2a_gemm.sweeps_table(every())
    told = [dict(zip(header, one)) for one in body]
    assert len(told) == 4 * (3 + 9)
    second = next(t for t in told if t["GEMM"] == "gemm2" and t["parameter"] == "chosen")
    assert second["value"] == "lead 5, chunks 1, programs 132, raster 16, bn 256"
    assert second["bmm / it (p10, p90)"] == "0.990 (0.980, 1.010)"
    assert second["bmm + bias / it (p10, p90)"].startswith("1.119")
    assert (second["registers"], second["spills"], second["floor µs"]) == ("168", "0", "1,950.0")
    assert told[0]["registers"] == told[0]["elements that differ"] == "-", "the library's"


# ---- the layer and the pass ----------------------------------------------------------------------


def test_the_pass_stands_beside_its_bar():
    left, right = a2a_gemm.layer(every()).axes
    bars = [one for one in right.patches if one.get_gid() == "share"]
    assert [bar.get_height() for bar in bars] == [0.86, 0.71]
    assert [to_hex(bar.get_facecolor()) for bar in bars] == [style.PASS, style.FAIL]
    assert {line.get_ydata()[0] for line in right.lines} == {0.75}
    header, body = a2a_gemm.layer_table(every())
    told = {one[0]: dict(zip(header, one)) for one in body}
    assert told["pass: forward"][""] == "met" and told["pass: backward"][""] == "missed"
    assert told["pass: backward"]["bar"] == "0.75" and told["pass: copy"]["bar"] == "-"
    assert "backward: 0.71 of a copy's bandwidth, bar 0.75" in a2a_gemm.layer_alt(every())


def test_what_was_not_measured_has_no_panel():
    (axes,) = a2a_gemm.layer([between()]).axes
    assert axes.get_title(loc="left").startswith("element-wise pass")
    (axes,) = a2a_gemm.layer([whole()]).axes
    assert axes.get_title(loc="left").startswith("the layer")


def test_the_layer_has_times_floors_and_ratios():
    left, _ = a2a_gemm.layer(every()).axes
    assert len([one for one in left.patches if one.get_gid() == "time"]) == 6
    assert [one.get_xdata()[0] for one in marks(left, "floor")] == [2960.0] * 3 + [9120.0] * 3
    said = " ".join(looks.words(left))
    assert "none / it 1.100" in said and "none / it 1.000" not in said
    header, body = a2a_gemm.layer_table(every())
    assert dict(zip(header, body[1]))["none / it (p10, p90)"] == "1.100 (1.090, 1.120)"
