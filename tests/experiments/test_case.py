"""Cases and their keys; parameters read from text, and the words for a bad one."""

from dataclasses import dataclass, fields

import pytest

from rlkernel.experiments import NAMES, load
from rlkernel.experiments.case import Case, UsageError, param, parse_params, parse_value
from rlkernel.grid import Grid


@dataclass(frozen=True)
class Params:
    world_size: int = param(2, "ranks")
    shape: tuple[int, ...] = param((1, 2), "sizes")
    backward: bool = param(False, "also backward")
    rate: float = param(0.1, "learning rate")
    limit: int | None = param(None, "at most")
    mode: str = param("fast", "how", choices=("fast", "slow"))
    modes: tuple[str, ...] = param(("fast",), "how", choices=("fast", "slow"))


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("shape", "[4,16,128]", (4, 16, 128)),
        ("shape", "4,16", (4, 16)),
        ("shape", "4", (4,)),
        ("shape", [4, 16], (4, 16)),
        ("shape", 4, (4,)),
        ("backward", "true", True),
        ("backward", "off", False),
        ("rate", "1e-3", 1e-3),
        ("rate", 1, 1.0),
        ("limit", "8", 8),
        ("limit", "none", None),
        ("limit", None, None),
        ("world_size", "4", 4),
        ("world_size", 4.0, 4),
        ("mode", "slow", "slow"),
        ("modes", "fast,slow", ("fast", "slow")),
        ("modes", "['fast', 'slow']", ("fast", "slow")),
    ],
)
def test_values_are_read_by_their_annotation(name, given, expected):
    value = getattr(parse_params(Params, {name: given}), name)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("wrold_size", 4, "unknown parameter wrold_size; did you mean world_size?"),
        ("zzz", 4, "unknown parameter zzz; there are world_size, shape"),
        ("world_size", "four", "parameter world_size: expected int, for example 4; got 'four'"),
        ("world_size", 2.5, "got 2.5"),
        ("world_size", True, "got True"),
        ("world_size", float("inf"), "got inf"),
        ("shape", "[4, x]", r"parameter shape: expected tuple of int, for example \[4, 4\]; got"),
        ("shape", "[]", "parameter shape"),
        ("backward", "maybe", "expected bool, for example true; got 'maybe'"),
        ("limit", "few", "expected int or None, for example 4; got 'few'"),
        ("rate", None, "parameter rate: expected float, for example 1e-3"),
        ("mode", "slwo", "mode='slwo' is not possible .did you mean slow.*fast, slow"),
        ("modes", "fast,medium", "modes='medium' is not possible"),
        ("mode", 3, "parameter mode: expected str"),
    ],
)
def test_a_bad_value_names_parameter_type_and_example(name, given, words):
    with pytest.raises(UsageError, match=words):
        parse_params(Params, {name: given})


def test_list_annotations_read_lists():
    assert parse_value("x", list[int], "1,2") == [1, 2]


def test_the_key_follows_what_is_measured_and_nothing_else():
    base = Case("e", Grid(tp=2), "fp32", 11, "none", {"a": 1, "b": 2})
    assert base.key == Case("e", Grid(tp=2), "fp32", 11, "none", {"b": 2, "a": 1}).key
    assert Case.from_dict(base.to_dict()) == base and len(base.key) == 16
    changed = [
        Case("f", base.grid, "fp32", 11, "none", base.parameters),
        Case("e", Grid(cp=2), "fp32", 11, "none", base.parameters),
        Case("e", base.grid, "bf16", 11, "none", base.parameters),
        Case("e", base.grid, "fp32", 12, "none", base.parameters),
        Case("e", base.grid, "fp32", 11, "missing", base.parameters),
        Case("e", base.grid, "fp32", 11, "none", {"a": 1, "b": 3}),
    ]
    assert len({case.key for case in [base, *changed]}) == 7
    assert base.title == "tp2 fp32 seed 11 fault none a=1 b=2"


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_keeps_the_contract(name):
    module = load(name)
    assert module.NAME == name and module.QUESTION.endswith("?")
    assert all(f.metadata["help"] for f in fields(module.Params))
    found = module.cases(module.Params())
    assert found and all(isinstance(case, Case) and case.experiment == name for case in found)
    assert len({case.key for case in found}) == len(found)
    told = hasattr(module, "coverage")  # both lists follow from the rows
    assert told or (module.COVERED and module.NOT_COVERED)
    for function in ("run", "verdict", "summary", "table", "protocol"):
        assert callable(getattr(module, function))


def test_unknown_experiment():
    with pytest.raises(ValueError, match="unknown experiment tp-swigl; did you mean tp-swiglu?"):
        load("tp-swigl")
