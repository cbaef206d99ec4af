"""A KurrentDB (EventStoreDB) inside the test process: the real gRPC protocol on loopback, events in memory.

In: nothing. Out: an address for any client, in this process or another; a server that can be killed and started again
with everything it had. It speaks what a projector needs: append, read and subscribe to `$all` or a stream with filters
and checkpoints, persistent subscriptions, gossip. Its behaviour was modelled from the protocol and from what the client
expects, not compared with a real server; the same suites run against one when `BULLPEN_TEST_KURRENT` names it.
"""

from __future__ import annotations

import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Self

from bullpen.errors import MissingExtra
from bullpen.testing.servers import free_port

try:
    import grpc
    from google.protobuf import any_pb2, empty_pb2
    from kurrentdbclient.protos.v1 import (
        gossip_pb2,
        gossip_pb2_grpc,
        persistent_pb2,
        persistent_pb2_grpc,
        shared_pb2,
        status_pb2,
        streams_pb2,
        streams_pb2_grpc,
    )
except ModuleNotFoundError as missing:
    raise MissingExtra("kurrent", "the KurrentDB of tests") from missing

__all__ = ["KurrentServer"]

_THREADS: Final = 64


@dataclass(frozen=True, slots=True)
class _Stored:
    id: str
    stream: str
    type: str
    content_type: str
    revision: int
    position: int
    data: bytes
    metadata: bytes
    created: int
    """100 ns since 1970, as the server counts."""


@dataclass(slots=True)
class _Group:
    """A persistent subscription: what it has read, what waits for an acknowledgement, what comes again."""

    wants: Callable[[_Stored], bool]
    cursor: int
    most_retries: int
    timeout_s: float
    again: list[tuple[_Stored, int]] = field(default_factory=list)
    parked: list[_Stored] = field(default_factory=list)
    consumers: int = 0


