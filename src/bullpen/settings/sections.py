"""The sections of the settings: what may be configured from outside, with its default and its limits.

An option is a field made with `option`. Its key in the file is `section.name`, its argument `section_name`, its
variable `BULLPEN_SECTION_NAME` unless another is named here. Options that a part of bullpen owns stand in that part's
option class, which a section inherits. A new feature adds a section here and a field of it in `Settings`.
Elsewhere: kinds of values (`kinds`), finding them (`sources`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from bullpen._kernel.options import at_least, choice, option
from bullpen._kernel.ownership import distrust_directory
from bullpen._kernel.policy import WORKFLOW_RUN
from bullpen.errors import InvalidOption
from bullpen.ops.alert_options import AlertTiming, SymptomLimits
from bullpen.settings.kinds import (
    ADDRESS,
    AMQP,
    AMQP_NAME,
    BROKERS,
    COUNT_OR_AUTO,
    CRON,
    DATABASE,
    DIRECTORY,
    EVENT_STORE,
    FILE,
    GROUP,
    HTTPS,
    KEYS,
    MAIL,
    NAME,
    OBJECTS,
    PHONE,
    PREFIX,
    PREFIXES,
    SECRET,
    SECRET_ADDRESS,
    SMTP,
    TOPIC,
    WORDS,
)
from bullpen.settings.origin import Origin

__all__ = [
    "REDIS_GENERAL",
    "AlertSettings",
    "CodecSettings",
    "DashboardSettings",
    "EmbeddedSettings",
    "EndpointSettings",
    "EventSettings",
    "KafkaSettings",
    "LedgerSettings",
    "MessageSettings",
    "OutboxSettings",
    "RabbitMQSettings",
    "RedisSettings",
    "RunSettings",
    "SmsSettings",
    "SmtpSettings",
    "WebhookSettings",
    "WorkflowSettings",
]

EmbeddedMode = Literal["auto", "never"]
AppendFsync = Literal["everysec", "always"]
DatabaseDuty = Literal["service", "worker", "tenant"]
UnknownTypes = Literal["dead", "leave"]
MessageTransport = Literal["bullmq", "rabbitmq", "memory"]
RetryGrowth = Literal["exponential", "linear"]
WorkflowTransport = Literal["bullmq", "kafka", "rabbitmq", "memory"]
DashboardAccess = Literal["none", "token", "passwords", "proxy"]
LabelColour = Literal["grey", "blue", "green", "orange", "red"]

REDIS_GENERAL: Final = "REDIS_HOST and REDIS_PORT"
"""The other way to name the server."""


def _redis_host_and_port(environ: Mapping[str, str]) -> tuple[str, Origin] | None:
    """REDIS_HOST and REDIS_PORT, one of which is enough, as an address."""
    host, port = environ.get("REDIS_HOST"), environ.get("REDIS_PORT")
    if not host and not port:
        return None
    if host and (re.search(r"[\s/@?#\[\]]", host) or re.fullmatch(r"[^:]*:[0-9]+", host)):
        raise InvalidOption("environment variable REDIS_HOST", "a host name without scheme or port", host)
    if port and not (re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= 65_535):
        expected = "a port from 1 to 65535"
        if port.startswith("tcp://"):
            expected += (
                " (Kubernetes sets this variable beside a service called redis: set BULLPEN_REDIS_URL, or "
                "`enableServiceLinks: false` in the pod)"
            )
        raise InvalidOption("environment variable REDIS_PORT", expected, port)
    given = " and ".join(name for name in ("REDIS_HOST", "REDIS_PORT") if environ.get(name))
    name = host or "localhost"
    return f"redis://{f'[{name}]' if ':' in name else name}:{port or 6379}", Origin("environment", given)


_PROJECT_MARKS = (".bullpen", "pyproject.toml", ".git")


def _project_data_dir(start: Path) -> tuple[Path, Origin]:
    """`.bullpen` in the nearest directory that looks like a project, so that all its processes share one server."""
    for directory in (start, *start.parents):
        if distrust_directory(directory) is not None:
            break
        for mark in _PROJECT_MARKS:
            if (directory / mark).exists():
                return directory / ".bullpen", Origin("default", f"beside {directory / mark}")
    return start / ".bullpen", Origin("default", "in the working directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """Where queues live."""

    url: str | None = option(None, ADDRESS, otherwise=_redis_host_and_port, secret=True)
    """Address of the server; REDIS_HOST and REDIS_PORT are the other way to say it. None: the bundled server."""
    prefix: str = option("bull", PREFIX, variable="BULLPEN_PREFIX")
    """First part of every key. On Redis Cluster use `{bull}`, so that all keys of a queue share a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings:
    """The bundled server, used when no address is given."""

    mode: EmbeddedMode = option("auto", choice(EmbeddedMode), variable="BULLPEN_EMBEDDED")
    """`never` in production: a missing address is then an error instead of a private, empty server."""
    data_dir: Path = option(Path(".bullpen"), DIRECTORY, variable="BULLPEN_DATA_DIR", derived=_project_data_dir)
    """Where its data lies. Processes with the same directory share one server."""
    appendfsync: AppendFsync | None = option(None, choice(AppendFsync))
    """`always`: each write is on the disk before it is answered, which level `fsync` of an add needs. None: as the
    directory was used last, at first `everysec`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSettings:
    """How job data and return values are stored. Plain unless keys or a store are set."""

    keys: str | None = option(None, KEYS, secret=True)
    """Keys that encrypt, `k2:<base64>,k1:<base64>`: the first encrypts, all decrypt. Each is 32 random bytes."""
    store: str | None = option(None, OBJECTS)
    """Where large job data go: `file:///directory`, shared by all processes, or `s3://bucket/prefix`, with the keys of
    `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`."""
    above: int = option(262_144, at_least(0))
    """Data of more bytes than this goes to the store."""
    max_bytes: int = option(104_857_600, at_least(1))
    """Longer data is neither stored there nor read from there."""
    refuse_plain: bool = option(False)
    """Fail jobs whose data is not encrypted, without running them. Needs keys."""
    s3_endpoint: str | None = option(None, HTTPS)
    """Address of an S3-compatible server. None: Amazon's."""
    s3_region: str | None = option(None, WORDS)
    """Region that requests are signed for. None: `AWS_REGION`, else `us-east-1`."""

    @property
    def key_ring(self) -> dict[str, str]:
        """Keys by id, the one that encrypts first."""
        pairs = [part.strip().partition(":") for part in (self.keys or "").split(",") if part.strip()]
        return {key_id: key for key_id, _, key in pairs}


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """The SQL database that holds outbox and inbox."""

    url: str | None = option(None, DATABASE, variable="BULLPEN_DATABASE_URL", secret=True)
    """PostgreSQL or SQLite. None: a SQLite file beside the bundled server's data."""
    schema: str = option("core_outbox", NAME, variable="BULLPEN_DATABASE_SCHEMA")
    """Schema of the tables on PostgreSQL."""
    tenant_role: str | None = option(None, NAME, variable="BULLPEN_TENANT_ROLE")
    """Database role of APIs. With all three roles row-level security keeps tenants apart."""
    worker_role: str | None = option(None, NAME, variable="BULLPEN_WORKER_ROLE")
    """Database role of workers of deliveries and runs."""
    service_role: str | None = option(None, NAME, variable="BULLPEN_SERVICE_ROLE")
    """Database role of dispatchers, maintenance and granting of credits, which see all tenants."""
    duty: DatabaseDuty = option("service", choice(DatabaseDuty), variable="BULLPEN_DATABASE_DUTY")
    """Which of the three roles this process has. Only with roles."""
    pool_size: int = option(20, at_least(1), variable="BULLPEN_DATABASE_POOL_SIZE")
    """Connections to PostgreSQL that this process holds at most. Ten runs at the same time need one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSettings:
    """Dispatchers of the outbox."""

    claim_batch_size: int = option(100, at_least(1), general="OUTBOX_CLAIM_BATCH_SIZE")
    """Rows claimed by one tick, over all channels."""
    max_attempts: int = option(10, at_least(1), general="OUTBOX_MAX_ATTEMPTS")
    """Deliveries of a row before it is DEAD, for rows that do not say themselves."""
    tick_interval_ms: int = option(1_000, at_least(1), general="OUTBOX_TICK_INTERVAL_MS")
    """How often to poll without a notification of new rows."""
    lease_ms: int = option(60_000, at_least(1_000))
    """How long a claim holds. After a crash rows wait this long; it must exceed the slowest delivery."""
    fair_tenants: bool = option(True)
    """Spread claims over the tenants of a channel, too. Costs one more query per channel and tick."""
    strict_sources: bool = option(False)
    """Store each source event once, whatever its route. Every process that stores messages must say the same."""
    dead_letter_topic: str = option("outbox.dead", TOPIC, general="OUTBOX_DEADLETTER_TOPIC")
    """Where the death of a row is announced: a queue, or an integration type with its channel."""
    unknown_types: UnknownTypes = option("dead", choice(UnknownTypes))
    """What happens to a row whose type no route serves: DEAD with a clear code, or left for another application."""

    @property
    def dead_letter_type(self) -> str:
        """The topic as an integration type; a plain name is a queue."""
        return self.dead_letter_topic if ":" in self.dead_letter_topic else f"bullmq:{self.dead_letter_topic}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """Webhooks."""

    timeout_ms: int = option(5_000, at_least(1), general="WEBHOOK_TIMEOUT_MS")
    """How long one call may take, from the name to the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSettings:
    """Endpoints of tenants, to which `publish` sends. All processes should say the same."""

    off_after_ms: int = option(432_000_000, at_least(0))
    """An endpoint that has taken no delivery for so long, while some were tried, is switched off. 0: never."""
    off_failures: int = option(10, at_least(1))
    """Deliveries that must have failed in that time."""
    overlap_ms: int = option(86_400_000, at_least(0))
    """How long the old secret signs beside the new one after a rotation."""
    most_per_tenant: int = option(100, at_least(1))
    """Endpoints that one tenant may have: each event of it becomes so many messages at most."""
    concurrency: int = option(5, at_least(1))
    """Deliveries to one endpoint at the same time, per process."""
    allow_http: bool = option(False)
    """Addresses may begin with `http://`: what is sent can be read on the way."""
    allowed_networks: str | None = option(None, WORDS)
    """Networks of your own that endpoints may be in, with commas: `10.1.0.0/16`. Public addresses always may."""

    @property
    def networks(self) -> tuple[str, ...]:
        """The networks, one by one."""
        return tuple(part.strip() for part in (self.allowed_networks or "").split(",") if part.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class SmtpSettings:
    """The server that mail leaves through."""

    url: str | None = option(None, SMTP, secret=True)
    """Address with user and password: `smtp://` is STARTTLS, `smtps://` TLS, `smtp+plain://` no encryption."""
    sender: str | None = option(None, WORDS)
    """Who mail comes from: `Shop <shop@example.com>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmsSettings:
    """The provider of short messages."""

    url: str | None = option(None, HTTPS, secret=True)
    """Where messages are posted to."""
    account: str | None = option(None, WORDS)
    token: str | None = option(None, SECRET, secret=True)
    sender: str | None = option(None, WORDS)
    """Number or name that messages come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Workers of the workflow-run preset."""

    concurrency: int | Literal["auto"] = option(WORKFLOW_RUN.concurrency, COUNT_OR_AUTO, general="WORKER_CONCURRENCY")
    """Runs handled at the same time by one worker; `auto`: as many as event loop and memory can take, at most 100. A
    change needs a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSettings:
    """Scheduled messages: what carries them, when the scheduler runs, how consumers retry."""

    transport: MessageTransport = option("bullmq", choice(MessageTransport))
    """What carries orders from scheduler to sender. `bullmq` uses the Redis or embedded server that is there anyway."""
    schedule: str = option("* * * * *", CRON, general="CRON_MINUTE_SCHEDULE")
    """Cron pattern of the scheduler, in UTC."""
    look_ahead_ms: int = option(3_600_000, at_least(0), variable="BULLPEN_MESSAGES_LOOK_AHEAD")
    """How long before its instant a message is given to the broker, which holds it back until then."""
    message_ttl_ms: int = option(86_400_000, at_least(1))
    """What waits longer in the RabbitMQ queue is dead-lettered."""
    max_queue_length: int = option(100_000, at_least(1))
    """More messages are refused by the RabbitMQ queue, and stay in the database until there is room."""

    concurrency: int = option(5, at_least(1), general="QUEUE_CONCURRENCY")
    """Deliveries held and handled at the same time by one consumer (the broker calls it prefetch)."""
    max_concurrency: int = option(0, at_least(0))
    """A sender grows to this concurrency while messages are late and providers keep up. 0: up to 200 unless somebody
    set `concurrency`, else not above it."""
    max_retries: int = option(5, at_least(0), general="QUEUE_MAX_RETRIES")
    """Tries after the first one."""
    retry_delay_ms: int = option(2_000, at_least(1), general="QUEUE_RETRY_DELAY")
    """Pause before the first retry."""
    retry_backoff: RetryGrowth = option("exponential", choice(RetryGrowth), general="QUEUE_RETRY_BACKOFF")
    """How the pause grows from retry to retry."""

    @property
    def max_attempts(self) -> int:
        """All tries, the first one included; this is what a retry policy counts."""
        return self.max_retries + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitMQSettings:
    """The broker of scheduled messages, and what it creates."""

    url: str = option("amqp://guest:guest@localhost:5672", AMQP, general="RABBITMQ_URL", secret=True)
    """Address of the broker; of a cluster the addresses of all nodes, separated by commas."""
    queue_name: str = option("birthday.messages.queue", AMQP_NAME, general="RABBITMQ_QUEUE_NAME")
    dlq_name: str = option("birthday.messages.dlq", AMQP_NAME, general="RABBITMQ_DLQ_NAME")
    """Queue of the messages that failed finally."""
    exchange_name: str = option("birthday.messages", AMQP_NAME, general="RABBITMQ_EXCHANGE_NAME")
    """Topic exchange that messages are published to."""
    dlx_name: str = option("birthday.messages.dlx", AMQP_NAME, general="RABBITMQ_DLX_NAME")
    """Direct exchange that dead letters go through."""
    connections: int = option(1, at_least(1, 2))
    """2: consumers have their own, so that flow control of publishers cannot hold back acknowledgements."""

    @property
    def urls(self) -> list[str]:
        """Address of every node."""
        return [part.strip() for part in self.url.split(",")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSettings:
    """Where a projector reads events."""

    connection_string: str | None = option(None, EVENT_STORE, general="ESDB_CONNECTION_STRING", secret=True)
    """KurrentDB or EventStoreDB. None: the ledger's own table of events."""
    subscription_prefix: str | None = option(None, PREFIXES, general="ESDB_SUBSCRIPTION_PREFIX")
    """Beginnings of the event types that are wanted, separated by commas. None: all."""
    subscription_group: str | None = option(None, GROUP, variable="BULLPEN_SUBSCRIPTION_GROUP")
    """Persistent subscription of the event store to read instead of keeping a checkpoint. None: keep one."""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes, one by one."""
        return tuple(part.strip() for part in (self.subscription_prefix or "").split(",") if part.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """Where Kafka is."""

    brokers: str = option("localhost:9092", BROKERS, general="KAFKA_BROKERS")
    """Comma-separated list of `host:port`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSettings:
    """Workflows whose definition leaves the transport open."""

    transport: WorkflowTransport = option("bullmq", choice(WorkflowTransport), variable="BULLPEN_TRANSPORT")
    """What carries their events. `memory` is for tests: nothing outlives the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings(SymptomLimits, AlertTiming):
    """Who is alerted when work is stuck. A limit of 0 switches its alert off."""

    webhook_url: str | None = option(None, SECRET_ADDRESS, secret=True)
    """Gets every alert as JSON. It may be in your own network."""
    webhook_secret: str | None = option(None, SECRET, secret=True)
    """Signs what the webhook gets: `whsec_…`."""
    slack_url: str | None = option(None, SECRET_ADDRESS, secret=True)
    """Incoming webhook of a Slack channel."""
    email: str | None = option(None, MAIL)
    """Gets every alert by mail, through `BULLPEN_SMTP_URL`."""
    sms: str | None = option(None, PHONE)
    """Gets every alert as a short message, through `BULLPEN_SMS_URL`."""
    label: str | None = option(None, WORDS)
    """Names this installation in every alert: `production`."""
    every_ms: int = option(30_000, at_least(1))
    """How often all processes together check."""

    @property
    def has_target(self) -> bool:
        """Whether an alert target is configured."""
        return any((self.webhook_url, self.slack_url, self.email, self.sms))


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardSettings:
    """The web dashboard: how people come in, and what every page says of the installation."""

    access: DashboardAccess = option("none", choice(DashboardAccess))
    """`none` is for addresses of the own machine only."""
    token: str | None = option(None, SECRET, secret=True)
    """With `token`: the secret to log in. At least 22 random characters; one is made at the start unless given."""
    passwords: Path | None = option(None, FILE)
    """With `passwords`: the file that `bullpen dashboard --add-user NAME` makes."""
    proxies: str | None = option(None, WORDS)
    """With `proxy`: addresses or networks of the proxy, with commas. Headers of others are refused."""
    user_header: str = option("X-Forwarded-User", WORDS)
    """With `proxy`: where it says who it is."""
    groups_header: str = option("X-Forwarded-Groups", WORDS)
    """With `proxy`: where it says the groups, with commas."""
    admin_groups: str | None = option(None, WORDS)
    """With `proxy`: groups that may do everything, with commas."""
    operator_groups: str | None = option(None, WORDS)
    """With `proxy`: groups that may retry, pause and see payloads, separated by commas. All others only read."""
    hosts: str | None = option(None, WORDS)
    """Host names under which it is reached, with commas, beside names of the own machine."""
    read_only: bool = option(False)
    """No user may change anything."""
    label: str | None = option(None, WORDS)
    """Names this installation on every page and in every confirmation: `production`."""
    colour: LabelColour = option("grey", choice(LabelColour))
    """Of the label."""
    history: bool = option(True)
    """Worker processes tell every ten seconds what they do, and add what their jobs did to the charts."""
    frame_ancestors: str | None = option(None, WORDS)
    """Origins whose pages may show the dashboard in a frame; none by default."""
