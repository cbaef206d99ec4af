"""The one door to Kafka: a producer that is made again after it broke, members of groups, readers of whole topics.

In: brokers, topics, bytes. Out: plain records, offsets; our errors instead of the driver's. Nothing is decided here
about retries, order or what a record means. Elsewhere: events as records (`transports.kafka`), outbox rows as records
(`channels.kafka`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, TypedDict, Unpack

from bullpen.errors import BullpenError, ConnectionLost, MissingExtra, ServerRefused, require

if find_spec("aiokafka") is None:
    raise MissingExtra("kafka", "Kafka")

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.conn import collect_hosts, create_conn
from aiokafka.errors import (
    AuthenticationFailedError,
    CommitFailedError,
    GroupAuthorizationFailedError,
    IllegalStateError,
    InvalidTopicError,
    KafkaConnectionError,
    KafkaError,
    MessageSizeTooLargeError,
    RecordTooLargeError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
)

from bullpen._kernel.duration import is_text
from bullpen._kernel.logs import calming
from bullpen.plugins._kafka_batches import readable_fetch

__all__ = [
    "Brokers",
    "GroupMember",
    "KafkaDoor",
    "KafkaRecord",
    "Partition",
    "PartitionLost",
    "RecordRefused",
    "translate",
]

_DRIVER: Final = "aiokafka"
_FETCH: Final = 1
"""The number of that request."""
_CONNECT_TIMEOUT_S: Final = 10.0
_REASON_TIMEOUT_S: Final = 2.0
"""A refusal comes at once; what does not answer is away."""
_REQUEST_TIMEOUT_MS: Final = 10_000
_LARGEST_RECORD_BYTES: Final = 11 * 1024 * 1024
"""Our own limit of 10 MiB and some room; the topic's `max.message.bytes` decides in the end."""
_NEW_TOPIC_S: Final = 1.0
"""How often a group asks for a topic that the cluster does not know yet."""
_NEW_PARTITIONS_MS: Final = 30_000
"""How often it asks for more partitions of those it knows. The driver's own five minutes are for both."""

_REFUSALS: Final = (
    AuthenticationFailedError,
    GroupAuthorizationFailedError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
)
TRANSLATED: Final = (KafkaError, OSError, TimeoutError)
"""What the driver may raise on a connection that breaks at any moment."""


class Partition(NamedTuple):
    topic: str
    number: int


class PartitionLost(BullpenError):
    """The partition belongs to somebody else by now; nothing was committed."""


class RecordRefused(ServerRefused):
    """This record will never be taken; others may be."""


@dataclass(frozen=True, slots=True)
class KafkaRecord:
    """One record as it lies in its partition."""

    partition: Partition
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]
    timestamp_ms: int


class BrokerArguments(TypedDict, total=False):
    """How a cluster lets us in: the fields of `Brokers`, without the addresses."""

    client_id: str | None
    tls: ssl.SSLContext | None
    username: str | None
    password: str | None
    sasl_mechanism: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Brokers:
    """Where the cluster is and how it lets us in."""

    addresses: tuple[str, ...]
    client_id: str | None = None
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sasl_mechanism: str = "PLAIN"

    def __post_init__(self) -> None:
        fits = bool(self.addresses) and all(is_text(one) for one in self.addresses)
        require("brokers", fits, "host:port, comma-separated", self.addresses)

    @classmethod
    def parse(cls, brokers: str, **options: Unpack[BrokerArguments]) -> Brokers:
        """From a comma-separated list."""
        require("brokers", is_text(brokers), "host:port, comma-separated", brokers)
        return cls(addresses=tuple(part.strip() for part in brokers.split(",")), **options)

    def as_options(self) -> dict[str, Any]:
        protocol = f"{'SASL_' if self.username else ''}{'SSL' if self.tls else 'PLAINTEXT'}"
        options: dict[str, Any] = {
            "bootstrap_servers": list(self.addresses),
            "security_protocol": protocol,
            "ssl_context": self.tls,
        }
        if self.client_id is not None:
            options["client_id"] = self.client_id
        if self.username is not None:
            options |= {
                "sasl_mechanism": self.sasl_mechanism,
                "sasl_plain_username": self.username,
                "sasl_plain_password": self.password,
            }
        return options


