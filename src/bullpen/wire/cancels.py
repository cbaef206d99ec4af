"""How a cancelled job is written: the text of its failure, and the wishes that workers read.

In: the reason of whoever cancels. Out: text for `failedReason`, and from stored text and stream entries the reason
again. Elsewhere: writing it (`lua/cancel.lua`), asking (`bullpen.queue.cancel`), obeying (`bullpen.worker`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

_WORD: Final = "cancelled"


class CancelRequest(NamedTuple):
    """Somebody wants the run of a job to end."""

    job_id: str
    token: str
    """Of the lock when it was asked: a later run of the same job is not meant."""
    reason: str


def cancel_text(reason: str) -> str:
    """What a cancelled job failed with, readable for every client."""
    return f"{_WORD}: {reason}" if reason else _WORD


def reason_in(deferred_failure: str) -> str | None:
    """The reason behind a deferred failure that is a cancellation; None: it is another one."""
    word, _, reason = deferred_failure.partition(": ")
    return reason if word == _WORD else None


def read_requests(reply: Any) -> tuple[bytes | None, list[CancelRequest]]:
    """Id of the last entry, and what was asked, from the reply to XREAD."""
    if not reply:
        return None, []
    entries = reply[0][1]
    requests = []
    for _, flat in entries:
        fields = dict(zip(flat[::2], flat[1::2], strict=False))
        job_id, token, reason = (fields.get(name, b"") for name in (b"job", b"token", b"reason"))
        requests.append(CancelRequest(_id(job_id), _id(token), reason.decode("utf-8", "replace")))
    return entries[-1][0], requests


def _id(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
