"""What a notebook takes is checked before anything is launched."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rlkernel.experiments.case import UsageError
from rlkernel.pages import parameters

CELL = '''
"""What may be changed."""
run: str = ""
world_size: int = 2  # ranks
shape: tuple[int, ...] = (3, 2)
backward: bool = False
lr: float = 1e-3  # of SGD
limit: int | None = None
names: tuple[str, ...] = ("fp32",)
'''


def write(path, source, tags=("parameters",)):
    cell = {"cell_type": "code", "source": source, "metadata": {"tags": list(tags)}}
    path.write_text(json.dumps({"cells": [cell | {"outputs": [], "execution_count": None}]}))
    return path


@pytest.fixture
def book(tmp_path):
    return write(tmp_path / "a {b} c.ipynb", CELL)


def test_read(book):
    found = parameters.read(book)
    assert list(found) == ["run", "world_size", "shape", "backward", "lr", "limit", "names"]
    assert found["shape"].default == (3, 2) and found["world_size"].help == "ranks"
    assert str(found["lr"]) == "lr (float, default 0.001)  of SGD"


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("shape", "[4,16,128]", (4, 16, 128)),
        ("shape", "4,16", (4, 16)),
        ("shape", [1, 2], (1, 2)),
        ("backward", "true", True),
        ("backward", False, False),
        ("lr", "1e-3", 1e-3),
        ("lr", "2", 2.0),
        ("limit", "7", 7),
        ("limit", "none", None),
        ("limit", None, None),
        ("names", "fp32,bf16", ("fp32", "bf16")),
        ("run", "results/a b {c}", "results/a b {c}"),
    ],
)
def test_values_are_read_by_their_annotation(book, name, text, value):
    found = parameters.validate(book, {name: text})[name]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "given, says",
    [
        ({"wrold_size": "4"}, "unknown parameter wrold_size; did you mean world_size?"),
        ({"zzz": "4"}, "unknown parameter zzz; there are run, world_size"),
        ({"world_size": "four"}, "world_size: expected int, for example 4; got 'four'"),
        ({"shape": "[4,x]"}, "shape: expected tuple of int, for example [4, 4]; got '[4,x]'"),
        ({"backward": "maybe"}, "backward: expected bool, for example true"),
        ({"limit": "some"}, "limit: expected int or None"),
        ({"lr": "fast"}, "lr: expected float, for example 1e-3"),
    ],
)
def test_a_wrong_one_is_named(book, given, says):
    with pytest.raises(UsageError, match=".") as caught:
        parameters.validate(book, given)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "source, says",
    [
        ("x = 3", "holds `name: type = literal` only; found `x = 3`"),
        ("x: int = len('a')", "cannot read the parameter `x: int = len('a')`"),
        ("x: object = 3", "cannot read"),
        ("print(1)", "found `print(1)`"),
    ],
)
def test_a_parameters_cell_holds_nothing_else(tmp_path, source, says):
    with pytest.raises(UsageError) as caught:
        parameters.read(write(tmp_path / "a.ipynb", source))
    assert says in str(caught.value)


def test_no_notebook(tmp_path):
    (tmp_path / "a.ipynb").write_text("no json")
    for name, says in (("a.ipynb", "is not a notebook"), ("b.ipynb", "no such notebook")):
        with pytest.raises(UsageError, match=says):
            parameters.read(tmp_path / name)


def test_without_a_parameters_cell_nothing_may_be_given(tmp_path):
    book = write(tmp_path / "a.ipynb", CELL, tags=())
    assert parameters.validate(book, {}) == {}
    with pytest.raises(UsageError, match="unknown parameter lr; there are none"):
        parameters.validate(book, {"lr": 1})


def test_the_command_refuses_and_launches_nothing(book, results):
    """Exit 2 by the real command line, and not one file."""
    command = [sys.executable, "-m", "rlkernel", "notebook", str(book), "-p", "wrold_size", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "unknown parameter wrold_size; did you mean world_size?" in done.stderr
    assert list(results.iterdir()) == []


def test_every_notebook_of_the_house_takes_a_run(root):
    books = sorted((root / "notebooks").glob("*.ipynb"))
    assert books
    for book in books:
        found = parameters.read(book)
        assert found["run"].default == "" and found["run"].hint is str
        assert all(p.help for p in found.values()), book.name
