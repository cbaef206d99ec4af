"""KurrentDB (EventStoreDB) as a source of events.

In: a connection string and which event types are wanted. Out: a filtered `$all` behind a position, or what a persistent
subscription hands out; after an outage the subscription ends, and whoever reads subscribes again from its checkpoint.
The server's own checkpoints of a filtered read come out as empty batches, so that a rare event type does not read
everything again. A stored event that the client cannot decode ends its stream at that event for good; such an event is
mended on the way to the client, with a problem that says why. Elsewhere: what events become (`bullpen.outbox`), the
port (`bullpen.ports.source`). Only this module knows the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

from bullpen._kernel import json
from bullpen._kernel.addresses import show_address
from bullpen._kernel.duration import check_int, check_texts
from bullpen._kernel.ending import end
from bullpen.errors import BullpenError, InvalidOption, MissingExtra, SourceUnavailable, WrongVersion, require
from bullpen.ports.source import BEGINNING, NO_STREAM, EventBatch, EventFilter, NewEvent, SourceEvent, SourceHealth

# The C core writes every lost connection to stderr by itself; whoever wants to see that says so.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
try:
    import grpc
    from kurrentdbclient import AsyncKurrentDBClient, StreamState
    from kurrentdbclient import NewEvent as _NewEvent
    from kurrentdbclient.common import construct_recorded_event
    from kurrentdbclient.events import RecordedEvent
    from kurrentdbclient.exceptions import (
        AlreadyExistsError,
        KurrentDBClientError,
        ProgrammingError,
        WrongCurrentVersionError,
    )
except ModuleNotFoundError as missing:
    raise MissingExtra("kurrent", "KurrentDB as a source of events") from missing

__all__ = ["KurrentSource"]

_NOT_OURS: Final = (r"\$.+",)
"""Event types of the server's own."""

# What the client raises when the server is gone, also at whoever uses a subscription that has ended meanwhile.
_FAILURES: Final = (KurrentDBClientError, ProgrammingError, grpc.RpcError, grpc.aio.UsageError, TimeoutError)

_is_url = re.compile(r"(?:esdb|kurrentdb|kdb)(?:\+discover)?://[^\x00-\x20]+").fullmatch
# A persistent subscription parks an event on the server after so many redeliveries. Here an outage redelivers, and
# what cannot be stored is parked by the projector, in sight: the server must never give up by itself.
_NEVER_PARK: Final = 2_000_000_000
_ACK_DELAY_S: Final = 0.05
_UNREADABLE: Final = b"\xffcannot be decoded: "
"""In front of the reason, in place of the metadata of an event that was mended. No metadata begin with it."""
# A new connection must not inherit the pauses that gRPC keeps for the broken one: ours grow in the projector.
_GRPC_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100))


