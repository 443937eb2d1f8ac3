"""Whole audits with real ranks: every fault of both blocks and of torch's own twins is named."""

import json

import pytest

from rlkernel.collectives import catalogue
from rlkernel.experiments import audit
from rlkernel.experiments.case import UsageError, parse_params
from tests.experiments.launched import measure, select


@pytest.fixture(scope="module")
def two(shared_results):
    """P = 2, all four twins."""
    return measure("audit", shared_results, nproc="2", fault="all", block=list(audit.BLOCKS))


@pytest.fixture(scope="module")
def four(shared_results):
    """P = 4, where torch can still split the SwiGLU block."""
    blocks = ["swiglu", "gqa", "torch-swiglu"]
    return measure("audit", shared_results, nproc="4", fault="all", block=blocks)


def rows_of(block, two, four):
    return [row for record in (two, four) for row in select(record, block=block)]


@pytest.mark.parametrize("block", audit.BLOCKS)
def test_a_clean_twin_is_called_clean(two, four, block):
    clean = [row for row in rows_of(block, two, four) if row["case"]["fault"] == "none"]
    assert clean and all(row["passed"] for row in clean)
    for row in clean:
        assert all(f["kind"] == "equal" for f in row["result"]["findings"])
        assert len(row["result"]["findings"]) > 20
        assert "bias.grad" in {f["boundary"] for f in row["result"]["findings"]}


@pytest.mark.parametrize("block", audit.BLOCKS)
def test_every_fault_is_named_at_its_boundary(two, four, block):
    rows = rows_of(block, two, four)
    for row in rows:
        result = row["result"]
        assert result["told"] == "right", (row["case"], result["says"])
        assert result["sure"] == "certain", (row["case"], result["says"])
    known = {**audit.FAULTS, **audit.STYLES}[block]
    assert {row["case"]["fault"] for row in rows} == {"none", *known}


def test_the_twin_and_the_diagnosis_know_of_no_fault():
    """They import neither the faults nor the catalogue."""
    import ast
    from pathlib import Path

    import rlkernel.audit

    for file in Path(rlkernel.audit.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        words = {alias.name for node in ast.walk(tree) for alias in getattr(node, "names", ())}
        words |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any("fault" in word or "catalogue" in word for word in words), file


def test_verdicts_and_summary(two):
    everything = parse_params(audit.Params, {"fault": "all", "nproc": "2"})
    assert audit.verdict(everything, two.rows)["passed"] and two.run["exit_code"] == 0
    (row,) = select(two, block="swiglu", fault="missing_forward_reduce")
    alone = parse_params(audit.Params, {"fault": "missing_forward_reduce", "block": "swiglu"})
    assert not audit.verdict(alone, [row])["passed"]
    said = json.loads(json.dumps(audit.summary(alone, [row])))
    assert said["passed"] is False and "the sum over ranks {0, 1} is missing" in said["says"][0]
    header, body = audit.table(everything, two.rows)
    assert len(body) == len(two.rows) and all(len(line) == len(header) for line in body)
    wrong = json.loads(json.dumps(two.rows))
    wrong[3]["result"]["told"] = "wrong"
    assert not audit.verdict(everything, wrong)["passed"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nproc": 1}, "nproc=1 is not possible"),
        ({"nproc": 6}, "nproc=6 is not possible"),
        ({"nproc": 8}, "nproc=8 is too many for swiglu: at most 4"),
        ({"dense": "x:y"}, "give both --dense and --twin"),
        ({"dense": "no_such:f", "twin": "no_such:g"}, "'no_such:f' was not found"),
        ({"dense": "json", "twin": "json"}, "'json' was not found: expected module:function"),
        ({"dense": "json:load", "twin": "json:lods"}, "function in json: lods; did you mean load"),
        ({"dense": "json:loads", "twin": "json:loads", "fault": "all"}, "goes into the rec"),
        ({"fault": "missing_kv_reduce", "block": "swiglu"}, "cannot show in swiglu"),
        ({"fault": "missing_forward_reduces"}, "did you mean missing_forward_reduce"),
    ],
)
def test_what_cannot_be_audited_is_refused(given, words):
    with pytest.raises(UsageError, match=words):
        audit.cases(parse_params(audit.Params, given))


def test_the_catalogues_agree_with_themselves():
    for faults in (catalogue.SWIGLU, catalogue.GQA):
        assert len(faults) >= 10
        for site in {fault.site for fault in faults.values() if fault.observer}:
            kinds = {fault.kind for fault in faults.values() if fault.site == site}
            unsummed = "subset" if site == "dw" else "missing"
            assert {unsummed, "doubled", "averaged", "wrong_group"} <= kinds, site
        for name, fault in faults.items():
            assert fault.name == name and fault.says and fault.detector in ("equivalence", "repeat")
            assert bool(fault.observer) != bool(fault.load), name
            assert fault.site in audit.BOUNDARY, name
            least = fault.smallest
            assert fault.grid(least.tp) == least and fault.grid(least.tp // 2) is None
            assert least.dp == 1 or fault.grid(4) is None
