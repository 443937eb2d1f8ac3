"""What twin and dense side hand out, and what of it is refused: which rank, what, what to do."""

from __future__ import annotations

import pytest
import torch

from rlkernel import __main__ as main
from rlkernel.audit import PARTIAL, REPLICATED, Reference, shard
from rlkernel.audit.boundaries import Layout
from rlkernel.audit.gathered import Unusable, gathered
from rlkernel.audit.report import audit

X = torch.arange(24.0).reshape(4, 6)
DENSE = Reference({}, X, X, {"a": X, "b": X})
WHOLE = {"a": (X, REPLICATED), "b": (X, REPLICATED)}


def cut(dim=0, index=None, parts=2):
    """Every rank's slice of a; index: what each says instead of its own rank."""
    at = range(2) if index is None else index
    return [{"a": (X, shard(dim, i, parts))} for i in at]


class Ranks:
    """The control plane of two ranks, as rank 0 sees it."""

    device, rank = torch.device("cpu"), 0

    def __init__(self, other, unsteady=None):
        self.other, self.unsteady = other, unsteady

    def collect(self, mine):
        return [mine, self.unsteady if isinstance(mine, list) else self.other]


def told(mine, other, due=DENSE):
    return gathered(mine, due, Ranks(other))


def test_what_fits_is_handed_on():
    partial = {"a": (X, PARTIAL)}
    for pair in ([WHOLE, WHOLE], cut(), cut(-1), cut(0, (1, 0)), [partial, partial]):
        for found, given in zip(told(*pair), pair, strict=True):
            assert list(found) == list(given)
            assert all(found[n][0].equal(X) and found[n][1] == given[n][1] for n in given)


@pytest.mark.parametrize(
    ("mine", "other", "words"),
    [
        ([X], {}, r"rank 0 returned a list: expected a mapping boundary -> \(tensor, layout\)"),
        ({}, {}, "rank 0 returned an empty mapping.*trace"),
        ({"a": X}, WHOLE, "rank 0 returned a -> Tensor: expected .*laid_out"),
        ({"a": (X, 3)}, WHOLE, "rank 0 returned a -> Tensor, int: expected"),
        ({"a": (3, REPLICATED)}, WHOLE, "rank 0 returned a -> int, Layout: expected"),
        (WHOLE, "a -> Tensor: of its own", "rank 1 returned a -> Tensor: of its own"),
        (WHOLE, {"a": WHOLE["a"]}, "ranks 0 and 1 list different.*rank 1 lists not b; expected"),
        ({"a": WHOLE["a"]}, WHOLE, "ranks 0 and 1 list different.*rank 1 lists also b; expected"),
        (WHOLE, dict(reversed(WHOLE.items())), "rank 1 lists them in another order"),
        ({"c": (X, REPLICATED)}, {"c": (X, REPLICATED)}, "does not have: c; it has a, b: name"),
        (*cut(0, (0, 0)), r"a: no rank has slice 1: rank 0 shard\(0, 0, 2\); rank 1 shard\(0, 0"),
        (*cut(0, (0, 1), 4), "a: no rank has slice 2, 3: .*expected every index of range"),
        (*cut(0, (0, 2)), r"a: rank 1 gave shard\(0, 2, 2\): expected an index from 0 to 1"),
        (*cut(0, (0, 1), 3), r"rank 0 gave shard\(0, 0, 3\).*dense \(4, 6\) gives \(here 2\)"),
        (*cut(2), r"a: rank 0 gave shard\(2, 0, 2\), but the dense one has 2 dimensions"),
        (cut()[0], {"a": (X, REPLICATED)}, r"rank 1 gave no shard, rank 0 shard\(0, 0, 2\)"),
        (cut()[0], cut(1)[1], r"rank 1 gave shard\(1, 1, 2\), rank 0 shard\(0, 0, 2\): expected"),
        ({"a": (X, PARTIAL)}, {"a": (X, REPLICATED)}, "a: ranks 0 and 1 differ, one calls it p"),
    ],
)
def test_what_does_not_is_refused(mine, other, words):
    with pytest.raises(Unusable, match=words):
        told(mine, other)


def test_slices_of_two_dimensions_must_cover_all_pairs():
    def both(i, j):
        return {"a": (X, Layout(((0, i, 2), (1, j, 2))))}

    with pytest.raises(Unusable, match=r"no rank has slice \(0, 1\), \(1, 0\): rank 0 shard\(0, 0"):
        told(both(0, 0), both(1, 1))


def test_a_dense_side_that_returns_something_else():
    with pytest.raises(Unusable, match="the dense side returned a dict: expected Reference"):
        audit(lambda seed: {"x": X}, lambda due: WHOLE, Ranks(WHOLE), 11)


@pytest.mark.parametrize("differ", [False, True])
def test_replicas_that_differ_within_tolerance_are_noted(differ):
    theirs = {"a": (X * (1 + 1e-6), REPLICATED)} if differ else {"a": (X, REPLICATED)}
    report = audit(lambda seed: DENSE, lambda due: {"a": (X, REPLICATED)}, Ranks(theirs, []), 11)
    assert report["passed"] and report["replicas_differ"] == (["a"] if differ else [])
    assert ("replicas differ in their bits at a" in report["says"]) == differ


# ---- from the command line -----------------------------------------------------------------------


def dense(seed):
    return DENSE


def twin(rank, group, state_dict, x, target):
    return {"a": (x, shard(0, 0, 2))}


def test_bad_usage_seen_by_the_ranks_ends_like_any_other(capsys, results):
    words = ["audit", "--dense", f"{__name__}:dense", "--twin", f"{__name__}:twin", "--nproc", "2"]
    assert main.main(words) == 2
    said = capsys.readouterr().err
    assert "rlkernel: audit: bad usage, says rank" in said and "a: no rank has slice 1" in said
    assert "Traceback" not in said
