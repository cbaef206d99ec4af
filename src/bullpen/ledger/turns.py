"""Turns of entities as rows: who has one, and until when.

In: names and tokens. Out: at most one holder per name, until its lease ends or it gives the turn back. A row with a
lease, and not a lock of the session, which a pooler between us and the database would give to others; nor one of a
transaction, which would stay open for as long as actions run.
Elsewhere: waiting for a turn and renewing it (`bullpen.workflow.locks`).
"""

from __future__ import annotations

import hashlib
import time
from typing import Final

from bullpen.ledger import tables
from bullpen.ledger._words import Words
from bullpen.ledger.database import Database
from bullpen.ledger.driver import prepared

__all__ = ["Turns"]

_SWEEP_EVERY_S: Final = 60.0
_MOST_SWEPT: Final = 1_000


class Turns:
    """The turns of one ledger."""

    def __init__(self, database: Database) -> None:
        self._database = database
        words = Words(database.dialect, database.schema, database.clock_offset_ms)
        table = words._table(tables.turns.name)
        self._take = f"""
INSERT INTO {table} AS t (name, token, until) VALUES (:name, :token, {words._later(":lease_ms")})
ON CONFLICT (name) DO UPDATE SET token = excluded.token, until = excluded.until
WHERE t.token = excluded.token OR t.until < {words.now}
RETURNING token"""
        # Not one that somebody takes at this moment: whoever waited for it here could wait for us there.
        skip = " FOR UPDATE SKIP LOCKED" if database.is_postgres else ""
        self._sweep = f"""
DELETE FROM {table} WHERE until < {words.now}
AND name IN (SELECT name FROM {table} WHERE until < {words.now} ORDER BY until LIMIT {_MOST_SWEPT}{skip})"""
        self._sweep_at = 0.0
        self._release = f"DELETE FROM {table} WHERE name = :name AND token = :token"

    @property
    def place(self) -> str:
        """Where they are kept."""
        return f"{self._database.address} {self._database.schema}"

    async def take(self, name: str, token: str, lease_ms: int) -> bool:
        """Take a turn that is free or whose lease has ended, renew our own. False: somebody else has it."""
        given = {"name": _digest(name), "token": token, "lease_ms": lease_ms}
        is_taken = bool(await self._database.fetch(self._take, given))
        if is_taken and time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + _SWEEP_EVERY_S
            await self.sweep()
        return is_taken

    async def sweep(self) -> int:
        """Remove turns whose lease has ended: their holders died. Returns how many. Runs by itself with the first turn
        of a process and once a minute: a program of workflows has no other upkeep of its ledger."""
        async with self._database.statement() as connection:
            return (await connection.execute(prepared(self._sweep))).rowcount

    async def release(self, name: str, token: str) -> None:
        """Give it back, if it is still ours."""
        await self._database.fetch(self._release, {"name": _digest(name), "token": token})


def _digest(name: str) -> str:
    """Short, and of no use to a tenant who reads what others have."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
