"""The words in which SQL differs between the two databases, for everyone who writes statements.

Batches travel as one JSON parameter `:rows`, so a statement has the same text for one row and for a thousand, needs no
placeholder list, and can be given to any driver. Columns of such a batch begin with `s_`, so that they never hide a
column of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from bullpen.ledger.database import DialectName, now_sql, qualified


@dataclass(frozen=True)
class Words:
    """For one database, schema and clock."""

    dialect: DialectName
    schema: str
    clock_offset_ms: int = 0

    @cached_property
    def now(self) -> str:
        return now_sql(self.dialect, self.clock_offset_ms)

    @property
    def _is_postgres(self) -> bool:
        return self.dialect == "postgresql"

    def _table(self, name: str) -> str:
        return qualified(self.dialect, self.schema, name)

    def _later(self, milliseconds: str) -> str:
        """The database's now plus an expression in milliseconds."""
        return (
            f"{self.now} + {milliseconds} * interval '1 millisecond'"
            if self._is_postgres
            else f"{self.now} + {milliseconds}"
        )

    def _earlier(self, milliseconds: str) -> str:
        return (
            f"{self.now} - {milliseconds} * interval '1 millisecond'"
            if self._is_postgres
            else f"{self.now} - {milliseconds}"
        )

    def _batch(self, columns: dict[str, str], alias: str = "s") -> str:
        """The parameter `:rows` as a table."""
        if self._is_postgres:
            typed = ", ".join(f"s_{name} {kind}" for name, kind in columns.items())
            return f"jsonb_to_recordset(CAST(:rows AS jsonb)) AS {alias}({typed})"
        parts = ", ".join(f"json_extract(value, '$.s_{name}') AS s_{name}" for name in columns)
        return f"(SELECT {parts} FROM json_each(:rows)) AS {alias}"

    @staticmethod
    def _is(*statuses: str, of: str = "status") -> str:
        """For rows that are found by their ids. Not `status IN …`: the server would see that an index of such rows
        exists, and its statistics may be from before a million of them came: each batch would read them all."""
        return f"coalesce({of}, '') IN ({', '.join(repr(status) for status in statuses)})"

    def _json(self, expression: str) -> str:
        return f"CAST({expression} AS jsonb)" if self._is_postgres else expression
