"""Apply a message once, however often it arrives.

The key of a message is stored in the transaction that applies it: both happen or neither does. Two consumers that hold
the same message wait for each other at the key; the second finds it applied. Elsewhere: who sends twice and why
(`bullpen.outbox`), what may be passed as connection (`_callers`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from bullpen.errors import require
from bullpen.ledger import tables
from bullpen.ledger._callers import async_caller, sync_caller
from bullpen.ledger._sql import Sql
from bullpen.ledger.records import encode_rows


class Inbox:
    """Keys of messages that were applied."""

    def __init__(self, schema: str) -> None:
        self._schema = schema

    @asynccontextmanager
    async def once(self, connection: Any, key: str, *, scope: str = "default") -> AsyncIterator[bool]:
        """Gives True the first time that a transaction with this key commits, and False ever after.

            async with session.begin():
                async with ledger.once(session, message.id) as is_new:
                    if is_new:
                        account.balance += message.amount

        `scope` is the consumer: two consumers may each apply one message. A block that raises leaves no key behind.
        """
        caller, row = async_caller(connection), _row(scope, key)
        sql = Sql(caller.dialect, self._schema)
        is_new = bool(await caller.run(sql.receive, row))
        try:
            yield is_new
        except BaseException:
            if is_new:
                # The caller may catch it and commit what else it did: then the message must count as not applied. Where
                # the database itself has given up the transaction, this fails too and nothing is committed anyway.
                with contextlib.suppress(Exception):
                    await caller.run(sql.unreceive, row)
            raise

    @contextmanager
    def once_sync(self, connection: Any, key: str, *, scope: str = "default") -> Iterator[bool]:
        """As `once`, for blocking connections."""
        caller, row = sync_caller(connection), _row(scope, key)
        sql = Sql(caller.dialect, self._schema)
        is_new = bool(caller.run(sql.receive, row))
        try:
            yield is_new
        except BaseException:
            if is_new:
                with contextlib.suppress(Exception):  # as above
                    caller.run(sql.unreceive, row)
            raise


def _row(scope: str, key: str) -> str:
    for name, value, limit in (("scope", scope, 120), ("key", key, 300)):
        assert tables.inbox.c[name].type.length == limit  # type: ignore[attr-defined]  # both are String columns
        fits = isinstance(value, str) and 0 < len(value) <= limit and "\0" not in value
        require(name, fits, f"1 to {limit} characters", value)
    return encode_rows([{"scope": scope, "key": key}])
