"""Which modules are for users: the tests of names, errors and parameters ask here."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import bullpen

ROOMS = ("bullpen.redis.", "bullpen.queue.", "bullpen.worker.")
"""Their modules serve each other: public is only one that lists its names."""

DJANGO = "bullpen.integrations.django"
"""Its modules are importable in a Django project only, which `tests/integrations` is."""


def public_modules() -> Iterator[str]:
    """All modules that no part of whose name is private, without the inner ones of rooms."""
    for found in pkgutil.walk_packages(bullpen.__path__, "bullpen."):
        if "._" in found.name or ".migrations" in found.name or found.name.startswith(DJANGO):
            continue
        if not found.name.startswith(ROOMS) or hasattr(importlib.import_module(found.name), "__all__"):
            yield found.name


def public_names(module: str) -> Iterator[tuple[str, object]]:
    """What a module lists, or, where it lists nothing, what has no underscore."""
    loaded = importlib.import_module(module)
    names = vars(loaded)
    for name in names.get("__all__", [each for each in names if not each.startswith("_")]):
        yield name, getattr(loaded, name)  # perhaps only loaded now
