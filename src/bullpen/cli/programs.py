"""The program that a command is about: its module is imported, and its app taken out of it.

In: `MODULE:APP`. Out: a `Bullpen`, or any other object of that name. Elsewhere: commands about a server (`context`).
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bullpen.cli.context import Done, OnServer, ProgramOption, WrongCommand

if TYPE_CHECKING:
    from bullpen.app import Bullpen

__all__ = ["OnProgram", "find_object", "load_app"]


@dataclass(frozen=True, kw_only=True)
class OnProgram(OnServer):
    """A command about what a program may keep elsewhere than on the server of the queues."""

    program: ProgramOption = None

    def made(self) -> Bullpen:
        """The named program's app, else the configured one, to be entered."""
        from bullpen.app import Bullpen
        from bullpen.wiring.servers import CommandLine, obeying

        if self.program is None:
            return Bullpen(self.redis, prefix=self.prefix)
        with obeying(CommandLine(redis=self.redis, prefix=self.prefix)):
            return load_app(self.program)


def load_app(target: str) -> Bullpen:
    """Import the module, from the working directory too, and take the Bullpen out of it."""
    from bullpen.app import Bullpen

    module_name, attribute, module, found = find_object(target)
    if isinstance(found, Bullpen):
        return found
    apps = [name for name, value in vars(module).items() if isinstance(value, Bullpen)]
    hint = f"; it has {', '.join(f'{module_name}:{name}' for name in apps)}" if apps else ""
    raise WrongCommand(f"{module_name!r} has no Bullpen object named {attribute!r}{hint}")


def find_object(target: str) -> tuple[str, str, Any, Any]:
    """Import `MODULE:NAME`, from the working directory too: the two words, the module, and what has that name or None.

    `app` is the name where none is given."""
    module_name, _, attribute = target.partition(":")
    if not module_name:
        raise WrongCommand(f"{target!r}: expected MODULE:APP, such as shop.jobs:app")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import(module_name)
    found: Any = module
    for part in (attribute or "app").split("."):
        found = getattr(found, part, None)
    return module_name, attribute or "app", module, found


def _import(name: str) -> Any:
    from bullpen.errors import BullpenError

    try:
        return importlib.import_module(name)
    except BullpenError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the program of the user raises
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise WrongCommand(f"there is no module {name!r} here or on the Python path") from None
        # The program of the user has failed, not the command: its author needs to see where.
        traceback.print_exception(error)
        raise Done(f"importing {name!r} failed: {error}") from None
