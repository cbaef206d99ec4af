"""What is configured from outside: arguments, environment, TOML file, defaults."""

from bullpen.settings.origin import Origin, Setting
from bullpen.settings.sections import (
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
from bullpen.settings.settings import Settings, misspelt_variables

__all__ = [
    "AlertSettings",
    "CodecSettings",
    "DashboardSettings",
    "EmbeddedSettings",
    "EndpointSettings",
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
