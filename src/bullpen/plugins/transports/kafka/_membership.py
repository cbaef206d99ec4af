"""This process in its consumer group: partitions while they are ours, what they hand out, and what is committed.

In: records from the driver, and what became of each. Out: deliveries, at most one per partition at a time; commits
that never pass a record that is not settled. Elsewhere: which outcome does what (`transport`), records (`_records`),
the driver (`bullpen.plugins._kafka`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Self

from bullpen._kernel.ending import end
from bullpen._kernel.patience import Patience
from bullpen.errors import BullpenError, ConnectionLost, DeliveryLost, InvalidOption
from bullpen.plugins._kafka import Brokers, GroupMember, KafkaDoor, KafkaRecord, Partition, PartitionLost
from bullpen.plugins._reports import MessagingReports
from bullpen.plugins.transports.kafka._records import Trouble, delivery_of, parked_for_s
from bullpen.ports.transport import Delivery

_POLL_MS: Final = 100
_COMMIT_EVERY_S: Final = 0.1
_MOST_BUFFERED: Final = 100
"""Records of one partition that wait here; a full one is fetched no further."""
_HAND_OVER_S: Final = 5.0
"""How long running handlers may finish before their partitions go to another member."""
_LONGEST_PAUSE_S: Final = 2.0


class Line:
    """One partition while it is ours."""

    __slots__ = (
        "buffer",
        "committed",
        "delivery",
        "is_lost",
        "is_paused",
        "partition",
        "position",
        "rests_until",
        "trouble",
    )

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.buffer: deque[KafkaRecord] = deque()
        self.delivery: Delivery | None = None
        self.position: int | None = None
        """The next offset to commit, once it has moved."""
        self.committed: int | None = None
        self.trouble: Trouble | None = None
        """Of the record in front."""
        self.rests_until = float("inf")
        """Not handed out before; for ever until it is known how often the record in front failed."""
        self.is_paused = False
        self.is_lost = False

    def is_ready(self, now: float) -> bool:
        return bool(self.buffer) and self.delivery is None and now >= self.rests_until

    def record_of(self, delivery: Delivery) -> KafkaRecord:
        if self.is_lost or self.delivery is not delivery:
            raise DeliveryLost(
                delivery.source, delivery.id, "its partition was assigned to another member of the group"
            )
        return self.buffer[0]

    def pass_on(self, record: KafkaRecord) -> None:
        """The record in front is settled for good."""
        self.buffer.popleft()
        self.position = record.offset + 1
        self.delivery, self.trouble = None, None

    def metadata(self) -> str:
        """What is stored beside the commit: nothing, unless the record there has failed."""
        return self.trouble.metadata() if self.trouble is not None and self.trouble.offset == self.position else ""

    def lose(self) -> None:
        self.is_lost = True
        if self.delivery is not None:
            self.delivery.lose()


class Membership:
    """This process in its consumer group: joins when somebody consumes, and again whenever Kafka fails it."""

    def __init__(
        self,
        group: str,
        door: KafkaDoor,
        brokers: Brokers,
        topics_of: Callable[[str], Iterable[str]],
        reports: MessagingReports,
        session_timeout_ms: int,
    ) -> None:
        """`topics_of` names all topics that a source is read from."""
        self._group, self._door, self._topics_of = group, door, topics_of
        self._brokers, self._reports, self._session_timeout_ms = brokers, reports, session_timeout_ms
        self._views: dict[str, TopicDeliveries] = {}
        self._lines: dict[Partition, Line] = {}
        self._member: GroupMember | None = None
        self._subscribed: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._last_commit = 0.0
        self._trouble: BullpenError | None = None
        self._is_lost = False
        self._was_connected = False
        self._is_closed = False

    def join(self, source: str, prefetch: int) -> TopicDeliveries:
        if self._is_closed:
            raise ConnectionLost("this Kafka transport was closed")
        view = self._views.get(source)
        if view is not None and not view.is_stopped:
            raise InvalidOption("topic", "a source that this transport does not consume yet", source)
        view = self._views[source] = TopicDeliveries(self, source, set(self._topics_of(source)), prefetch)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"bullpen kafka {self._group}")
            self._watcher = asyncio.create_task(self._watch(), name=f"bullpen kafka watch {self._group}")
        return view

    def lines_of(self, topics: set[str]) -> list[Line]:
        return [line for line in self._lines.values() if line.partition.topic in topics]

    async def aclose(self) -> None:
        self._is_closed = True
        for view in self._views.values():
            await view.stop()
        await end(*(task for task in (self._task, self._watcher) if task is not None))

    # ---- settling ---------------------------------------------------------------------------------------------

    def pass_on(self, line: Line, record: KafkaRecord) -> None:
        """The record is done; its commit leaves with the next few."""
        line.pass_on(record)
        self._wake(line)

    async def commit_past(self, line: Line, record: KafkaRecord) -> None:
        """The record is settled, and that must not be forgotten: what replaced it would come twice."""
        self.pass_on(line, record)
        await self._commit([line])

    async def hold(self, line: Line, record: KafkaRecord, failures: int, rest_ms: int) -> None:
        """Let the partition rest; the same record is next, and whoever has the partition knows how often it failed."""
        line.trouble = Trouble.begins(record.offset, failures, rest_ms)
        line.position, line.committed = record.offset, None
        try:
            await self._commit([line])
        finally:
            line.delivery = None
            line.rests_until = _now() + rest_ms / 1000
            self._wake(line)

    async def _commit(self, lines: Iterable[Line]) -> None:
        due = [line for line in lines if line.position is not None and line.position != line.committed]
        positions = {line.partition: (line.position or 0, line.metadata()) for line in due}
        if not positions:
            return
        member = self._member
        lost = next((line for line in due if line.is_lost), None)
        if member is None or lost is not None:
            raise DeliveryLost(due[0].partition.topic, "", "its partition was assigned to another member of the group")
        written = {line: line.position for line in due}
        try:
            await member.commit(positions)
        except PartitionLost as error:
            raise DeliveryLost(due[0].partition.topic, "", str(error)) from error
        for line, position in written.items():
            line.committed = position

    def _wake(self, line: Line) -> None:
        for view in self._views.values():
            if line.partition.topic in view.topics:
                view.changed.set()

    # ---- being a member ---------------------------------------------------------------------------------------

    async def _run(self) -> None:
        patience = Patience(longest_s=_LONGEST_PAUSE_S)
        try:
            while True:
                started = _now()
                try:
                    await self._be_a_member()
                except BullpenError as error:
                    self._note_lost(error)
                except Exception as error:  # noqa: BLE001 - what the driver cannot read must not end us in silence
                    self._note_lost(f"{type(error).__name__}: {error}")
                finally:
                    await self._leave()
                if _now() - started > _LONGEST_PAUSE_S:
                    patience.reset()
                await patience.pause()
        finally:
            await self._leave()

    async def _be_a_member(self) -> None:
        member = GroupMember(
            self._brokers,
            self._group,
            on_revoked=self._on_revoked,
            on_assigned=self._on_assigned,
            session_timeout_ms=self._session_timeout_ms,
            hand_over_ms=int(_HAND_OVER_S * 1000),
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

    def _regulate(self, member: GroupMember, line: Line) -> None:
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
        lines = {partition: Line(partition) for partition in partitions}
        self._lines |= lines
        try:
            known = await self._door.committed(self._group, partitions)
        except BullpenError as error:
            self._trouble = error  # the driver would only log it
            return
        for partition, line in lines.items():
            offset, metadata = known.get(partition, (-1, ""))
            line.trouble = Trouble.read(offset, metadata)
            line.rests_until = 0.0 if line.trouble is None else _now() + line.trouble.left_s()
            self._wake(line)

    async def _leave(self) -> None:
        member = self._member
        lines, self._lines = list(self._lines.values()), {}
        self._subscribed = set()
        if member is not None:
            with suppress(BullpenError, TimeoutError):
                async with asyncio.timeout(_LONGEST_PAUSE_S):
                    await self._commit(lines)
        self._member = None
        for line in lines:
            line.lose()
        if member is not None:
            await member.stop()
            self._reports.closed(self._group)

    async def _watch(self) -> None:
        """A consumer with nothing to commit never hears that its cluster is gone: the driver waits in silence."""
        while True:
            await asyncio.sleep(self._session_timeout_ms / 4000)
            try:
                async with asyncio.timeout(self._session_timeout_ms / 1000):
                    await self._door.topics()
            except (BullpenError, TimeoutError) as error:
                self._note_lost(str(error) or "no answer")
            else:
                if self._is_lost and self._member is not None:
                    self._note_connected()

    def _note_connected(self) -> None:
        self._reports.connected(self._group, again=self._was_connected)
        self._was_connected, self._is_lost = True, False

    def _note_lost(self, reason: object) -> None:
        if not self._is_closed:
            self._is_lost = True
            self._reports.disconnected(self._group, reason)


class TopicDeliveries:
    """What one consumer receives: at most one delivery per partition, at most `prefetch` in all."""

    def __init__(self, membership: Membership, source: str, topics: set[str], prefetch: int) -> None:
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
            has_room = sum(line.delivery is not None for line in lines) < self._prefetch
            delivery = self._take(lines) if has_room else None
            if delivery is not None:
                return delivery
            # Without room only a settled delivery helps, and that is told.
            rests = [line.rests_until for line in lines if line.buffer and line.delivery is None] if has_room else []
            await self._sleep(min(rests, default=None))
        raise StopAsyncIteration

    async def stop(self) -> None:
        self.is_stopped = True
        self.changed.set()

    def _take(self, lines: list[Line]) -> Delivery | None:
        now = _now()
        # The partition whose record is oldest first: a busy one must not starve the others.
        for line in sorted(lines, key=lambda one: one.buffer[0].timestamp_ms if one.buffer else 0):
            if not line.is_ready(now):
                continue
            record = line.buffer[0]
            rest_s = parked_for_s(record, self._source)
            if rest_s > 0 and line.trouble is None:
                line.rests_until = now + rest_s
                continue
            delivery = line.delivery = delivery_of(record, self._source, line.trouble, line)
            return delivery
        return None

    async def _sleep(self, until: float | None) -> None:
        try:
            async with asyncio.timeout_at(until):
                await self.changed.wait()
        except TimeoutError:
            pass  # a rest is over


def _now() -> float:
    return asyncio.get_running_loop().time()
