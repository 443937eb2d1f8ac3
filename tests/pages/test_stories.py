"""The front page's three verdicts are read from records: change the record, and they change."""

from __future__ import annotations

import pytest

from rlkernel import records
from rlkernel.pages import evidence, required, stories
from tests.figures import counted, exchanges, layers, products, synthetic
from tests.pages.test_show import GPUS, record
from tests.pages.test_submission import row as exchange

PASSED = {"passed": True, "checks": [{"name": "a", "passed": True, "value": 0, "limit": 0}]}


def made(home, experiment: str, name: str, rows, **run):
    """A finished record of today's code under results/."""
    facts = {"experiment": experiment, "verdict": PASSED, "parameters": {}, "device": "cpu"}
    facts |= {"source": evidence.source(experiment)}
    return record(home / experiment / name, rows, **{**facts, **run})


def layer(layout: str, differ: int = 0) -> dict:
    row = layers.layer(layout)
    row["result"] |= {"mismatches": differ, "elements": 1_000_000}
    return row


# ---- same bits -----------------------------------------------------------------------------------


def test_no_record_is_no_verdict(results):
    for story in stories.told():
        assert (story.word, story.good, story.shown) == ("not measured", None, None)
        assert story.gaps
        assert not any(fact.found for fact in story.facts)


@pytest.mark.parametrize("differ, word, good", [(0, "yes", True), (3, "no", False)])
def test_the_bits_of_all_layouts_decide(results, differ, word, good):
    made(results, "det-ffn", "cpu", [layer("tp2"), layer("tp4", differ)])
    story = stories.same_bits()
    assert (story.word, story.good) == (word, good)
    assert story.facts[0].text.startswith(f"{differ} of 2,000,000 elements differ")
    assert "tp2, tp4" in story.facts[0].text and story.machines == ["2-core x86-64 CPU"]
    assert [what for what, _ in story.gaps] == [
        "NOT MEASURED: a forward beside the official layer",
        "NOT MEASURED: a training step beside the official layer",
    ]  # fmt: skip


def test_one_device_that_differs_is_a_no(results):
    made(results, "det-ffn", "gpu", [layer("tp2", 1)], device="cuda", environment=GPUS)
    made(results, "det-ffn", "cpu", [layer("tp2")])
    assert stories.same_bits().word == "no"


def test_what_fails_is_not_passed_over_for_a_larger_record(results):
    (good,) = PASSED["checks"]
    failed = {"passed": False, "checks": [good, good | {"passed": False}]}
    made(results, "ws2", "small", [layer("tp2")], verdict=failed)
    made(results, "ws2", "large", [layer("tp2"), layer("tp4")])
    assert any(fact.text.startswith("1 of 2 checks hold") for fact in stories.same_bits().facts)


def test_the_cost_is_the_span_of_the_record_s_ratios(results):
    rows = [products.ffn(1), products.ffn(1024)]
    more = {"device": "cuda", "environment": GPUS, "parameters": {"graph": True}}
    made(results, "det-ffn", "gpu", rows, **more)
    told = [x["ratios"]["official"]["median"] for r in rows for x in r["result"]["lines"]
            if x["contract"] == "tree8.bf16" and "ratios" in x]  # fmt: skip
    unknown, fact = stories.same_bits().facts
    assert unknown.text == "No record compares a layout with one rank."
    assert f"A forward takes {min(told):.2f} to {max(told):.2f} of the official" in fact.text
    assert "1 to 1,024 rows" in fact.text and stories.same_bits().shown == fact.found[0]


def test_a_stale_record_speaks_only_where_no_fresh_one_does(results):
    made(results, "det-ffn", "old", [layer("tp2", 5), layer("tp4", 5)], source="0" * 64)
    assert stories.same_bits().word == "no"
    made(results, "det-ffn", "new", [layer("tp2")])
    story = stories.same_bits()
    assert story.word == "yes" and [r.path.name for r in story.facts[0].found] == ["new"]


# ---- which sum is missing ------------------------------------------------------------------------


def test_faults_and_twins_are_counted(results):
    rows = synthetic.catalogue()
    asked = {"mode": "catalogue"}
    made(results, "tp-swiglu", "a", rows, parameters=asked)
    faults = sum(row["case"]["fault"] != "none" for row in rows)
    story = stories.missing_sum()
    assert (story.word, story.good) == ("named", True)
    assert story.facts[0].text.startswith(f"{faults} of {faults} planted faults are seen first")
    assert f"{len(rows) - faults} of {len(rows) - faults} correct twins" in story.facts[0].text
    rows[-1]["result"]["caught"] = False
    made(results, "tp-swiglu", "b", [*rows, rows[0] | {"key": "more"}], parameters=asked)
    story = stories.missing_sum()
    assert (story.word, story.good) == ("not always", False)
    assert f"{faults - 1} of {faults} planted faults" in story.facts[0].text


# ---- is communication hidden ---------------------------------------------------------------------


@pytest.mark.parametrize("gain, word, good", [(1.3, "mostly", True), (1.2, "mostly", True),
                                              (1.05, "partly", True),
                                              (0.9, "no", False)])  # fmt: skip
def test_the_sign_and_size_of_what_is_hidden(results, gain, word, good):
    rows = [exchange(gains={"kernel/4": gain}, timed=("documented", "hot"))]
    made(results, "a2a-ffn", "gpu", rows, device="cuda", environment=GPUS)
    story = stories.hidden()
    share = (exchanges.SERIAL - exchanges.SERIAL / gain) / exchanges.COMM
    assert (story.word, story.good) == (word, good)
    assert f"hides {share:+.2f} of the communication" in story.facts[0].text
    assert ("communication, more than all" in story.facts[0].text) == (share > 1)
    assert f"{gain:.3f} times as fast" in story.facts[0].text
    gaps = [f"NOT MEASURED: {need.name}" for need in (required.BACKWARD, required.EMULATED)]
    assert [what for what, _ in story.gaps] == [*gaps, required.PARTIAL]


