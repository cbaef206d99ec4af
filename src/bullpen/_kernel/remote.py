"""An error that was raised in another process."""

from __future__ import annotations

from collections.abc import Iterable


class RemoteError(Exception):
    """Text, stack and class names of an error that could not travel itself."""

    def __init__(self, reason: str, stack: str, class_names: Iterable[str]) -> None:
        super().__init__(reason)
        self.stack = stack
        names = list(class_names)
        self.kind = names[0] if names else qualified(RemoteError)
        """`module.QualName` of its class."""
        self.class_names = frozenset(names)
        """`module.QualName` of the class and all its bases, so that rules about classes still hold."""


def qualified(kind: type) -> str:
    """The name under which a class is known in `class_names`."""
    return f"{kind.__module__}.{kind.__qualname__}"
