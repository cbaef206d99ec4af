"""What is configured from outside, read and checked once: arguments, environment, TOML file, defaults.

In: arguments of the caller, environment variables, `bullpen.toml` or the `[tool.bullpen]` table of `pyproject.toml`.
Out: one frozen `Settings`, and for each value its `Origin`. A value that cannot be used stops the start with a message
that names the variable, the argument or the line of the file it came from.
Elsewhere: connecting to what is named here (`bullpen.queue`), starting the bundled server (`bullpen.embedded`).

A new feature adds a section: a dataclass of `_option(...)` fields, and a field of it in `Settings`. The key in the
file, the name of the argument, the check and `config show` follow from that.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_type_hints

from bullpen._kernel.addresses import show_address
from bullpen._kernel.cron import next_after
from bullpen._kernel.ids import check_prefix
from bullpen._kernel.logs import get_logger
from bullpen._kernel.ownership import Distrusted, distrust_directory, read_trusted
from bullpen.errors import InvalidOption, NotConfigured, require

__all__ = [
    "AlertSettings",
    "CodecSettings",
    "DashboardSettings",
    "EmbeddedSettings",
    "EventSettings",
    "KafkaSettings",
    "LedgerSettings",
    "MessageSettings",
    "Origin",
    "OutboxSettings",
    "RabbitMQSettings",
    "RedisSettings",
    "RunSettings",
    "Setting",
    "Settings",
    "SmsSettings",
    "SmtpSettings",
    "WebhookSettings",
    "WorkflowSettings",
    "misspelt_variables",
]

_OTHER_VARIABLES: Final = ("BULLPEN_TEST", "BULLPEN_BENCH", "BULLPEN_SERVER_BINARY")
"""Read elsewhere."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from. As text it is the name a reader has to look for."""

    kind: Literal["argument", "environment", "file", "default"]
    name: str
    """The argument, the variable, or the key in its file; for a default, where it was derived from."""

    def __str__(self) -> str:
        match self.kind:
            case "argument":
                return f"argument {self.name}"
            case "environment":
                return f"environment variable {self.name}"
            case "file":
                return self.name
            case "default":
                return f"default{f' ({self.name})' if self.name else ''}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of `config show`: secrets are already hidden."""

    key: str
    value: str
    origin: Origin
    variable: str | None
    """The environment variable that sets it, if there is one."""
    general: str | None = None
    """A name without our prefix that sets it too, if there is one."""

    @property
    def is_general(self) -> bool:
        """Whether it was taken from a variable without our prefix, which may have been set for another program."""
        return self.origin.kind == "environment" and not self.origin.name.startswith("BULLPEN_")


_logger: Final = get_logger("bullpen.settings")

# What kinds of values there are ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    expected: str
    accepts: Callable[[Any], bool]
    from_text: Callable[[str], object] = str
    """Environment variables are always text; a file or an argument must have the right type by itself."""
    shown: Callable[[Any], str] = str
    is_path: bool = False


