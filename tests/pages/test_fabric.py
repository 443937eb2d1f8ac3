"""The model as a page shows it: made from records that it names, labelled, or a visible gap."""

from __future__ import annotations

import pytest

from rlkernel.figures import exchange as draw
from rlkernel.pages import evidence, fabric
from rlkernel.pages.evidence import Evidence
from rlkernel.records.alpha_beta import LinkCost
from tests.figures import exchanges, messages
from tests.pages.test_show import GPUS, displayed, record


@pytest.fixture
def measured(results):
    """(exchanges on one and on two nodes, the layer on both), as two GPUs would leave them."""

    def made(experiment: str, name: str, rows: list[dict]) -> Evidence:
        keys = {"case_keys": [row["key"] for row in rows]}
        folder = results / experiment / name
        facts = {"experiment": experiment, "device": "cuda", "environment": GPUS, **keys}
        return Evidence(experiment, {"device": "cuda"}, record(folder, rows, **facts))

    far = exchanges.row({"with-sm/4": 1.3, "kernel/4": 1.4})
    far["result"]["topology"] = messages.row(2, 1, 4096)["result"]["topology"]
    links = [made("exchange", "one", messages.rows(1, 2)),
             made("exchange", "two", messages.rows(2, 1))]  # fmt: skip
    gains = {f"{name}/{count}": gain for name, gain in exchanges.SPEED.items() for count in (2, 4)}
    layers = [made("a2a-ffn", "near", [exchanges.row(gains)]), made("a2a-ffn", "far", [far])]
    return links, layers


def absent(experiment: str) -> Evidence:
    return Evidence(experiment, {"device": "cuda"}, None, (), "needs 2 GPUs")


def test_every_measured_point_stands_beside_the_model(measured):
    links, layers = measured
    (piece,) = displayed(fabric.check, links, layers)
    assert piece["kind"] == "model" and "<strong>Model</strong>" in piece["html"]
    for name in ("exchange/one", "exchange/two", "a2a-ffn/near", "a2a-ffn/far"):
        assert f"results/{name}" in piece["html"], name
    count = 2 * len(messages.SIZES)
    assert f"exchange: {count} points, median error 0%, worst 0%" in piece["text"]
    assert "A2A-FFN, 1 node: 8 points" in piece["text"]
    assert "A2A-FFN, 2 emulated nodes of one host: 4 points" in piece["text"]
    assert "bytes / 450 GB/s" in piece["html"], "as CUDA graphs: 0.8 of the planted times"


def test_other_fabrics_are_a_model_of_the_measured_workload(measured):
    links, layers = measured
    nic = fabric.given(10.0, 50.0)
    (piece,) = displayed(fabric.predict, links, layers[0], None, nic)
    assert piece["kind"] == "model" and piece["text"].startswith("A model, not a measurement")
    assert "intra, as fitted: 16 µs" in piece["html"]
    assert "inter, as given: 10 µs + 0 µs a message + bytes / 50 GB/s" in piece["html"]
    for name in ("P = 8, 1 x 8, flat", "P = 8, 2 x 4, two steps", "P = 16, 2 x 8, flat"):
        assert name in piece["text"], name
    assert "P=2 B=512 T=64 D=1280 k=6 bf16" in piece["html"]
    assert displayed(fabric.predict, links, layers[0], nic, nic)[0]["text"] != piece["text"]


def test_what_records_do_not_determine_is_a_gap(measured):
    links, layers = measured
    nic = LinkCost(10.0, 0.0, 50.0)
    for call, says in (
        ((fabric.check, [absent("exchange")], layers), "python -m rlkernel exchange --device cuda"),
        ((fabric.predict, [absent("exchange")], layers[0], None, nic), "no exchange was timed"),
        ((fabric.predict, links, absent("a2a-ffn"), None, nic), "python -m rlkernel a2a-ffn"),
        ((fabric.predict, links[:1], layers[0], None, None), "no cost of inter links"),
    ):
        (piece,) = displayed(*call)
        assert piece["kind"] == "gap" and piece["text"].startswith("NO MODEL here")
        assert says in piece["text"], piece["text"]


def test_a_layer_whose_links_nobody_timed_is_a_gap_beside_the_rest(measured):
    links, layers = measured
    gap, piece = displayed(fabric.check, links[:1], layers)
    assert gap["kind"] == "gap" and "2 emulated nodes of one host: no cost of inter" in gap["text"]
    assert piece["kind"] == "model" and "A2A-FFN, 1 node: 8 points" in piece["text"]


def test_a_given_link_must_be_one():
    assert fabric.given(10.0, None) is None
    for start, rate in ((10.0, 0.0), (-1.0, 50.0)):
        with pytest.raises(ValueError, match="give positive numbers"):
            fabric.given(start, rate)


def test_a_record_answers_for_the_nodes_it_was_on(results):
    home = results / "exchange"
    for name, nodes, each in (("one", 1, 2), ("two", 2, 1)):
        rows = messages.rows(nodes, each)
        started = f"2026-01-0{nodes}T00:00:00Z"  # the newest is on two nodes
        keys = [row["key"] for row in rows]
        record(home / name, rows, started=started, experiment="exchange", device="cpu",
               parameters={"nodes": 1}, case_keys=keys)  # fmt: skip
    for nodes, name in ((1, "one"), (2, "two")):
        found = evidence.get("exchange", run=str(home), device="cpu", nproc=(2,), nodes=nodes)
        assert found.local.path.name == name
        assert draw.where(found.local.rows[0]).startswith(str(nodes))


def test_what_was_reached_stands_with_its_source_or_as_a_gap(measured):
    _, (_, layer) = measured
    (row,) = layer.local.rows
    told = {"time": {"mean": 0.91, "ci95": 0.02, "why": ""},
            "trace": {"mean": 0.7, "ci95": 0.2, "why": "wider than 0.05"}}  # fmt: skip
    for times in row["result"]["times"].values():
        for line in times["schedules"].values():
            line["reached"] = told
    table, gap = displayed(fabric.reached, [layer, absent("a2a-ffn")])
    assert "results/a2a-ffn/far" in table["html"] and "+0.91 ± 0.02" in table["text"]
    assert "NOT MEASURED: wider than 0.05" in table["text"]
    assert gap["kind"] == "gap" and "needs 2 GPUs" in gap["text"]
