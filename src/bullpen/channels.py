"""Where a delivery leaves: webhooks, Kafka, Slack, email, SMS, queues, and what a channel of one's own needs.

    from bullpen.channels import Webhook

Each channel is loaded when it is first named, and with it its driver (the extras `http`, `kafka` and `email`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bullpen._kernel.lazy import lazy

if TYPE_CHECKING:
    from bullpen.plugins.channels.email import Email, EmailArguments, EmailTemplate
    from bullpen.plugins.channels.kafka import KafkaChannel, KafkaChannelArguments
    from bullpen.plugins.channels.queue import QueueChannel
    from bullpen.plugins.channels.slack import Slack, SlackArguments
    from bullpen.plugins.channels.sms import Sms, SmsArguments
    from bullpen.plugins.channels.webhook import Webhook, WebhookArguments
    from bullpen.ports.channel import (
        Accepted,
        Channel,
        ChannelHealth,
        LooksUp,
        Message,
        NotTried,
        Refused,
        SendResult,
        Unavailable,
        Unknown,
        WhenUnknown,
        when_unknown,
    )

__all__ = [
    "Accepted",
    "Channel",
    "ChannelHealth",
    "Email",
    "EmailArguments",
    "EmailTemplate",
    "KafkaChannel",
    "KafkaChannelArguments",
    "LooksUp",
    "Message",
    "NotTried",
    "QueueChannel",
    "Refused",
    "SendResult",
    "Slack",
    "SlackArguments",
    "Sms",
    "SmsArguments",
    "Unavailable",
    "Unknown",
    "Webhook",
    "WebhookArguments",
    "WhenUnknown",
    "when_unknown",
]

_HOMES: Final = {
    "bullpen.plugins.channels.email": ("Email", "EmailArguments", "EmailTemplate"),
    "bullpen.plugins.channels.kafka": ("KafkaChannel", "KafkaChannelArguments"),
    "bullpen.plugins.channels.queue": ("QueueChannel",),
    "bullpen.plugins.channels.slack": ("Slack", "SlackArguments"),
    "bullpen.plugins.channels.sms": ("Sms", "SmsArguments"),
    "bullpen.plugins.channels.webhook": ("Webhook", "WebhookArguments"),
    "bullpen.ports.channel": (
        *("Accepted", "Channel", "ChannelHealth", "LooksUp", "Message", "NotTried", "Refused", "SendResult"),
        *("Unavailable", "Unknown", "WhenUnknown", "when_unknown"),
    ),
}

# Hidden from type checkers, which would otherwise believe that every name exists.
if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
