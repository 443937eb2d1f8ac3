"""Which records answer what the overlap question asks for."""

from __future__ import annotations

import pytest

from rlkernel.pages import chapters, required
from tests.figures import counted, exchanges
from tests.pages.test_show import record


@pytest.mark.parametrize("device, what, ours", [
    ("cuda", "all", True), ("cuda", "public", True), ("cpu", "all", False), ("cuda", "ep1", False),
])  # fmt: skip
def test_a_preflight_that_made_the_public_checks_answers_for_them(tmp_path, device, what, ours):
    made = record(tmp_path / "a", [], experiment="preflight", device=device,
                  parameters={"what": what})  # fmt: skip
    assert required._ours(made) == ours
    (need,) = (n for n in required.NEEDS if n.name == "the public checks, two GPUs")
    assert bool(need.answers([made])) == (device == "cuda")


def test_of_a_whole_preflight_the_layers_rows_tell_their_paths(tmp_path):
    plain = {"key": "plain", "case": exchanges.row()["case"], "result": {"us": 3.0}}
    made = record(tmp_path / "a", [plain, exchanges.row()], experiment="preflight", device="cuda")
    told = chapters.Chapters([made])
    assert "preflight/a" in told.fusion() and told.paths()
    assert all("preflight/a" in piece and "chunks: kernel/4" in piece for piece in told.pieces)


def test_counters_answer_where_a_product_was_beside_others(tmp_path):
    (need,) = (n for n in required.NEEDS if "hardware counters" in n.name)
    part = record(tmp_path / "a", [counted.calibration()], experiment="counters", device="cuda")
    whole = record(tmp_path / "b", counted.every(), experiment="counters", device="cuda")
    assert need.answers([part, whole]) == [whole]
