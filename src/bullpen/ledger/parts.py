"""The parts of a ledger: which tables and which steps of the migration belong to what.

A program that only stores messages needs no tables for runs. The outbox is the ground: its audit, its checkpoints and
its identity are used by all, so its tables are always made; every other part can be left out, and added later.
No I/O. Elsewhere: the tables (`tables`), making them (`migrate`), asking which are there (`version`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal

from bullpen._kernel.command_line import command_line
from bullpen._kernel.duration import check_texts
from bullpen.errors import require
from bullpen.ledger import tables

__all__ = ["PARTS", "Part", "check_parts", "command_for", "command_that_makes", "parts_of", "steps_for", "table_part"]

Part = Literal["outbox", "runs", "messages", "workflows", "projector", "alerts"]

PARTS: Final[tuple[Part, ...]] = ("outbox", "runs", "messages", "workflows", "projector", "alerts")

_STEPS: Final[Mapping[str, tuple[Part, ...]]] = {
    "0001": ("outbox",),
    "0002": ("messages",),
    "0003": ("projector",),
    "0004": ("workflows",),
    "0005": ("outbox",),
    "0006": ("runs",),
    "0007": ("alerts",),
    "0008": ("workflows",),
    "0009": ("outbox", "runs"),  # asks itself for which of the two it is run
    "0010": ("outbox",),
    "0011": ("runs",),
    "0012": ("outbox",),
    "0013": ("outbox", "runs", "workflows"),  # as 0009
    "0014": ("outbox",),
    "0015": ("alerts",),
}
_OPTIONAL: Final[Mapping[str, Part]] = {
    **dict.fromkeys((t.name for t in (tables.runs, tables.run_steps)), "runs"),
    **dict.fromkeys((t.name for t in (tables.credit_accounts, tables.credit_entries)), "runs"),
    **dict.fromkeys((t.name for t in (tables.recipients, tables.occasions, tables.messages)), "messages"),
    tables.message_limits.name: "messages",
    **dict.fromkeys((t.name for t in (tables.workflow_history, tables.turns)), "workflows"),
    **dict.fromkeys((t.name for t in (tables.events, tables.parked_events)), "projector"),
    tables.incidents.name: "alerts",
}
_FIRST: Final[Mapping[Part, str]] = {
    "outbox": tables.outbox.name,
    "runs": tables.runs.name,
    "messages": tables.messages.name,
    "workflows": tables.workflow_history.name,
    "projector": tables.events.name,
    "alerts": tables.incidents.name,
}
"""A table of the first step of each part: where it is, the part is."""
_FUNCTIONS_OF_RUNS: Final = re.compile(r"\b(?:run|credits)_[a-z_]+\(").search


def check_parts(parts: Iterable[str]) -> frozenset[Part]:
    """These parts, and the outbox. Raises InvalidOption for a name that is none."""
    given = check_texts("parts", parts)
    for part in given:
        require("parts", part in PARTS, f"some of {', '.join(PARTS)}", part)
    return frozenset(part for part in PARTS if part in given or part == "outbox")


def table_part(table: str) -> Part:
    """The part that a table of the ledger belongs to."""
    return _OPTIONAL.get(table, "outbox")


def parts_of(names: Collection[str]) -> frozenset[Part]:
    """The parts whose tables are among these names, perhaps those of an older version."""
    return frozenset(part for part, first in _FIRST.items() if first in names)


def steps_for(wanted: Collection[Part], installed: Collection[Part], current: str | None) -> dict[str, frozenset[Part]]:
    """What each step makes: for parts that are there, only steps that came after `current`, the version of all."""
    return {
        step: frozenset(
            part for part in parts if part in wanted and (part not in installed or current is None or step > current)
        )
        for step, parts in _STEPS.items()
    }


def command_for(parts: Collection[Part] = (), *, everything: bool = False) -> str:
    """What to type so that the tables of these parts are there and up to date."""
    chosen = [part for part in PARTS if part in parts]
    return command_line("migrate", **({} if everything or not chosen else {"for": ",".join(chosen)}))


def command_that_makes(text: str) -> str:
    """What to type so that the table or function is there which an error of the database misses."""
    missed = {part for table, part in _OPTIONAL.items() if re.search(rf"\b{table}\b", text)}
    return command_for(missed or ({"runs"} if _FUNCTIONS_OF_RUNS(text) else ()))
