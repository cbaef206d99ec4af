"""Names and ids: which are allowed, and how new ones are made.

In: ids and names of callers. Out: the same text, or InvalidOption that says what is wrong with it.
Elsewhere: the Redis keys built from them (`bullpen.wire.keys`).
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import uuid
from typing import Any
from urllib.parse import quote, unquote

from bullpen.errors import InvalidOption

MAX_ID_LENGTH = 500
MAX_LANE_LENGTH = 255

QUEUE_SUFFIXES = frozenset(
    {
        "meta", "id", "wait", "paused", "active", "prioritized", "pc", "delayed", "waiting-children", "completed",
        "failed", "stalled", "stalled-check", "limiter", "marker", "events", "repeat", "de", "dn", "metrics",
        "delay", "priority", "bp",
    }
)  # fmt: skip
"""Last parts of the keys of a queue. A job with such an id would share a key with the queue itself and corrupt it."""

JOB_SUFFIXES = frozenset({"lock", "logs", "dependencies", "processed", "failed", "unsuccessful"})
"""Last parts of the keys that belong to one job."""

RESERVED = QUEUE_SUFFIXES | JOB_SUFFIXES

# Keys of a queue with further parts: `repeat:<scheduler>:<ms>`, `metrics:completed:data`, `de:<id>`, `bp:call:<id>`.
_FAMILIES = frozenset({"repeat", "de", "dn", "metrics", "bp"})

_integer_like = re.compile(r"[+-]?[0-9]+").fullmatch
_plain = re.compile(r"[A-Za-z][A-Za-z0-9_-]*").fullmatch
_control = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]").search


def check_job_id(job_id: Any) -> str:
    """Return the id if a job may have it, by the rules of BullMQ and a few more that keep its keys apart.

    Raises InvalidOption for option `job_id`.
    """
    if not isinstance(job_id, str) or not job_id:
        raise InvalidOption("job_id", "non-empty text", job_id)
    if len(job_id) > MAX_ID_LENGTH:
        raise InvalidOption("job_id", f"at most {MAX_ID_LENGTH} characters", job_id)
    if _plain(job_id) and job_id not in RESERVED:  # nearly always
        return job_id
    if _control(job_id):
        raise InvalidOption("job_id", "text without line breaks, control characters or lone surrogates", job_id)
    if _integer_like(job_id):
        raise InvalidOption(
            "job_id", "an id that is not a number (BullMQ's counter uses numbers)", job_id, suggestion=f"job-{job_id}"
        )
    if job_id in RESERVED:
        raise InvalidOption(
            "job_id", "an id that is not one of the queue's own keys", job_id, suggestion=f"job-{job_id}"
        )
    if ":" in job_id:
        _check_segments(job_id)
    return job_id


def _check_segments(job_id: str) -> None:
    segments = job_id.split(":")
    if len(segments) != 3:
        raise InvalidOption(
            "job_id", "no ':' or exactly two (BullMQ's rule)", job_id, suggestion=encode_segment(job_id)
        )
    if segments[0] == "0":
        raise InvalidOption("job_id", "an id that does not start with '0:'", job_id)
    if segments[0] in _FAMILIES or segments[2] in JOB_SUFFIXES:
        raise InvalidOption(
            "job_id", "an id that is not one of the queue's own keys", job_id, suggestion=encode_segment(job_id)
        )


def check_lane(lane: Any) -> str:
    """Return the name if a lane may have it. Raises InvalidOption for option `lane`."""
    if not isinstance(lane, str) or not lane:
        raise InvalidOption("lane", "non-empty text", lane)
    if len(lane) > MAX_LANE_LENGTH:
        raise InvalidOption("lane", f"at most {MAX_LANE_LENGTH} characters", lane)
    if _control(lane) or lane != lane.strip():
        raise InvalidOption("lane", "text without control characters or spaces at its ends", lane)
    return lane


def check_scheduler_id(scheduler_id: Any) -> str:
    """Return the id if a job scheduler may have it. Raises InvalidOption for option `scheduler_id`.

    BullMQ takes any text. But `<id>:<number>` is the name of a job of the scheduler `<id>`, and `<id>:lock` that of a
    lock: such records would share a key.
    """
    if not isinstance(scheduler_id, str) or not scheduler_id:
        raise InvalidOption("scheduler_id", "non-empty text", scheduler_id)
    if len(scheduler_id) > MAX_ID_LENGTH:
        raise InvalidOption("scheduler_id", f"at most {MAX_ID_LENGTH} characters", scheduler_id)
    if _control(scheduler_id):
        raise InvalidOption(
            "scheduler_id", "text without line breaks, control characters or lone surrogates", scheduler_id
        )
    _, colon, last = scheduler_id.rpartition(":")
    if colon and (last in JOB_SUFFIXES or _integer_like(last)):
        expected = "an id that does not end like the key of a job: `:` and a number, or `:lock` and the like"
        raise InvalidOption("scheduler_id", expected, scheduler_id, suggestion=encode_segment(scheduler_id))
    return scheduler_id


def check_stored_id(option: str, given: Any) -> str:
    """Return the id if something may be stored under it by any client; one that is no UTF-8 was read with surrogates in
    place of its bytes. Raises InvalidOption."""
    if not isinstance(given, str):
        raise InvalidOption(option, "an id as text", given)
    try:
        given.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidOption(option, "an id as text without lone surrogates", given) from None
    return given


class ForeignName(str):
    """The name of a queue that another library made, as it stands: it may be empty."""

    __slots__ = ()


def check_queue_name(name: Any) -> str:
    """Return the name if a queue may have it. Raises InvalidOption for option `queue`."""
    if type(name) is ForeignName:
        return name
    if not isinstance(name, str) or not name:
        raise InvalidOption("queue", "non-empty text as the queue's name", name)
    if _control(name) or name != name.strip():
        raise InvalidOption("queue", "a name without control characters or spaces at its ends", name)
    if ":" in name:
        expected = "a name without ':', which separates the parts of Redis keys"
        raise InvalidOption("queue", expected, name, suggestion=name.replace(":", "-"))
    return name


def check_prefix(prefix: Any) -> str:
    """Return the key prefix if it may be used; `{bull}` puts all its queues in one cluster slot."""
    if not isinstance(prefix, str) or not prefix:
        raise InvalidOption("prefix", "non-empty text", prefix)
    if _control(prefix) or prefix != prefix.strip():
        raise InvalidOption("prefix", "text without control characters or spaces at its ends", prefix)
    if prefix.endswith(":"):
        expected = "text that does not end with ':', which is added"
        raise InvalidOption("prefix", expected, prefix, suggestion=prefix.rstrip(":") or "bull")
    return prefix


def is_encodable(text: str) -> bool:
    """False for text with lone surrogates, which no UTF-8 field can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_segment(text: str) -> str:
    """Percent-encode what may not stand inside an id (`:` and the like). Reversible; different texts stay different."""
    return quote(text, safe="-_.~@+=,!()*' ", errors="surrogatepass")


