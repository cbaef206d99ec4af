"""Public is what `__all__` lists: the list and the reality are compared for every public module."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

import pytest

from tests.static.public import public_modules


def own_names(module: ModuleType) -> set[str]:
    """Public classes and functions of ours: defined here, or, in a package, taken in from its modules."""
    package = module.__name__ if not hasattr(module, "__path__") else module.__name__ + "."
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and (value.__module__ == module.__name__ or value.__module__.startswith(package))
    }


@pytest.mark.parametrize("name", ["bullpen", *public_modules()])
def test_the_list_of_public_names_is_true(name: str) -> None:
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", None)
    if exported is None:
        assert not hasattr(module, "__path__") or not own_names(module), "a package with public names lists them"
        return

    assert len(exported) == len(set(exported)), "a name is listed twice"
    assert [each for each in exported if not hasattr(module, each)] == [], "listed, but not there"
    assert own_names(module) - set(exported) == set(), "public by its name, but not listed"
