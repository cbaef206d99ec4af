"""The command `bullpen`. What it needs beyond the library is the extra `cli`; without it, it says so."""

from __future__ import annotations

import sys

from bullpen.errors import MissingExtra

__all__ = ["main"]

_OF_THE_EXTRA = ("click", "rich")


def main() -> None:
    """Entry point of the command."""
    try:
        from bullpen.cli.commands import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OF_THE_EXTRA:
            raise
        print(f"bullpen: {MissingExtra('cli', 'the command line')}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run(sys.argv[1:]))
