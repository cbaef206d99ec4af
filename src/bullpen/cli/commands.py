"""The tree of commands, and what their errors become: one line on stderr and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from typing import Annotated, Any, Final

import typer

from bullpen import _version
from bullpen._kernel.printable import printable
from bullpen.cli import common
from bullpen.errors import BullpenError, ConnectionLost, EmbeddedError, InvalidOption, MissingExtra, NotConfigured

NOT_DONE, WRONG, UNREACHABLE, TIME_UP, INTERRUPTED = 1, 2, 3, 4, 130

_VERSION: Final = f"bullpen {_version.__version__}"

# Typer carries its own copy of click in newer versions; its public names lead to the right classes in all of them.
_ClickError: Final[Any] = typer.BadParameter.__mro__[2]

# Where each command is, in the order of the help. One is imported when it is run: all take three times as long.
_COMMANDS: Final = {
    "demo": "demo.command:demo",
    "run": "run_app:run",
    "exporter": "exporter:exporter",
    "serve": "serve:serve",
    "dashboard": "dashboard:dashboard",
    "top": "top.command:top",
    "queues": "queues:app",
    "jobs": "jobs:app",
    "schedules": "schedules:app",
    "dead-letters": "dead_letters:app",
    "payloads": "payloads:app",
    "outbox": "outbox:app",
    "projector": "projector:app",
    "workflows": "workflows:app",
    "messages": "messages:app",
    "runs": "runs:app",
    "alerts": "alerts:app",
    "migrate": "migrate:migrate",
    "doctor": "doctor:doctor",
    "bench": "bench.command:bench",
    "config": "config:app",
    "completion": "completion:completion",
}
# Commands of a group that another module has: each adds its own.
_ADDED: Final = {
    "queues": ("follow:add_to_queues", "upkeep:add_to", "lanes:add_to"),
    "jobs": ("follow:add_to_jobs",),
    "outbox": ("destinations:add_to", "watch:add_to_outbox"),
    "workflows": ("entities:add_to",),
    "messages": ("watch:add_to_messages",),
    "runs": ("watch:add_to_runs",),
}


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"bullpen.cli.{module}"), name)


@cache
def _command(name: str) -> Any:
    """A function, or a group with all of its commands."""
    command = _load(_COMMANDS[name])
    for place in _ADDED.get(name, ()):
        _load(place)(command)
    return command


def _show_version(wanted: bool) -> None:
    if wanted:
        print(_VERSION)
        raise typer.Exit


def _bullpen(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Durable jobs for Python on the BullMQ protocol."""


@cache
def tree(*names: str) -> Any:
    """The command as click sees it, with the subcommands of these names or with all."""
    app = typer.Typer(
        name="bullpen",
        help="Durable jobs for Python on the BullMQ protocol.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_bullpen)
    for name in names or _COMMANDS:
        command = _command(name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return typer.main.get_command(app)


def run(arguments: list[str]) -> int:
    """Run one command; returns the exit code."""
    if arguments == ["--version"]:  # without reading a hundred signatures
        print(_VERSION)
        return 0
    common.speak_plainly(as_json="--json" in arguments)
    named = [name for name in arguments[:1] if name in _COMMANDS]
    try:
        result = tree(*named).main(arguments, prog_name="bullpen", standalone_mode=False)
        sys.stdout.flush()
    except _ClickError as error:
        return _say(_usage(error), WRONG)
    except (InvalidOption, NotConfigured, MissingExtra, common.WrongCommand) as error:
        return _say(_in_words_of_the_command(str(error)), WRONG)
    except (ConnectionLost, EmbeddedError) as error:
        return _say(str(error), UNREACHABLE)
    except common.TimeUp as error:
        return _say(str(error), TIME_UP)
    except (BullpenError, common.Done) as error:
        return _say(str(error), NOT_DONE)
    except (typer.Abort, KeyboardInterrupt):
        return _say("interrupted", INTERRUPTED)
    except (BrokenPipeError, SystemExit) as error:
        # Typer and rich make SystemExit(1) of a broken pipe. Whoever read our output has seen enough: no failure.
        if isinstance(error, SystemExit) and error.code != 1:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end
        return 0
    if result == INTERRUPTED:  # Typer again: Ctrl-C comes back as a result
        return _say("interrupted", INTERRUPTED)
    return result if isinstance(result, int) else 0


def _say(text: str, code: int) -> int:
    if text:
        print(f"bullpen: {printable(text)}", file=sys.stderr)
    return code


def _in_words_of_the_command(message: str) -> str:
    """Settings know the two options by the names of their arguments."""
    return message.replace("argument redis_url", "--redis").replace("argument redis_prefix", "--prefix")


def _usage(error: Any) -> str:
    message = error.format_message().strip().rstrip(".")
    if not message:  # a group without a command has printed its help
        return ""
    path = error.ctx.command_path if error.ctx is not None else "bullpen"
    return f"{message[0].lower()}{message[1:]}; see '{path} --help'"