class _Store:
    """What the server keeps over a restart."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.events: list[_Stored] = []
        self.streams: dict[str, list[_Stored]] = {}
        self.ids: dict[tuple[str, str], _Stored] = {}
        self.groups: dict[str, _Group] = {}
        self.next_position = 1_000

    def append(
        self, stream: str, expected: Any, proposed: list[tuple[str, dict[str, str], bytes, bytes]]
    ) -> tuple[int, int] | int:
        """Revision and position of the last event; or the actual revision when another one was expected."""
        with self.changed:
            known = self.streams.setdefault(stream, [])
            actual = len(known) - 1
            stored = [self.ids.get((stream, event_id)) for event_id, _, _, _ in proposed]
            if stored and all(stored):
                last = stored[-1]
                assert last is not None
                return last.revision, last.position
            fits = expected == "any" or expected == actual or (expected == "exists" and actual >= 0)
            if not fits:
                if not known:
                    del self.streams[stream]
                return actual
            for event_id, headers, metadata, data in proposed:
                event = _Stored(
                    event_id,
                    stream,
                    headers["type"],
                    headers["content-type"],
                    len(known),
                    self.next_position,
                    data,
                    metadata,
                    time.time_ns() // 100,
                )
                # Positions are offsets in a log: they grow by more than one.
                self.next_position += 64 + len(data) + len(metadata)
                known.append(event)
                self.events.append(event)
                self.ids[stream, event_id] = event
            self.changed.notify_all()
            return known[-1].revision, known[-1].position

    def index_after(self, position: int) -> int:
        """Of the first event behind a position."""
        low, high = 0, len(self.events)
        while low < high:
            middle = (low + high) // 2
            if self.events[middle].position <= position:
                low = middle + 1
            else:
                high = middle
        return low


def _wanting(options: Any) -> Callable[[_Stored], bool]:
    """The filter of a request."""
    if options.WhichOneof("filter_option") != "filter":
        return lambda _: True
    by_type = options.filter.WhichOneof("filter") == "event_type"
    expression = options.filter.event_type if by_type else options.filter.stream_identifier
    prefixes, pattern = tuple(expression.prefix), expression.regex and re.compile(expression.regex)

    def wants(event: _Stored) -> bool:
        text = event.type if by_type else event.stream
        return text.startswith(prefixes) if prefixes else bool(pattern.search(text))

    return wants


class KurrentServer:
    """Enter it, then read `url`. `kill` cuts every connection at once; `restart` comes back on the same port."""

    def __init__(self) -> None:
        self.port = free_port()
        self._store = _Store()
        self._server: grpc.Server | None = None
        self._generation = 0
        self.subscriptions = 0
        """How often somebody has subscribed."""

    @property
    def url(self) -> str:
        return f"kurrentdb://127.0.0.1:{self.port}?Tls=false&KeepAliveInterval=1000&KeepAliveTimeout=1000"

    @property
    def discover_url(self) -> str:
        """As for a cluster: the client asks for the leader first."""
        return f"esdb+discover://127.0.0.1:{self.port}?Tls=false"

    @property
    def event_count(self) -> int:
        return len(self._store.events)

    def parked(self, group: str) -> int:
        """How many events a persistent subscription has given up."""
        return len(self._store.groups[group].parked)

    def damage(
        self, index: int, *, id: str | None = None, stream: str | None = None, created: int | None = None
    ) -> None:
        """Change what is stored of an event; bytes that are no text stand as surrogates in `stream`."""
        with self._store.changed:
            event = self._store.events[index]
            self._store.events[index] = replace(
                event,
                id=event.id if id is None else id,
                stream=event.stream if stream is None else stream,
                created=event.created if created is None else created,
            )

    def forget(self) -> None:
        """Begin with an empty store."""
        self._store = _Store()

    def restart(self) -> None:
        """Start; after `kill` with all that was stored."""
        assert self._server is None
        self._generation += 1
        # Without SO_REUSEPORT two servers on one port would share its connections.
        server = grpc.server(ThreadPoolExecutor(_THREADS), options=[("grpc.so_reuseport", 0)])
        streams_pb2_grpc.add_StreamsServicer_to_server(_Streams(self), server)  # type: ignore[no-untyped-call]
        persistent_pb2_grpc.add_PersistentSubscriptionsServicer_to_server(_Groups(self), server)  # type: ignore[no-untyped-call]
        gossip_pb2_grpc.add_GossipServicer_to_server(_Gossip(self), server)  # type: ignore[no-untyped-call]
        deadline = time.monotonic() + 10
        while True:
            try:
                server.add_insecure_port(f"127.0.0.1:{self.port}")
                break
            except RuntimeError:  # connections of the one before still close
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        server.start()
        self._server = server

    def kill(self) -> None:
        """Cut all connections now. What was acknowledged stays. Safe to call twice."""
        server, self._server = self._server, None
        self._generation += 1
        with self._store.changed:
            self._store.changed.notify_all()  # subscriptions notice that they are over
        if server is not None:
            server.stop(None).wait(10)

    def __enter__(self) -> Self:
        self.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class _Service:
    def __init__(self, server: KurrentServer) -> None:
        self._server = server
        self._generation = server._generation

    @property
    def _store(self) -> _Store:
        return self._server._store

    def _is_over(self, context: Any) -> bool:
        return self._generation != self._server._generation or not context.is_active()


class _Streams(_Service, streams_pb2_grpc.StreamsServicer):
    def Append(self, request_iterator: Iterator[Any], context: Any) -> Any:  # noqa: N802 - the protocol's name
        options = next(request_iterator).options
        proposed = [
            (each.proposed_message.id.string, dict(each.proposed_message.metadata),
             each.proposed_message.custom_metadata, each.proposed_message.data)
            for each in request_iterator
        ]  # fmt: skip
        kind = options.WhichOneof("expected_stream_revision")
        expected = {"any": "any", "no_stream": -1, "stream_exists": "exists"}.get(kind, options.revision)
        done = self._store.append(options.stream_identifier.stream_name.decode(), expected, proposed)
        if isinstance(done, int):
            wrong = streams_pb2.AppendResp.WrongExpectedVersion()
            if done < 0:
                wrong.current_no_stream.CopyFrom(shared_pb2.Empty())
            else:
                wrong.current_revision = done
            return streams_pb2.AppendResp(wrong_expected_version=wrong)
        position = streams_pb2.AppendResp.Position(commit_position=done[1], prepare_position=done[1])
        return streams_pb2.AppendResp(
            success=streams_pb2.AppendResp.Success(current_revision=done[0], position=position)
        )

    def BatchAppend(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802 - as above
        options, proposed = None, []
        for request in request_iterator:
            if request.HasField("options"):
                options = request.options
            proposed += [
                (each.id.string, dict(each.metadata), each.custom_metadata, each.data)
                for each in request.proposed_messages
            ]
            if not request.is_final:
                continue
            assert options is not None
            kind = options.WhichOneof("expected_stream_position")
            expected = {"any": "any", "no_stream": -1, "stream_exists": "exists"}.get(kind, options.stream_position)
            done = self._store.append(options.stream_identifier.stream_name.decode(), expected, proposed)
            answer = streams_pb2.BatchAppendResp(
                correlation_id=request.correlation_id, stream_identifier=options.stream_identifier
            )
            if isinstance(done, int):
                wrong = shared_pb2.WrongExpectedVersion()
                if done < 0:
                    wrong.current_no_stream.CopyFrom(empty_pb2.Empty())
                else:
                    wrong.current_stream_revision = done
                detail = any_pb2.Any()
                detail.Pack(wrong)
                answer.error.CopyFrom(status_pb2.Status(message="wrong expected version", details=detail))
            else:
                answer.success.current_revision = done[0]
                answer.success.position.commit_position = done[1]
                answer.success.position.prepare_position = done[1]
            yield answer
            options, proposed = None, []

    def Read(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802 - as above
        options = request.options
        if options.WhichOneof("count_option") == "subscription":
            yield from self._subscribe(options, context)
            return
        backwards = options.read_direction == streams_pb2.ReadReq.Options.Backwards
        if options.WhichOneof("stream_option") == "stream":
            name = options.stream.stream_identifier.stream_name.decode()
            found = list(self._store.streams.get(name, ()))
            if not found:
                missing = streams_pb2.ReadResp.StreamNotFound(stream_identifier=options.stream.stream_identifier)
                yield streams_pb2.ReadResp(stream_not_found=missing)
                return
            if options.stream.WhichOneof("revision_option") == "revision":
                at = options.stream.revision
                found = [each for each in found if (each.revision <= at if backwards else each.revision >= at)]
        else:
            found = list(self._store.events)
            if options.all.WhichOneof("all_option") == "position":
                at = options.all.position.commit_position
                found = [each for each in found if (each.position <= at if backwards else each.position >= at)]
        wants, left = _wanting(options), options.count
        for event in reversed(found) if backwards else found:
            if left == 0:
                return
            if wants(event):
                left -= 1
                yield streams_pb2.ReadResp(event=_read_event(streams_pb2, event))

    def _subscribe(self, options: Any, context: Any) -> Iterator[Any]:
        self._server.subscriptions += 1
        confirmation = streams_pb2.ReadResp.SubscriptionConfirmation(subscription_id=str(uuid.uuid4()))
        yield streams_pb2.ReadResp(confirmation=confirmation)
        store, wants = self._store, _wanting(options)
        kind = options.all.WhichOneof("all_option")
        if kind == "position":
            index = store.index_after(options.all.position.commit_position)
        else:
            index = 0 if kind == "start" else len(store.events)
        filtered = options.WhichOneof("filter_option") == "filter"
        interval = options.filter.max * options.filter.checkpointIntervalMultiplier if filtered else 0
        scanned, was_caught_up = 0, False
        while True:
            with store.changed:
                if index >= len(store.events) and was_caught_up:
                    store.changed.wait(1.0)
                fresh = store.events[index : index + 500]
            if self._is_over(context):
                return
            for event in fresh:
                scanned += 1
                if wants(event):
                    was_caught_up = False
                    yield streams_pb2.ReadResp(event=_read_event(streams_pb2, event))
                if interval and scanned % interval == 0:
                    at = streams_pb2.ReadResp.Checkpoint(
                        commit_position=event.position, prepare_position=event.position
                    )
                    yield streams_pb2.ReadResp(checkpoint=at)
            index += len(fresh)
            if not fresh and not was_caught_up:
                was_caught_up = True
                yield streams_pb2.ReadResp(caught_up=streams_pb2.ReadResp.CaughtUp())


class _Groups(_Service, persistent_pb2_grpc.PersistentSubscriptionsServicer):
    def Create(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        options, store = request.options, self._store
        with store.changed:
            if options.group_name in store.groups:
                context.abort(grpc.StatusCode.ALREADY_EXISTS, f"group {options.group_name} exists")
            kind = options.all.WhichOneof("all_option")
            cursor = (
                store.index_after(options.all.position.commit_position)
                if kind == "position"
                else 0
                if kind == "start"
                else len(store.events)
            )
            store.groups[options.group_name] = _Group(
                _wanting(options.all), cursor, options.settings.max_retry_count,
                (options.settings.message_timeout_ms or 30_000) / 1000,
            )  # fmt: skip
        return persistent_pb2.CreateResp()

    def Read(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802 - as above
        options = next(request_iterator).options
        store, name = self._store, options.group_name
        group = store.groups.get(name)
        if group is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"group {name} does not exist")
            return
        confirmation = persistent_pb2.ReadResp.SubscriptionConfirmation(subscription_id=f"$all::{name}")
        yield persistent_pb2.ReadResp(subscription_confirmation=confirmation)
        # What was sent and is not settled: it belongs to this connection, and comes again when the connection ends.
        open_ones: dict[str, tuple[_Stored, int, float]] = {}
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def listen() -> None:
            try:
                for each in request_iterator:
                    answers.put(each)
                    with store.changed:
                        store.changed.notify_all()
            except Exception:  # noqa: BLE001 - the client hung up; gRPC says so in many ways
                return

        threading.Thread(target=listen, daemon=True, name="kurrent acks").start()
        try:
            while not self._is_over(context):
                with store.changed:
                    self._settle(group, open_ones, answers)
                    sending = self._next(group, open_ones, options.buffer_size or 10)
                    if not sending:
                        store.changed.wait(0.1)
                for event, retries in sending:
                    content = _read_event(persistent_pb2, event)
                    content.retry_count = retries
                    yield persistent_pb2.ReadResp(event=content)
        finally:
            with store.changed:
                for event, retries, _ in open_ones.values():
                    self._come_again(group, event, retries)
                store.changed.notify_all()

    def _next(
        self, group: _Group, open_ones: dict[str, tuple[_Stored, int, float]], most: int
    ) -> list[tuple[_Stored, int]]:
        now, sending = time.monotonic(), []
        for event_id, (event, retries, due) in list(open_ones.items()):
            if now > due:
                del open_ones[event_id]
                self._come_again(group, event, retries)
        while len(open_ones) < most:
            if group.again:
                event, retries = group.again.pop(0)
            elif group.cursor < len(self._store.events):
                event, retries = self._store.events[group.cursor], 0
                group.cursor += 1
                if not group.wants(event):
                    continue
            else:
                break
            open_ones[event.id] = (event, retries, now + group.timeout_s)
            sending.append((event, retries))
        return sending

    def _settle(
        self, group: _Group, open_ones: dict[str, tuple[_Stored, int, float]], answers: queue.SimpleQueue[Any]
    ) -> None:
        while True:
            try:
                answer = answers.get_nowait()
            except queue.Empty:
                return
            kind = answer.WhichOneof("content")
            for each in getattr(answer, kind).ids:
                known = open_ones.pop(each.string, None)
                if known is None or kind == "ack":
                    continue
                event, retries, _ = known
                if answer.nack.action == persistent_pb2.ReadReq.Nack.Retry:
                    self._come_again(group, event, retries)
                elif answer.nack.action == persistent_pb2.ReadReq.Nack.Park:
                    group.parked.append(event)

    def _come_again(self, group: _Group, event: _Stored, retries: int) -> None:
        if retries >= group.most_retries:
            group.parked.append(event)
        else:
            group.again.append((event, retries + 1))


class _Gossip(_Service, gossip_pb2_grpc.GossipServicer):
    def Read(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        end_point = gossip_pb2.EndPoint(address="127.0.0.1", port=self._server.port)
        leader = gossip_pb2.MemberInfo(
            state=gossip_pb2.MemberInfo.VNodeState.Leader, is_alive=True, http_end_point=end_point
        )
        return gossip_pb2.ClusterInfo(members=[leader])


def _read_event(module: Any, event: _Stored) -> Any:
    """The message of either service."""
    recorded = module.ReadResp.ReadEvent.RecordedEvent(
        id=shared_pb2.UUID(string=event.id),
        stream_identifier=shared_pb2.StreamIdentifier(stream_name=event.stream.encode("utf-8", "surrogateescape")),
        stream_revision=event.revision,
        commit_position=event.position,
        prepare_position=event.position,
        metadata={"type": event.type, "content-type": event.content_type, "created": str(event.created)},
        custom_metadata=event.metadata,
        data=event.data,
    )
    return module.ReadResp.ReadEvent(event=recorded, commit_position=event.position)
