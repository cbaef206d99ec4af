"""Named tuples on the hot path."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

Record = TypeVar("Record", bound=tuple[Any, ...])


def maker(record: type[Record]) -> Callable[[tuple[Any, ...]], Record]:
    """Make a NamedTuple from a tuple of all its fields. Its class takes them one by one, in Python, which costs more
    than everything else about a tuple; whoever uses this gives up the check of their number."""
    return partial(tuple.__new__, record)
