"""The port over Kafka topics: records keyed by urn, one delivery at a time per partition, offsets as acknowledgement.

A record is a line in a log, it cannot be put back. So while one is retried its partition waits (only that one), and how
often it failed stands in the metadata of a commit at its own offset: whoever has the partition next knows. Asked to
`park`, a failed record goes to a retry topic instead and its successors may overtake it. Nothing is ever committed
beyond a record that is not settled. Commits of finished records are gathered for a moment: after a crash the last few
come again. Elsewhere: the driver (`_kafka`), the policy (`bullpen.plugins.messaging`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, Self, assert_never

from bullpen._kernel import json
from bullpen._kernel.duration import check_int, is_text
from bullpen._kernel.ids import random_id
from bullpen._kernel.outcome import Completed, Delayed, Failed, Outcome, Retry, Waiting, WaitingChildren
from bullpen._kernel.policy import WORKFLOW_EVENT, DeadLetters, RetryPolicy
from bullpen.errors import BullpenError, ConnectionLost, InvalidOption, NotJson, ServerRefused, require
from bullpen.plugins._kafka import Brokers, GroupMember, KafkaDoor, Partition, PartitionLost, Record
from bullpen.plugins._reports import Reports
from bullpen.plugins.messaging import MessagingClient
from bullpen.plugins.transports._encoding import (
    RETRY_COUNT_HEADER,
    TRIES_HEADER,
    encode_payload,
    read_count,
    read_tries,
    tries_to_header,
)
from bullpen.plugins.transports._letters import event_of, letter_of, read_letter, who
from bullpen.ports.bindings import Kafka
from bullpen.ports.dead_letters import DeadLetter, DeadLetterNotFound
from bullpen.ports.transport import Delivery, DeliveryLost, Depth, Event, Features, Health, Published, Settled

__all__ = ["KafkaClient", "KafkaTransport"]

LABEL: Final = "Kafka"
ID_HEADER, NAME_HEADER = "x-bullpen-id", "x-bullpen-name"
PAUSE_HEADER: Final = "x-bullpen-pause"
"""On a retry topic: how many milliseconds the record rests, from its timestamp."""
_OURS: Final = frozenset({ID_HEADER, NAME_HEADER, PAUSE_HEADER, RETRY_COUNT_HEADER, TRIES_HEADER})
_FAILURES_MARK: Final = "bullpen:failures="
_POLL_MS: Final = 100
_COMMIT_EVERY_S: Final = 0.1
_MOST_BUFFERED: Final = 100
"""Records of one partition that wait here; a full one is fetched no further."""
_HAND_OVER_S: Final = 5.0
"""How long running handlers may finish before their partitions go to another member."""
_LONGEST_PAUSE_S: Final = 2.0
_RETRY_TOPICS: Final = 5


class KafkaTransport:
    """Events as records. One membership of one group serves all topics that this process consumes."""

    label = LABEL
    features = Features(ordered=True, delays=False)

    def __init__(
        self,
        brokers: str | Brokers = "localhost:9092",
        *,
        group: str,
        client_id: str | None = None,
        dead_letters: DeadLetters | None = None,
        retry: Literal["pause", "park"] = "pause",
        retry_topics: int = _RETRY_TOPICS,
    ) -> None:
        """`retry_topics`: how many topics `{topic}-retry-N` parked records use, one per failure; the last takes all
        further ones. Records of one topic should rest equally long: each waits for those before it."""
        require("group", is_text(group), "non-empty text as the consumer group", group)
        require("retry", retry in ("pause", "park"), "'pause' or 'park'", retry)
        if isinstance(brokers, str):
            brokers = Brokers.parse(brokers, client_id=client_id)
        self.group, self.retry = group, retry
        self._retry_topics = check_int("retry_topics", retry_topics, minimum=1)
        self._dead_letters = dead_letters or WORKFLOW_EVENT.policy.dead_letters
        self._reports = Reports(LABEL)
        self.door = KafkaDoor(brokers)
        self._membership = _Membership(self, brokers, self._reports)

    async def publish(self, event: Event, *, delay_ms: int = 0) -> Published:
        if delay_ms:
            raise InvalidOption("delay", f"0, because {LABEL} cannot hold messages back", delay_ms)
        event_id = event.id or random_id(event.name)
        headers = {**event.headers, ID_HEADER: event_id, NAME_HEADER: event.name}
        if event.tries is not None:
            headers[TRIES_HEADER] = tries_to_header(event.tries)
        value = encode_payload(event)
        partition, offset = await self.door.send(event.source, key=event.urn.encode(), value=value, headers=headers)
        return Published(event_id, event.source, f"{event.source}[{partition}]@{offset}")

    async def deliveries(self, source: str, *, prefetch: int, ordered: bool = False) -> _TopicDeliveries:
        """`prefetch` bounds how many partitions have a delivery at the same time; each has one. Always in order."""
        if ordered and self.retry == "park":
            raise InvalidOption("ordered", "False: a parked record is overtaken by its successors", ordered)
        return self._membership.join(source, prefetch)

    async def settle(self, delivery: Delivery, outcome: Outcome) -> Settled:
        line: _Line = delivery.handle
        record = line.record_of(delivery)
        settled, failures = Settled(), delivery.attempt - 1
        match outcome:
            case Completed():
                line.pass_on(record)
            case Retry(delay_ms=delay_ms) if self.retry == "park":
                await self._park(delivery, record, failures + 1, delay_ms)
                await self._membership.commit_past(line, record)
            case Retry(delay_ms=delay_ms):
                await self._membership.hold(line, record, failures + 1, delay_ms)
            case Delayed(delay_ms) | Waiting(delay_ms):
                await self._membership.hold(line, record, failures, delay_ms)
            case Failed():
                settled = await self._bury(delivery, outcome)
                await self._membership.commit_past(line, record)
            case WaitingChildren():
                await self._membership.hold(line, record, failures, 0)
                raise InvalidOption("outcome", f"none that waits for other jobs on {LABEL}", outcome)
            case _:
                assert_never(outcome)
        return settled

    async def check(self) -> Health:
        """Healthy means that topics can be listed."""
        try:
            await self.door.topics()
        except BullpenError as error:
            return Health(False, str(error))
        return Health(True)

    async def depth(self, source: str) -> Depth:
        """Records behind the group's commits, those being handled and parked ones included."""
        total = 0
        for topic in self.topics_of(source):
            ends = await self.door.end_offsets(topic)
            committed = await self.door.committed(self.group, ends)
            total += sum(max(0, end - committed.get(where, (0, ""))[0]) for where, end in ends.items())
        return Depth(total)

    def dead_letters(self, source: str) -> _TopicDeadLetters:
        name = self._dead_letters.queue_for(source)
        if name is None:
            raise InvalidOption("dead_letters", "a policy that keeps dead letters in a queue", self._dead_letters.store)
        return _TopicDeadLetters(self, source, name)

    async def aclose(self) -> None:
        """Commit what is done, leave the group. What is not settled goes to whoever gets its partition."""
        await self._membership.aclose()
        await self.door.aclose()

    def topics_of(self, source: str) -> list[str]:
        """The topic, and its retry topics if failed records are parked."""
        parked = range(1, self._retry_topics + 1) if self.retry == "park" else ()
        return [source, *(f"{source}-retry-{number}" for number in parked)]

    async def _park(self, delivery: Delivery, record: Record, failures: int, delay_ms: int) -> None:
        topic = f"{delivery.source}-retry-{min(failures, self._retry_topics)}"
        headers = {
            **delivery.headers,
            ID_HEADER: delivery.id,
            NAME_HEADER: delivery.name,
            RETRY_COUNT_HEADER: str(failures),
            PAUSE_HEADER: str(delay_ms),
        }
        if delivery.event.tries is not None:
            headers[TRIES_HEADER] = tries_to_header(delivery.event.tries)
        await self.door.send(topic, key=record.key, value=record.value, headers=headers)

    async def _bury(self, delivery: Delivery, failed: Failed) -> Settled:
        name = self._dead_letters.queue_for(delivery.source)
        if name is None:
            return Settled()
        try:
            await _TopicDeadLetters(self, delivery.source, name).put(letter_of(delivery, failed))
        except (ServerRefused, InvalidOption) as error:
            # The record itself stays in its topic, for as long as that keeps records.
            return Settled(dead_letter_problem=str(error))
        return Settled(dead_letter=name)


