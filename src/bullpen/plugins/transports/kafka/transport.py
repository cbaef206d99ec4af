"""The port over Kafka topics: records keyed by urn, one delivery at a time per partition, offsets as acknowledgement.

A record is a line in a log, it cannot be put back. So while one is retried its partition waits (only that one), and how
often it failed stands in the metadata of a commit at its own offset: whoever has the partition next knows. Asked to
`park`, a failed record goes to a retry topic instead and its successors may overtake it. Nothing is ever committed
beyond a record that is not settled. Commits of finished records are gathered for a moment: after a crash the last few
come again. Elsewhere: partitions and commits (`_membership`), format (`_records`), dead letters (`_dead_letters`), the
driver (`bullpen.plugins._kafka`), the policy (`bullpen.plugins.messaging`).
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Final, Literal, assert_never

from bullpen._kernel.duration import check_int, is_text, to_ms
from bullpen._kernel.ids import random_id
from bullpen._kernel.outcome import Completed, Delayed, Failed, Outcome, Retry, Waiting, WaitingChildren
from bullpen._kernel.policy import WORKFLOW_EVENT, DeadLetterPolicy
from bullpen.errors import BullpenError, InvalidOption, ServerRefused, require
from bullpen.plugins._kafka import Brokers, KafkaDoor, KafkaRecord
from bullpen.plugins._reports import MessagingReports
from bullpen.plugins.transports._dead_letters import dead_letter_of
from bullpen.plugins.transports._encoding import encode_payload
from bullpen.plugins.transports.kafka._dead_letters import TopicDeadLetters
from bullpen.plugins.transports.kafka._membership import Line, Membership, TopicDeliveries
from bullpen.plugins.transports.kafka._records import LONGEST_REST_MS, headers_of, parked_headers
from bullpen.ports.transport import Delivery, Depth, Event, Features, Published, Settled, TransportHealth

__all__ = ["KafkaTransport"]

LABEL: Final = "Kafka"
RETRY_TOPICS: Final = 5
SESSION_TIMEOUT_MS: Final = 10_000
_REST_AFTER_MISTAKE_MS: Final = 1_000


class KafkaTransport:
    """Events as records. One membership of one group serves all topics that this process consumes."""

    label = LABEL

    def __init__(
        self,
        brokers: str | Brokers = "localhost:9092",
        *,
        group: str,
        client_id: str | None = None,
        dead_letters: DeadLetterPolicy | None = None,
        retry: Literal["pause", "park"] = "pause",
        retry_topics: int = RETRY_TOPICS,
        session_timeout: int | timedelta = SESSION_TIMEOUT_MS,
    ) -> None:
        """`retry_topics`: how many topics `{topic}-retry-N` parked records use, one per failure; the last takes all
        further ones. Records of one topic should rest equally long: each waits for those before it.
        `session_timeout`: after so long without a sign of life the group gives our partitions to others; clusters
        accept 6 s and more unless they are told otherwise."""
        require("group", is_text(group), "non-empty text as the consumer group", group)
        require("retry", retry in ("pause", "park"), "'pause' or 'park'", retry)
        if isinstance(brokers, str):
            brokers = Brokers.parse(brokers, client_id=client_id)
        self.group, self.retry = group, retry
        # A parked record is overtaken. Whether a record was delivered before a crash, the log does not tell.
        self.features = Features(ordered=retry == "pause", delays=False, marks_redelivered=False)
        self._retry_topics = check_int("retry_topics", retry_topics, minimum=1)
        self._dead_letters = dead_letters or WORKFLOW_EVENT.policy.dead_letters
        self.door = KafkaDoor(brokers)
        session_timeout_ms = to_ms("session_timeout", session_timeout, minimum=100)
        self._membership = Membership(
            group, self.door, brokers, self.topics_of, MessagingReports(LABEL), session_timeout_ms
        )

    async def publish(self, event: Event, *, delay_ms: int = 0) -> Published:
        if delay_ms:
            raise InvalidOption("delay", f"0, because {LABEL} cannot hold messages back", delay_ms)
        named = event if event.id else replace(event, id=random_id(event.name))
        partition, offset = await self.door.send(
            event.source, key=event.urn.encode(), value=encode_payload(event), headers=headers_of(named)
        )
        return Published(named.id, event.source, f"{event.source}[{partition}]@{offset}")

    async def deliveries(self, source: str, *, prefetch: int, ordered: bool = False) -> TopicDeliveries:
        """`prefetch` bounds how many partitions have a delivery at the same time; each has one. Always in order."""
        if ordered and not self.features.ordered:
            raise InvalidOption("ordered", "False: a parked record is overtaken by its successors", ordered)
        return self._membership.join(source, prefetch)

    async def settle(self, delivery: Delivery, outcome: Outcome) -> Settled:
        line: Line = delivery.handle
        record = line.record_of(delivery)
        try:
            return await self._settle(line, record, delivery, outcome)
        except BullpenError:
            raise
        except Exception:
            # A mistake of ours or the driver's: its partition goes on with the same record, after a rest.
            await self._membership.hold(line, record, delivery.attempt - 1, _REST_AFTER_MISTAKE_MS)
            raise

    async def _settle(self, line: Line, record: KafkaRecord, delivery: Delivery, outcome: Outcome) -> Settled:
        settled, failures = Settled(), delivery.attempt - 1
        match outcome:
            case Completed():
                self._membership.pass_on(line, record)
            case Retry(delay_ms=delay_ms) if self.retry == "park":
                await self._park(delivery, record, failures + 1, delay_ms)
                await self._membership.commit_past(line, record)
            case Retry(delay_ms=delay_ms):
                # The pause may come from a header of anybody.
                await self._membership.hold(line, record, failures + 1, min(delay_ms, LONGEST_REST_MS))
            case Delayed(delay_ms) | Waiting(delay_ms):
                await self._membership.hold(line, record, failures, delay_ms)
            case Failed():
                settled = await self._bury(delivery, outcome)
                await self._membership.commit_past(line, record)
            case WaitingChildren():
                await self._membership.hold(line, record, failures, 0)
                raise InvalidOption("outcome", f"another outcome: {LABEL} cannot wait for other jobs", outcome)
            case _:
                assert_never(outcome)
        return settled

    async def check(self) -> TransportHealth:
        """Healthy means that topics can be listed."""
        try:
            await self.door.topics()
        except BullpenError as error:
            return TransportHealth(False, str(error))
        return TransportHealth(True)

    async def depth(self, source: str) -> Depth:
        """Records behind the group's commits, those being handled and parked ones included."""
        total = 0
        for topic in self.topics_of(source):
            ends = await self.door.end_offsets(topic)
            committed = await self.door.committed(self.group, ends)
            total += sum(max(0, end - committed.get(where, (0, ""))[0]) for where, end in ends.items())
        return Depth(total)

    def dead_letters(self, source: str) -> TopicDeadLetters:
        name = self._dead_letters.queue_for(source)
        if name is None:
            raise InvalidOption("dead_letters", "a policy that keeps dead letters in a queue", self._dead_letters.store)
        return TopicDeadLetters(self, source, name)

    async def aclose(self) -> None:
        """Commit what is done, leave the group. What is not settled goes to whoever gets its partition."""
        await self._membership.aclose()
        await self.door.aclose()

    def topics_of(self, source: str) -> list[str]:
        """The topic, and its retry topics if failed records are parked."""
        parked = range(1, self._retry_topics + 1) if self.retry == "park" else ()
        return [source, *(f"{source}-retry-{number}" for number in parked)]

    async def _park(self, delivery: Delivery, record: KafkaRecord, failures: int, delay_ms: int) -> None:
        topic = f"{delivery.source}-retry-{min(failures, self._retry_topics)}"
        headers = parked_headers(delivery.event, failures, delay_ms)
        await self.door.send(topic, key=record.key, value=record.value, headers=headers)

    async def _bury(self, delivery: Delivery, failed: Failed) -> Settled:
        name = self._dead_letters.queue_for(delivery.source)
        if name is None:
            return Settled()
        try:
            await TopicDeadLetters(self, delivery.source, name).put(dead_letter_of(delivery, failed))
        except (ServerRefused, InvalidOption) as error:
            # The record itself stays in its topic, for as long as that keeps records.
            return Settled(dead_letter_problem=str(error))
        return Settled(dead_letter=name)
