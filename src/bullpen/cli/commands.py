"""The tree of commands, and what their errors become: one line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Annotated, Any, Final

import typer

from bullpen import _version
from bullpen._kernel.printable import printable
from bullpen.cli import (
    alerts,
    common,
    config,
    dead_letters,
    destinations,
    entities,
    follow,
    jobs,
    messages,
    migrate,
    outbox,
    projector,
    queues,
    run_app,
    runs,
    schedules,
    upkeep,
    watch,
    workflows,
)
from bullpen.cli.bench.command import bench
from bullpen.cli.completion import completion
from bullpen.cli.demo.command import demo
from bullpen.cli.doctor import doctor
from bullpen.cli.exporter import exporter
from bullpen.cli.top.command import top
from bullpen.errors import BullpenError, ConnectionLost, EmbeddedError, InvalidOption, MissingExtra, NotConfigured

app = typer.Typer(
    name="bullpen",
    help="Durable jobs for Python on the BullMQ protocol.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

NOT_DONE, WRONG, UNREACHABLE, TIME_UP, INTERRUPTED = 1, 2, 3, 4, 130

# Typer carries its own copy of click in newer versions; its public names lead to the right classes in all of them.
_ClickError: Final[Any] = typer.BadParameter.__mro__[2]


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"bullpen {_version.__version__}")
        raise typer.Exit


@app.callback()
def bullpen(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Durable jobs for Python on the BullMQ protocol."""


app.command("demo")(demo)
app.command("run")(run_app.run)
app.command("exporter")(exporter)
app.command("top")(top)
follow.add_to_queues(queues.app)
upkeep.add_to(queues.app)
app.add_typer(queues.app, name="queues")
follow.add_to_jobs(jobs.app)
app.add_typer(jobs.app, name="jobs")
app.add_typer(schedules.app, name="schedules")
app.add_typer(dead_letters.app, name="dead-letters")
destinations.add_to(outbox.app)
watch.add_to(outbox.app, runs.app, messages.app)
app.add_typer(outbox.app, name="outbox")
app.add_typer(projector.app, name="projector")
entities.add_to(workflows.app)
app.add_typer(workflows.app, name="workflows")
app.add_typer(messages.app, name="messages")
app.add_typer(runs.app, name="runs")
app.add_typer(alerts.app, name="alerts")
app.command("migrate")(migrate.migrate)
app.command("doctor")(doctor)
app.command("bench")(bench)
app.add_typer(config.app, name="config")
app.command("completion")(completion)


@cache
def tree() -> Any:
    """The whole command as click sees it. Made once: reading a hundred signatures takes a tenth of a second."""
    return typer.main.get_command(app)


def run(arguments: list[str]) -> int:
    """Run one command; returns the exit code."""
    common.speak_plainly(as_json="--json" in arguments)
    try:
        result = tree().main(arguments, prog_name="bullpen", standalone_mode=False)
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
