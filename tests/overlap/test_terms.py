"""Terms from made-up samples: dropped rounds, slowest ranks, paired ratios, signs."""

from __future__ import annotations

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


@pytest.mark.parametrize("backward, times", [(False, 1), (True, 3)])
def test_throughput(backward, times):
    line = terms.throughput({1: 100.0, 2: 100.0}, LAYER, backward)
    assert line["tokens_per_s"] == pytest.approx(2 * 4 * 16 / 100e-6)
    assert line["flops"] == 6 * 2 * 4 * 8 * 8 * 16 * times
    assert line["tflops"] == pytest.approx(line["flops"] / 100e-6 / 1e12)
