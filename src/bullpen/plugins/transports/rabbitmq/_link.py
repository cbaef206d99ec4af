"""A connection to whichever node is up, opened again after it broke.

In: addresses of the nodes and a topology. Out: channels on a connection whose topology is declared; our errors instead
of the driver's. A connection of the driver that repairs itself knows one address only, so going on to the next node is
done here. Nothing is repeated: whoever uses a channel must know whether repeating is safe.

A question on a channel that is cancelled before its answer leaves the driver and the broker with different ideas of
that channel, and the next frame on its number ends the whole connection, with every delivery on it. So nothing is
cancelled half way: what was begun goes on to its end in a task of the link, and only its caller stops to wait.
Elsewhere: what is declared (`topology`), what is sent and settled (`transport`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection
from aio_pika.exceptions import (
    CONNECTION_EXCEPTIONS,
    AuthenticationError,
    ChannelPreconditionFailed,
    DeliveryError,
    ProbableAuthenticationError,
    PublishError,
)
from yarl import URL

from bullpen._kernel.ending import end
from bullpen._kernel.logs import calming
from bullpen.errors import BullpenError, ConnectionLost, NotTakenNow, ServerRefused
from bullpen.plugins._reports import MessagingReports
from bullpen.plugins.transports.rabbitmq._frames import GuardedStream
from bullpen.plugins.transports.rabbitmq.topology import (
    AmqpExchange,
    Declaration,
    DeclaredQueue,
    QueueBinding,
    Topology,
)

T = TypeVar("T")

HEARTBEAT_S: Final = 60
_CONNECT_TIMEOUT_S: Final = 5.0
_DECLARE_TIMEOUT_S: Final = 20.0
"""Not bound by the time for connecting: a cluster that elects leaders takes its time to declare."""
_CLOSE_TIMEOUT_S: Final = 1.0
_BLOCKED: Final = (
    "RabbitMQ is short of memory or disk and blocks publishers; its log and `rabbitmqctl status` show which"
)
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
"""After a node is back, or another was elected, work must go on within 5 s."""


def translate(error: BaseException) -> BullpenError:
    """Our error for one of the driver's."""
    text = str(error) or type(error).__name__
    if isinstance(error, BullpenError):
        return error
    if isinstance(error, AuthenticationError | ProbableAuthenticationError):
        return ServerRefused(f"RabbitMQ refused the login: {text}")
    if isinstance(error, ChannelPreconditionFailed):
        return ServerRefused(f"RabbitMQ has this name with other arguments: {text}")
    if isinstance(error, PublishError):
        return ServerRefused(f"no queue is bound for the message, so it was returned: {text}")
    if isinstance(error, DeliveryError):
        return NotTakenNow(f"RabbitMQ refused the message, its queue is full or has no leader: {text}")
    if isinstance(error, TimeoutError):
        return ConnectionLost("RabbitMQ did not answer in time")
    return ConnectionLost(f"connection to RabbitMQ: {text}")


TRANSLATED: Final = (*CONNECTION_EXCEPTIONS, TimeoutError)
"""What the driver may raise, on a connection that breaks at any moment."""


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Our errors for whatever the driver raises inside of the block.

    When a connection breaks, the driver cancels whoever waits for an answer on it. Nobody asked for that: left as it
    is, it would end the waiting task without a word, a consumer for example.
    """
    try:
        yield
    except BullpenError:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ConnectionLost("connection to RabbitMQ: it broke while waiting for an answer") from error
    except TRANSLATED as error:
        raise translate(error) from error


class _GuardedConnection(aio_pika.Connection):
    """A connection that no message can break, whatever its properties are."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.kwargs["transport_factory"] = GuardedStream()