def translate(error: BaseException) -> BullpenError:
    """Our error for one of the driver's."""
    text = str(error) or type(error).__name__
    if isinstance(error, BullpenError):
        return error
    if isinstance(error, CommitFailedError | IllegalStateError):
        return PartitionLost(f"Kafka assigned the partition to another member: {text}")
    if isinstance(error, MessageSizeTooLargeError | RecordTooLargeError):
        larger = (
            "the record is larger than its topic allows; raise the topic's max.message.bytes or send smaller records"
        )
        return RecordRefused(f"Kafka refused it: {larger} ({text})")
    if isinstance(error, InvalidTopicError):
        return RecordRefused(f"Kafka refused it: {text}")
    if isinstance(error, _REFUSALS):
        return ServerRefused(f"Kafka refused it: {text}")
    if isinstance(error, TimeoutError):
        return ConnectionLost("Kafka did not answer in time")
    return ConnectionLost(f"connection to Kafka: {text}")


class KafkaDoor:
    """What one process needs of a cluster besides its group membership: sending, reading whole topics, offsets."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self._producer: AIOKafkaProducer | None = None
        self._admin: AIOKafkaAdminClient | None = None
        self._opening = asyncio.Lock()
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether there is a producer that once reached the cluster; without one nothing has left."""
        return self._producer is not None

    async def send(
        self,
        topic: str,
        *,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
    ) -> tuple[int, int]:
        """Partition and offset, once all replicas in sync have the record."""
        producer = await self._ready_producer()
        packed = [(name, text.encode()) for name, text in (headers or {}).items()]
        try:
            with calming(_DRIVER):
                sent = await producer.send_and_wait(topic, value=value, key=key, headers=packed, partition=partition)
        except TRANSLATED as error:
            if not getattr(error, "retriable", False):
                # An idempotent producer that lost its sequence never works again.
                await self._drop_producer(producer)
            raise translate(error) from error
        return int(sent.partition), int(sent.offset)

    async def topics(self) -> set[str]:
        """All topics that we may see: the cluster answers."""
        admin = await self._ready_admin()
        try:
            with calming(_DRIVER):
                return set(await admin.list_topics())
        except TRANSLATED as error:
            await self._drop_admin()
            raise translate(error) from error

    async def committed(self, group: str, partitions: Iterable[Partition]) -> dict[Partition, tuple[int, str]]:
        """Offset and metadata of each partition that has a commit."""
        wanted = [TopicPartition(*partition) for partition in partitions]
        if not wanted:
            return {}
        admin = await self._ready_admin()
        try:
            with calming(_DRIVER):
                found = await admin.list_consumer_group_offsets(group, partitions=wanted)
        except TRANSLATED as error:
            await self._drop_admin()
            raise translate(error) from error
        return {
            Partition(tp.topic, tp.partition): (int(stored.offset), str(stored.metadata or ""))
            for tp, stored in found.items()
            if stored.offset >= 0
        }

    async def end_offsets(self, topic: str) -> dict[Partition, int]:
        """Where each partition of a topic ends; empty when there is no such topic."""
        if topic not in await self.topics():
            return {}
        async with self._reader(topic) as reader:
            ends = await reader.end_offsets(reader.assignment())
        return {Partition(tp.topic, tp.partition): int(offset) for tp, offset in ends.items()}

    async def read_all(self, topic: str) -> AsyncIterator[KafkaRecord]:
        """Every record that is in the topic now, each partition in its order."""
        if topic not in await self.topics():
            return
        async with self._reader(topic) as reader:
            partitions = sorted(reader.assignment())
            starts, ends = await reader.beginning_offsets(partitions), await reader.end_offsets(partitions)
            left = {tp for tp in partitions if starts[tp] < ends[tp]}
            for tp in partitions:
                reader.seek(tp, starts[tp])
            while left:
                for tp, records in (await reader.getmany(*left, timeout_ms=1_000)).items():
                    for record in records:
                        if record.offset < ends[tp]:
                            yield _record(record)
                    if await reader.position(tp) >= ends[tp]:
                        left.discard(tp)

    async def aclose(self) -> None:
        self._is_closed = True
        if self._producer is not None:
            await self._drop_producer(self._producer)
        await self._drop_admin()

    @contextlib.asynccontextmanager
    async def _reader(self, topic: str) -> AsyncIterator[AIOKafkaConsumer]:
        """A consumer of no group with all partitions of a topic that exists, for the length of a block."""
        self._must_be_open()
        reader = AIOKafkaConsumer(
            topic,
            **self._brokers.as_options(),
            enable_auto_commit=False,
            max_partition_fetch_bytes=_LARGEST_RECORD_BYTES,
            # Questions about offsets wait behind a fetch on the same connection, and none of ours waits for news.
            fetch_max_wait_ms=10,
        )
        _guard(reader)
        await _start(reader, self._brokers)
        try:
            yield reader
        except TRANSLATED as error:
            raise translate(error) from error
        finally:
            await _stop(reader)

    async def _ready_producer(self) -> AIOKafkaProducer:
        async with self._opening:
            self._must_be_open()
            if self._producer is None:
                producer = AIOKafkaProducer(
                    **self._brokers.as_options(),
                    acks="all",
                    enable_idempotence=True,
                    request_timeout_ms=_REQUEST_TIMEOUT_MS,
                    max_request_size=_LARGEST_RECORD_BYTES,
                )
                await _start(producer, self._brokers)
                self._producer = producer
            return self._producer

    async def _ready_admin(self) -> AIOKafkaAdminClient:
        async with self._opening:
            self._must_be_open()
            if self._admin is None:
                admin = AIOKafkaAdminClient(**self._brokers.as_options(), request_timeout_ms=_REQUEST_TIMEOUT_MS)
                await _start(admin, self._brokers)
                self._admin = admin
            return self._admin

    async def _drop_producer(self, producer: AIOKafkaProducer) -> None:
        if self._producer is producer:
            self._producer = None
        await _stop(producer)

    async def _drop_admin(self) -> None:
        admin, self._admin = self._admin, None
        if admin is not None:
            await _stop(admin)

    def _must_be_open(self) -> None:
        if self._is_closed:
            raise ConnectionLost("this Kafka transport was closed")


