"""Transports, found by their entry points: `memory`, `bullmq`, `rabbitmq`, `kafka`, and those of other packages.

Only the one that is asked for is imported, and with it its driver.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, Final

from bullpen.errors import InvalidOption, MissingExtra

__all__ = ["available", "load"]

GROUP: Final = "bullpen.transports"


def available() -> list[str]:
    """Names of all installed transports."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def load(name: str) -> type[Any]:
    """The client class of a transport. Raises MissingExtra when its driver is not installed."""
    for point in entry_points(group=GROUP):
        if point.name == name:
            try:
                client: type[Any] = point.load()
            except MissingExtra:
                raise
            except ModuleNotFoundError as error:
                extra = (point.extras or [name])[0]
                raise MissingExtra(extra, f"transport {name!r} (module {error.name!r} is missing)") from error
            return client
    raise InvalidOption("transport", f"one of {', '.join(available())}", name)