class KurrentSource:
    """Events of a KurrentDB or EventStoreDB.

        source = KurrentSource("esdb+discover://events.internal:2113", prefixes=["payment.", "account."])

    `group` reads a persistent subscription to `$all` of that name instead, made when it is missing: the server keeps
    the position and spreads events over all who read, in no promised order. `timeout_ms` bounds single calls.
    """

    def __init__(
        self,
        url: str,
        *,
        prefixes: str | Iterable[str] = (),
        regex: str | None = None,
        group: str | None = None,
        batch_size: int = 200,
        timeout_ms: int = 10_000,
        checkpoint_window: int = 30,
        root_certificates: str | bytes | None = None,
    ) -> None:
        require(
            "url", isinstance(url, str) and _is_url(url) is not None, "esdb+discover://host:port", show_address(url)
        )
        require("group", group is None or (isinstance(group, str) and group != ""), "a name or None", group)
        self._url, self._group, self._root_certificates = _with_keepalive(url), group, root_certificates
        wanted = (prefixes,) if isinstance(prefixes, str) else check_texts("prefixes", prefixes)
        self._filter = EventFilter(wanted, regex)
        self._batch_size = check_int("batch_size", batch_size, minimum=1)
        self._timeout_s = check_int("timeout_ms", timeout_ms, minimum=1) / 1000
        self._window = check_int("checkpoint_window", checkpoint_window, minimum=1)
        self._client: AsyncKurrentDBClient | None = None

    @property
    def name(self) -> str:
        return re.sub(r"(?<=://)[^/@]*@", "***@", show_address(self._url).partition("?")[0])

    # ---- reading ------------------------------------------------------------------------------------------------

    async def subscribe(self, after: int) -> AsyncGenerator[EventBatch, None]:
        reading = self._catch_up(after) if self._group is None else self._hand_out(after, self._group)
        async with contextlib.aclosing(reading) as batches:
            async for batch in batches:
                yield batch

    async def read(self, after: int, *, until: int) -> AsyncGenerator[EventBatch, None]:
        if after >= until:
            return
        async with self._connected() as client:
            found = await client.read_all(commit_position=None if after < 0 else after, **self._wanted(), timeout=None)
            events: list[SourceEvent] = []
            async for event in _stopping(found):
                if event.commit_position > until:
                    break
                if event.commit_position > after:  # the position itself is included
                    events.append(_event(event))
                if len(events) == self._batch_size:
                    yield EventBatch(tuple(events), events[-1].position)
                    events = []
            if events:
                yield EventBatch(tuple(events), events[-1].position)

    async def confirm(self, batch: EventBatch) -> None:
        """Tell the persistent subscription. One that has ended meanwhile hands the events out again."""
        if batch.receipt is not None:
            subscription: Any = batch.receipt
            with _translated():
                for event in batch.events:
                    await subscription.ack(uuid.UUID(event.id))

    async def head(self) -> int:
        """The newest event that is wanted."""
        async with self._connected() as client:
            found = await client.read_all(backwards=True, limit=1, **self._wanted(), timeout=self._timeout_s)
            newest = [event.commit_position async for event in _stopping(found)]
        return newest[0] if newest else BEGINNING

    async def check(self) -> SourceHealth:
        try:
            await self.head()
        except SourceUnavailable as error:
            return SourceHealth(False, str(error))
        return SourceHealth(True)

    async def aclose(self) -> None:
        await self._forget_client()

    # ---- appending ----------------------------------------------------------------------------------------------

    async def append(self, stream: str, events: Iterable[NewEvent], *, expected_version: int | None = None) -> int:
        """Append events with checked metadata; returns the position. Appending them again changes nothing.

        `expected_version` is as in `EventLog.append`. Raises WrongVersion when the stream is at another one.
        """
        given = [
            _NewEvent(
                type=event.type,
                data=json.encode(event.data),
                metadata=json.encode(event.metadata.to_wire()),
                id=_uuid(event.id),
            )
            for event in events
        ]
        state: int | StreamState = StreamState.ANY if expected_version is None else expected_version
        if expected_version == NO_STREAM:
            state = StreamState.NO_STREAM
        async with self._connected() as client:
            try:
                return int(
                    await client.append_to_stream(stream, events=given, current_version=state, timeout=self._timeout_s)
                )
            except WrongCurrentVersionError as error:
                actual = error.actual_version
                raise WrongVersion(
                    stream, expected_version, actual if isinstance(actual, int) else NO_STREAM
                ) from error

    # ---- inside -------------------------------------------------------------------------------------------------

    async def _catch_up(self, after: int) -> AsyncGenerator[EventBatch, None]:
        async with self._connected() as client:
            subscription = await client.subscribe_to_all(
                commit_position=None if after < 0 else after,
                include_checkpoints=True,
                include_caught_up=True,
                window_size=self._window,
                timeout=None,
                **self._wanted(),
            )
            position = after
            async with _pumping(subscription, self._batch_size) as pump:
                while True:
                    arrived = await pump.take()
                    caught_up = any(each.is_caught_up for each in arrived)
                    recorded = [each for each in arrived if not each.is_caught_up]
                    position = max([position, *(each.commit_position for each in recorded)])
                    events = tuple(_event(each) for each in recorded if not each.is_checkpoint)
                    if recorded or caught_up:
                        yield EventBatch(events, position, caught_up=caught_up)

    async def _hand_out(self, after: int, group: str) -> AsyncGenerator[EventBatch, None]:
        async with self._connected() as client:
            await self._make_group(client, after, group)
            subscription = await client.read_subscription_to_all(
                group, event_buffer_size=self._batch_size, max_ack_delay=_ACK_DELAY_S, stopping_grace=_ACK_DELAY_S
            )
            async with _pumping(subscription, self._batch_size) as pump:
                while True:
                    events = tuple(_event(each) for each in await pump.take())
                    yield EventBatch(events, None, caught_up=pump.is_empty, receipt=subscription)

    async def _make_group(self, client: AsyncKurrentDBClient, after: int, group: str) -> None:
        wanted = self._filter.regex
        if self._filter.prefixes:
            wanted = f"({'|'.join(map(re.escape, self._filter.prefixes))}).*"
        chosen: dict[str, Any] = {"filter_include": [f"({wanted})"]} if wanted else {"filter_exclude": _NOT_OURS}
        begin: dict[str, Any] = {} if after < 0 else {"commit_position": after}
        with contextlib.suppress(AlreadyExistsError):
            await client.create_subscription_to_all(
                group, **begin, **chosen, max_retry_count=_NEVER_PARK, timeout=self._timeout_s
            )

    def _wanted(self) -> dict[str, Any]:
        if self._filter.prefixes:
            return {"filter_include": self._filter.prefixes, "filter_by_prefix": True}
        if self._filter.regex is not None:
            # The client puts ^ and $ around it, and an alternative would escape from them.
            return {"filter_include": [f"({self._filter.regex})"]}
        return {"filter_exclude": _NOT_OURS}

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncKurrentDBClient]:
        """The client; after a failure a new one is made, since a channel that broke may stay broken."""
        try:
            with _translated():
                if self._client is None:
                    client = AsyncKurrentDBClient(self._url, root_certificates=self._root_certificates)
                    client.grpc_options += _GRPC_OPTIONS
                    async with asyncio.timeout(self._timeout_s):
                        await client.connect()
                    self._client = client
                yield self._client
        except SourceUnavailable:
            await self._forget_client()
            raise

    async def _forget_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(*_FAILURES):
                await client.close()


