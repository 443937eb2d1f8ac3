"""The bars of the fused kernel, read from made-up records of two GPUs."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from rlkernel import records
from rlkernel.experiments import matrix
from rlkernel.pages import bar_rows, bars, costs, evidence, raw, submission
from tests.figures import exchanges
from tests.pages.test_report import Page
from tests.pages.test_show import GPUS, displayed, record

COUNTED = {f"{name}/{n}": gain - (n == 8) * 0.05
           for name, gain in exchanges.SPEED.items() for n in (4, 8)}  # fmt: skip
FORWARD, BACK = "none / kernel, forward", "none / kernel, forward and backward"
BITS = bars.BARS[0].what
PEAK, PEAKS = (bar.what for bar in bars.BARS[-2:])


def gpu(folder, *rows, **run) -> records.Record:
    facts = {"experiment": "a2a-ffn", "device": "cuda", "environment": GPUS, "backend": "nccl",
             "argv": ["python"], "finished": "2026-01-02T00:00:00Z"}  # fmt: skip
    return record(folder, list(rows), **{**facts, **run})


@pytest.fixture
def said(tmp_path):
    """said(*rows, **run) -> {bar: its line} of one record more than the call before."""
    found = []

    def read(*rows, **run) -> dict[str, dict[str, str]]:
        if rows:
            found.insert(0, gpu(tmp_path / str(len(found)), *rows, **run))
        header, body = bars.table(found, lambda one: one.path.name)
        return {line[0]: dict(zip(header, line, strict=True)) for line in body}

    return read


def test_every_bar_is_a_line_and_without_records_a_command(said):
    told = said()
    assert list(told) == [bar.what for bar in bars.BARS] and len(told) == 14
    for bar in bars.BARS:
        line = told[bar.what]
        assert (
            line["verdict"] == f"NOT MEASURED: {bar.command}" and line["measured (p10, p90)"] == "-"
        )
        assert bar.command.startswith("python -m rlkernel a2a-ffn --device cuda --nproc 2 ")


def test_a_whole_record_answers_each_bar_with_its_spread_state_and_machine(said):
    told = said(exchanges.whole(COUNTED), exchanges.whole(COUNTED, backward=True))
    assert told[FORWARD] == {
        "bar": FORWARD, "must": "1.18", "beyond": "1.22", "read": "hot, kernel/4", "record": "0",
        "measured (p10, p90)": "1.170 (1.150, 1.190)", "machine": "2x Some GPU",
        "verdict": "missed",
    }  # fmt: skip
    measured = {name: line["measured (p10, p90)"] for name, line in told.items()}
    verdicts = {name: line["verdict"] for name, line in told.items()}
    assert verdicts[BACK] == "holds, and beyond"
    assert measured["eager none / kernel, forward (other settings)"].startswith("2.296 (")
    assert verdicts["compiled none / kernel, forward (other settings)"] == "holds, and beyond"
    exposed = "exposed communication / T comm, forward"
    assert measured[exposed].startswith("0.186 (0.174, 0.199); at other counts 0.186 to")
    assert verdicts[exposed] == "missed"
    against = "with-sm / kernel, each at its best chunk count"
    assert measured[against] == "1.125, of medians" and verdicts[against] == "holds, and beyond"
    assert told[against]["read"] == "hot, with-sm/4 over kernel/4"
    assert verdicts["sm-free / kernel, each at its best chunk count"] == "holds"
    inside = "hidden inside the kernels, forward, each rank"
    assert measured[inside] == "rank 0 0.970, rank 1 0.870" and verdicts[inside] == "holds"
    for peak in (PEAK, PEAKS):
        assert measured[peak] == "rank 0 +5.00%, rank 1 +5.00%" and verdicts[peak] == "holds"


@pytest.mark.parametrize("gain, verdict", [
    (1.1799, "missed"), (1.18, "holds"), (1.2199, "holds"), (1.22, "holds, and beyond"),
])  # fmt: skip
def test_reaching_a_bar_holds(said, gain, verdict):
    assert said(exchanges.whole({"kernel/4": gain}))[FORWARD]["verdict"] == verdict


@pytest.mark.parametrize("peak, verdict", [
    (1.11, "missed"), (1.09, "holds"), (1.0, "holds, and beyond"), (0.9, "holds, and beyond"),
])  # fmt: skip
def test_a_limit_from_above_is_read_the_other_way(said, peak, verdict):
    assert said(exchanges.whole(peak={"kernel": peak}))[PEAK]["verdict"] == verdict


def test_over_is_more_than_equal_and_one_count_is_no_best(said):
    bar = "with-sm / kernel, each at its best chunk count"
    equal = {"with-sm/4": 1.2, "with-sm/8": 1.1, "kernel/4": 1.2}
    assert said(exchanges.whole(equal))[bar]["verdict"] == "missed"
    one = said(exchanges.whole({"with-sm/4": 1.0, "kernel/4": 1.2}), started="2027")[bar]
    assert one["verdict"] == "missed" and one["record"] == "0"  # the newer one decides nothing


def test_one_count_alone_says_why_it_decides_nothing(said):
    bar = "with-sm / kernel, each at its best chunk count"
    line = said(exchanges.whole({"with-sm/4": 1.0, "kernel/4": 1.2}))[bar]
    assert line["measured (p10, p90)"] == "1.200, of medians"
    assert line["verdict"].startswith("NOT MEASURED (one chunk count only): python -m rlkernel")


WRONG = {
    "cold": lambda row: row["result"]["times"].pop("hot"),
    "shape": lambda row: row["case"]["parameters"].update(batch=256),
    "payload": lambda row: row["case"]["parameters"].update(comm_scale=2),
    "width": lambda row: row["case"]["parameters"].update(compute_scale=2),
    "compiled": lambda row: row["case"]["parameters"].update(compile=True),
    "operators": lambda row: row["case"]["parameters"].update(elementwise="torch"),
    "layer": lambda row: row["case"]["parameters"].update(block=False),
    "dtype": lambda row: row["case"].update(dtype="fp32"),
    "ranks": lambda row: row["case"]["grid"].update(dp=4),
    "fault": lambda row: row["case"].update(fault="early-chunk"),
    "cpu": lambda row: row["result"].update(device="cpu"),
    "one GPU": lambda row: row["result"]["topology"].update(gpus=1),
    "nodes": lambda row: row["result"]["topology"].update(nodes=2),
    "placed nowhere": lambda row: row["result"].pop("topology"),
    "chunks": lambda row: row["result"]["lines"][-1].update(rung="chunks"),
    "times": lambda row: row["result"].pop("times"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_like_for_like_answers_no_time(said, name):
    row = exchanges.whole()
    assert said(row)[FORWARD]["verdict"] == "missed"
    WRONG[name](row)
    assert said(row, started="2027")[FORWARD]["record"] == "0"


def test_the_newest_record_answers_and_a_stale_one_only_alone(said, monkeypatch):
    first = said(exchanges.whole({"kernel/4": 1.3}), started="2026-01-01")[FORWARD]
    assert first["verdict"] == "holds, and beyond"
    second = said(exchanges.whole({"kernel/4": 1.1}), started="2026-01-02")[FORWARD]
    assert (second["record"], second["verdict"]) == ("1", "missed")  # nobody chooses the best
    monkeypatch.setattr(evidence, "is_stale", lambda one: one.path.name == "1")
    assert said()[FORWARD]["record"] == "0"


def test_a_record_without_the_newer_fields_answers_the_others(said):
    row = exchanges.whole()
    for name in ("memory", "inside"):
        del row["result"][name]
    for times in row["result"]["times"].values():
        del times["others"]
    for line in row["result"]["times"]["hot"]["schedules"].values():
        del line["exposed_us"], line["exposed"]
    told = {name: line["verdict"] for name, line in said(row).items()}
    assert told[FORWARD] == "missed" and told[PEAK].startswith("NOT MEASURED: ")
    assert sum(verdict.startswith("NOT MEASURED: ") for verdict in told.values()) == 10


# ---- between nodes -------------------------------------------------------------------------------

NODES = {way: f"of what could be hidden, two emulated nodes with a GPU each, {way}"
         for way in ("forward", "forward and backward")}  # fmt: skip


def between(time: float, trace: float, why: str = "", **more) -> dict:
    row = exchanges.whole({"with-sm/4": 1.5, "kernel/4": 1.4, "kernel/8": 1.5}, **more)
    row["result"]["topology"].update(nodes=2)
    for times in row["result"]["times"].values():
        for line in times["schedules"].values():
            line["reached"] = {way: {"mean": mean, "ci95": 0.03, "why": why}
                               for way, mean in (("time", time), ("trace", trace))}  # fmt: skip
    return row


@pytest.mark.parametrize("time, trace, verdict", [
    (0.79, 0.97, "missed"), (0.97, 0.79, "missed"), (0.85, 0.97, "holds"),
    (0.96, 1.02, "holds, and beyond"),
])  # fmt: skip
def test_the_lower_of_both_ways_decides_between_nodes(said, time, trace, verdict):
    told = said(between(time, trace))
    line = told[NODES["forward"]]
    assert line["verdict"] == verdict and line["read"].startswith("hot, kernel/8, ")
    assert line["measured (p10, p90)"] == (
        f"{time:+.2f} ± 0.03 by time, {trace:+.2f} ± 0.03 by trace"
    )
    assert told[NODES["forward and backward"]]["verdict"].startswith("NOT MEASURED: ")
    assert told[FORWARD]["verdict"].startswith("NOT MEASURED: "), "nodes answer no bar of one host"
    assert said(between(0.9, 0.9, backward=True))[NODES["forward and backward"]]["record"] == "1"


def test_what_is_no_measurement_between_nodes_decides_nothing(said):
    wide = "+0.87 ± 0.06, wider than 0.05"
    assert said(between(0.9, 0.9, why=wide))[NODES["forward"]]["verdict"].startswith("NOT MEASURED")
    one = between(0.9, 0.9)
    one["result"]["topology"].update(nodes=1)
    assert said(one)[NODES["forward"]]["verdict"].startswith("NOT MEASURED")


# ---- paired by the raw samples -------------------------------------------------------------------


def samples(row: dict, times: dict[str, list[float]]) -> str:
    found = [
        {"key": row["key"], "rank": rank, "variant": variant, "round": n, "us": us - 5 * rank,
         "dropped": n == 0, "state": "hot"}
        for variant, each in times.items() for n, us in enumerate(each) for rank in (0, 1)
    ]  # fmt: skip
    return "".join(json.dumps(one) + "\n" for one in found)


def test_an_opponent_is_paired_by_the_rounds_of_the_samples(tmp_path):
    row = exchanges.whole(COUNTED)
    found = gpu(tmp_path / "a", row)
    times = {"with-sm/4": [1.0, 30.0, 44.0, 60.0], "kernel/4": [9.0, 20.0, 40.0, 30.0]}
    (found.path / "samples.jsonl").write_text(samples(row, times))
    lines = {line[0]: line for line in bars.table([found], lambda one: "a")[1]}
    line = lines["with-sm / kernel, each at its best chunk count"]
    assert line[3] == "1.500 (1.100, 2.000)"  # of the medians it would be 44 / 30
    assert lines["sm-free / kernel, each at its best chunk count"][3].endswith("of medians")
    assert raw.paired(found, row, "documented", "with-sm/4", "kernel/4") is None


def test_a_ratio_under_other_settings_follows_from_the_samples(tmp_path):
    row = exchanges.whole({"kernel/4": 1.2}, timed=("hot",))
    times, hot = row["result"]["times"], row["result"]["times"]["hot"]
    hot["terms"], hot["schedules"] = {}, {}
    del hot["others"]["compiled"]
    hot["others"]["eager"] = {"slowest": {"median_us": 50.0},
                              "ratio": {"kernel/4": {"median": 2.0}}}  # fmt: skip
    found = gpu(tmp_path / "a", row)
    given = {"none eager": [0.0, 40.0, 60.0], "kernel/4": [0.0, 20.0, 30.0]}
    (found.path / "samples.jsonl").write_text(samples(row, given))
    assert raw.apart(found) == []
    found.rows[0]["result"]["times"]["hot"]["others"]["eager"]["ratio"]["kernel/4"]["median"] = 2.3
    assert raw.apart(found) == ["kernel/4, hot: none eager / it 2.3, the samples give 2"]
    assert times


# ---- bits ----------------------------------------------------------------------------------------


def seeds(count: int, **more) -> list[dict]:
    return [exchanges.whole({"kernel/4": 1.2}, seed=n, timed=(), **more) for n in range(count)]


def test_ten_seeds_of_both_shapes_hold_and_fewer_are_not_measured(said):
    told = said(*seeds(10), *seeds(9, **bar_rows.PUBLIC))[BITS]
    assert told["verdict"].startswith("NOT MEASURED (9 of 10 seeds, public): ")
    told = said(*seeds(10, **bar_rows.PUBLIC), started="2027")[BITS]
    assert told["verdict"] == "holds"
    assert told["measured (p10, p90)"] == (
        "default: seeds 10, equal 10 of 10, fused 10; public: seeds 10, equal 19 of 19, fused 19"
    )
    assert told["record"] == "0, 1" and told["read"] == "torch.equal, whole batch"


@pytest.mark.parametrize("spoil", [
    lambda row: row["result"]["checks"][0].__setitem__(1, False),
    lambda row: row["result"]["lines"][0].update(rung="chunks"),
], ids=["unequal", "not fused"])  # fmt: skip
def test_one_wrong_seed_misses_whatever_else_is_there(said, spoil):
    rows = seeds(3)
    spoil(rows[1])
    assert said(*rows)[BITS]["verdict"] == "missed"


def test_what_was_not_compared_over_the_whole_batch_is_no_seed(said):
    rows = [*seeds(10), *seeds(10, **bar_rows.PUBLIC)]
    rows[0]["result"]["checks"] = [["kernel/4: forward", True, "holds", "torch.equal"]]
    assert "(9 of 10 seeds, default)" in said(*rows)[BITS]["verdict"]


@pytest.mark.parametrize("count, fused, unequal, verdict", [
    (15, 6, 0, "holds"), (32, 16, 0, "holds"), (32, 17, 0, "holds, and beyond"),
    (31, 31, 0, "holds"), (32, 32, 1, "missed"),
])  # fmt: skip
def test_of_the_matrix_each_configuration_is_counted_once(said, count, fused, unequal, verdict):
    """Ranks may share a GPU: no time is read."""

    def row(number: int, **more) -> dict:
        one = asdict(matrix.FULL[number])
        found = exchanges.whole({"kernel/4": 1.2}, ranks=one.pop("ranks"), timed=(), **one, **more)
        result = found["result"]
        result["lines"][0]["rung"] = "fused" if number < fused else "chunks"
        result["checks"][0][1] = number >= unequal
        result["topology"]["gpus"] = 1
        return found

    rows = [row(number) for number in range(count)]
    line = said(*rows, row(0, backward=True), exchanges.whole(batch=511))[bars.BARS[1].what]
    wanted = f"{count - unequal} of 32 equal, {fused} fused, {unequal} unequal"
    assert (line["measured (p10, p90)"], line["verdict"]) == (wanted, verdict)


# ---- where it is shown ---------------------------------------------------------------------------


def test_a_page_shows_what_was_measured_here_and_what_was_published(results):
    gpu(results / "a2a-ffn" / "mine", exchanges.whole(), started="2027")
    gpu(results / "published" / "a2a-ffn" / "theirs", exchanges.whole(backward=True))
    (piece,) = displayed(bars.tabulate)
    assert piece["kind"] == "table" and "NOT MEASURED" in piece["text"]
    assert "results/a2a-ffn/mine (stale)" in piece["html"]
    assert "results/published/a2a-ffn/theirs (stale)" in piece["html"]
    (piece,) = displayed(bars.tabulate, str(results / "published" / "a2a-ffn" / "theirs"))
    assert "a2a-ffn/mine" not in piece["html"] and "a2a-ffn/theirs" in piece["html"]


def test_the_readme_waits_for_a_time(tmp_path):
    without = gpu(tmp_path / "a", *seeds(10))
    assert bars.lines([without]) == [] == bars.lines([])
    empty, head, *_ = lines = bars.lines([without, gpu(tmp_path / "b", exchanges.whole())])
    assert empty == "" and head.startswith("| bar | must | beyond |") and len(lines) == 19
    assert lines[-1].startswith("From ") and costs.STALE in lines[-1]


def test_the_report_has_the_table_and_the_figures(tmp_path):
    rows = [exchanges.whole(), exchanges.whole(backward=True)]
    for row in rows:
        for line in row["result"]["lines"]:
            line["forward"] = {"mismatches": 0, "elements": 1}
        for times in row["result"]["times"].values():
            for line in (times["none"], *times["schedules"].values()):
                line["flops"] = 1
        del row["result"]["inside"]  # the made-up one has nothing to draw
    for name, found in (("new", rows), ("old", [exchanges.whole(timed=(), traced=False)])):
        if name == "old":
            del found[0]["result"]["memory"], found[0]["result"]["inside"]
        page = Page(submission._document("report", [gpu(tmp_path / name, *found, not_covered=[])]))
        text = " ".join(page.text.split())
        assert "What the fused kernel is held to" in text and PEAKS in text, name
        alts = [alt.split(" over that")[0] for alt in page.alts]
        for start in ("Peak memory", "Time of none under other settings"):
            assert (start in alts) == (name == "new"), (name, start)
