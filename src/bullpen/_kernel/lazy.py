"""Modules that hand on names of others, which are loaded when they are first used.

For public modules whose names need optional dependencies: importing the module costs next to nothing and needs none of
them. In: where each name lives. Out: the module's `__getattr__`. Type checkers read the imports under `TYPE_CHECKING`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy(module: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], object]:
    """A `__getattr__` for `module`, which hands on the names of each home."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> object:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value: object = getattr(import_module(home), name)
        setattr(sys.modules[module], name, value)  # the next access does not come here
        return value

    return find
