"""Channels with what is configured: brokers, servers, credentials and time limits come from settings, never from code.

In: settings, and what only the program knows (a target's address, templates). Out: channels. Elsewhere: the channels
themselves (`bullpen.plugins.channels`), whose drivers are loaded when one is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Unpack
from urllib.parse import unquote, urlsplit

from bullpen.errors import NotConfigured
from bullpen.settings import Settings

if TYPE_CHECKING:
    from bullpen.plugins.channels.email import Email, EmailArguments, Security
    from bullpen.plugins.channels.kafka import KafkaChannel, KafkaChannelArguments
    from bullpen.plugins.channels.slack import Slack, SlackArguments
    from bullpen.plugins.channels.sms import Sms, SmsArguments
    from bullpen.plugins.channels.webhook import Webhook, WebhookArguments

__all__ = ["Channels"]

_SECURITY: Final[dict[str, Security]] = {"smtp": "starttls", "smtps": "tls", "smtp+plain": "none"}


class Channels:
    """Makes channels from settings. Further arguments are those of the channel."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def webhook(self, url: str, **options: Unpack[WebhookArguments]) -> Webhook:
        """One endpoint, with `WEBHOOK_TIMEOUT_MS`."""
        from bullpen.plugins.channels.webhook import Webhook

        options.setdefault("timeout_ms", self._settings.webhooks.timeout_ms)
        return Webhook(url, **options)

    def kafka(self, **options: Unpack[KafkaChannelArguments]) -> KafkaChannel:
        """The topics of `KAFKA_BROKERS`."""
        from bullpen.plugins.channels.kafka import KafkaChannel

        return KafkaChannel(self._settings.kafka.brokers, **options)

    def slack(self, url: str, **options: Unpack[SlackArguments]) -> Slack:
        """One incoming webhook."""
        from bullpen.plugins.channels.slack import Slack

        return Slack(url, **options)

    def email(self, **options: Unpack[EmailArguments]) -> Email:
        """The server of `BULLPEN_SMTP_URL`, as `BULLPEN_SMTP_SENDER`."""
        from bullpen.plugins.channels.email import Email

        parts = urlsplit(self._need("smtp", "url"))
        given: dict[str, Any] = {
            "sender": options.pop("sender", None) or self._need("smtp", "sender"),
            "port": parts.port,
            "security": _SECURITY[parts.scheme],
            "username": None if parts.username is None else unquote(parts.username),
            "password": None if parts.password is None else unquote(parts.password),
        }
        return Email(parts.hostname or "localhost", **{**given, **options})

    def sms(self, **options: Unpack[SmsArguments]) -> Sms:
        """The provider of `BULLPEN_SMS_URL`."""
        from bullpen.plugins.channels.sms import Sms

        given: dict[str, Any] = {**options}
        for name in ("url", "account", "token", "sender"):
            given[name] = given.get(name) or self._need("sms", name)
        return Sms(**given)

    def _need(self, section: str, name: str) -> str:
        value: str | None = getattr(getattr(self._settings, section), name)
        if value is None:
            raise NotConfigured(
                f"{section}.{name} is not configured; set BULLPEN_{section.upper()}_{name.upper()}, or `{name}` in the "
                f"[{section}] section of bullpen.toml"
            )
        return value
