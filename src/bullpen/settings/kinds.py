"""Kinds of values that are particular to settings: addresses, names, secrets, files.

In: a value from an argument, a variable or a file. Out: whether it can be used, and how it is shown; secrets are not.
Elsewhere: numbers, choices and switches (`bullpen._kernel.options`).
"""

from __future__ import annotations

import re
from pathlib import Path

from bullpen._kernel.addresses import show_address
from bullpen._kernel.cron import next_after
from bullpen._kernel.ids import check_prefix
from bullpen._kernel.options import OptionKind, at_least
from bullpen.errors import InvalidOption, require

SCHEMES = (
    *("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
    "embedded",
)
_is_address = re.compile(rf"(?:{'|'.join(map(re.escape, SCHEMES))})://[^\x00-\x1f]+").fullmatch
ADDRESS = OptionKind(
    "an address that starts with " + ", ".join(f"{scheme}://" for scheme in SCHEMES),
    lambda value: isinstance(value, str) and _is_address(value) is not None,
    str.strip,
    show_address,
)


_is_database = re.compile(r"(?:postgres(?:ql)?|sqlite)(?:\+[a-z0-9]+)?://[^\x00-\x1f]+").fullmatch
DATABASE = OptionKind(
    "postgresql://user@host/database or sqlite:///path",
    lambda value: isinstance(value, str) and _is_database(value) is not None,
    str.strip,
    show_address,
)
_COUNT = at_least(1)
COUNT_OR_AUTO = OptionKind(
    f"{_COUNT.expected}, or 'auto'",
    lambda value: value == "auto" or _COUNT.accepts(value),
    lambda text: "auto" if text.strip() == "auto" else _COUNT.from_text(text),
)
_is_name = re.compile(r"[a-z_][a-z0-9_]{0,62}").fullmatch
NAME = OptionKind(
    "lower-case letters, digits and underscores, not beginning with a digit",
    lambda value: isinstance(value, str) and _is_name(value) is not None,
    str.strip,
)
_is_amqp = re.compile(r"amqps?://[^\x00-\x20,]+(?:\s*,\s*amqps?://[^\x00-\x20,]+)*").fullmatch
AMQP = OptionKind(
    "an address that starts with amqp:// or amqps://, or several separated by commas",
    lambda value: isinstance(value, str) and _is_amqp(value) is not None,
    str.strip,
    show_address,
)
BROKERS = OptionKind(
    "host:port, or several separated by commas",
    lambda value: isinstance(value, str) and re.fullmatch(r"[^\s,]+(?:\s*,\s*[^\s,]+)*", value) is not None,
    str.strip,
)
_is_event_store = re.compile(r"(?:esdb|kurrentdb|kdb)(?:\+discover)?://[^\x00-\x20]+").fullmatch
EVENT_STORE = OptionKind(
    "esdb+discover://host:port, or esdb:// or kurrentdb://",
    lambda value: isinstance(value, str) and _is_event_store(value) is not None,
    str.strip,
    show_address,
)
PREFIXES = OptionKind(
    "a prefix of event types, such as 'payment.', or several separated by commas",
    lambda value: (
        isinstance(value, str) and re.fullmatch(r"\s*[^\s,$][^\s,]*(?:\s*,\s*[^\s,$][^\s,]*)*\s*", value) is not None
    ),
    str.strip,
)
GROUP = OptionKind(
    "the name of a persistent subscription, at most 200 characters",
    lambda value: isinstance(value, str) and re.fullmatch(r"[^\x00-\x1f]{1,200}", value) is not None,
    str.strip,
)
AMQP_NAME = OptionKind(
    "the name of a queue or exchange, at most 200 characters",
    lambda value: isinstance(value, str) and re.fullmatch(r"[^\x00-\x1f]{1,200}", value) is not None,
    str.strip,
)
# An integration type, whose column has 120 characters; without a channel it is a queue.
TOPIC = OptionKind(
    "the name of a queue or an integration type such as 'kafka:outbox.dead', at most 100 characters",
    lambda value: isinstance(value, str) and re.fullmatch(r"[^\x00-\x1f]{1,100}", value) is not None,
    str.strip,
)

_is_smtp = re.compile(r"(?:smtps?|smtp\+plain)://[^\x00-\x20]+").fullmatch
SMTP = OptionKind(
    "smtp://user:password@host:587 (STARTTLS), smtps://… (TLS) or smtp+plain://… (no encryption)",
    lambda value: isinstance(value, str) and _is_smtp(value) is not None,
    str.strip,
    show_address,
)
_is_https = re.compile(r"https?://[^\x00-\x20]+").fullmatch
HTTPS = OptionKind(
    "an address that starts with https://",
    lambda value: isinstance(value, str) and _is_https(value) is not None,
    str.strip,
    show_address,
)
WORDS = OptionKind(
    "printable text", lambda value: isinstance(value, str) and value.isprintable() and value.strip() != "", str.strip
)
SECRET_ADDRESS = OptionKind(HTTPS.expected, HTTPS.accepts, str.strip, lambda _: "***")
MAIL = OptionKind(
    "a mail address",
    lambda value: isinstance(value, str) and re.fullmatch(r"[^\s@<>,]+@[^\s@<>,]+", value) is not None,
    str.strip,
)
PHONE = OptionKind(
    "a telephone number such as +4930123456",
    lambda value: isinstance(value, str) and re.fullmatch(r"\+[1-9][0-9]{6,14}", value) is not None,
    str.strip,
)
SECRET = OptionKind("printable text", WORDS.accepts, str.strip, lambda _: "***")


def _is_pattern(value: object) -> bool:
    try:
        next_after(value, None, 0) if isinstance(value, str) else require("pattern", False, "text", value)
    except InvalidOption:
        return False
    return True


CRON = OptionKind("a cron pattern such as '* * * * *'", _is_pattern, str.strip)


def _is_prefix(value: object) -> bool:
    try:
        check_prefix(value)
    except InvalidOption:
        return False
    return True


_is_key_list = re.compile(r"\s*[\w.-]+:[A-Za-z0-9+/]{43}=\s*(?:,\s*[\w.-]+:[A-Za-z0-9+/]{43}=\s*)*").fullmatch
KEYS = OptionKind(
    "id:key, or several separated by commas, each key 32 bytes as base64",
    lambda value: isinstance(value, str) and _is_key_list(value) is not None,
    str.strip,
    lambda _: "***",
)
_is_store = re.compile(r"file:///[^\x00-\x1f]+|s3://[A-Za-z0-9.-]+(?:/[A-Za-z0-9=._/-]*)?").fullmatch
OBJECTS = OptionKind(
    "file:///directory or s3://bucket/prefix",
    lambda value: isinstance(value, str) and _is_store(value) is not None,
    str.strip,
)
PREFIX = OptionKind("text without control characters, spaces at its ends, or ':' as its last character", _is_prefix)
FILE = OptionKind(
    "the path of a file",
    lambda value: isinstance(value, str | Path) and str(value) != "" and "\0" not in str(value),
    is_path=True,
)
DIRECTORY = OptionKind(
    "the path of a directory",
    lambda value: isinstance(value, str | Path) and str(value) != "" and "\0" not in str(value),
    is_path=True,
)
