"""Read every instant that PostgreSQL can hold: also infinity, years before 1 and beyond 9999.

In: the bytes of a timestamptz. Out: a datetime; the nearest that there is for one that no datetime can be. The driver
raises instead, and for the whole answer: one such row, which another program wrote, would keep all others from being
claimed. Elsewhere: the same for SQLite (`tables.to_datetime`).
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Loader
from psycopg.pq import Format

from bullpen.ledger.tables import EARLIEST, LATEST

__all__ = ["read_every_instant"]

_TYPE: Final = "timestamptz"
_Exact: Final = psycopg.adapters.get_loader(psycopg.postgres.types[_TYPE].oid, Format.TEXT)


class _InstantLoader(Loader):
    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        assert _Exact is not None
        self._exact = _Exact(oid, context)

    def load(self, data: Buffer) -> datetime:
        try:
            found: datetime = self._exact.load(data)
            return found
        except psycopg.DataError:
            text = bytes(data)
            return EARLIEST if text.startswith(b"-") or text.endswith(b"BC") else LATEST


def read_every_instant(connection: Any) -> None:
    """For all cursors of a connection of the driver."""
    connection.adapters.register_loader(_TYPE, _InstantLoader)
