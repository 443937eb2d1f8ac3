"""The rules of the house, held over this tree, and each shown to catch a tree that breaks it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import rlkernel
from tests import house

RULES = (
    house.against_the_direction,
    house.torch_at_import,
    house.cycles,
    house.long_files,
    house.untidy_notebooks,
    house.loose_requirements,
    house.undocumented_targets,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_this_tree_keeps(rule, root):
    assert rule(root) == []


def plant(root: Path, **files: str) -> Path:
    """A small tree: plant(tmp, run__launch="import torch") writes rlkernel/run/launch.py."""
    (root / "rlkernel").mkdir(parents=True, exist_ok=True)
    (root / "rlkernel" / "__init__.py").touch()
    for name, text in files.items():
        path = root / "rlkernel" / Path(*name.split("___")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text, encoding="utf-8")
    return root


UP = "against the one direction"
OUT = "which is not for"


@pytest.mark.parametrize(
    "where, line, says",
    [
        ("grid", "from rlkernel import contract", UP),
        ("contract", "import rlkernel.collectives.comm", UP),
        ("collectives___comm", "from ..experiments.case import Case", UP),
        ("collectives___comm", "def f():\n    from rlkernel.run import launch", UP),
        ("reconstruct___swiglu", "from rlkernel.ffn import ops", UP),
        ("plugin", "import rlkernel.pages.report", UP),
        ("experiments___a", "import importlib\nimportlib.import_module('rlkernel.run.b')", UP),
        ("records___store", "from rlkernel.grid import Grid", UP),
        ("records___store", "import numpy", OUT),
        ("figures___ws2", "from rlkernel import experiments", UP),
        ("pages___report", "from rlkernel.experiments import load", UP),
        ("pages___report", "def f():\n    from rlkernel.reconstruct import swiglu", UP),
        ("__main__", "from rlkernel.pages import report", UP),
        ("plugin", "import matplotlib.pyplot as plt", OUT),
        ("run___worker", "def f():\n    import papermill", OUT),
        ("pages___report", "import matplotlib", OUT),
        ("contract", "import scipy", OUT),
        ("surprise", "from rlkernel import grid", UP),
    ],
)
def test_direction_is_caught(tmp_path, where, line, says):
    found = house.against_the_direction(plant(tmp_path, **{where: line}))
    assert len(found) == 1 and says in found[0], found


@pytest.mark.parametrize(
    "where, line",
    [
        ("contract", "from rlkernel.grid import is_power_of_two"),
        ("reconstruct___swiglu", "import torch\nfrom ..collectives import regions"),
        ("run___worker", "from rlkernel import experiments, records"),
        ("figures___ws2", "import matplotlib\nfrom . import style\nfrom rlkernel import records"),
        ("pages___report", "def f():\n    from rlkernel.run.launch import measure"),
        ("__main__", "from rlkernel.run import launch\ndef f():\n    import rlkernel.pages.report"),
    ],
)
def test_direction_lets_pass(tmp_path, where, line):
    assert house.against_the_direction(plant(tmp_path, **{where: line})) == []


def test_torch_behind_two_corners_is_caught(tmp_path):
    plant(
        tmp_path,
        run___launch="from rlkernel.run import helper",
        run___helper="try:\n    from rlkernel import compare\nexcept ImportError:\n    pass",
        compare="import torch.distributed as dist",
        grid="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        experiments___ws2="def run():\n    import torch",
    )
    chain = "rlkernel.run.launch -> rlkernel.run.helper -> rlkernel.compare -> torch.distributed"
    assert house.torch_at_import(tmp_path) == [chain]


def test_torch_in_a_package_above_is_caught(tmp_path):
    plant(tmp_path, experiments___case="", __main__="import rlkernel.experiments.case")
    (tmp_path / "rlkernel" / "experiments" / "__init__.py").write_text("import torch")
    found = house.torch_at_import(tmp_path)
    assert "rlkernel.__main__ -> rlkernel.experiments -> torch" in found


def test_a_ring_is_caught(tmp_path):
    lazy = "def f():\n    from rlkernel.records import a"
    plant(tmp_path, records___a="from rlkernel.records import b", records___b=lazy)
    assert house.cycles(tmp_path) == []
    plant(tmp_path, records___b="from rlkernel.records import a")
    assert house.cycles(tmp_path) == [
        "rlkernel.records.a -> rlkernel.records.b -> rlkernel.records.a"
    ]


def test_a_long_file_is_caught(tmp_path):
    plant(tmp_path, grid="x = 1\n" * house.LONGEST_FILE)
    assert house.long_files(tmp_path) == []
    plant(tmp_path, grid="x = 1\n" * (house.LONGEST_FILE + 1))
    assert house.long_files(tmp_path) == ["rlkernel/grid.py: 351 lines"]


def test_an_untidy_notebook_is_caught(tmp_path):
    long = "%matplotlib inline\ndef f():\n" + "    x = 1\n" * 10
    cells = [{"cell_type": "markdown", "source": ["words"]}] * 24
    cells += [{"cell_type": "code", "source": [long], "outputs": [], "execution_count": None}]
    cells += [{"cell_type": "code", "source": ["!true"], "outputs": [], "execution_count": 3}]
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "07_bad.ipynb").write_text(json.dumps({"cells": cells}))
    assert house.untidy_notebooks(tmp_path) == [
        "07_bad.ipynb: 26 cells",
        "07_bad.ipynb, cell 24: f has 11 lines",
        "07_bad.ipynb, cell 25: not stripped (nbstripout does it)",
    ]


def test_loose_requirements_are_caught(tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\ntriton==3.7.1\nnumpy>=2\nidna==3\n")
    (tmp_path / "env" / "requirements-cpu.txt").write_text("-r ../requirements.txt\n")
    (tmp_path / "env" / "requirements-cuda.txt").write_text("torch==2.13.0\n")
    (tmp_path / "env" / "requirements-rocm.txt").write_text("torch==2.12.0\nidna==3\n")
    (tmp_path / "env" / "constraints.txt").write_text("Idna==3\nsix==1.17.0\n")
    assert house.loose_requirements(tmp_path) == [
        "requirements.txt: 'numpy>=2' is no exact pin",
        "requirements-cuda.txt does not include requirements.txt",
        "requirements-rocm.txt and requirements.txt differ in 'torch==2.12.0'",
        "requirements-rocm.txt and requirements.txt differ in 'torch==2.13.0'",
        "idna is pinned as a requirement and as a constraint",
    ]


def test_undocumented_targets_are_caught(tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "results").mkdir()
    (tmp_path / "Makefile").write_text(".PHONY: test\ntest: x  ## all\nreport:\n\techo\n")
    (tmp_path / "README.md").write_text("`make test` or make report or\n\n    make coffee\n")
    (tmp_path / "env" / "README.md").touch()
    (tmp_path / "results" / "README.md").touch()
    assert house.undocumented_targets(tmp_path) == [
        "report has no `## description`",
        "report is not in .PHONY",
        "README.md names `make coffee`",
        "README.md does not say `make report`",
    ]


def test_help_lists_every_target(root):
    shown = subprocess.run(["make", "-C", str(root)], capture_output=True, text=True).stdout
    targets = re.findall(r"^([a-z]+):", (root / "Makefile").read_text(), flags=re.MULTILINE)
    assert len(targets) >= 11
    for name in targets:
        assert re.search(rf"^ +{name} +\S", shown, flags=re.MULTILINE), name


def ruff(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_ruff_is_content(root):
    done = ruff("--output-format=concise", str(root))
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_would_complain(root, tmp_path):
    (tmp_path / "bad.py").write_text("import os\n")
    assert ruff(f"--config={root / 'pyproject.toml'}", str(tmp_path)).returncode == 1


LOOK = """
import runpy, sys
sys.argv = ["rlkernel", *{arguments}]
try:
    runpy.run_module("rlkernel", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
heavy = {{"torch", "triton", "numpy", "matplotlib", "papermill", "nbconvert", "jupyter_client"}}
print("LOADED", sorted(heavy & set(sys.modules)))
"""


@pytest.mark.parametrize("name", ["", "preflight", "tp-swiglu"])
def test_help_loads_nothing_heavy(name, root):
    arguments = [*name.split(), "--help"]
    done = subprocess.run(
        [sys.executable, "-c", LOOK.format(arguments=arguments)],
        cwd=root, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["LOADED []"], done.stdout + done.stderr


def test_everything_imports_from_a_bare_root(root, tmp_path):
    """Not installed, from another folder, through PYTHONPATH alone; nothing is printed."""
    names = [name for name in house.modules(root) if not name.endswith("__main__")]
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-c", code],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_gitignore_hides_runs_and_shows_the_house(root, tmp_path):
    (tmp_path / ".gitignore").write_bytes((root / ".gitignore").read_bytes())
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)

    def ignored(path: str) -> bool:
        ask = ["git", "-C", str(tmp_path), "check-ignore", "-q", "--no-index", path]
        return subprocess.run(ask).returncode == 0

    for path in ("env/requirements-cpu.txt", "env/build_venv.py", "results/README.md"):
        assert not ignored(path), path
    for path in ("results/published/tp-swiglu/cpu/run.json", "results/published/figures/a.png"):
        assert not ignored(path), path
    for path in (".venv/bin/python", "results/tp-swiglu/x/run.json", "results/report/index.html"):
        assert ignored(path), path
    for path in ("rlkernel/__pycache__/a.pyc", "notebooks/.ipynb_checkpoints/a.ipynb"):
        assert ignored(path), path


def test_hooks_are_local(root):
    """A commit must not need the network, nor another ruff than the pinned one."""
    hooks = yaml.safe_load((root / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"]
    for hook in hooks["repos"][0]["hooks"]:
        assert hook["language"] == "system" and hook["entry"].startswith(".venv/bin/python -m ")


def test_the_hook_leaves_the_notebooks_as_they_are(root, tmp_path):
    strip = [sys.executable, "-m", "nbstripout", "--keep-id", "--verify"]
    books = sorted((root / "notebooks").glob("*.ipynb"))
    done = subprocess.run([*strip, *books], capture_output=True, text=True)
    assert books and done.returncode == 0, done.stdout + done.stderr

    book = json.loads(books[0].read_text(encoding="utf-8"))
    next(cell for cell in book["cells"] if cell["cell_type"] == "code")["execution_count"] = 7
    (tmp_path / "ran.ipynb").write_text(json.dumps(book), encoding="utf-8")
    assert subprocess.run([*strip, tmp_path / "ran.ipynb"], capture_output=True).returncode == 1


def test_versions_agree(root):
    newest = re.search(r"^## (\S+)", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest[1].strip("[]") in (rlkernel.__version__, "Unreleased")
    assert (root / "LICENSE").read_text().lstrip().startswith("Apache License")


def test_every_installed_package_is_pinned(root):
    """Only where .venv was built by env/build_venv.py: elsewhere the set is not ours."""
    if not (Path(sys.prefix) / "ready.json").exists():
        pytest.skip("this Python is not the .venv that `make setup` builds")
    pinned = set()
    for path in (root / "requirements.txt", root / "env" / "constraints.txt"):
        pinned |= {house.canonical(line) for line in house.pins(path)[0]}
    have = {house.canonical(d.metadata["Name"]) for d in importlib.metadata.distributions()}
    free = re.compile(r"pip|appnope|(nvidia|cuda|amd|rocm|hip)-.*|(pytorch-)?triton(-rocm)?")
    assert {name for name in have - pinned if not free.fullmatch(name)} == set()


SKIPPED = """
import pytest

@pytest.mark.browser
@pytest.mark.skipif(True, reason="no Chromium on PATH")
def test_before():
    pass

@pytest.mark.browser
def test_within():
    pytest.skip("no Chromium on PATH")

def test_other():
    pytest.skip("has nothing to do with browsers")
"""


@pytest.mark.parametrize("required, ends", [("", "3 skipped"), ("1", "1 failed, 1 skipped, 1 err")])
def test_a_required_browser_may_not_be_skipped(root, tmp_path, required, ends):
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest"]
    command += ["-p", "no:cacheprovider", "-c", str(root / "pyproject.toml")]
    command += [f"--rootdir={tmp_path}", str(tmp_path)]
    env = os.environ | {"RLKERNEL_REQUIRE_BROWSER": required, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].startswith(ends), done.stdout + done.stderr
    assert done.returncode == (1 if required else 0)
