"""The figures of the audit and of the catalogue on made-up rows."""

from __future__ import annotations

import pytest

from rlkernel.figures import audit, catalogue
from tests.figures import synthetic
from tests.figures.looks import drawn_and_told, words

FAULTS = [*synthetic.catalogue(), *synthetic.attention()]
PLOTS = {
    "catalogue": (audit.CATALOGUE, FAULTS),
    "cause": (audit.CAUSE, []),
    "findings": (audit.FINDINGS, [synthetic.audit(fault="x", first="leave")]),
    "clean": (audit.FINDINGS, [synthetic.audit()]),
    "verdicts": (audit.VERDICTS, synthetic.audits()),
}


@pytest.mark.parametrize("name", PLOTS)
def test_drawn_and_told(name):
    drawn_and_told(*PLOTS[name])


# ---- the catalogue -------------------------------------------------------------------------------


def cells(axes) -> list[list[str]]:
    """The states of the cells, line by line, as they are drawn."""
    columns = len(axes.get_xticklabels())
    drawn = [p.get_gid() for p in axes.patches]
    return [drawn[i : i + columns] for i in range(0, len(drawn), columns)]


def test_first_wrong_and_right_stand_where_they_belong():
    swiglu, gqa = catalogue.matrix(FAULTS).axes
    assert cells(swiglu) == [
        ["first"] + ["wrong"] * 7,
        ["right", "right", "first", "wrong", "right", "right", "right", "wrong"],
    ]
    assert cells(gqa) == [
        ["first"] + ["wrong"] * 4,
        ["right"] * 3 + ["first", "wrong"],
    ]
    titles = [t.get_text() for t in gqa.get_yticklabels()]
    assert titles == ["missing output reduce", "missing kv reduce"]  # the correct twin is left out


def test_what_only_some_seeds_break_is_some():
    rows = [
        synthetic.gqa(fault="doubled_output_reduce", seed=s, wrong=("output", *more))
        for s, more in ((1, ("loss",)), (2, ()))
    ]
    (axes,) = catalogue.matrix(rows).axes
    assert cells(axes) == [["first", "some", "right", "right", "right"]]


def test_an_order_of_arrival_varies_its_bits():
    row = synthetic.gqa(4, "arrival_order_output_reduce")
    row["result"] |= {"first_wrong": "output", "seen_by": "repeat"}
    (axes,) = catalogue.matrix([row]).axes
    assert cells(axes) == [["bits vary"] + ["right"] * 4]
    assert {"P 4", "right, but not the same bits twice"} <= set(words(axes))


def test_where_it_was_shown():
    lanes = [synthetic.gqa(dp=2)]
    split = [synthetic.gqa(sequence_parallel="on")]
    assert catalogue.shown_on(lanes) == "P 2 dp 2"
    assert catalogue.shown_on(split) == "P 2 SP"
    assert catalogue.shown_on([*split, synthetic.gqa(4)]) == "P 2, 4"


def test_every_fault_has_its_look():
    from rlkernel.collectives.catalogue import GQA, SWIGLU

    assert all(catalogue.looks(name) for name in (*GQA, *SWIGLU))


# ---- one audit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", synthetic.BOUNDARIES)
def test_the_frame_stands_at_the_first_wrong_boundary(first):
    row = synthetic.audit(fault="x", first=first)
    (axes,) = audit.findings([row]).axes
    (frame,) = [p for p in axes.patches if p.get_gid() == "first-wrong"]
    names = [t.get_text() for t in axes.get_yticklabels()]
    assert names == list(synthetic.BOUNDARIES)
    assert names[round(frame.get_y() + 0.5)] == first
    assert words(axes) == ["missing"]  # what follows from it is not named
    assert f"{first} is wrong" in audit.findings_alt([row])
    marked = [line[1] for line in audit.findings_table([row])[1] if line[0]]
    assert marked == [first]


def test_no_frame_around_a_clean_block():
    (axes,) = audit.findings([synthetic.audit()]).axes
    assert not axes.patches and not axes.texts
    assert "all right" in audit.findings_alt([synthetic.audit()])


def test_every_kind_of_finding_is_explained():
    """Each name that the diagnosis can give stands in the picture of what causes predict."""
    import re
    from pathlib import Path

    from rlkernel import audit as package

    said = {name.replace(" ", "_") for name, *_ in audit.CAUSES}
    source = (Path(package.__file__).parent / "hypotheses.py").read_text()
    assert len(re.findall(r'return \(?\s*"([a-z_]+)",', source)) > 10
    for kind in re.findall(r'return \(?\s*"([a-z_]+)",', source):
        assert kind in said | {"summed_already"}, kind


# ---- the verdicts --------------------------------------------------------------------------------


def test_a_cell_is_coloured_by_its_worst_case():
    figure = audit.verdicts(synthetic.audits())
    swiglu, gqa, torchs = figure.axes
    assert [p.get_gid() for p in swiglu.patches] == [
        "right", "right", "unsure", "right", "right",
    ]  # fmt: skip
    assert words(swiglu) == [
        "clean", "clean", "missing @ leave", "missing @ leave", "subset @ norm.grad",
        "on 2 × 2 ranks",
    ]  # fmt: skip
    assert [p.get_gid() for p in gqa.patches] == ["wrong"]
    assert [a.get_title(loc="left") for a in figure.axes] == ["SwiGLU", "GQA", "torch's GQA"]
    assert words(torchs) == ["missing @ down"]


def test_the_alternative_counts_and_names_what_is_not_right():
    said = audit.verdicts_alt(synthetic.audits())
    assert "SwiGLU: 4 right, 1 unsure, 0 wrong (missing forward reduce)" in said
    assert "GQA: 0 right, 0 unsure, 1 wrong (stale input grad reduce)" in said


def test_a_case_nobody_expected_anything_of_has_a_sentence_and_no_verdict():
    theirs = synthetic.audit("theirs", first="leave")
    del theirs["result"]["told"]
    theirs["case"]["parameters"]["twin"] = "my_block:forgetful"
    assert audit.sentences([theirs])[1] == [
        ["forgetful", "4", "not clean", "certain", "leave: a sentence"]
    ]
    assert audit.verdicts_table([theirs])[1] == []
