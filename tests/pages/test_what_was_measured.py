"""What a page says of a record as a whole: whether it is of today's code, which parts it has."""

from __future__ import annotations

from rlkernel.pages import evidence, show
from rlkernel.pages.evidence import Evidence
from tests.pages.test_show import displayed, record


def test_a_record_is_old_when_other_code_moved_its_bytes(results):
    """One that does not say which code did is taken by its experiment's own imports."""
    mine = {"source": evidence.source("tp-swiglu")}
    for name, seam, stale in (("a", {}, False), ("b", {"seam": evidence.seam()}, False),
                              ("c", {"seam": "0" * 64}, True)):  # fmt: skip
        made = record(results / "tp-swiglu" / name, **mine, **seam)
        assert evidence.is_stale(made) is stale, name


def test_coverage_says_which_parts_of_an_experiment_were_measured(results):
    """Its lists speak of all parts, whichever a record has."""
    cases = [{"parameters": {"what": what}} for what in ("layer", "layer", "hash")]
    made = record(results / "det-ffn" / "a", experiment="det-ffn", cases=cases)
    (piece,) = displayed(show.coverage, Evidence("det-ffn", {}, made))
    assert "Parts that were measured: layer, hash." in piece["html"]
    whole = record(results / "tp-swiglu" / "d", cases=[{"parameters": {"size": "article"}}])
    (piece,) = displayed(show.coverage, Evidence("tp-swiglu", {}, whole))
    assert "Parts that were" not in piece["html"]
