"""Arguments and options that several commands have, and how their values are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import click

from bullpen.cli.completion import event_names, queue_names
from bullpen.cli.context import WrongCommand
from bullpen.cli.show import short
from bullpen.cli.tree import Argument, Option

E = TypeVar("E", bound=StrEnum)


class StateOption(StrEnum):
    """Where jobs are; as `JobState`, which takes long to import."""

    WAITING = "waiting"
    PRIORITIZED = "prioritized"
    DELAYED = "delayed"
    ACTIVE = "active"
    WAITING_CHILDREN = "waiting-children"
    COMPLETED = "completed"
    FAILED = "failed"


QueueArgument = Annotated[str, Argument("QUEUE", "Name of the queue.", complete=queue_names)]
QueuesArgument = Annotated[
    list[str] | None,
    Argument("[QUEUE]...", "Only these; default: all.", complete=queue_names),
]
AppArgument = Annotated[str, Argument("MODULE:APP", "Where your Bullpen object is; ':app' is optional.")]
AppOption = Annotated[
    str | None, Option("--app", metavar="MODULE:APP", help="Your program, if it defines something that is needed here.")
]
TenantOption = Annotated[str | None, Option("--tenant", metavar="ID", help="Only this tenant.")]
LimitOption = Annotated[int, Option(min=1, help="At most this many.")]
AllOption = Annotated[bool, Option("--all", help="Everything that matches the filters.")]
DryRunOption = Annotated[bool, Option("--dry-run", help="Only count; change nothing.")]
YesOption = Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")]
ByOption = Annotated[str | None, Option(metavar="WHO", help="Stored in the audit trail.", default="you")]
EventOption = Annotated[
    list[str] | None,
    Option("--event", metavar="EVENT", help="Only this kind, such as failed; may be repeated.", complete=event_names),
]


def one_way(chosen: object, everything: bool, what: str) -> None:
    """Either some are named, or all are meant; not both, not neither."""
    if bool(chosen) == everything:
        raise WrongCommand(f"name the {what}, or pass --all")


def duration(option: str, text: str) -> timedelta:
    """`1500` or `1500ms`, `90s`, `15m`, `2h`, `1d`."""
    from bullpen._kernel.duration import written_ms

    ms = written_ms(text)
    if ms is None:
        raise click.BadParameter(
            f"{text!r} is no duration; write 1500 (milliseconds), 90s, 15m, 2h or 1d", param_hint=f"'{option}'"
        )
    return timedelta(milliseconds=ms)


def seconds(option: str, text: str | None) -> float | None:
    """The same as a number; None where nothing was said."""
    return None if text is None else duration(option, text).total_seconds()


def instant(option: str, text: str | None, *, zoned: bool = False) -> datetime | None:
    """An instant in ISO 8601, in UTC unless it says otherwise or must (`zoned`); None where nothing was said."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or (zoned and found.tzinfo is None):
        hint = (
            "not a time with a zone; write it like 2026-05-01T00:00:00Z" if zoned else "no time; write 2030-01-31T12:00"
        )
        raise click.BadParameter(f"{text!r} is {hint}", param_hint=f"'{option}'")
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def parse_json(option: str, text: str) -> Any:
    """JSON from the command line; `-` reads it from stdin, `@FILE` from a file."""
    if text.startswith("@"):
        try:
            return json.loads(Path(text[1:]).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            problem = f"{text[1:]!r} cannot be read as JSON: {error}"
            raise click.BadParameter(problem, param_hint=f"'{option}'") from None
    try:
        return json.loads(sys.stdin.read() if text == "-" else text)
    except ValueError as error:
        raise click.BadParameter(f"{short(text)} is not JSON: {error}", param_hint=f"'{option}'") from None


def status(kind: type[E], text: str | None, shown: Mapping[str, str] = MappingProxyType({})) -> E | None:
    """One of a ledger's states, in any case of letters. `shown`: those that people read by another word."""
    if text is None:
        return None
    stored = {word: name for name, word in shown.items()}
    try:
        return kind(stored.get(text.upper(), text.upper()))
    except ValueError:
        words = ", ".join(shown.get(name, name) for name in kind)
        raise WrongCommand(f"no such status {text!r}; there is {words}") from None