Assigned = Callable[[set[Partition]], Awaitable[None]]


class GroupMember:
    """One member of a consumer group, from start to stop. After an error it is of no use any more: make another."""

    def __init__(
        self,
        brokers: Brokers,
        group: str,
        *,
        on_revoked: Assigned,
        on_assigned: Assigned,
        session_timeout_ms: int,
        hand_over_ms: int,
    ) -> None:
        """`hand_over_ms`: how long `on_revoked` may take; the group waits for it."""
        self._on_revoked, self._on_assigned = on_revoked, on_assigned
        self._brokers = brokers
        self._consumer = AIOKafkaConsumer(
            **brokers.as_options(),
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            session_timeout_ms=session_timeout_ms,
            heartbeat_interval_ms=max(1, session_timeout_ms // 4),
            rebalance_timeout_ms=max(session_timeout_ms, 2 * hand_over_ms),
            max_partition_fetch_bytes=_LARGEST_RECORD_BYTES,
            metadata_max_age_ms=_NEW_PARTITIONS_MS,
        )
        self._topics: list[str] = []
        self._asked_again = 0.0
        _guard(self._consumer)

    async def start(self) -> None:
        await _start(self._consumer, self._brokers)

    def subscribe(self, topics: Iterable[str]) -> None:
        self._topics = sorted(topics)
        if self._topics:
            with calming(_DRIVER):  # it starts tasks
                self._consumer.subscribe(self._topics, listener=_RebalanceListener(self._on_revoked, self._on_assigned))
        else:
            self._consumer.unsubscribe()

    async def poll(self, *, timeout_ms: int, most: int) -> dict[Partition, list[KafkaRecord]]:
        """What has arrived, by partition, in order. Must be called all the time, or the group thinks we are dead."""
        self._ask_for_new_topics()
        try:
            with calming(_DRIVER):
                batches = await self._consumer.getmany(timeout_ms=timeout_ms, max_records=most)
        except TRANSLATED as error:
            raise translate(error) from error
        return {
            Partition(tp.topic, tp.partition): [_record(record) for record in records]
            for tp, records in batches.items()
        }

    async def commit(self, positions: Mapping[Partition, tuple[int, str]]) -> None:
        """Store the next offset of each partition, with a text. Raises PartitionLost when one is no longer ours."""
        try:
            with calming(_DRIVER):
                await self._consumer.commit({TopicPartition(*where): what for where, what in positions.items()})
        except TRANSLATED as error:
            raise translate(error) from error

    def pause(self, partition: Partition) -> None:
        if TopicPartition(*partition) in self._consumer.assignment():
            self._consumer.pause(TopicPartition(*partition))

    def resume(self, partition: Partition) -> None:
        if TopicPartition(*partition) in self._consumer.assignment():
            self._consumer.resume(TopicPartition(*partition))

    async def stop(self) -> None:
        """Leave the group. Never raises."""
        await _stop(self._consumer)

    def _ask_for_new_topics(self) -> None:
        """A topic may be made after its group: by its first record, or by somebody. Without this question its records
        wait for as long as the driver trusts what it knows."""
        now = asyncio.get_running_loop().time()
        if now - self._asked_again < _NEW_TOPIC_S or all(map(self._consumer.partitions_for_topic, self._topics)):
            return
        self._asked_again = now
        self._consumer._client.force_metadata_update()  # the driver offers this question to nobody else


class _RebalanceListener(ConsumerRebalanceListener):  # type: ignore[misc]  # the driver carries no types
    def __init__(self, on_revoked: Assigned, on_assigned: Assigned) -> None:
        self._on_revoked, self._on_assigned = on_revoked, on_assigned

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        await self._on_revoked({Partition(tp.topic, tp.partition) for tp in revoked})

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        await self._on_assigned({Partition(tp.topic, tp.partition) for tp in assigned})


def _guard(consumer: AIOKafkaConsumer) -> None:
    """Let this consumer see only batches that it can decode. The driver has no place for that: its client is reached
    into, and a test fails when it has moved."""
    client = consumer._client
    send = client.send

    async def send_and_check(node_id: int, request: Any, **options: Any) -> Any:
        response = await send(node_id, request, **options)
        if response is not None and response.API_KEY == _FETCH:
            response.topics = [
                (topic, [(*fetched, readable_fetch(raw) if raw else raw) for *fetched, raw in partitions])
                for topic, partitions in response.topics
            ]
        return response

    client.send = send_and_check


async def _start(client: AIOKafkaProducer | AIOKafkaConsumer | AIOKafkaAdminClient, brokers: Brokers) -> None:
    try:
        # The tasks that it starts now tell of every attempt to reach a cluster that is away.
        with calming(_DRIVER):
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await client.start()
    except BaseException as error:
        await _stop(client)
        if isinstance(error, KafkaConnectionError):
            reason = await _why_unreachable(brokers) or error
            raise translate(reason) from reason
        if isinstance(error, TRANSLATED):
            raise translate(error) from error
        raise


async def _why_unreachable(brokers: Brokers) -> Exception | None:
    """The driver says of a wrong password or certificate only that it reached nobody: the addresses are asked again.

    What a cluster refuses comes before what a single address did not answer.
    """
    options = brokers.as_options()
    hosts = collect_hosts(options.pop("bootstrap_servers"))
    found: Exception | None = None
    for host, port, _ in hosts:
        try:
            async with asyncio.timeout(_REASON_TIMEOUT_S / len(hosts)):
                (await create_conn(host, port, request_timeout_ms=_REQUEST_TIMEOUT_MS, **options)).close()
        except TRANSLATED as error:
            found = found or error
            if isinstance(error, _REFUSALS):
                found = error
                break
    return found


async def _stop(client: AIOKafkaProducer | AIOKafkaConsumer | AIOKafkaAdminClient) -> None:
    # Stopping talks to the broker (a flush, leaving the group); one that is away must not hold us.
    with contextlib.suppress(*TRANSLATED), calming(_DRIVER):
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await (client.close() if isinstance(client, AIOKafkaAdminClient) else client.stop())


def _record(record: Any) -> KafkaRecord:
    return KafkaRecord(
        Partition(record.topic, record.partition),
        int(record.offset),
        record.key,
        record.value,
        tuple((name, value or b"") for name, value in record.headers),
        int(record.timestamp or 0),
    )