def decode_segment(segment: str) -> str:
    """Undo `encode_segment`."""
    return unquote(segment, errors="surrogatepass")


def random_id(prefix: str = "") -> str:
    """A new id, never seen before: `<prefix>-<uuid4>`. The random part, not the clock, makes it unique."""
    return check_job_id(f"{encode_segment(prefix)}-{uuid.uuid4()}" if prefix else str(uuid.uuid4()))


def keyed_id(*parts: str) -> str:
    """The same id for the same parts, another id for others, so that adding twice makes one job.

    `keyed_id("send-email", "urn:order:1")` is `send-email~urn%3Aorder%3A1`. Parts too long for an id become a digest.
    """
    joined = "~".join(encode_segment(part).replace("~", "%7E") for part in parts)
    if not joined:
        raise InvalidOption("job_id", "at least one part that is not empty", parts)
    if len(joined) > MAX_ID_LENGTH:
        # No encoded text begins like this, so a digest never meets one.
        return f"%sha256~{hashlib.sha256(joined.encode()).hexdigest()}"
    if joined in RESERVED or _integer_like(joined):
        # Encoding one more character makes it an allowed id that still decodes to the same part.
        joined = f"%{ord(joined[0]):02X}{joined[1:]}"
    return check_job_id(joined)


def worker_name() -> str:
    """`{hostname}-{pid}-{random}`: tells on which machine and process a job ran."""
    return f"{clean_name(socket.gethostname()) or 'host'}-{os.getpid()}-{secrets.token_hex(4)}"


def clean_name(name: str) -> str:
    """Drop what a Redis connection name cannot hold (spaces, control characters) and colons, its separator."""
    return re.sub(r"[^!-9;-~]", "", name)


def new_token() -> str:
    """A lock token that nobody else has."""
    return str(uuid.uuid4())
