"""The tree of commands, and what their errors become: one line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any, Final

import click

from bullpen import _version
from bullpen._kernel.printable import printable
from bullpen.cli import completion, context
from bullpen.cli.tree import Group, Place, make
from bullpen.errors import BullpenError, ConnectionLost, EmbeddedError, InvalidOption, MissingExtra, NotConfigured

NOT_DONE, WRONG, UNREACHABLE, TIME_UP, INTERRUPTED = 1, 2, 3, 4, 130

_VERSION: Final = f"bullpen {_version.__version__}"

_ROOT: Final = Group(
    "Durable jobs for Python on the BullMQ protocol.",
    {
        "demo": Place("demo:demo", "See it work: thousands of jobs, a killed worker, and a sum that adds up.", False),
        "run": Place("run_app:run", "Run the workers of an application until SIGTERM or Ctrl-C.", False),
        "serve": Place("serve:serve", "Serve an ASGI application apart from the workers.", False),
        "dashboard": Place("dashboard:dashboard", "Serve the web dashboard.", False),
        "exporter": Place("exporter:exporter", "Serve numbers for Prometheus.", False),
        "top": Place("top:top", "Watch all queues.", False),
        "mark": Place("mark:mark", "Set a mark in the charts of the dashboard: a deploy.", False),
        "queues": Place("queues:app", "See, pause and limit queues; delete jobs of one state."),
        "jobs": Place("jobs:app", "See, add, change, retry, cancel and remove jobs."),
        "workers": Place("workers:app", "See who is connected to work."),
        "schedules": Place("schedules:app", "See and change what runs by the clock."),
        "dead-letters": Place("dead_letters:app", "See what failed for good; redrive, edit or discard it."),
        "operations": Place("operations:app", "See, stop and resume bulk actions that are stored."),
        "payloads": Place("payloads:app", "Sealed job data: keys in use, and objects without a job."),
        "outbox": Place("outbox:app", "See rows of the outbox; redrive dead ones; switch destinations off and on."),
        "projector": Place("projector:app", "See how far projectors are; retry or skip parked events; backfill."),
        "workflows": Place("workflows:app", "See, check and draw workflows; see and move their entities."),
        "messages": Place("messages:app", "See scheduled messages and their recipients; retry what failed."),
        "runs": Place("runs:app", "See, start, cancel and retry runs; credits."),
        "alerts": Place("alerts:app", "See open incidents; send a test alert."),
        "migrate": Place("migrate:migrate", "Make the tables of the database, or bring them up to date.", False),
        "doctor": Place("doctor:doctor", "Say what is wrong and what to do about it.", False),
        "bench": Place("bench.command:bench", "Measure how fast jobs go in and out of your server.", False),
        "config": Place("config:app", "See which settings hold."),
        "completion": Place("completion:completion", "Print what makes a shell complete this command.", False),
    },
)


def _show_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        print(_VERSION)
        ctx.exit()


@cache
def tree() -> Any:
    """The whole command; what is below is imported when it is asked for."""
    version = click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
                           help="Print the version.")  # fmt: skip
    return make(_ROOT, version)


def run(arguments: list[str]) -> int:
    """Run one command; returns the exit code."""
    if completion.VARIABLE in os.environ:
        tree().main(arguments, prog_name="bullpen")  # answers the shell and exits
    context.log_plainly(as_json="--json" in arguments)
    try:
        with tree().make_context("bullpen", arguments) as opened:
            tree().invoke(opened)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code if error.exit_code != INTERRUPTED else _say("interrupted", INTERRUPTED)
    except click.ClickException as error:
        return _say(_usage(error), WRONG)
    except (InvalidOption, NotConfigured, MissingExtra, context.WrongCommand) as error:
        return _say(_in_words_of_the_command(str(error)), WRONG)
    except (ConnectionLost, EmbeddedError) as error:
        return _say(str(error), UNREACHABLE)
    except context.TimeUp as error:
        return _say(str(error), TIME_UP)
    except (BullpenError, context.Done) as error:
        return _say(str(error), NOT_DONE)
    except (click.Abort, KeyboardInterrupt):
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has seen enough: no failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end
    return 0


def _say(text: str, code: int) -> int:
    if text:
        print(f"bullpen: {printable(text)}", file=sys.stderr)
    return code


def _in_words_of_the_command(message: str) -> str:
    """Settings know the two options by the names of their arguments."""
    return message.replace("argument redis_url", "--redis").replace("argument redis_prefix", "--prefix")


def _usage(error: Any) -> str:
    message = error.format_message().strip().rstrip(".")
    path = error.ctx.command_path if getattr(error, "ctx", None) is not None else "bullpen"
    return f"{message[0].lower()}{message[1:]}{'' if message.endswith('?') else ';'} see '{path} --help'"