class _Line:
    """One partition while it is ours."""

    __slots__ = (
        "buffer",
        "committed",
        "delivery",
        "failures",
        "is_lost",
        "is_paused",
        "partition",
        "position",
        "rests_until",
    )

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.buffer: deque[Record] = deque()
        self.delivery: Delivery | None = None
        self.position: int | None = None
        """The next offset to commit, once it has moved."""
        self.committed: int | None = None
        self.failures: tuple[int, int] | None = None
        """(offset, how often it failed) of the record in front."""
        self.rests_until = float("inf")
        """Not handed out before; for ever until it is known how often the record in front failed."""
        self.is_paused = False
        self.is_lost = False

    def is_ready(self, now: float) -> bool:
        return bool(self.buffer) and self.delivery is None and now >= self.rests_until

    def record_of(self, delivery: Delivery) -> Record:
        if self.is_lost or self.delivery is not delivery:
            raise DeliveryLost(delivery.source, delivery.id, "its partition went to another member of the group")
        return self.buffer[0]

    def pass_on(self, record: Record) -> None:
        """The record in front is settled for good."""
        self.buffer.popleft()
        self.position = record.offset + 1
        self.delivery, self.failures = None, None

    def lose(self) -> None:
        self.is_lost = True
        if self.delivery is not None:
            self.delivery.lose()


