"""The entry that stands for a finally failed job in its dead-letter queue.

In: a failed job. Out: the JSON around its payload (the script puts the stored bytes in between, so they stay exact);
and back, the payload of an entry. No input or output here.
Elsewhere: writing it with the move to failed (`bullpen.worker.exchange`), later (`sweep`), and what an operator
does with it (`operations`).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from bullpen._kernel import json
from bullpen._kernel.clock import ServerClock
from bullpen._kernel.outcome import Cause, Failed
from bullpen.errors import DeadLetterNotEditable, InvalidOption
from bullpen.ports.dead_letters import DeadLetter
from bullpen.queue.dead_letters.index import facts_of
from bullpen.queue.job import Job
from bullpen.wire.envelope import seal_words
from bullpen.wire.keys import QueueKeys, slot

_ENTRY_OPTS: Final = {"attempts": 1, "removeOnComplete": False, "removeOnFail": False}


def entry_id(job_id: str, attempts_started: int) -> str:
    """The same failure always gets the same id, so it cannot be written twice."""
    return f"dl-{job_id}-{attempts_started}".replace(":", "%3A")


def entry_options(identity: str) -> bytes:
    """The options of an entry: no worker takes it, and nothing removes it."""
    return msgspec.json.encode({**_ENTRY_OPTS, "jobId": identity})


def check_same_slot(keys: QueueKeys, dead_letter_keys: QueueKeys) -> None:
    """One script writes both queues; with a cluster tag they must be in one slot."""
    if keys.hash_tag is not None and slot(keys.base) != slot(dead_letter_keys.base):
        raise InvalidOption(
            "dead_letters",
            f"a dead-letter queue in the cluster slot of {keys.name!r} (keep its {{tag}})",
            dead_letter_keys.name,
        )


def check_not_sealed(store: str, entry_id: str, data: Any) -> None:
    """A sealed payload goes back unchanged: an edit would be plain text, or no payload at all."""
    if (words := seal_words(data)) is not None:
        reason = f"its payload is {words}; redrive it as it is, or add a new job with a queue that has the codec"
        raise DeadLetterNotEditable(store, entry_id, reason)


class DeadLetterWriter:
    """Makes the arguments that let the exchange write an entry."""

    def __init__(
        self, keys: QueueKeys, dead_letter_keys: QueueKeys, clock: ServerClock, *, with_cancelled: bool = False
    ) -> None:
        check_same_slot(keys, dead_letter_keys)
        self.with_cancelled = with_cancelled
        """Whether cancelled jobs get one too."""
        self.base = dead_letter_keys.base
        self.name = dead_letter_keys.name
        self._queue = keys.name
        self._clock = clock

    def wants(self, failed: Failed) -> bool:
        """Whether this failure needs a person: a job that was cancelled on purpose does not."""
        return self.with_cancelled or failed.cause is not Cause.CANCELLED

    def parts(self, job: Job, failed: Failed) -> tuple[str, str, bytes, bytes, bytes, str, bytes]:
        """The entry of a job that fails now: its id and name, the JSON before and after the payload, its options, and
        what the script does with the payload."""
        return self._parts(
            job,
            {
                "error": {"message": failed.reason, "stack": failed.stack},
                "errorMessage": _first_line(failed.reason),
                "cause": failed.cause.value,
                "failedAt": _iso(self._clock.now_ms()),
                "attemptsMade": job.attempts_made + 1,
            },
        )

    def parts_of_failed(self, job: Job) -> tuple[str, str, bytes, bytes, bytes, str, bytes]:
        """The same for a job that failed before, perhaps in a worker of another client; its cause is not known."""
        reason = job.record.raw_failed_reason or ""
        return self._parts(
            job,
            {
                "error": {"message": reason, "stack": job.stacktrace[-1] if job.stacktrace else None},
                "errorMessage": _first_line(reason),
                "failedAt": _iso(job.finished_on or self._clock.now_ms()),
                "attemptsMade": job.attempts_made,
            },
        )

    def _parts(self, job: Job, failure: dict[str, Any]) -> tuple[str, str, bytes, bytes, bytes, str, bytes]:
        record = job.record
        identity = _storable(entry_id(job.id, job.attempts_started))
        form = _form_of(record.raw_data)
        # Of a sealed payload nothing is shown, not even ids: whoever opened it here has a key, readers may not.
        data = job.data if form == "json" and not record.is_sealed else None
        head: dict[str, Any] = {
            "originalJobId": _storable(job.id),
            "originalJobName": job.name,
            "originalQueue": self._queue,
            "originalTimestamp": record.timestamp,
            "originalOpts": _raw_json(record.raw_opts),
            **failure,
            "attemptsStarted": job.attempts_started,
        }
        if job.priority:
            head["originalPriority"] = job.priority
        if record.parent_key:
            head["parent"] = record.parent_key
        for name in ("runId", "tenantId"):
            if isinstance(data, dict) and isinstance(data.get(name), str):
                head[name] = data[name]
        if form != "json":
            head["originalDataForm"] = form
        before = b'{"originalData":'
        if form == "base64":
            before += b'"' + base64.b64encode(record.raw_data) + b'"'
        return (
            identity,
            f"{job.name}-failed",
            before,
            # Last, so that it counts: whoever may write the job can put other data there now, with members of its own.
            b"," + msgspec.json.encode(head)[1:],
            entry_options(identity),
            _HOW_THE_SCRIPT_PUTS_IT[form],
            facts_of(DeadLetter.from_entry(identity, head, source=self._queue)),
        )


_HOW_THE_SCRIPT_PUTS_IT: Final = {"json": "", "text": "text", "base64": "sent"}


def _form_of(raw: bytes) -> str:
    """How a payload can stand inside an entry. What only lenient readers take would make the whole entry unreadable."""
    if _is_strict_json(raw):
        return "json"
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "base64"
    return "text"


def original_data(entry: dict[str, msgspec.Raw]) -> bytes:
    """The payload of the job that failed, byte for byte."""
    raw = bytes(entry.get("originalData", msgspec.Raw(b"{}")))
    form = bytes(entry.get("originalDataForm", msgspec.Raw(b'"json"')))
    if form == b'"json"':
        return raw
    text = str(json.decode(raw))
    return base64.b64decode(text) if form == b'"base64"' else text.encode()


def _is_strict_json(raw: bytes) -> bool:
    try:
        msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _raw_json(raw: bytes) -> Any:
    """Stored JSON as it is, so that nothing is lost on the way; broken JSON as none."""
    return msgspec.Raw(raw) if _is_strict_json(raw) else {}


def _storable(job_id: str) -> str:
    """An id that is no UTF-8 shows its bytes as escapes: JSON holds text only."""
    return job_id.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _iso(epoch_ms: int) -> str:
    return datetime.fromtimestamp(epoch_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def complete_entry(letter: DeadLetter) -> dict[str, Any]:
    """The entry with at least what a redrive needs: one that was made elsewhere may know other fields only."""
    known: Mapping[str, Any] = {
        "originalJobId": letter.message_id,
        "originalJobName": letter.name or "unknown",
        "originalQueue": letter.source,
        "originalData": letter.data,
        "error": {"message": letter.error_message, "stack": letter.error_stack},
        "failedAt": letter.failed_at,
        "attemptsMade": letter.attempts_made,
        "attemptsStarted": starts_of(letter),
    }
    perhaps = {"cause": letter.cause, "tenantId": letter.tenant_id}
    return {**known, **{name: value for name, value in perhaps.items() if value is not None}, **letter.entry}


def starts_of(letter: DeadLetter) -> int:
    """How often the work had been started, by the entry, by the end of its id, or by its attempts."""
    told = letter.entry.get("attemptsStarted")
    if isinstance(told, int) and told >= 0:
        return told
    last = letter.id.rpartition("-")[2]
    return int(last) if last.isdecimal() else max(1, letter.attempts_made)