@pytest.mark.parametrize("exposed, told", [(0.19, "0.19"), (-0.18, "nothing (-0.18)")])
def test_what_stays_exposed_is_told_and_never_as_less_than_nothing(results, exposed, told):
    row = exchange(gains={"kernel/4": 1.2}, timed=("hot",))
    row["result"]["times"]["hot"]["schedules"]["kernel/4"]["exposed"] = exposed
    made(results, "a2a-ffn", "gpu", [row], device="cuda", environment=GPUS)
    assert f"without communication {told} stays exposed" in stories.hidden().facts[0].text


def test_what_one_record_covers_no_longer_counts_as_open(results):
    row = exchange(gains={"kernel/4": 1.2}, timed=("hot",))
    for name, lacking in (("a", ["gradients", "a link"]), ("b", ["a link", "peak memory"])):
        made(results, "a2a-ffn", name, [row], device="cuda", environment=GPUS, not_covered=lacking)
    both = records.find("a2a-ffn")
    assert evidence.not_covered(both) == ["a link"]
    assert evidence.not_covered(both[:1]) == both[0].run["not_covered"]
    other = made(results, "exchange", "c", [row], not_covered=["two nodes", "a link"])
    assert evidence.not_covered([*both, other]) == ["a link", "two nodes"]


def test_counters_say_what_a_product_pays(results):
    made(results, "counters", "gpu", [counted.calibration()], device="cuda")
    assert not any("hardware counters" in fact.text for fact in stories.hidden().facts)
    made(results, "counters", "more", counted.every(), device="cuda")
    (told,) = (f.text for f in stories.hidden().facts if "hardware counters" in f.text)
    assert "32 SMs held 1.43 to 1.86" in told and "alone 1" not in told


def test_noise_is_no_verdict(results):
    row = exchange(gains={"kernel/4": 1.2}, timed=("hot",))
    row["result"]["times"]["hot"]["schedules"]["kernel/4"]["hidden"]["ci95"] = 0.9
    made(results, "a2a-ffn", "gpu", [row], device="cuda", environment=GPUS)
    story = stories.hidden()
    assert (story.word, story.good) == ("noise", None) and "± 0.90" in story.facts[0].text


def test_emulated_nodes_are_called_that_and_decide_nothing(results):
    row = exchange(gains={"kernel/4": 1.2}, timed=("hot",))
    row["result"]["topology"] = {"kind": "emulated nodes on one host (NCCL_HOSTID)"}
    limits = [required.PARTIAL, "other fabrics"]
    made(results, "a2a-ffn", "gpu", [row], device="cuda", environment=GPUS, not_covered=limits)
    story = stories.hidden()
    assert (story.word, story.good) == ("not measured", None)
    assert "(emulated nodes on one host (NCCL_HOSTID), P = 2 bf16" in story.facts[1].text
    assert (required.PARTIAL, required.REAL_NODES.command) in story.gaps
    assert story.coverage("not_covered") == (["other fabrics"], 1), "what is a gap is said once"


def test_of_emulated_nodes_each_direction_speaks_and_what_was_reached_goes_first(results):
    def between(name, backward, why, started):
        row = exchange(gains={"kernel/4": 1.2}, timed=("documented",), backward=backward)
        row["result"]["topology"] = {"kind": "emulated nodes on one host (NCCL_HOSTID)"}
        told = {"mean": 0.91, "ci95": 0.02, "why": why}
        line = row["result"]["times"]["documented"]["schedules"]["kernel/4"]
        line["reached"] = {"time": told, "trace": told}
        made(results, "a2a-ffn", name, [row], device="cuda", environment=GPUS, started=started)

    between("answers", False, "", "2026-01-01T")
    between("newer", False, "T_comp / T_comm is 0.10, not from 0.5 to 2.0", "2026-03-01T")
    between("step", True, "", "2026-02-01T")
    _, *facts = stories.hidden().facts
    told = [(f.found[0].path.name, f.text.partition(" Of what it could hide there: ")[2])
            for f in facts if "emulated" in f.text]  # fmt: skip
    assert told == [(name, "+0.91 ± 0.02 by time, +0.91 ± 0.02 by trace.")
                    for name in ("answers", "step")]  # fmt: skip


def test_a_cpu_says_nothing_about_gpus(results):
    made(results, "a2a-ffn", "cpu", exchanges.cpu()[:1])
    untimed = exchanges.row(timed=(), traced=False, batch=4)
    made(results, "a2a-ffn", "more", [untimed, untimed | {"key": "b"}], started="2026-02-01T")
    story = stories.hidden()
    assert (story.word, story.good) == ("not measured", None)
    assert "No record of two GPUs" in story.facts[0].text
    assert "1 of 1 checks hold" in story.facts[1].text
    assert [r.path.name for r in story.facts[1].found] == ["more"]
    assert story.shown.path.name == "cpu", "what was not timed cannot be drawn"


def test_limits_are_short_and_say_how_many_more(results):
    limits = [f"limit {n}" for n in range(5)]
    made(results, "a2a-ffn", "cpu", exchanges.cpu()[:1], not_covered=limits)
    assert stories.hidden().coverage("not_covered") == (limits[:3], 5)