class _Membership:
    """This process in its consumer group: joins when somebody consumes, and again whenever Kafka fails it."""

    def __init__(self, transport: KafkaTransport, brokers: Brokers, reports: Reports) -> None:
        self._transport, self._brokers, self._reports = transport, brokers, reports
        self._views: dict[str, _TopicDeliveries] = {}
        self._lines: dict[Partition, _Line] = {}
        self._member: GroupMember | None = None
        self._subscribed: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._last_commit = 0.0
        self._trouble: BullpenError | None = None
        self._is_lost = False
        self._was_connected = False
        self._is_closed = False

    def join(self, source: str, prefetch: int) -> _TopicDeliveries:
        if self._is_closed:
            raise ConnectionLost("this Kafka transport was closed")
        view = self._views.get(source)
        if view is not None and not view.is_stopped:
            raise InvalidOption("topic", "one that this transport does not consume yet", source)
        view = self._views[source] = _TopicDeliveries(self, source, set(self._transport.topics_of(source)), prefetch)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"bullpen kafka {self._transport.group}")
        return view

    def lines_of(self, topics: set[str]) -> list[_Line]:
        return [line for line in self._lines.values() if line.partition.topic in topics]

    async def aclose(self) -> None:
        self._is_closed = True
        for view in self._views.values():
            await view.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # ---- settling ---------------------------------------------------------------------------------------------

    async def commit_past(self, line: _Line, record: Record) -> None:
        """The record is settled, and that must not be forgotten: what replaced it would come twice."""
        line.pass_on(record)
        await self._commit([line])
        self._wake(line)

    async def hold(self, line: _Line, record: Record, failures: int, rest_ms: int) -> None:
        """Let the partition rest; the same record is next, and whoever has the partition knows how often it failed."""
        line.failures = (record.offset, failures)
        line.position, line.committed = record.offset, None
        try:
            await self._commit([line])
        finally:
            line.delivery = None
            line.rests_until = _now() + rest_ms / 1000
            self._wake(line)

    async def _commit(self, lines: Iterable[_Line]) -> None:
        due = [line for line in lines if line.position is not None and line.position != line.committed]
        positions = {line.partition: (line.position or 0, _metadata(line)) for line in due}
        if not positions:
            return
        member = self._member
        lost = next((line for line in due if line.is_lost), None)
        if member is None or lost is not None:
            raise DeliveryLost(due[0].partition.topic, "", "its partition went to another member of the group")
        written = {line: line.position for line in due}
        try:
            await member.commit(positions)
        except PartitionLost as error:
            raise DeliveryLost(due[0].partition.topic, "", str(error)) from error
        for line, position in written.items():
            line.committed = position

    def _wake(self, line: _Line) -> None:
        for view in self._views.values():
            if line.partition.topic in view.topics:
                view.changed.set()

    # ---- being a member ---------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause_s = 0.05
        try:
            while True:
                started = _now()
                try:
                    await self._be_a_member()
                except BullpenError as error:
                    self._note_lost(error)
                finally:
                    await self._leave()
                if _now() - started > _LONGEST_PAUSE_S:
                    pause_s = 0.05
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            await self._leave()

    async def _be_a_member(self) -> None:
        member = GroupMember(
            self._brokers, self._transport.group, on_revoked=self._on_revoked, on_assigned=self._on_assigned
        )
        await member.start()
        self._member, self._trouble = member, None
        self._note_connected()
        while True:
            if self._trouble is not None:
                raise self._trouble
            self._update_subscription(member)
            if not self._subscribed:
                await asyncio.sleep(_POLL_MS / 1000)
                continue
            for partition, records in (await member.poll(timeout_ms=_POLL_MS, most=_MOST_BUFFERED)).items():
                line = self._lines.get(partition)
                if line is not None:
                    line.buffer.extend(records)
                    self._wake(line)
            for line in self._lines.values():
                self._regulate(member, line)
            if _now() - self._last_commit >= _COMMIT_EVERY_S:
                self._last_commit = _now()
                with suppress(DeliveryLost):  # told by the rebalance that follows
                    await self._commit(self._lines.values())

    def _update_subscription(self, member: GroupMember) -> None:
        """A topic that is no longer consumed is left once nothing of it is being handled."""
        wanted = {
            topic
            for view in self._views.values()
            if not view.is_stopped or any(line.delivery for line in self.lines_of(view.topics))
            for topic in view.topics
        }
        if wanted != self._subscribed:
            self._subscribed = wanted
            member.subscribe(wanted)

    def _regulate(self, member: GroupMember, line: _Line) -> None:
        is_full = len(line.buffer) >= _MOST_BUFFERED
        if is_full and not line.is_paused:
            member.pause(line.partition)
            line.is_paused = True
        elif line.is_paused and len(line.buffer) < _MOST_BUFFERED // 2:
            member.resume(line.partition)
            line.is_paused = False

    async def _on_revoked(self, partitions: set[Partition]) -> None:
        """Before others get them: let running handlers end, commit what is done, give up the rest."""
        lines = [self._lines.pop(partition) for partition in partitions if partition in self._lines]
        deadline = _now() + _HAND_OVER_S
        while any(line.delivery for line in lines) and _now() < deadline:  # noqa: ASYNC110 - many may end it
            await asyncio.sleep(0.02)
        with suppress(BullpenError):
            await self._commit(lines)
        for line in lines:
            line.lose()

    async def _on_assigned(self, partitions: set[Partition]) -> None:
        # Before anything is awaited: records may arrive while we still ask how often the first of them failed.
        lines = {partition: _Line(partition) for partition in partitions}
        self._lines |= lines
        try:
            known = await self._transport.door.committed(self._transport.group, partitions)
        except BullpenError as error:
            self._trouble = error  # the driver would only log it
            return
        for partition, line in lines.items():
            offset, metadata = known.get(partition, (-1, ""))
            failures = _read_failures(metadata)
            line.failures = (offset, failures) if failures else None
            line.rests_until = 0.0
            self._wake(line)

    async def _leave(self) -> None:
        member, self._member = self._member, None
        lines, self._lines = list(self._lines.values()), {}
        self._subscribed = set()
        if member is not None:
            self._member = member
            with suppress(BullpenError):
                async with asyncio.timeout(2):
                    await self._commit(lines)
            self._member = None
        for line in lines:
            line.lose()
        if member is not None:
            await member.stop()
            self._reports.closed(self._transport.group)

    def _note_connected(self) -> None:
        self._reports.connected(self._transport.group, again=self._was_connected)
        self._was_connected, self._is_lost = True, False

    def _note_lost(self, reason: object) -> None:
        if not self._is_lost and not self._is_closed:
            self._is_lost = True
            self._reports.disconnected(self._transport.group, reason)