def _whole_number(minimum: int) -> _Kind:
    def from_text(text: str) -> object:
        # int() alone would also take "1_000" and digits of other scripts, which nobody means.
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()) else text

    def accepts(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= minimum

    return _Kind(f"a whole number of at least {minimum}", accepts, from_text)


def _from_yes_or_no(text: str) -> object:
    return {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower(), text)


_YES_OR_NO = _Kind(
    "true or false", lambda value: isinstance(value, bool), _from_yes_or_no, lambda value: str(value).lower()
)


def _one_or_two() -> _Kind:
    one = _whole_number(1)
    return _Kind("1 or 2", lambda value: one.accepts(value) and value <= 2, one.from_text)


def _one_of(*choices: str) -> _Kind:
    return _Kind(" or ".join(map(repr, choices)), lambda value: value in choices, str.strip)


_SCHEMES = (
    *("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
    "embedded",
)
_is_address = re.compile(rf"(?:{'|'.join(map(re.escape, _SCHEMES))})://[^\x00-\x1f]+").fullmatch
_ADDRESS = _Kind(
    "an address that starts with " + ", ".join(f"{scheme}://" for scheme in _SCHEMES),
    lambda value: isinstance(value, str) and _is_address(value) is not None,
    str.strip,
    show_address,
)


_is_database = re.compile(r"(?:postgres(?:ql)?|sqlite)(?:\+[a-z0-9]+)?://[^\x00-\x1f]+").fullmatch
_DATABASE = _Kind(
    "postgresql://user@host/database or sqlite:///path",
    lambda value: isinstance(value, str) and _is_database(value) is not None,
    str.strip,
    show_address,
)
_is_name = re.compile(r"[a-z_][a-z0-9_]{0,62}").fullmatch
_NAME = _Kind(
    "lower-case letters, digits and underscores, not beginning with a digit",
    lambda value: isinstance(value, str) and _is_name(value) is not None,
    str.strip,
)
_is_amqp = re.compile(r"amqps?://[^\x00-\x20,]+(?:\s*,\s*amqps?://[^\x00-\x20,]+)*").fullmatch
_AMQP = _Kind(
    "an address that starts with amqp:// or amqps://, or several with commas between them",
    lambda value: isinstance(value, str) and _is_amqp(value) is not None,
    str.strip,
    show_address,
)
_BROKERS = _Kind(
    "host:port, or several with commas between them",
    lambda value: isinstance(value, str) and re.fullmatch(r"[^\s,]+(?:\s*,\s*[^\s,]+)*", value) is not None,
    str.strip,
)
_is_event_store = re.compile(r"(?:esdb|kurrentdb|kdb)(?:\+discover)?://[^\x00-\x20]+").fullmatch
_EVENT_STORE = _Kind(
    "esdb+discover://host:port, or esdb:// or kurrentdb://",
    lambda value: isinstance(value, str) and _is_event_store(value) is not None,
    str.strip,
    show_address,
)
_PREFIXES = _Kind(
    "the beginning of event types, such as 'payment.', or several with commas between them",
    lambda value: (
        isinstance(value, str) and re.fullmatch(r"\s*[^\s,$][^\s,]*(?:\s*,\s*[^\s,$][^\s,]*)*\s*", value) is not None
    ),
    str.strip,
)
_GROUP = _Kind(
    "the name of a persistent subscription, at most 200 characters",
    lambda value: isinstance(value, str) and re.fullmatch(r"[^\x00-\x1f]{1,200}", value) is not None,
    str.strip,
)
_AMQP_NAME = _Kind(
    "the name of a queue or exchange, at most 200 characters",
    lambda value: isinstance(value, str) and re.fullmatch(r"[^\x00-\x1f]{1,200}", value) is not None,
    str.strip,
)
# An integration type, whose column has 120 characters; without a channel it is a queue.
_TOPIC = _Kind(
    "the name of a queue or an integration type such as 'kafka:outbox.dead', at most 100 characters",
    lambda value: isinstance(value, str) and re.fullmatch(r"[^\x00-\x1f]{1,100}", value) is not None,
    str.strip,
)

_is_smtp = re.compile(r"(?:smtps?|smtp\+plain)://[^\x00-\x20]+").fullmatch
_SMTP = _Kind(
    "smtp://user:password@host:587 (STARTTLS), smtps://… (TLS) or smtp+plain://… (no encryption)",
    lambda value: isinstance(value, str) and _is_smtp(value) is not None,
    str.strip,
    show_address,
)
_is_https = re.compile(r"https?://[^\x00-\x20]+").fullmatch
_HTTPS = _Kind(
    "an address that starts with https://",
    lambda value: isinstance(value, str) and _is_https(value) is not None,
    str.strip,
    show_address,
)
_WORDS = _Kind(
    "printable text", lambda value: isinstance(value, str) and value.isprintable() and value.strip() != "", str.strip
)
_SECRET_ADDRESS = _Kind(_HTTPS.expected, _HTTPS.accepts, str.strip, lambda _: "***")
_MAIL = _Kind(
    "a mail address",
    lambda value: isinstance(value, str) and re.fullmatch(r"[^\s@<>,]+@[^\s@<>,]+", value) is not None,
    str.strip,
)
_PHONE = _Kind(
    "a telephone number such as +4930123456",
    lambda value: isinstance(value, str) and re.fullmatch(r"\+[1-9][0-9]{6,14}", value) is not None,
    str.strip,
)
_SECRET = _Kind("printable text", _WORDS.accepts, str.strip, lambda _: "***")


def _is_pattern(value: object) -> bool:
    try:
        next_after(value, None, 0) if isinstance(value, str) else require("pattern", False, "text", value)
    except InvalidOption:
        return False
    return True


_CRON = _Kind("a cron pattern such as '* * * * *'", _is_pattern, str.strip)


def _is_prefix(value: object) -> bool:
    try:
        check_prefix(value)
    except InvalidOption:
        return False
    return True


_is_key_list = re.compile(r"\s*[\w.-]+:[A-Za-z0-9+/]{43}=\s*(?:,\s*[\w.-]+:[A-Za-z0-9+/]{43}=\s*)*").fullmatch
_KEYS = _Kind(
    "id:key, or several with commas between them, each key 32 bytes as base64",
    lambda value: isinstance(value, str) and _is_key_list(value) is not None,
    str.strip,
    lambda _: "***",
)
_is_store = re.compile(r"file:///[^\x00-\x1f]+|s3://[A-Za-z0-9.-]+(?:/[A-Za-z0-9=._/-]*)?").fullmatch
_OBJECTS = _Kind(
    "file:///directory or s3://bucket/prefix",
    lambda value: isinstance(value, str) and _is_store(value) is not None,
    str.strip,
)
_PREFIX = _Kind("text without control characters, spaces at its ends, or ':' as its last character", _is_prefix)
_FILE = _Kind(
    "the path of a file",
    lambda value: isinstance(value, str | Path) and str(value) != "" and "\0" not in str(value),
    is_path=True,
)
_DIRECTORY = _Kind(
    "the path of a directory",
    lambda value: isinstance(value, str | Path) and str(value) != "" and "\0" not in str(value),
    is_path=True,
)


# Values that are not simply looked up ------------------------------------------------------------------------------


_REDIS_GENERAL: Final = "REDIS_HOST and REDIS_PORT"


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


def _option(
    default: Any,
    kind: _Kind,
    variable: str | None = None,
    general: str | None = None,
    *,
    otherwise: Callable[[Mapping[str, str]], tuple[object, Origin] | None] | None = None,
    derived: Callable[[Path], tuple[object, Origin]] | None = None,
    secret: bool = False,
) -> Any:
    """A value of a section, looked for in argument, `variable`, `general`, `otherwise`, file; else `derived` or
    `default`. `general` is a name without our prefix, which other programs may use as well."""
    metadata = {"kind": kind, "variable": variable, "general": general, "otherwise": otherwise, "derived": derived}
    return field(default=default, repr=not secret, metadata=metadata)


# The sections ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """Where queues live."""

    url: str | None = _option(None, _ADDRESS, "BULLPEN_REDIS_URL", otherwise=_redis_host_and_port, secret=True)
    """Address of the server; REDIS_HOST and REDIS_PORT are the other way to say it. None: the bundled server."""
    prefix: str = _option("bull", _PREFIX, "BULLPEN_PREFIX")
    """First part of every key. On Redis Cluster use `{bull}`, so that all keys of a queue share a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings:
    """The bundled server, used when no address is given."""

    mode: Literal["auto", "never"] = _option("auto", _one_of("auto", "never"), "BULLPEN_EMBEDDED")
    """`never` in production: a missing address is then an error instead of a private, empty server."""
    data_dir: Path = _option(  # noqa: RUF009 - _option() is dataclasses.field()
        Path(".bullpen"), _DIRECTORY, "BULLPEN_DATA_DIR", derived=_project_data_dir
    )
    """Where its data lies. Processes with the same directory share one server."""
    appendfsync: Literal["everysec", "always"] | None = _option(
        None, _one_of("everysec", "always"), "BULLPEN_EMBEDDED_APPENDFSYNC"
    )
    """`always`: each write is on the disk before it is answered, which level `fsync` of an add needs. None: as the
    directory was used last, at first `everysec`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSettings:
    """How job data and return values are stored. Plain unless keys or a store are set."""

    keys: str | None = _option(None, _KEYS, "BULLPEN_CODEC_KEYS", secret=True)
    """Keys that encrypt, `k2:<base64>,k1:<base64>`: the first encrypts, all decrypt. Each is 32 random bytes."""
    store: str | None = _option(None, _OBJECTS, "BULLPEN_CODEC_STORE")
    """Where large job data go: `file:///directory`, shared by all processes, or `s3://bucket/prefix`, with the keys of
    `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`."""
    above: int = _option(262_144, _whole_number(0), "BULLPEN_CODEC_ABOVE")
    """Data of more bytes than this goes to the store."""
    max_bytes: int = _option(104_857_600, _whole_number(1), "BULLPEN_CODEC_MAX_BYTES")
    """Longer data is neither stored there nor read from there."""
    refuse_plain: bool = _option(False, _YES_OR_NO, "BULLPEN_CODEC_REFUSE_PLAIN")
    """Fail jobs whose data is not encrypted, without running them. Needs keys."""
    s3_endpoint: str | None = _option(None, _HTTPS, "BULLPEN_CODEC_S3_ENDPOINT")
    """Address of an S3-compatible server. None: Amazon's."""
    s3_region: str | None = _option(None, _WORDS, "BULLPEN_CODEC_S3_REGION")
    """Region that requests are signed for. None: `AWS_REGION`, else `us-east-1`."""

    @property
    def key_ring(self) -> dict[str, str]:
        """Keys by id, the one that encrypts first."""
        pairs = [part.strip().partition(":") for part in (self.keys or "").split(",") if part.strip()]
        return {key_id: key for key_id, _, key in pairs}


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """The SQL database that holds outbox and inbox."""

    url: str | None = _option(None, _DATABASE, "BULLPEN_DATABASE_URL", secret=True)
    """PostgreSQL or SQLite. None: a SQLite file beside the bundled server's data."""
    schema: str = _option("core_outbox", _NAME, "BULLPEN_DATABASE_SCHEMA")
    """Schema of the tables on PostgreSQL."""
    tenant_role: str | None = _option(None, _NAME, "BULLPEN_TENANT_ROLE")
    """Database role of APIs. With all three roles row-level security keeps tenants apart."""
    worker_role: str | None = _option(None, _NAME, "BULLPEN_WORKER_ROLE")
    """Database role of workers of deliveries and runs."""
    service_role: str | None = _option(None, _NAME, "BULLPEN_SERVICE_ROLE")
    """Database role of dispatchers and maintenance, which see all tenants, and of whoever grants credits."""
    duty: Literal["service", "worker", "tenant"] = _option(
        "service", _one_of("service", "worker", "tenant"), "BULLPEN_DATABASE_DUTY"
    )
    """Which of the three roles this process has. Only with roles."""
    pool_size: int = _option(20, _whole_number(1), "BULLPEN_DATABASE_POOL_SIZE")
    """Connections to PostgreSQL that this process holds at most. Ten runs at the same time need one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSettings:
    """Dispatchers of the outbox."""

    claim_batch_size: int = _option(100, _whole_number(1), "BULLPEN_OUTBOX_CLAIM_BATCH_SIZE", "OUTBOX_CLAIM_BATCH_SIZE")
    """Rows claimed by one tick, over all channels."""
    max_attempts: int = _option(10, _whole_number(1), "BULLPEN_OUTBOX_MAX_ATTEMPTS", "OUTBOX_MAX_ATTEMPTS")
    """Deliveries of a row before it is DEAD, for rows that do not say themselves."""
    tick_interval_ms: int = _option(
        1_000, _whole_number(1), "BULLPEN_OUTBOX_TICK_INTERVAL_MS", "OUTBOX_TICK_INTERVAL_MS"
    )
    """How often to look although nobody told of new rows."""
    lease_ms: int = _option(60_000, _whole_number(1_000), "BULLPEN_OUTBOX_LEASE_MS")
    """How long a claim holds. After a crash rows wait so long; it must exceed the slowest delivery."""
    fair_tenants: bool = _option(False, _YES_OR_NO, "BULLPEN_OUTBOX_FAIR_TENANTS")
    """Spread claims over the tenants of a channel, too. Costs one more query per channel and tick."""
    strict_sources: bool = _option(False, _YES_OR_NO, "BULLPEN_OUTBOX_STRICT_SOURCES")
    """Store each source event once, whatever its route. Every process that stores messages must say the same."""
    dead_letter_topic: str = _option(
        "outbox.dead", _TOPIC, "BULLPEN_OUTBOX_DEAD_LETTER_TOPIC", "OUTBOX_DEADLETTER_TOPIC"
    )
    """Where the death of a row is announced: a queue, or an integration type with its channel."""
    unknown_types: Literal["dead", "leave"] = _option("dead", _one_of("dead", "leave"), "BULLPEN_OUTBOX_UNKNOWN_TYPES")
    """What happens to a row whose type no route serves: DEAD with a clear code, or left for another application."""

    @property
    def dead_letter_type(self) -> str:
        """The topic as an integration type; a plain name is a queue."""
        return self.dead_letter_topic if ":" in self.dead_letter_topic else f"bullmq:{self.dead_letter_topic}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """Webhooks."""

    timeout_ms: int = _option(5_000, _whole_number(1), "BULLPEN_WEBHOOKS_TIMEOUT_MS", "WEBHOOK_TIMEOUT_MS")
    """How long one call may take, from the name to the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmtpSettings:
    """The server that mail leaves through."""

    url: str | None = _option(None, _SMTP, "BULLPEN_SMTP_URL", secret=True)
    """Address with user and password: `smtp://` is STARTTLS, `smtps://` TLS, `smtp+plain://` no encryption."""
    sender: str | None = _option(None, _WORDS, "BULLPEN_SMTP_SENDER")
    """Who mail comes from: `Shop <shop@example.com>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmsSettings:
    """The provider of short messages."""

    url: str | None = _option(None, _HTTPS, "BULLPEN_SMS_URL", secret=True)
    """Where messages are posted to."""
    account: str | None = _option(None, _WORDS, "BULLPEN_SMS_ACCOUNT")
    token: str | None = _option(None, _SECRET, "BULLPEN_SMS_TOKEN", secret=True)
    sender: str | None = _option(None, _WORDS, "BULLPEN_SMS_SENDER")
    """Number or name that messages come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Workers of the workflow-run preset."""

    concurrency: int = _option(100, _whole_number(1), "BULLPEN_RUNS_CONCURRENCY", "WORKER_CONCURRENCY")
    """Runs handled at the same time by one worker. A change needs a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSettings:
    """Scheduled messages: what carries them, when the scheduler runs, how consumers retry."""

    transport: Literal["bullmq", "rabbitmq", "memory"] = _option(
        "bullmq", _one_of("bullmq", "rabbitmq", "memory"), "BULLPEN_MESSAGES_TRANSPORT"
    )
    """What carries orders from scheduler to sender. `bullmq` uses the Redis or embedded server that is there anyway."""
    schedule: str = _option("* * * * *", _CRON, "BULLPEN_MESSAGES_SCHEDULE", "CRON_MINUTE_SCHEDULE")
    """Cron pattern of the scheduler, in UTC."""
    look_ahead_ms: int = _option(3_600_000, _whole_number(0), "BULLPEN_MESSAGES_LOOK_AHEAD")
    """How long before its instant a message is given to the broker, which holds it back until then."""
    message_ttl_ms: int = _option(86_400_000, _whole_number(1), "BULLPEN_MESSAGES_MESSAGE_TTL_MS")
    """What waits longer in the RabbitMQ queue is dead-lettered."""
    max_queue_length: int = _option(100_000, _whole_number(1), "BULLPEN_MESSAGES_MAX_QUEUE_LENGTH")
    """More messages are refused by the RabbitMQ queue, and stay in the database until there is room."""

    concurrency: int = _option(5, _whole_number(1), "BULLPEN_MESSAGES_CONCURRENCY", "QUEUE_CONCURRENCY")
    """Deliveries held and handled at the same time by one consumer (the broker calls it prefetch)."""
    max_concurrency: int = _option(0, _whole_number(0), "BULLPEN_MESSAGES_MAX_CONCURRENCY")
    """A sender goes up to so many while messages are late and providers keep up. 0: to 200 if nobody has set
    `concurrency`, else not above it."""
    max_retries: int = _option(5, _whole_number(0), "BULLPEN_MESSAGES_MAX_RETRIES", "QUEUE_MAX_RETRIES")
    """Tries after the first one."""
    retry_delay_ms: int = _option(2_000, _whole_number(1), "BULLPEN_MESSAGES_RETRY_DELAY_MS", "QUEUE_RETRY_DELAY")
    """Pause before the first retry."""
    retry_backoff: Literal["exponential", "linear"] = _option(
        "exponential", _one_of("exponential", "linear"), "BULLPEN_MESSAGES_RETRY_BACKOFF", "QUEUE_RETRY_BACKOFF"
    )
    """How the pause grows from retry to retry."""

    @property
    def max_attempts(self) -> int:
        """All tries, the first one included; this is what a retry policy counts."""
        return self.max_retries + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RabbitMQSettings:
    """The broker of scheduled messages, and what it is told to make."""

    url: str = _option("amqp://guest:guest@localhost:5672", _AMQP, "BULLPEN_RABBITMQ_URL", "RABBITMQ_URL", secret=True)
    """Address of the broker; of a cluster the addresses of all nodes, with commas between them."""
    queue_name: str = _option(
        "birthday.messages.queue", _AMQP_NAME, "BULLPEN_RABBITMQ_QUEUE_NAME", "RABBITMQ_QUEUE_NAME"
    )
    dlq_name: str = _option("birthday.messages.dlq", _AMQP_NAME, "BULLPEN_RABBITMQ_DLQ_NAME", "RABBITMQ_DLQ_NAME")
    """Queue of the messages that failed finally."""
    exchange_name: str = _option(
        "birthday.messages", _AMQP_NAME, "BULLPEN_RABBITMQ_EXCHANGE_NAME", "RABBITMQ_EXCHANGE_NAME"
    )
    """Topic exchange that messages are published to."""
    dlx_name: str = _option("birthday.messages.dlx", _AMQP_NAME, "BULLPEN_RABBITMQ_DLX_NAME", "RABBITMQ_DLX_NAME")
    """Direct exchange that dead letters go through."""
    connections: int = _option(1, _one_or_two(), "BULLPEN_RABBITMQ_CONNECTIONS")
    """2: consumers have their own, so that flow control of publishers cannot hold back acknowledgements."""

    @property
    def urls(self) -> list[str]:
        """Address of every node."""
        return [part.strip() for part in self.url.split(",")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSettings:
    """Where a projector reads events."""

    connection_string: str | None = _option(
        None, _EVENT_STORE, "BULLPEN_EVENTS_CONNECTION_STRING", "ESDB_CONNECTION_STRING", secret=True
    )
    """KurrentDB or EventStoreDB. None: the ledger's own table of events."""
    subscription_prefix: str | None = _option(
        None, _PREFIXES, "BULLPEN_EVENTS_SUBSCRIPTION_PREFIX", "ESDB_SUBSCRIPTION_PREFIX"
    )
    """Beginnings of the event types that are wanted, with commas between them. None: all."""
    subscription_group: str | None = _option(None, _GROUP, "BULLPEN_SUBSCRIPTION_GROUP")
    """Persistent subscription of the event store to read instead of keeping a checkpoint. None: keep one."""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes, one by one."""
        return tuple(part.strip() for part in (self.subscription_prefix or "").split(",") if part.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """Where Kafka is."""

    brokers: str = _option("localhost:9092", _BROKERS, "BULLPEN_KAFKA_BROKERS", "KAFKA_BROKERS")
    """Comma-separated list of `host:port`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowSettings:
    """Workflows whose definition leaves the transport open."""

    transport: Literal["bullmq", "kafka", "rabbitmq", "memory"] = _option(
        "bullmq", _one_of("bullmq", "kafka", "rabbitmq", "memory"), "BULLPEN_TRANSPORT"
    )
    """What carries their events. `memory` is for tests: nothing outlives the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """Who is told what does not go on by itself. Of the limits 0 switches one off."""

    webhook_url: str | None = _option(None, _SECRET_ADDRESS, "BULLPEN_ALERTS_WEBHOOK_URL", secret=True)
    """Gets every alert as JSON. It may be in your own network."""
    webhook_secret: str | None = _option(None, _SECRET, "BULLPEN_ALERTS_WEBHOOK_SECRET", secret=True)
    """Signs what the webhook gets: `whsec_…`."""
    slack_url: str | None = _option(None, _SECRET_ADDRESS, "BULLPEN_ALERTS_SLACK_URL", secret=True)
    """Incoming webhook of a Slack channel."""
    email: str | None = _option(None, _MAIL, "BULLPEN_ALERTS_EMAIL")
    """Gets every alert by mail, through `BULLPEN_SMTP_URL`."""
    sms: str | None = _option(None, _PHONE, "BULLPEN_ALERTS_SMS")
    """Gets every alert as a short message, through `BULLPEN_SMS_URL`."""
    label: str | None = _option(None, _WORDS, "BULLPEN_ALERTS_LABEL")
    """Names this installation in every alert: `production`."""
    every_ms: int = _option(30_000, _whole_number(1), "BULLPEN_ALERTS_EVERY_MS")
    """How often all processes together look."""
    repeat_ms: int = _option(14_400_000, _whole_number(1), "BULLPEN_ALERTS_REPEAT_MS")
    """An incident that lasts is told again after so long."""
    resolve_after_ms: int = _option(120_000, _whole_number(0), "BULLPEN_ALERTS_RESOLVE_AFTER_MS")
    """It is over when no sign of it was seen for so long."""
    hold_ms: int = _option(60_000, _whole_number(0), "BULLPEN_ALERTS_HOLD_MS")
    """A Redis server that is away is told of after so long."""
    growth: int = _option(100, _whole_number(1), "BULLPEN_ALERTS_GROWTH")
    """Dead letters are told again when there are so many more than at the last time."""
    dead_letters: int = _option(1, _whole_number(0), "BULLPEN_ALERTS_DEAD_LETTERS")
    """So many in one queue, or dead rows in the outbox."""
    queue_late_ms: int = _option(300_000, _whole_number(0), "BULLPEN_ALERTS_QUEUE_LATE_MS")
    """The next job of a queue waits so long."""
    no_worker_ms: int = _option(120_000, _whole_number(0), "BULLPEN_ALERTS_NO_WORKER_MS")
    """The next job of a queue waits so long, and no worker is connected."""
    outbox_late_ms: int = _option(300_000, _whole_number(0), "BULLPEN_ALERTS_OUTBOX_LATE_MS")
    """Rows of the outbox were due so long ago, and nobody has claimed them."""
    outbox_claimed_ms: int = _option(300_000, _whole_number(0), "BULLPEN_ALERTS_OUTBOX_CLAIMED_MS")
    """The lease of claimed rows ran out so long ago."""
    scheduler_late_ms: int = _option(300_000, _whole_number(0), "BULLPEN_ALERTS_SCHEDULER_LATE_MS")
    """Messages were due so long ago and are not queued."""
    run_stuck_ms: int = _option(900_000, _whole_number(0), "BULLPEN_ALERTS_RUN_STUCK_MS")
    """Runs have not ended, and nobody has touched them for so long."""

    @property
    def has_target(self) -> bool:
        """Whether somebody is to be told."""
        return any((self.webhook_url, self.slack_url, self.email, self.sms))


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardSettings:
    """The web dashboard: how people come in, and what every page says of the installation."""

    access: Literal["none", "token", "passwords", "proxy"] = _option(
        "none", _one_of("none", "token", "passwords", "proxy"), "BULLPEN_DASHBOARD_ACCESS"
    )
    """`none` is for addresses of the own machine only."""
    token: str | None = _option(None, _SECRET, "BULLPEN_DASHBOARD_TOKEN", secret=True)
    """With `token`: what lets in. At least 22 characters by chance; one is made at the start unless given."""
    passwords: Path | None = _option(None, _FILE, "BULLPEN_DASHBOARD_PASSWORDS")  # noqa: RUF009 - as above
    """With `passwords`: the file that `bullpen dashboard --add-user NAME` makes."""
    proxies: str | None = _option(None, _WORDS, "BULLPEN_DASHBOARD_PROXIES")
    """With `proxy`: addresses or networks of the proxy, with commas. Headers of others are refused."""
    user_header: str = _option("X-Forwarded-User", _WORDS, "BULLPEN_DASHBOARD_USER_HEADER")
    """With `proxy`: where it says who it is."""
    groups_header: str = _option("X-Forwarded-Groups", _WORDS, "BULLPEN_DASHBOARD_GROUPS_HEADER")
    """With `proxy`: where it says the groups, with commas."""
    admin_groups: str | None = _option(None, _WORDS, "BULLPEN_DASHBOARD_ADMIN_GROUPS")
    """With `proxy`: groups that may do everything, with commas."""
    operator_groups: str | None = _option(None, _WORDS, "BULLPEN_DASHBOARD_OPERATOR_GROUPS")
    """With `proxy`: groups that may retry, pause and see payloads, with commas. All others only look."""
    hosts: str | None = _option(None, _WORDS, "BULLPEN_DASHBOARD_HOSTS")
    """Host names under which it is reached, with commas, beside names of the own machine."""
    read_only: bool = _option(False, _YES_OR_NO, "BULLPEN_DASHBOARD_READ_ONLY")
    """Nobody may change anything."""
    label: str | None = _option(None, _WORDS, "BULLPEN_DASHBOARD_LABEL")
    """Names this installation on every page and in every confirmation: `production`."""
    colour: Literal["grey", "blue", "green", "orange", "red"] = _option(
        "grey", _one_of("grey", "blue", "green", "orange", "red"), "BULLPEN_DASHBOARD_COLOUR"
    )
    """Of the label."""
    frame_ancestors: str | None = _option(None, _WORDS, "BULLPEN_DASHBOARD_FRAME_ANCESTORS")
    """Origins whose pages may show the dashboard in a frame; nobody's unless given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that is configured from outside. Make it with `Settings.load()`."""

    redis: RedisSettings = field(default_factory=RedisSettings)
    embedded: EmbeddedSettings = field(default_factory=EmbeddedSettings)
    codec: CodecSettings = field(default_factory=CodecSettings)
    ledger: LedgerSettings = field(default_factory=LedgerSettings)
    outbox: OutboxSettings = field(default_factory=OutboxSettings)
    webhooks: WebhookSettings = field(default_factory=WebhookSettings)
    smtp: SmtpSettings = field(default_factory=SmtpSettings)
    sms: SmsSettings = field(default_factory=SmsSettings)
    runs: RunSettings = field(default_factory=RunSettings)
    messages: MessageSettings = field(default_factory=MessageSettings)
    rabbitmq: RabbitMQSettings = field(default_factory=RabbitMQSettings)
    kafka: KafkaSettings = field(default_factory=KafkaSettings)
    events: EventSettings = field(default_factory=EventSettings)
    workflows: WorkflowSettings = field(default_factory=WorkflowSettings)
    alerts: AlertSettings = field(default_factory=AlertSettings)
    dashboard: DashboardSettings = field(default_factory=DashboardSettings)
    origins: Mapping[str, Origin] = field(default_factory=lambda: MappingProxyType({}), repr=False, compare=False)
    """Where each value came from, by key: `redis.url`."""

    @classmethod
    def load(
        cls, *, environ: Mapping[str, str] | None = None, start: Path | None = None, **arguments: object
    ) -> Settings:
        """Read all sources. For each value the first one that has it wins: argument, environment, file, default.

        `start` is where the search for a file and for the project's directory begins, the working directory unless
        given. An argument is called like its key with an underscore (`redis_url`); None means "not given". An empty
        environment variable counts as not set. Values that are not used are not checked.

        Raises InvalidOption for a value or a name that cannot be used.
        """
        environ = os.environ if environ is None else environ
        start = (Path.cwd() if start is None else start).absolute()
        _refuse_unknown_arguments(arguments)
        sources = _Sources(arguments, environ, _find_file(start), start)
        origins: dict[str, Origin] = {}
        sections: dict[str, Any] = {}
        for name, section in _sections().items():
            values: dict[str, Any] = {}
            for entry in fields(section):
                values[entry.name], origins[f"{name}.{entry.name}"] = sources.find(name, entry)
            sections[name] = section(**values)
        return cls(**sections, origins=MappingProxyType(origins))

    def with_redis(self, *, url: str | None = None, prefix: str | None = None) -> Settings:
        """The same with another server or prefix, as if they had been arguments."""
        changes = {name: value for name, value in (("url", url), ("prefix", prefix)) if value is not None}
        origins = {f"redis.{name}": Origin("argument", f"redis_{name}") for name in changes}
        return replace(
            self, redis=replace(self.redis, **changes), origins=MappingProxyType({**self.origins, **origins})
        )

    def connection_url(self) -> str:
        """The server to use when a queue or worker was given none: the configured one, else the bundled one.

        Raises NotConfigured when there is no address and the bundled server may not be used.
        """
        if self.redis.url is not None:
            return self.redis.url
        if self.embedded.mode == "never":
            origin = self.origins.get("embedded.mode", Origin("argument", "embedded_mode"))
            raise NotConfigured(
                f"no Redis address is configured, and {origin} forbids the embedded server; give `connection=`, or set "
                "BULLPEN_REDIS_URL, or REDIS_HOST and REDIS_PORT, or `url` in the [redis] section of bullpen.toml"
            )
        sync = self.embedded.appendfsync
        return f"embedded://{self.embedded.data_dir}" + (f"?appendfsync={sync}" if sync is not None else "")

    def has_redis(self) -> bool:
        """Whether there is a server for queues: one that is named, or the bundled one."""
        return self.redis.url is not None or self.embedded.mode != "never"

    def database_url(self) -> str:
        """Where the ledger is: the configured database, else a SQLite file beside the bundled server's data.

        Raises NotConfigured when there is no address and nothing bundled may be used.
        """
        if self.ledger.url is not None:
            return self.ledger.url
        if self.embedded.mode == "never":
            origin = self.origins.get("embedded.mode", Origin("argument", "embedded_mode"))
            raise NotConfigured(
                f"no database is configured, and {origin} forbids the file beside the embedded server; set "
                "BULLPEN_DATABASE_URL, or `url` in the [ledger] section of bullpen.toml"
            )
        return f"sqlite:///{self.embedded.data_dir / 'ledger.sqlite3'}"

    def has_ledger(self) -> bool:
        """Whether a database is configured, or the file beside the bundled server has been made."""
        if self.ledger.url is not None:
            return True
        return self.embedded.mode != "never" and (self.embedded.data_dir / "ledger.sqlite3").exists()

    def describe(self) -> Iterator[Setting]:
        """All settings in the order of their sections, as `config show` prints them."""
        for name, section in _sections().items():
            for entry in fields(section):
                value = getattr(getattr(self, name), entry.name)
                key = f"{name}.{entry.name}"
                yield Setting(
                    key,
                    "" if value is None else entry.metadata["kind"].shown(value),
                    self.origins.get(key, Origin("default", "")),
                    entry.metadata["variable"],
                    _REDIS_GENERAL if key == "redis.url" else entry.metadata["general"],
                )


@cache
def _sections() -> Mapping[str, type[Any]]:
    hints = get_type_hints(Settings)
    return MappingProxyType({entry.name: hints[entry.name] for entry in fields(Settings) if entry.name != "origins"})


# Finding values ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _File:
    """The configuration file that was found, its names already known to be right."""

    path: Path
    tables: Mapping[str, Mapping[str, object]]
    within: str = ""
    """The table inside a file that is not ours alone: `tool.bullpen.`"""


@dataclass(frozen=True, slots=True)
class _Sources:
    arguments: Mapping[str, object]
    environ: Mapping[str, str]
    file: _File | None
    start: Path

    def find(self, section: str, entry: Field[Any]) -> tuple[object, Origin]:
        """The value of one option, checked, and where it was found."""
        kind: _Kind = entry.metadata["kind"]
        argument = f"{section}_{entry.name}"
        if (given := self.arguments.get(argument)) is not None:
            return _checked(kind, given, Origin("argument", argument), self.start)
        for variable in (entry.metadata["variable"], entry.metadata["general"]):
            if variable is not None and (text := self.environ.get(variable)):
                return _checked(kind, kind.from_text(text), Origin("environment", variable), self.start)
        if entry.metadata["otherwise"] is not None and (found := entry.metadata["otherwise"](self.environ)) is not None:
            value, origin = found
            return value, origin
        if self.file is not None and (given := self.file.tables.get(section, {}).get(entry.name)) is not None:
            origin = Origin("file", f"{self.file.within}{section}.{entry.name} in {self.file.path}")
            return _checked(kind, given, origin, self.file.path.parent)
        if entry.metadata["derived"] is not None:
            value, origin = entry.metadata["derived"](self.start)
            return value, origin
        assert entry.default is not MISSING
        return entry.default, Origin("default", "")


def _checked(kind: _Kind, value: object, origin: Origin, base: Path) -> tuple[object, Origin]:
    if not kind.accepts(value):
        shown = show_address(value) if isinstance(value, str) and "://" in value else kind.shown(value)
        raise InvalidOption(str(origin), kind.expected, shown if isinstance(value, str) else value)
    if kind.is_path:
        # Relative to the file that says it, or to where we were started; never to where a process happens to be later.
        return base / Path(str(value)).expanduser(), origin
    return value, origin


def misspelt_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that look like ours and that nobody reads, and what each was probably meant to be.

    Others are not ours to judge: an orchestrator makes variables of its own from the names of services.
    """
    environ = os.environ if environ is None else environ
    known = {entry.metadata["variable"] for section in _sections().values() for entry in fields(section)} - {None}
    found: dict[str, str] = {}
    for name in sorted(environ):
        if name.startswith("BULLPEN_") and name not in known and not name.startswith(_OTHER_VARIABLES):
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.88)
            if nearest:
                found[name] = nearest[0]
    return found


def _refuse_unknown_arguments(arguments: Mapping[str, object]) -> None:
    known = [f"{name}_{entry.name}" for name, section in _sections().items() for entry in fields(section)]
    for argument in arguments:
        _refuse_unknown(argument, known, "an argument of Settings.load")


def _refuse_unknown(name: str, known: list[str], what: str) -> None:
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        expected = f"one of {', '.join(known)}"
        raise InvalidOption(what, expected, name, suggestion=nearest[0] if nearest else None)


def _find_file(start: Path) -> _File | None:
    """The nearest file upwards that configures us. The search ends with the repository it begins in, and where another
    user of the machine could have written what is found."""
    for directory in (start, *start.parents):
        if (reason := distrust_directory(directory)) is not None:
            _logger.warning("no settings are read from %s or above: it %s", directory, reason)
            return None
        own, project = directory / "bullpen.toml", directory / "pyproject.toml"
        try:
            if (found := _read_toml(own)) is not None:
                return _check_names(own, found, within="")
            tool = (_read_toml(project) or {}).get("tool")
        except Distrusted:
            return None
        if isinstance(tool, dict) and "bullpen" in tool:
            return _check_names(project, tool["bullpen"], within="tool.bullpen.")
        if (directory / ".git").exists():
            return None
    return None


def _read_toml(path: Path) -> dict[str, Any] | None:
    try:
        raw = read_trusted(path)
        return None if raw is None else _parsed(raw)
    except Distrusted as reason:
        _logger.warning("no settings are read from %s: it %s", path, reason)
        raise
    except (OSError, ValueError) as error:  # no permission; no UTF-8, no TOML
        raise InvalidOption(str(path), "a readable TOML file", str(error)) from error


@lru_cache(maxsize=8)
def _parsed(raw: bytes) -> dict[str, Any]:
    """Each queue without a prefix asks for the settings, and parsing a long file takes longer than reading it."""
    return tomllib.loads(raw.decode())


def _check_names(path: Path, content: Any, within: str) -> _File:
    if not isinstance(content, dict):
        raise InvalidOption(f"{within.rstrip('.')} in {path}", "a table", content)
    sections = _sections()
    for name, table in content.items():
        _refuse_unknown(name, list(sections), f"a section of {within.rstrip('.') or 'the file'} in {path}")
        if not isinstance(table, dict):
            raise InvalidOption(f"{within}{name} in {path}", "a table", table)
        for key in table:
            _refuse_unknown(key, [entry.name for entry in fields(sections[name])], f"a key of {within}{name} in {path}")
    return _File(path, content, within)
