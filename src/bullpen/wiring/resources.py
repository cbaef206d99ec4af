"""What an application opens by its settings: connection, codec, ledger, queues.

In: settings, and what the program or the command line names instead. Out: each made when it is first asked for, one for
all callers, and closed once. What was given belongs to whoever gave it. Elsewhere: reading settings
(`bullpen.settings`), finding the server (`servers`), the ledger (`ledger`), the codec (`codec`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Unpack

from bullpen._kernel.logs import get_logger
from bullpen.errors import InvalidOption
from bullpen.queue import Queue
from bullpen.queue.arguments import QueueArguments
from bullpen.queue.codec import Codec, check_codec
from bullpen.redis import Connection
from bullpen.settings import Origin, Settings
from bullpen.wiring.servers import command_line, connect, connect_to_configured

if TYPE_CHECKING:  # needs an extra, and is loaded when it is first asked for
    from bullpen.ledger import Ledger
    from bullpen.queue.sync import Queue as SyncQueue

__all__ = ["Resources"]

logger = get_logger("bullpen.app")

_FROM_CODE: Final = Origin("argument", "redis_url")


class Resources:
    """Those of one app. Making it neither connects nor opens anything."""

    def __init__(
        self, connection: str | Connection | None, prefix: str | None, settings: Settings | None, codec: Codec | None
    ) -> None:
        """`connection`, `prefix` and `codec` win over the settings, which are loaded unless given; what `bullpen run`
        was told wins over both."""
        told = command_line()
        if told.redis is not None:
            _report_replaced(connection, settings)
            connection = told.redis
        prefix = told.prefix or prefix
        url = connection if isinstance(connection, str) else None
        self.settings = (
            Settings.load(redis_url=url, redis_prefix=prefix)
            if settings is None
            else settings.with_redis(url=told.redis, prefix=told.prefix)
        )
        self.prefix = prefix or self.settings.redis.prefix
        self._url = url
        self._connection = connection if isinstance(connection, Connection) else None
        self._owns_connection = self._connection is None
        self._codec = check_codec(codec)
        self._owns_codec = codec is None
        self._has_codec = codec is not None
        self.queues: dict[str, Queue] = {}
        self._sync_queues: dict[str, SyncQueue] = {}
        self.made_ledger: Ledger | None = None

    @property
    def connection(self) -> Connection:
        if self._connection is None:
            self._connection = connect(self._url) if self._url else connect_to_configured(self.settings)
        return self._connection

    @property
    def made_connection(self) -> Connection | None:
        """The connection, if somebody has asked for it."""
        return self._connection

    @property
    def has_redis(self) -> bool:
        """Whether there is a server for queues."""
        return not self._owns_connection or self._url is not None or self.settings.has_redis()

    @property
    def codec(self) -> Codec | None:
        if not self._has_codec:
            from bullpen.wiring.codec import make_codec

            self._codec, self._has_codec = make_codec(self.settings), True
        return self._codec

    @property
    def ledger(self) -> Ledger:
        if self.made_ledger is None:
            from bullpen.wiring.ledger import make_ledger

            self.made_ledger = make_ledger(self.settings)
        return self.made_ledger

    @property
    def has_ledger(self) -> bool:
        """Whether a ledger is used or configured, or its file exists."""
        return self.made_ledger is not None or self.settings.has_ledger()

    async def prepare(self) -> None:
        """Make the tables of the default ledger; refuse a configured one that is not ready or not safe."""
        from bullpen.wiring.ledger import prepare

        await prepare(self.ledger, self.settings)

    def queue(self, name: str, **defaults: Unpack[QueueArguments]) -> Queue:
        """The queue of this name, one object for all callers. `defaults` are those of `Queue`, given the first time."""
        known = self.queues.get(name)
        if known is None:
            given: QueueArguments = {"codec": self.codec, **defaults}
            known = self.queues[name] = Queue(name, connection=self.connection, prefix=self.prefix, **given)
        elif defaults:
            raise InvalidOption(f"queue {name!r}", "its defaults only where it is first used", defaults)
        return known

    def sync_queue(self, name: str) -> SyncQueue:
        """The same for callers without an event loop."""
        known = self._sync_queues.get(name)
        if known is None:
            from bullpen.queue.sync import Queue as SyncQueue

            known = self._sync_queues[name] = SyncQueue(
                name, connection=self.connection, prefix=self.prefix, codec=self.codec
            )
        return known

    @asynccontextmanager
    async def borrowed_queue(self, name: str) -> AsyncIterator[Queue]:
        """The program's own queue with its defaults, or one for this moment: the program may still say its defaults."""
        if (known := self.queues.get(name)) is not None:
            yield known
            return
        async with Queue(name, connection=self.connection, prefix=self.prefix, codec=self.codec) as queue:
            yield queue

    async def leave_loop(self) -> None:
        """Send what queues still hold and close what belongs to the running loop; in another loop all works again."""
        for queue in self.queues.values():
            await queue.leave_loop()
        if self._connection is not None:
            await self._connection.aclose()

    async def close_queues(self) -> None:
        """Send what queues still hold. First of all: others may still be in use by what is closed meanwhile."""
        for queue in self.queues.values():
            await queue.close()
        for blocking in self._sync_queues.values():
            blocking.close()

    async def aclose(self) -> None:
        """Let go of the rest, in the order of who uses whom."""
        if self.made_ledger is not None:
            await self.made_ledger.aclose()
        if self._codec is not None and self._owns_codec:
            await self._codec.aclose()
        if self._connection is not None and self._owns_connection:
            await self._connection.aclose()


def _report_replaced(connection: str | Connection | None, settings: Settings | None) -> None:
    """A server that somebody wrote down and that is not used: nobody should have to find that out."""
    if connection is None and settings is not None and settings.origins.get("redis.url") == _FROM_CODE:
        connection = settings.redis.url
    if connection is not None:
        named = connection if isinstance(connection, Connection) else connect(connection)
        logger.info("--redis is used instead of %r, which is in the code", named)