class _TopicDeliveries:
    """What one consumer receives: at most one delivery per partition, at most `prefetch` in all."""

    def __init__(self, membership: _Membership, source: str, topics: set[str], prefetch: int) -> None:
        self._membership, self._source, self._prefetch = membership, source, prefetch
        self.topics = topics
        self.is_stopped = False
        self.changed = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        while not self.is_stopped:
            self.changed.clear()
            lines = self._membership.lines_of(self.topics)
            if sum(line.delivery is not None for line in lines) < self._prefetch:
                delivery = self._take(lines)
                if delivery is not None:
                    return delivery
            await self._sleep(lines)
        raise StopAsyncIteration

    async def stop(self) -> None:
        self.is_stopped = True
        self.changed.set()

    def _take(self, lines: list[_Line]) -> Delivery | None:
        now = _now()
        # The partition whose record is oldest first: a busy one must not starve the others.
        for line in sorted(lines, key=lambda one: one.buffer[0].timestamp_ms if one.buffer else 0):
            if not line.is_ready(now):
                continue
            record = line.buffer[0]
            rest_s = _rest_left_s(record, self._source)
            if rest_s > 0 and line.failures is None:
                line.rests_until = now + rest_s
                continue
            delivery = line.delivery = _delivery_of(record, self._source, line)
            return delivery
        return None

    async def _sleep(self, lines: list[_Line]) -> None:
        rests = [
            line.rests_until
            for line in lines
            if line.buffer and line.delivery is None and line.rests_until < float("inf")
        ]
        try:
            async with asyncio.timeout_at(min(rests, default=None)):
                await self.changed.wait()
        except TimeoutError:
            pass  # a rest is over


