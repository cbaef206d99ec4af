"""The tables of the ledger as an operation of a Django migration."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from typing import Any

from django.db.migrations.operations.base import Operation

from bullpen.integrations.django._options import options


class LedgerTables(Operation):
    """Bring the ledger's tables in the database of `BULLPEN["OUTBOX"]` to the version of this program.

    What it runs may be run again: each version of the ledger adds a migration with this operation, so that a project
    that updates bullpen gets what is new.
    """

    reduces_to_sql = True
    reversible = True
    atomic = True

    def __init__(self, ledger_version: str) -> None:
        self.ledger_version = ledger_version

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Django has no models of these tables."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if options().outbox != schema_editor.connection.alias:
            return
        vendor = schema_editor.connection.vendor
        if vendor not in ("sqlite", "postgresql"):
            return
        from bullpen.ledger.migrate import render_sql

        text = render_sql("sqlite" if vendor == "sqlite" else "postgresql", parts=["outbox"])
        for statement in _statements(text, vendor):
            schema_editor.execute(statement, params=None)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Tables with messages that are still to leave are never dropped by going back."""

    def describe(self) -> str:
        return f"Tables of the bullpen ledger, version {self.ledger_version}"


def _statements(text: str, vendor: str) -> Iterator[str]:
    """Django has a transaction of its own. PostgreSQL takes all at once, SQLite one statement at a time."""
    text = re.sub(r"^(?:BEGIN|COMMIT);$", "", text, flags=re.MULTILINE)
    if vendor != "sqlite":
        yield text
        return
    waiting = ""
    for line in text.splitlines(keepends=True):
        waiting += line
        if sqlite3.complete_statement(waiting):
            yield waiting
            waiting = ""
