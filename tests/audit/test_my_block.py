"""Somebody else's block: the example that README and notebook show, audited by the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlkernel import __main__ as main
from rlkernel.audit import PARTIAL, REPLICATED, laid_out, shard
from tests.experiments.launched import measure, select

TWINS = ("my_block:twin", "my_block:forgetful")


@pytest.fixture(scope="module")
def example():
    """The folder of the example importable, here and in the ranks."""
    folder = str(Path(__file__).resolve().parents[2] / "notebooks" / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", folder)
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def audited(example, tmp_path_factory):
    """Both twins in one launch of four ranks."""
    results = tmp_path_factory.mktemp("results")
    return results, measure("audit", results, dense="my_block:dense", twin=TWINS, nproc="4")


def test_a_twin_with_all_its_sums_is_clean(audited):
    (row,) = select(audited[1], twin="my_block:twin")
    assert row["passed"] and row["result"]["kind"] == "clean"
    names = [f["boundary"] for f in row["result"]["findings"]]
    assert {"up", "down", "input.grad", "up.weight.grad", "down.weight.updated"} < set(names)


def test_a_forgotten_sum_is_named_where_it_is_missing(audited):
    (row,) = select(audited[1], twin="my_block:forgetful")
    result = row["result"]
    assert (result["kind"], result["boundary"]) == ("missing", "input.grad")
    assert result["sure"] == "certain"
    assert result["says"].startswith("input.grad: the sum over ranks {0, 1, 2, 3} is missing")
    wrong = [f["boundary"] for f in result["findings"] if f["kind"] != "equal"]
    assert wrong == ["input.grad"]  # output, loss and every weight gradient are right


@pytest.mark.parametrize(("twin", "code"), [(TWINS[0], 0), (TWINS[1], 1)])
def test_the_command_answers_by_exit_code(audited, monkeypatch, capsys, twin, code):
    """The cases are known from the launch above, so nothing is launched here."""
    monkeypatch.setenv("RLKERNEL_RESULTS", str(audited[0]))
    words = ["audit", "--dense", "my_block:dense", "--twin", twin, "--nproc", "4", "--json"]
    assert main.dispatch(words) == code
    said = json.loads(capsys.readouterr().out)
    assert said["passed"] == (code == 0) and said["cases"][0]["case"].startswith(twin)


# ---- laid_out ------------------------------------------------------------------------------------


def test_what_is_not_named_lies_where_its_owner_does():
    names = ("up", "up.grad", "up.weight.grad", "up.weight.updated", "down", "down.grad", "loss")
    seen = {name: torch.zeros(2) for name in (*names, "up.weight", "in.grad")}
    where = {"up": shard(-1, 1, 2), "up.weight": shard(0, 1, 2)}
    where |= {"down": PARTIAL, "in.grad": PARTIAL}
    found = {name: layout for name, (_, layout) in laid_out(seen, where).items()}
    assert list(found) == list(seen)
    assert found["up"] == found["up.grad"] == shard(-1, 1, 2)
    assert found["up.weight.grad"] == found["up.weight.updated"] == shard(0, 1, 2)
    assert (found["down"], found["down.grad"], found["in.grad"]) == (PARTIAL, REPLICATED, PARTIAL)
    assert found["loss"] == REPLICATED


def test_a_name_that_was_not_seen_is_refused():
    with pytest.raises(ValueError, match="no boundary downn: there are down, loss"):
        laid_out({"down": torch.zeros(1), "loss": torch.zeros(1)}, {"downn": PARTIAL})
