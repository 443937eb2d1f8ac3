"""Terms from made-up samples: dropped rounds, slowest ranks, paired ratios, signs."""

from __future__ import annotations

from random import Random

import pytest

from rlkernel.overlap import terms

LAYER = {"ranks": 2, "batch": 4, "tokens": 16, "dim": 8, "hidden": 16}


def samples(times: dict[str, list[list[float]]]):
    """{variant: [rank][round]} -> [rank][sample], with a first round that must not count."""
    ranks = len(next(iter(times.values())))
    return [
        [
            {"variant": name, "round": n, "us": us, "dropped": n == 0}
            for name, each in times.items()
            for n, us in enumerate([9e9, *each[rank]])
        ]
        for rank in range(ranks)
    ]


def found(overlapped, preset=None):
    times = {
        "none": [[100, 110], [120, 100]], "comp": [[60, 60], [60, 60]],
        "comm": [[40, 40], [30, 30]], "wire": [[20, 20], [20, 20]], "kernel/4": overlapped,
    }  # fmt: skip
    if preset:
        times["kernel/4 preset"] = preset
    return terms.by_rank(samples(times))


def test_each_round_counts_its_slowest_rank():
    times = found([[80, 90], [70, 95]])
    assert terms.slowest(times["none"]) == {1: 120, 2: 110}
    term = terms.term(times["none"])
    assert term["slowest"] == {"median_us": 115, "mean_us": 115, "min_us": 110, "max_us": 120}
    assert [rank["mean_us"] for rank in term["ranks"]] == [105, 110]
    assert term["seconds"] == pytest.approx({"mean": 105e-6, "min": 100e-6, "max": 110e-6})


def test_ratio_hidden_and_ceiling():
    line = terms.schedule(found([[80, 90], [70, 95]]), "kernel/4", LAYER, False)
    assert line["ratio"]["median"] == pytest.approx((120 / 80 + 110 / 95) / 2)
    assert line["hidden"]["median"] == pytest.approx(((120 - 80) / 40 + (110 - 95) / 40) / 2)
    assert line["hidden"]["ranks"] == pytest.approx([(20 + 20) / 2 / 40, (50 + 5) / 2 / 30])
    assert line["ceiling"] == pytest.approx(1 + 40 / 60) and "exposed_us" not in line


def test_an_interval_of_the_mean():
    found = terms.paired({1: 1.0, 2: 3.0, 3: 5.0}, {1: 0, 2: 0, 3: 0}, lambda a, b: a - b)
    assert found["mean"] == 3 and found["ci95"] == pytest.approx(1.96 * 2 / 3**0.5)
    assert terms.paired({1: 1.0}, {1: 1.0}, lambda a, b: a)["ci95"] == float("inf")


def test_what_overlap_loses_keeps_its_sign():
    line = terms.schedule(found([[150, 150], [150, 150]]), "kernel/4", LAYER, False)
    assert line["hidden"]["median"] == pytest.approx(-35 / 40) and line["ratio"]["median"] < 1
    assert all(rank < 0 for rank in line["hidden"]["ranks"])


def test_exposed_is_against_the_same_kernels_with_nothing_sent():
    line = terms.schedule(found([[80, 90], [70, 95]], [[70, 70], [71, 72]]), "kernel/4", LAYER, 0)
    assert line["exposed_us"]["median"] == pytest.approx((9 + 23) / 2)
    assert line["exposed"] == pytest.approx(16 / 40)


# ---- across nodes --------------------------------------------------------------------------------


def reached(serial, own, comm, comp):
    """One rank; a list of rounds each."""
    times = {"none": serial, "kernel/4": own, "comm": comm, "comp": comp}
    return terms.reached(terms.by_rank(samples({n: [t] for n, t in times.items()})), "kernel/4")


def test_reached_is_hidden_of_what_could_be():
    """hidden / min(1, T_comp / T_comm), on either side of 1; never where the shape is not fair."""
    rounds = 8
    for comp, wanted, ratio in ((50, 40 / 50, 0.5), (200, 40 / 100, 2.0)):
        line = reached([300] * rounds, [260] * rounds, [100] * rounds, [comp] * rounds)
        assert line["mean"] == pytest.approx(wanted) and line["comp_over_comm"] == ratio
        assert line["ci95"] == pytest.approx(0, abs=1e-9) and line["why"] == ""
    for comp, ratio in ((49, 0.49), (201, 2.01)):
        line = reached([300] * rounds, [260] * rounds, [100] * rounds, [comp] * rounds)
        assert line["why"] == f"T_comp / T_comm is {ratio}, not from 0.5 to 2.0"
    lost = reached([300] * rounds, [310] * rounds, [100] * rounds, [100] * rounds)
    assert lost["mean"] == pytest.approx(-0.1) and not lost["why"], "a loss keeps its sign"


def test_an_interval_that_covers_and_one_that_is_too_wide():
    """Against the truth of made-up samples, whose denominator varies as much as the rest."""
    random, held, truth = Random(7), 0, 0.8
    for _ in range(400):
        comm = [random.gauss(100, 8) for _ in range(40)]
        comp = [2 * c for c in comm]
        own = [300 - truth * c + random.gauss(0, 4) for c in comm]
        line = reached([300] * 40, own, comm, comp)
        held += abs(line["mean"] - truth) <= line["ci95"]
        assert line["ci95"] < terms.WIDEST and not line["why"]
    assert 0.92 <= held / 400 <= 0.98
    wide = reached([300] * 40, [220 + 40 * (n % 2) for n in range(40)], [100] * 40, [100] * 40)
    assert wide["ci95"] > terms.WIDEST and wide["why"].endswith("wider than 0.05")
    few = reached([300] * 4, [220] * 4, [100] * 4, [100] * 4)
    assert few["ci95"] is None and few["why"] == "4 samples, an interval needs 5"


def test_reached_by_traces_is_of_the_rank_that_hid_least():
    seen = [{"hidden": h, "each": [h] * 9, "why": ""} for h in (0.6, 0.4)]
    line = terms.reached_in_trace(seen, 0.5)
    assert line["mean"] == pytest.approx(0.8) and line["why"] == ""
    assert terms.reached_in_trace(seen, 4.0)["why"].startswith("T_comp / T_comm is 4.00")
    seen[1] |= {"hidden": None, "why": "inside one kernel"}
    assert terms.reached_in_trace(seen, 0.5)["why"] == "inside one kernel"


def test_students_t():
    table = {4: 2.7764, 8: 2.3060, 30: 2.0423, 1000: 1.9623}
    for freedom, value in table.items():
        assert terms._student(freedom) == pytest.approx(value, rel=3e-3)


@pytest.mark.parametrize("backward, times", [(False, 1), (True, 3)])
def test_throughput(backward, times):
    line = terms.throughput({1: 100.0, 2: 100.0}, LAYER, backward)
    assert line["tokens_per_s"] == pytest.approx(2 * 4 * 16 / 100e-6)
    assert line["flops"] == 6 * 2 * 4 * 8 * 8 * 16 * times
    assert line["tflops"] == pytest.approx(line["flops"] / 100e-6 / 1e12)
