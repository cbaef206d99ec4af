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
from bullpen.cli.tree import Group, LazyCommand, make
from bullpen.errors import BullpenError, ConnectionLost, EmbeddedError, InvalidOption, MissingExtra, NotConfigured

NOT_DONE, WRONG, UNREACHABLE, TIME_UP, INTERRUPTED = 1, 2, 3, 4, 130

_VERSION: Final = f"bullpen {_version.__version__}"

_ROOT: Final = Group(
    "Durable jobs for Python on the BullMQ protocol.",
    {
        "demo": LazyCommand(
            "demo:demo",
            "Run a demonstration: thousands of jobs, one killed worker, and a check that all jobs ended.",
            False,
        ),
        "init": LazyCommand("init:init", "Write a small project whose tests pass.", False),
        "run": LazyCommand("run_app:run", "Run the workers of an application until SIGTERM or Ctrl-C.", False),
        "shell": LazyCommand("shell:shell", "Open a Python prompt with an application loaded.", False),
        "serve": LazyCommand("serve:serve", "Serve an ASGI application without workers.", False),
        "dashboard": LazyCommand("dashboard:dashboard", "Serve the web dashboard.", False),
        "exporter": LazyCommand("exporter:exporter", "Serve metrics for Prometheus.", False),
        "top": LazyCommand("top:top", "Watch all queues.", False),
        "mark": LazyCommand("mark:mark", "Mark a time in the dashboard charts, such as a deployment.", False),
        "queues": LazyCommand("queues:app", "List, pause and limit queues; delete the jobs of one state."),
        "jobs": LazyCommand("jobs:app", "List, add, change, retry, cancel and remove jobs."),
        "workers": LazyCommand("workers:app", "List connected workers."),
        "schedules": LazyCommand("schedules:app", "List and change schedules."),
        "dead-letters": LazyCommand("dead_letters:app", "List dead letters; redrive, edit or discard them."),
        "operations": LazyCommand("operations:app", "List, stop and resume stored bulk actions."),
        "payloads": LazyCommand("payloads:app", "Manage sealed job data: keys in use, and objects without a job."),
        "outbox": LazyCommand("outbox:app", "List outbox rows; redrive dead rows; disable and enable destinations."),
        "endpoints": LazyCommand("endpoints:app", "List, change, test and replay the endpoints of tenants."),
        "projectors": LazyCommand(
            "projector:app", "Show the progress of projectors; retry or skip parked events; backfill."
        ),
        "workflows": LazyCommand(
            "workflows:app", "List, check and draw workflows; show entities and send them events."
        ),
        "messages": LazyCommand("messages:app", "List scheduled messages and recipients; retry failed messages."),
        "runs": LazyCommand("runs:app", "List, start, cancel and retry runs; manage credits."),
        "alerts": LazyCommand("alerts:app", "List open incidents; send a test alert."),
        "migrate": LazyCommand("migrate:migrate", "Create or update the database tables.", False),
        "doctor": LazyCommand("doctor:doctor", "Show what is wrong and how to fix it.", False),
        "bench": LazyCommand("bench.command:bench", "Measure how fast your server adds and runs jobs.", False),
        "config": LazyCommand("config:app", "Show the settings in effect and where each comes from."),
        "completion": LazyCommand("completion:completion", "Print the shell script for command completion.", False),
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