class _MendedQueue:
    """Between the stream and the client's decoding, in place of its own queue. The client has no place for that: its
    queue is reached into, and a test fails when it has moved."""

    def __init__(self, queue: asyncio.Queue[Any]) -> None:
        self._queue = queue

    async def get(self) -> Any:
        return _repaired(await self._queue.get())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def _repairing(response: Any) -> Any:
    response._read_resp_queue = _MendedQueue(response._read_resp_queue)
    return response


def _repaired(response: Any) -> Any:
    """A message of the server, with an event that the client can decode. It keeps what can be read."""
    if response is None or response.WhichOneof("content") != "event":
        return response
    try:
        construct_recorded_event(response.event)
    except Exception as error:  # noqa: BLE001 - that the client raises at all is the question
        for event in (response.event.event, response.event.link):
            name = event.stream_identifier.stream_name.decode("utf-8", "replace")
            event.stream_identifier.stream_name = name.encode()
            if event.id.string and not _is_uuid(event.id.string):
                event.id.string = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{name}@{event.commit_position}"))
            event.metadata["created"] = ""
        response.event.commit_position = response.event.event.commit_position
        response.event.event.custom_metadata = _UNREADABLE + f"{type(error).__name__}: {error}"[:300].encode()
    return response


class _Pump:
    """Takes from a subscription what is there, as one batch, without waiting for more."""

    def __init__(self, subscription: Any, most: int) -> None:
        self._arrived: asyncio.Queue[Any] = asyncio.Queue(most)
        self._most, self._subscription = most, subscription
        self.task = asyncio.create_task(self._run(), name="bullpen event subscription")

    async def _run(self) -> None:
        async for event in self._subscription:
            await self._arrived.put(event)

    @property
    def is_empty(self) -> bool:
        return self._arrived.empty()

    async def take(self) -> list[RecordedEvent]:
        """At least one. Raises what ended the subscription, after everything that came before it."""
        if self._arrived.empty():
            getting = asyncio.ensure_future(self._arrived.get())
            try:
                await asyncio.wait([getting, self.task], return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not getting.done():
                    getting.cancel()
            if not getting.done() or getting.cancelled():
                await self.task  # raises, or:
                raise SourceUnavailable("the event store ended the subscription")
            found = [getting.result()]
        else:
            found = []
        while len(found) < self._most and not self._arrived.empty():
            found.append(self._arrived.get_nowait())
        return found


@contextlib.asynccontextmanager
async def _pumping(subscription: Any, most: int) -> AsyncIterator[_Pump]:
    pump = _Pump(_repairing(subscription), most)
    try:
        yield pump
    finally:
        await end(pump.task)
        with contextlib.suppress(*_FAILURES):
            await subscription.stop(timeout=1)


async def _stopping(response: Any) -> AsyncIterator[RecordedEvent]:
    """The events of a response, which is stopped however the loop ends."""
    try:
        async for event in _repairing(response):
            yield event
    finally:
        with contextlib.suppress(*_FAILURES):
            await response.stop()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except BullpenError:
        raise
    except (*_FAILURES, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise SourceUnavailable(f"the event store does not answer: {type(error).__name__}: {reason[:300]}") from error


def _event(recorded: RecordedEvent) -> SourceEvent:
    metadata, problem = bytes(recorded.metadata), None
    if metadata.startswith(_UNREADABLE):
        metadata, problem = b"", f"the event {metadata[1:].decode('utf-8', 'replace')}"
    return SourceEvent(
        id=str(recorded.id),
        stream=recorded.stream_name,
        type=recorded.type,
        version=recorded.stream_position,
        position=recorded.commit_position,
        recorded_at=recorded.recorded_at or datetime.now(UTC),
        data_bytes=bytes(recorded.data),
        metadata_bytes=metadata,
        problem=problem,
    )


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


def _uuid(text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError:
        raise InvalidOption("event id", "a UUID, which this event store requires", text) from None


def _with_keepalive(url: str) -> str:
    """A connection that went silent must end, or the subscription would wait for ever; the client sends nothing."""
    if re.search(r"[?&]keepaliveinterval=", url, re.IGNORECASE):
        return url
    return f"{url}{'&' if '?' in url else '?'}KeepAliveInterval=10000&KeepAliveTimeout=10000"