def _delivery_of(record: Record, source: str, line: _Line) -> Delivery:
    """Anybody may have sent it: what cannot be read is told as the delivery's problem."""
    headers = {name: value.decode("utf-8", "replace") for name, value in record.headers}
    urn = (record.key or b"").decode("utf-8", "replace")
    payload, problem = _read_value(record.value)
    if not urn:
        problem = problem or "key: expected the urn of the entity"
    event_id = headers.get(ID_HEADER) or f"{source}-{record.partition.number}-{record.offset}"
    failures = read_count(headers.get(RETRY_COUNT_HEADER))
    is_known = line.failures is not None and line.failures[0] == record.offset
    if is_known and line.failures is not None:
        failures = line.failures[1]
    event = Event(
        source=source,
        urn=urn,
        name=headers.get(NAME_HEADER, ""),
        payload=payload,
        id=event_id,
        headers={name: text for name, text in headers.items() if name not in _OURS},
        tries=read_tries(headers.get(TRIES_HEADER)),
    )
    return Delivery(
        event,
        attempt=failures + 1,
        idempotency_key=f"{source}/{event_id}",
        handle=line,
        problem=problem,
        waited_ms=None if failures else max(0, int(time.time() * 1000) - record.timestamp_ms),
    )


def _read_value(value: bytes | None) -> tuple[Any, str | None]:
    if value is None:
        return None, None
    try:
        return json.decode(value), None
    except NotJson as error:
        return value.decode("utf-8", "replace"), f"the value is no JSON: {error}"


def _rest_left_s(record: Record, source: str) -> float:
    """How long a parked record still rests. Between systems durations travel; the instant is the broker's own."""
    if record.partition.topic == source:
        return 0.0
    headers = dict(record.headers)
    rest_ms = read_count(headers.get(PAUSE_HEADER))
    return (record.timestamp_ms + rest_ms) / 1000 - time.time()


def _metadata(line: _Line) -> str:
    if line.failures is None or line.failures[0] != line.position or not line.failures[1]:
        return ""
    return f"{_FAILURES_MARK}{line.failures[1]}"


def _read_failures(metadata: str) -> int:
    return read_count(metadata.removeprefix(_FAILURES_MARK)) if metadata.startswith(_FAILURES_MARK) else 0


