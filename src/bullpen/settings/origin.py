"""Where a value came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Origin", "Setting"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from. Its text is the name to search for."""

    kind: Literal["argument", "environment", "file", "default"]
    name: str
    """The argument, the variable, or the key in its file; for a default, where it was derived from."""

    def __str__(self) -> str:
        match self.kind:
            case "argument":
                return f"argument {self.name}"
            case "environment":
                return f"environment variable {self.name}"
            case "file":
                return self.name
            case "default":
                return f"default{f' ({self.name})' if self.name else ''}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of `config show`: secrets are already hidden."""

    key: str
    value: str
    origin: Origin
    variable: str | None
    """The environment variable that sets it, if there is one."""
    general: str | None = None
    """A name without our prefix that sets it too, if there is one."""

    @property
    def is_general(self) -> bool:
        """Whether it was taken from a variable without our prefix, which may have been set for another program."""
        return self.origin.kind == "environment" and not self.origin.name.startswith("BULLPEN_")
