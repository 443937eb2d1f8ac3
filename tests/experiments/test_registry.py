"""Every experiment has a name, and a new name makes no evidence of another experiment stale."""

from __future__ import annotations

import pytest

from rlkernel import experiments
from rlkernel.experiments import registry
from rlkernel.records.source import closure


def test_every_name_loads_the_module_of_that_name():
    assert set(experiments.NAMES) < set(registry.NAMES)
    for name in registry.NAMES:
        module = registry.load(name)
        assert module.NAME == name and module.__name__.startswith("rlkernel.experiments.")
    assert registry.load("rlkernel.experiments.exchange") is registry.load("exchange")


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(ValueError, match="unknown experiment exchnge; did you mean exchange"):
        registry.load("exchnge")


@pytest.mark.parametrize("name", registry.NAMES)
def test_the_list_is_in_no_closure(name):
    reached = closure(registry.load(name).__name__)
    assert registry.__name__ not in reached and "rlkernel.experiments" in reached
