"""Peak memory of the schedules, and `none` under other settings, on made-up rows of two GPUs."""

from __future__ import annotations

import pytest

from rlkernel.figures import a2a_ffn, a2a_memory, a2a_settings
from tests.figures import exchanges, looks

PLOTS = {"memory": a2a_memory, "settings": a2a_settings}
ROWS = [exchanges.whole(), exchanges.whole(backward=True)]


def plot(name: str):
    return getattr(a2a_ffn, name.upper())


def named(axes, gid: str) -> list:
    return [one for one in (*axes.patches, *axes.lines) if one.get_gid() == gid]


@pytest.mark.parametrize("name", PLOTS)
def test_drawn_deterministic_and_told(name):
    looks.drawn_and_told(plot(name), ROWS)


@pytest.mark.parametrize("name", PLOTS)
@pytest.mark.parametrize("rows", [exchanges.gpu(), [exchanges.row(timed=())], exchanges.cpu(), []])
def test_an_older_record_is_a_box_with_the_command(name, rows):
    command = PLOTS[name].COMMAND
    assert command in " ".join(looks.words(plot(name).draw(rows).axes[0]))
    header, body = plot(name).table(rows)
    assert header == ["not measured"] and command in body[0][0] and command in plot(name).alt(rows)


# ---- memory --------------------------------------------------------------------------------------


def test_a_bar_a_rank_over_none_with_the_limit():
    axes = a2a_memory.memory(ROWS[:1]).axes[0]
    widths = [bar.get_width() for bar in named(axes, "peak")]
    assert widths == pytest.approx([1, 1, 4, 4, 5, 5], abs=1e-3)
    (limit,) = named(axes, "limit")
    assert list(limit.get_xdata()) == pytest.approx([10, 10])
    assert "rank 1: +5.0%, 6.94 GiB" in looks.words(axes)


@pytest.mark.parametrize("over, said", [(1.0999, "holds"), (1.11, "missed"), (0.98, "holds")])
def test_the_kernel_is_held_to_the_limit_and_nobody_else(over, said):
    row = exchanges.whole(peak={"with-sm": 1.5, "kernel": over})
    row["result"]["memory"]["none"] = [7_000_000_000] * 2
    row["result"]["memory"]["kernel"] = [7_000_000_000, round(7e9 * over)]
    _, body = a2a_memory.memory_table([row])
    assert [line[-1] for line in body] == ["-"] * 4 + ["holds", said]
    assert body[-1][4] == f"{over - 1:+.2%}" and body[0][4] == "+0.00%"


def test_directions_are_kept_apart():
    names = {line[0] for line in a2a_memory.memory_table(ROWS)[1]}
    assert {"kernel, 4 chunks, forward", "kernel, 4 chunks, forward and backward"} <= names


# ---- other settings ------------------------------------------------------------------------------


def test_each_ratio_stands_beside_that_of_the_same_settings():
    row = exchanges.whole({"kernel/4": 1.2})
    axes = a2a_settings.settings([row]).axes[0]
    hot = (exchanges.COMM + exchanges.COMP) / 1.2
    for how, wanted in (("eager", 8360 / hot), ("compiled", 5400 / hot), ("same", 1.2)):
        (mark,) = named(axes, how)
        assert list(mark.get_xdata()) == pytest.approx([wanted]), how


def test_other_settings_are_labelled_wherever_they_are_shown():
    figure = a2a_settings.settings(ROWS)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["eager, other settings", "compiled, other settings", "the same settings"]
    said = [figure.axes[0].get_xlabel(), a2a_ffn.SETTINGS.title, a2a_ffn.SETTINGS.note,
            a2a_settings.settings_alt(ROWS)]  # fmt: skip
    assert all("other settings" in text for text in said)
    header, body = a2a_settings.settings_table(ROWS)
    assert [name for name in header if "/ it" in name and "other settings" not in name] == [
        "same settings: none / it (p10, p90)"
    ]
    assert {line[1] for line in body} == {"hot", "documented"} and len(body) == 12


def test_one_way_alone_leaves_the_other_s_place_empty():
    row = exchanges.whole({"kernel/4": 1.2}, timed=("hot",))
    del row["result"]["times"]["hot"]["others"]["compiled"]
    ((_, _, eager, compiled, over, none, _),) = a2a_settings.settings_table([row])[1]
    assert (eager, compiled, none) == ("8,360.0", "-", "-") and over.startswith("2.355 (")
    assert "compiled" not in a2a_settings.settings_alt([row])
