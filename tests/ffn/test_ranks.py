"""The checks of ranks.py, one test each, from one launch of eight real ranks."""

import ast
from pathlib import Path

import pytest

from tests.eight_ranks import launch
from tests.ffn import operators, shares

PROGRAM = Path(__file__).with_name("ranks.py")
NAMES = [
    node.name
    for node in ast.parse(PROGRAM.read_text()).body
    if isinstance(node, ast.FunctionDef) and "check" in map(ast.unparse, node.decorator_list)
]
NAMES += [check.__name__ for check in (*shares.CHECKS, *operators.CHECKS)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return launch(PROGRAM, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", NAMES)
def test_on_every_rank(reports, name):
    broken = [f"rank {rank}:\n{said[name]}" for rank, said in reports.items() if said[name]]
    assert not broken, "\n".join(broken)


def test_checks_were_found(reports):
    assert len(NAMES) > 10 and all(set(said) == set(NAMES) for said in reports.values())
