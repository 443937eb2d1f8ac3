"""The page about several nodes: what it shows from real ranks, what it says it does not show."""

from __future__ import annotations

import re

import pytest

from rlkernel import records
from tests.pages.test_report import Page, read

NAME = "08_cross_node"


def test_the_page_shows_what_it_must(built):
    page = Page(read(built.folder, NAME))
    for text in (
        "Every element arrives, on one node",
        "Every element arrives, on two agents",
        "across by process group: what arrives",
        "The bits of the sequential call, on two agents",
        "all_to_all over world by process-group/gloo",
        "A model, not a measurement",
        "partial milestone: two real nodes NOT COVERED",
        "COVERED",
    ):
        assert text in page.text, text
    starts = [alt.split(".")[0] for alt in page.alts]
    for start in (
        "Where the ranks stood",
        "Time and rate of one exchange by message size",
        "Two steps over a flat exchange, by message size",
        "Exposed communication by placement",
        "A model beside what was measured",
    ):
        assert start in starts, start
    exposed = next(alt for alt in page.alts if alt.startswith("Exposed"))
    for place in ("1 node", "2 agents of one host"):
        assert re.search(rf"with-sm[^;]*, {place}: [+-][\d,]+ µs exposed, hidden", exposed), place
    checked = next(alt for alt in page.alts if alt.startswith("A model beside"))
    assert re.search(r"exchange: 16 points, median error \d+%, worst \d+%", checked), checked
    assert "A2A-FFN, 2 agents of one host: " in checked


def test_one_machine_is_never_called_two_nodes(built):
    page = Page(read(built.folder, NAME))
    kinds = {
        row["result"]["topology"]["kind"]
        for record in records.find("exchange", built.results) for row in record.rows
    }  # fmt: skip
    assert len(kinds) == 2 and not any(kind.startswith("real") for kind in kinds)
    assert "real nodes" not in " ".join(page.alts)


def test_what_needs_gpus_is_a_box_with_its_command(built):
    if records.environment()["gpus"]:
        pytest.skip("this machine has GPUs: there is no gap to show")
    _, *gaps = Page(read(built.folder, NAME)).text.split("NOT MEASURED here: needs 2 GPUs")
    for command in ("exchange --device cuda --nodes 1", "exchange --device cuda --nodes 2",
                    "a2a-ffn --device cuda --overlap with-sm,sm-free,kernel"):  # fmt: skip
        assert any(f"python -m rlkernel {command}" in gap[:300] for gap in gaps), command
