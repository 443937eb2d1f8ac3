"""Traces of ranks become numbers of a row, and what is missing becomes a failed check."""

from __future__ import annotations

import gzip
from types import SimpleNamespace

from rlkernel.overlap import seen
from tests.records.traces import GEMM, NCCL, Book

VARIANTS = ("none", "with-sm/2")


def book(rank: int = 0, lost: bool = False) -> Book:
    made = Book(rank).run(NCCL, 9, 0, 100, lost=lost).run(GEMM, 7, 100, 200).mark("none")
    return made.run(NCCL, 9, 300, 400).run(GEMM, 7, 350, 450).mark("with-sm/2")


def alone(*others) -> SimpleNamespace:
    """A seam of two ranks whose other one says what it is told to."""
    return SimpleNamespace(grid=SimpleNamespace(size=2), collect=lambda mine: [mine, *others])


def test_every_rank_has_its_word_and_the_file_is_small_after(tmp_path):
    file = book().write(tmp_path / "t.json.gz")
    other = ({"none": {"rank": 1}, "with-sm/2": {"rank": 1}}, "")
    found, (name, held, value, _) = seen.seen(file, VARIANTS, alone(other))
    assert [one["rank"] for one in found["none"]] == [0, 1] and held and name == seen.CHECK
    assert (found["none"][0]["hidden"], found["with-sm/2"][0]["hidden"]) == (0.0, 0.5)
    assert value == "2 variants on 2 ranks"
    assert b"secret-host" not in gzip.decompress(file.read_bytes())
    again, _ = seen.seen(file, VARIANTS, alone(other))
    assert again == found and sorted(p.name for p in tmp_path.iterdir()) == ["t.json.gz"]


def test_missing_kernels_on_any_rank_fail_the_check(tmp_path):
    file = book(lost=True).write(tmp_path / "t.json.gz")
    found, (_, held, value, _) = seen.seen(file, VARIANTS, alone(({}, "")))
    assert (found, held) == ({}, False) and "have no kernel in the trace" in value
    file = book().write(tmp_path / "t.json.gz")
    found, (_, held, value, _) = seen.seen(file, VARIANTS, alone(({}, "rank 1: nothing ran")))
    assert (found, held, value) == ({}, False, "rank 1: nothing ran")


def test_several_ranks_without_any_communication_fail_the_check(tmp_path):
    file = Book().run(GEMM, 7, 0, 9).mark("none").write(tmp_path / "t.json.gz")
    _, (_, held, value, _) = seen.seen(file, ("none",), alone(({}, "")))
    assert not held and "no comm in the trace" in value


def test_messages_through_the_host_are_not_asked_of_a_devices_trace(tmp_path):
    file = Book().run(GEMM, 7, 0, 9).mark("none").write(tmp_path / "t.json.gz")
    other = ({"none": {"rank": 1, "hidden": None}}, "")
    found, (_, held, _, _) = seen.seen(file, ("none",), alone(other), staged=True)
    assert held and found["none"][0]["why"] == "no communication in this range"