class Link:
    """One connection, shared by everything that may share one."""

    def __init__(self, urls: Sequence[str], topology: Topology, reports: MessagingReports, *, name: str) -> None:
        self._urls = [URL(url) for url in urls]
        self._topology, self._reports, self._name = topology, reports, name
        self._next = 0
        self._connection: AbstractConnection | None = None
        self._declared: set[str] = set()
        self._publisher: AbstractChannel | None = None
        self._looker: AbstractChannel | None = None
        self._looking = asyncio.Lock()
        self._begun: set[asyncio.Task[Any]] = set()
        self._publishes: Counter[AbstractChannel] = Counter()
        self._opening = asyncio.Lock()
        self._failures = 0
        self._failure: tuple[float, BullpenError] | None = None
        """Why nobody let us in the last time, and until when nobody is asked again."""
        self._was_connected = False
        self._is_declared = False
        self._is_lost = False
        self._is_closed = False

    @property
    def pause_s(self) -> float:
        """How long to wait before the next attempt: short first, so that a brief cut costs little."""
        return float(min(_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S * 2 ** min(self._failures, 8)))

    async def connection(self) -> AbstractConnection:
        """The open connection, with the topology declared. Raises ConnectionLost at once when no node lets us in."""
        if self._is_closed:
            raise ConnectionLost("this RabbitMQ transport was closed")
        if self._connection is not None and _is_open(self._connection) and self._is_declared:
            return self._connection
        return await self.whole(self._ready_connection())

    async def _ready_connection(self) -> AbstractConnection:
        async with self._opening:
            if self._connection is None or not _is_open(self._connection):
                await self._open()
            elif not self._is_declared:
                await self._declare_topology(self._connection)
            assert self._connection is not None
            return self._connection

    async def whole(self, work: Coroutine[Any, Any, T], *, within_s: float | None = None) -> T:
        """Wait for work that goes on to its end whoever is cancelled meanwhile. Raises TimeoutError when it has not
        ended within the time; it goes on all the same."""
        task = self._begin(work)
        if within_s is not None and not (await asyncio.wait([task], timeout=within_s))[0]:
            raise TimeoutError
        return await asyncio.shield(task)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=f"{self._name} rabbitmq channel")
        self._begun.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._begun.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone

    async def _open(self) -> None:
        if self._failure is not None and time.monotonic() < self._failure[0]:
            # Hundreds may wait for the connection, each with pauses of its own: together they ask once per pause.
            raise type(self._failure[1])(str(self._failure[1]))
        error: BullpenError = ConnectionLost("no address of a RabbitMQ node was given")
        for _ in self._urls:
            url = self._urls[self._next % len(self._urls)]
            try:
                self._connection = await self._dial(url)
            except BullpenError as reason:
                error = reason
                self._next += 1
                if isinstance(reason, ServerRefused):
                    break  # the other nodes would say the same
                continue
            self._failures, self._failure = 0, None
            self._reports.connected(_shown(url), again=self._was_connected)
            self._was_connected, self._is_lost = True, False
            return
        self._failure = time.monotonic() + self.pause_s, error
        self._failures += 1
        self._note_lost(_shown(self._urls[0]), error)
        raise error

    async def _dial(self, url: URL) -> AbstractConnection:
        connection: AbstractConnection | None = None
        try:
            with translated():
                # What it logs of a failure is in the error that we get, and told by us.
                with calming("aiormq", drop=True):
                    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                        connection = await aio_pika.connect(
                            url.update_query({"heartbeat": url.query.get("heartbeat", str(HEARTBEAT_S))}),
                            client_properties={"connection_name": self._name},
                            connection_class=_GuardedConnection,
                        )
                connection.close_callbacks.add(self._on_closed)
                self._declared = set()
                self._publisher = self._looker = None
                await self._declare_topology(connection)
        except BullpenError:
            if connection is not None:
                await _hang_up(connection, _CLOSE_TIMEOUT_S)
            raise
        return connection

    async def _declare_topology(self, connection: AbstractConnection) -> None:
        self._is_declared = False
        with translated():
            await self.whole(self._declare(connection, self._topology.declarations()), within_s=_DECLARE_TIMEOUT_S)
        self._is_declared = True

    # ---- channels ---------------------------------------------------------------------------------------------

    async def declare(self, key: str, declarations: Iterable[Declaration]) -> None:
        """Declare something once per connection; `key` names it."""
        connection = await self.connection()
        if key in self._declared:
            return
        try:
            with translated():
                await self.whole(self._declare(connection, declarations), within_s=_DECLARE_TIMEOUT_S)
        except ConnectionLost as error:
            if isinstance(error.__cause__, TimeoutError) and connection is self._connection:
                raise await self.silent("a declaration was not answered in time") from error
            raise
        if connection is self._connection:
            self._declared.add(key)

    def forget(self, key: str) -> None:
        """It may be gone although the connection is not: declare it again before it is used the next time."""
        self._declared.discard(key)

    def forget_topology(self) -> None:
        """The same for everything: an exchange is gone, and with it what was bound to it."""
        self._is_declared = False
        self._declared = set()

    @contextlib.asynccontextmanager
    async def publishing(self) -> AsyncIterator[AbstractChannel]:
        """The channel for publishing: with confirms, and a returned message is an error.

        A channel remembers which node led a queue when it published there first; some brokers refuse everything after
        that until that node is back. So after a refusal the next publish gets a new channel, and the old one is closed
        when the last publish on it has ended.
        """
        channel = await self._ready_publisher()
        self._publishes[channel] += 1
        try:
            yield channel
        except DeliveryError as refusal:
            self.note_refusal(channel, refusal)
            raise
        finally:
            self._publishes[channel] -= 1
            if not self._publishes[channel]:
                del self._publishes[channel]
                if self._publisher is not channel:
                    await self.close(channel)

    def note_refusal(self, channel: AbstractChannel, refusal: BaseException | None) -> None:
        """For whoever reads confirms himself: the next publish gets another channel, if this is a reason to."""
        is_refused = isinstance(refusal, DeliveryError) and not isinstance(refusal, PublishError)
        if is_refused and self._publisher is channel:
            self._publisher = None

    async def _ready_publisher(self) -> AbstractChannel:
        connection = await self.connection()
        if self._publisher is None or self._publisher.is_closed:
            async with self._opening:
                if self._publisher is None or self._publisher.is_closed:
                    self._publisher = await self.open_channel(connection, "publisher", confirms=True)
        return self._publisher

    async def open_channel(
        self, connection: AbstractConnection, purpose: str, *, confirms: bool = False
    ) -> AbstractChannel:
        """A new channel. When nobody waits for it any more, it is closed as soon as it is open."""
        opening = self._begin(self._open_channel(connection, purpose, confirms=confirms))
        try:
            with translated():
                if not (await asyncio.wait([opening], timeout=_CONNECT_TIMEOUT_S))[0]:
                    raise TimeoutError
                return opening.result()
        except BaseException:
            opening.add_done_callback(self._close_unwanted)
            raise

    async def _open_channel(
        self, connection: AbstractConnection, purpose: str, *, confirms: bool = False
    ) -> AbstractChannel:
        with translated():
            channel = await connection.channel(publisher_confirms=confirms, on_return_raises=confirms)
        self._reports.channel_opened(purpose)
        channel.close_callbacks.add(lambda *_: self._reports.channel_closed(purpose))
        return channel

    def _close_unwanted(self, opening: asyncio.Task[AbstractChannel]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._begin(self._close(opening.result()))

    async def close(self, channel: AbstractChannel) -> None:
        """Close a channel that may be broken already, or whose broker does not answer."""
        with contextlib.suppress(TimeoutError):
            await self.whole(self._close(channel), within_s=_CLOSE_TIMEOUT_S)

    async def _close(self, channel: AbstractChannel) -> None:
        with contextlib.suppress(BullpenError), translated():
            await channel.close()

    async def ask(self, question: Callable[[AbstractChannel], Coroutine[Any, Any, T]]) -> T:
        """Ask the broker something on the one channel for that: who asks every few seconds opens no channels. One
        question at a time; the next waits for the answer even if the one who asked does not."""
        await self._looking.acquire()
        task = self._begin(self._ask(question))
        task.add_done_callback(lambda _: self._looking.release())
        return await asyncio.shield(task)

    async def _ask(self, question: Callable[[AbstractChannel], Coroutine[Any, Any, T]]) -> T:
        connection = await self.connection()
        if self._looker is None or self._looker.is_closed:
            self._looker = await self.open_channel(connection, "look")
        with translated():
            return await question(self._looker)

    @contextlib.asynccontextmanager
    async def channel(self, purpose: str) -> AsyncIterator[AbstractChannel]:
        """A channel for the length of a block, which must be `whole`. What was received on it and not acknowledged goes
        back."""
        channel = await self.open_channel(await self.connection(), purpose)
        try:
            with translated():
                yield channel
        finally:
            await self.close(channel)

    async def blocked_because(self) -> str:
        """Why the broker reads nothing from us although the connection is open; empty when it does."""
        underlay = None if self._connection is None else self._connection.transport
        if underlay is None:
            return ""
        try:
            async with asyncio.timeout(0):  # the driver only lets itself be waited for
                await underlay.connection.ready()
        except TimeoutError:
            return _BLOCKED
        return ""

    async def silent(self, why: str) -> BullpenError:
        """What it means that no answer came. A broker that is short of memory says so, and is waited for: who breaks
        the connection then gets every delivery once more, and that as often as their limit allows. Else nobody is
        there, and the connection is given up."""
        blocked = await self.blocked_because()
        if blocked:
            return NotTakenNow(blocked)
        await self.give_up(why)
        return ConnectionLost("RabbitMQ did not answer in time")

    async def give_up(self, why: str) -> None:
        """Break the present connection: it is open, and nobody answers."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._note_lost(self._name, why)
            await _hang_up(connection, _CLOSE_TIMEOUT_S)

    async def aclose(self) -> None:
        self._is_closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            await _hang_up(connection, _CONNECT_TIMEOUT_S)
            self._reports.closed(self._name)
        if self._begun:  # what still waits for an answer gets an error now
            await asyncio.wait(list(self._begun), timeout=_CLOSE_TIMEOUT_S)
            await end(*self._begun)

    async def _declare(self, connection: AbstractConnection, declarations: Iterable[Declaration]) -> None:
        channel = await connection.channel(publisher_confirms=False)
        for one in declarations:
            match one:
                case AmqpExchange(name, kind):
                    await channel.declare_exchange(name, kind, durable=True)
                case DeclaredQueue(name, arguments):
                    await channel.declare_queue(name, durable=True, arguments=dict(arguments))
                case QueueBinding(exchange, routing_key, queue, to_exchange):
                    if queue is not None:
                        await (await channel.get_queue(queue, ensure=False)).bind(exchange, routing_key)
                    elif to_exchange is not None:
                        target = await channel.get_exchange(to_exchange, ensure=False)
                        await target.bind(exchange, routing_key)
        await channel.close()

    def _on_closed(self, connection: Any, error: BaseException | None = None) -> None:
        if not self._is_closed and connection is self._connection:
            self._note_lost(self._name, str(error or "") or "closed by the broker")

    def _note_lost(self, endpoint: str, reason: object) -> None:
        if not self._is_closed:
            self._is_lost = True
            self._reports.disconnected(endpoint, reason)


async def _hang_up(connection: AbstractConnection, timeout_s: float) -> None:
    with contextlib.suppress(BullpenError), translated():
        async with asyncio.timeout(timeout_s):
            await connection.close()


def _is_open(connection: AbstractConnection) -> bool:
    return connection.connected.is_set() and not connection.is_closed


def _shown(url: URL) -> str:
    return f"{url.host}:{url.port}"
