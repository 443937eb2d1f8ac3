"""The hash of the code behind a number: what must change it, and what must not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlkernel.records import source_hash
from rlkernel.records.source import closure

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "__init__.py": "",
    "grid.py": "SIZE = 1\n",
    "experiments/__init__.py": "",
    "experiments/ask.py": (
        '"""A question."""\n'
        "from rlkernel.grid import SIZE\n"
        "def run():\n"
        '    """Runs."""\n'
        "    from rlkernel.blocks import deep  # a module\n"
        "    return deep.f(SIZE)\n"
    ),
    "blocks/__init__.py": "from . import near\n",
    "blocks/near.py": "from ..far import away\n",
    "blocks/deep.py": "import rlkernel.kernels.fold\ndef f(x):\n    return x + 1\n",
    "kernels/__init__.py": "",
    "kernels/fold.py": "PLUGIN = 'rlkernel.named'\n",
    "far.py": "away = 1\n",
    "named.py": "n = 1\n",
    "stranger.py": "s = 1\n",
}
MODULE = "rlkernel.experiments.ask"


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "rlkernel" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def edit(tree: Path, name: str, old: str, new: str) -> None:
    path = tree / "rlkernel" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_the_closure_is_everything_that_can_run(tree):
    assert sorted(closure(MODULE, tree)) == [
        "rlkernel",
        *("rlkernel.blocks", "rlkernel.blocks.deep", "rlkernel.blocks.near"),
        *("rlkernel.experiments", "rlkernel.experiments.ask"),
        *("rlkernel.far", "rlkernel.grid"),
        *("rlkernel.kernels", "rlkernel.kernels.fold"),
        "rlkernel.named",
    ]


CHANGES = {
    "itself": ("experiments/ask.py", "deep.f(SIZE)", "deep.f(SIZE + 1)"),
    "an import at the top": ("grid.py", "1", "2"),
    "a module imported inside a function": ("blocks/deep.py", "x + 1", "x + 2"),
    "a package on the way": ("blocks/__init__.py", "import near", "import near as n"),
    "a relative import behind it": ("far.py", "1", "2"),
    "an import of an import": ("kernels/fold.py", "PLUGIN", "PLUGIN = OTHER"),
    "a module named by a string": ("named.py", "1", "2"),
    "the root package": ("__init__.py", "", "x = 1\n"),
    "a default": ("blocks/deep.py", "f(x)", "f(x=None)"),
}
STAYS = {
    "a comment": ("experiments/ask.py", "# a module", "# another word"),
    "a docstring": ("experiments/ask.py", "A question.", "Another question."),
    "a function's docstring": ("experiments/ask.py", "Runs.", "Walks."),
    "layout": ("blocks/deep.py", "return x + 1", "return (\n        x + 1\n    )"),
    "what nobody imports": ("stranger.py", "1", "2"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes(tree, change):
    before = source_hash(MODULE, tree)
    edit(tree, *change)
    assert source_hash(MODULE, tree) != before


@pytest.mark.parametrize("change", STAYS.values(), ids=STAYS)
def test_stays(tree, change):
    before = source_hash(MODULE, tree)
    edit(tree, *change)
    assert source_hash(MODULE, tree) == before


def test_a_docstring_that_goes_away_stays_too(tree):
    before = source_hash(MODULE, tree)
    edit(tree, "experiments/ask.py", '    """Runs."""\n', "")
    assert source_hash(MODULE, tree) == before


def test_swapped_files_differ(tree):
    """Names count: the same texts in other places are other code."""
    before = source_hash(MODULE, tree)
    edit(tree, "far.py", "away = 1", "n = 1")
    edit(tree, "named.py", "n = 1", "away = 1")
    assert source_hash(MODULE, tree) != before


def test_f_strings_do_not_depend_on_how_they_are_cut(tree):
    edit(tree, "far.py", "away = 1", "away = f'a' 'b' f'{1}' 'c'")
    before = source_hash(MODULE, tree)
    edit(tree, "far.py", "f'a' 'b' f'{1}' 'c'", "f'ab{1}c'")
    assert source_hash(MODULE, tree) == before
    edit(tree, "far.py", "f'ab{1}c'", "f'ab{1}d'")
    assert source_hash(MODULE, tree) != before


def test_a_module_outside_the_package_counts_with_what_it_reaches():
    names = closure("tests.run.toy")
    assert "tests.run.toy" in names and "rlkernel.grid" in names
    assert not [name for name in names if name.startswith("torch")]


def test_no_such_module():
    with pytest.raises(ValueError, match=r"no module 'rlkernel\.nothing'"):
        source_hash("rlkernel.nothing")


def test_hashing_imports_nothing():
    code = (
        "import sys; from rlkernel.records.source import source_hash\n"
        "print(len(source_hash('rlkernel.experiments.tp_swiglu')), 'torch' in sys.modules,"
        " 'rlkernel.experiments' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.split() == ["64", "False", "False"]


def test_an_experiment_reaches_its_arithmetic():
    """The lazy import in run() is what computes: without it an edit there would go unseen."""
    assert "rlkernel.contract" in closure("rlkernel.experiments.tp_swiglu")