def _now() -> float:
    return asyncio.get_running_loop().time()


class _TopicDeadLetters:
    """Dead letters in a topic. A record cannot be taken out, so a letter that is done with gets a tombstone behind it
    in its partition. Every operation reads the whole topic: it is a place for what people look at, not for a backlog.
    """

    def __init__(self, transport: KafkaTransport, source: str, name: str) -> None:
        self._transport, self._source, self.name = transport, source, name

    async def depth(self) -> int:
        return len(await self._read())

    async def put(self, letter: DeadLetter) -> None:
        value = json.encode(dict(letter.entry), what="dead letter")
        await self._transport.door.send(self.name, key=letter.id.encode(), value=value)

    async def list(self, *, start: int = 0, count: int = 100) -> list[DeadLetter]:
        found = sorted((letter for letter, _ in (await self._read()).values()), key=lambda letter: letter.failed_at)
        return found[start : start + count]

    async def get(self, entry_id: str) -> DeadLetter | None:
        found = (await self._read()).get(entry_id)
        return None if found is None else found[0]

    async def redrive(self, entry_id: str, *, by: str | None = None) -> str:
        found = (await self._read()).get(entry_id)
        if found is None:
            raise DeadLetterNotFound(self.name, entry_id)
        letter, partition = found
        by = by or who()
        # Sent first: a crash in between delivers it twice with the same identity, and loses nothing.
        await self._transport.publish(event_of(letter, by=by))
        await self._bury(entry_id, partition, by)
        Reports(LABEL).redriven(letter, self.name, by)
        return letter.message_id

    async def discard(self, entry_id: str) -> bool:
        found = (await self._read()).get(entry_id)
        if found is None:
            return False
        await self._bury(entry_id, found[1], who())
        return True

    async def _bury(self, entry_id: str, partition: int, by: str) -> None:
        await self._transport.door.send(
            self.name, key=entry_id.encode(), value=None, partition=partition, headers={"x-removed-by": by}
        )

    async def _read(self) -> Mapping[str, tuple[DeadLetter, int]]:
        """Letters without a tombstone behind them, with their partitions."""
        found: dict[str, tuple[DeadLetter, int]] = {}
        async for record in self._transport.door.read_all(self.name):
            entry_id = (record.key or b"").decode("utf-8", "replace")
            if record.value is None:
                found.pop(entry_id, None)
                continue
            entry, problem = _read_value(record.value)
            told = entry if problem is None and isinstance(entry, dict) else {}
            found[entry_id] = (read_letter(entry_id, told, source=self._source), record.partition.number)
        return found


class KafkaClient(MessagingClient[Published]):
    """A messaging client on Kafka topics; the consumer group is `{workflow}consumer`, reading from the beginning."""

    def __init__(
        self,
        brokers: str | Brokers = "localhost:9092",
        *,
        workflow: str,
        client_id: str | None = None,
        policy: RetryPolicy = WORKFLOW_EVENT.policy,
        retry: Literal["pause", "park"] = "pause",
        **options: Any,
    ) -> None:
        """`options` are those of `MessagingClient`."""
        require("workflow", is_text(workflow), "non-empty text as the workflow's name", workflow)
        transport = KafkaTransport(
            brokers,
            group=f"{workflow}consumer",
            client_id=client_id,
            dead_letters=policy.dead_letters,
            retry=retry,
        )
        super().__init__(transport, policy=policy, **options)

    @classmethod
    def from_binding(cls, binding: Kafka[Any], *, workflow: str, **options: Any) -> KafkaClient:
        """The client that a workflow's `kafka` describes."""
        return cls(
            ",".join(binding.broker_list()),
            workflow=workflow,
            client_id=binding.client_id,
            policy=binding.policy(),
            retry=binding.retry,
            **options,
        )

    async def produce_keyed(self, topic: str, key: str, data: Any) -> Published:
        """Send a value under a key, as Kafka's own clients do: the key is the urn, the value is the payload."""
        return await self.send(self.event(topic, "", {"urn": key, "payload": data}))
