"""A session in a transaction, for routes of FastAPI that store messages of the outbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, TypeAlias

from fastapi import Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import HTTPConnection

from bullpen.integrations.starlette import engine_of


async def _transaction(connection: HTTPConnection) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(engine_of(connection)) as session, session.begin():
        yield session


OutboxSession: TypeAlias = Annotated[AsyncSession, Depends(_transaction, scope="function")]
"""A session in a transaction, on the engine of `install`. It is committed before the answer is sent: a client that was
told "done" can rely on it. When the route raises, it is rolled back."""
