"""Everything that is configured from outside, read and checked once.

In: all sources of values (`sources`). Out: one frozen `Settings`, and for each value its `Origin`.
Elsewhere: connecting to what is named here (`bullpen.redis`), starting the bundled server (`bullpen.embedded`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from bullpen.errors import NotConfigured
from bullpen.settings.origin import Origin, Setting
from bullpen.settings.sections import (
    REDIS_GENERAL,
    AlertSettings,
    CodecSettings,
    DashboardSettings,
    EmbeddedSettings,
    EndpointSettings,
    EventSettings,
    KafkaSettings,
    LedgerSettings,
    MessageSettings,
    OutboxSettings,
    RabbitMQSettings,
    RedisSettings,
    RunSettings,
    SmsSettings,
    SmtpSettings,
    WebhookSettings,
    WorkflowSettings,
)
from bullpen.settings.sources import (
    SettingOption,
    Sources,
    find_file,
    misspelt,
    options_of,
    refuse_unknown_arguments,
)

__all__ = ["Settings", "misspelt_variables"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that is configured from outside. Make it with `Settings.load()`."""

    redis: RedisSettings = field(default_factory=RedisSettings)
    embedded: EmbeddedSettings = field(default_factory=EmbeddedSettings)
    codec: CodecSettings = field(default_factory=CodecSettings)
    ledger: LedgerSettings = field(default_factory=LedgerSettings)
    outbox: OutboxSettings = field(default_factory=OutboxSettings)
    webhooks: WebhookSettings = field(default_factory=WebhookSettings)
    endpoints: EndpointSettings = field(default_factory=EndpointSettings)
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
        known = _options()
        refuse_unknown_arguments(arguments, _all_options())
        names = {section: [option.name for option in options] for section, options in known.items()}
        sources = Sources(arguments, environ, find_file(start, names), start)
        origins: dict[str, Origin] = {}
        sections: dict[str, Any] = {}
        for section, options in known.items():
            values: dict[str, Any] = {}
            for option in options:
                values[option.name], origins[option.key] = sources.find(option)
            sections[section] = _sections()[section](**values)
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
        for option in _all_options():
            value = getattr(getattr(self, option.section), option.name)
            yield Setting(
                option.key,
                "" if value is None else option.kind.shown(value),
                self.origins.get(option.key, Origin("default", "")),
                option.variable,
                REDIS_GENERAL if option.key == "redis.url" else option.metadata.general,
            )


def misspelt_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that look like settings of bullpen but are unknown, and what each was probably meant to be."""
    return misspelt(os.environ if environ is None else environ, _all_options())


@cache
def _sections() -> Mapping[str, type[Any]]:
    hints = get_type_hints(Settings)
    return MappingProxyType({entry.name: hints[entry.name] for entry in fields(Settings) if entry.name != "origins"})


@cache
def _options() -> Mapping[str, tuple[SettingOption, ...]]:
    return MappingProxyType({name: options_of(name, section) for name, section in _sections().items()})


def _all_options() -> Iterator[SettingOption]:
    return (option for options in _options().values() for option in options)
