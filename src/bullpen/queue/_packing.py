"""The arguments and the reply of the `add` script, for callers with and without an event loop.

In: checked jobs. Out: keys and arguments ready to send, and the records that the script stored. No I/O.
Elsewhere: sending them (`_adder`, `bullpen.sync`), the script itself (`bullpen.wire.lua.add`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from bullpen import _version
from bullpen._kernel import json, tracing
from bullpen.errors import require
from bullpen.wire.keys import QueueKeys
from bullpen.wire.options import JobOptions, make_options
from bullpen.wire.records import JobRecord, check_job_name

MOST_JOBS_PER_CALL: Final = 200
MOST_BYTES_PER_CALL: Final = 1024 * 1024
CALL_TTL_MS: Final = 600_000
VERSION_FIELD: Final = f"bullpen:{_version.__version__}"


class JobArguments:
    """A checked job, ready for the script."""

    __slots__ = ("data", "name", "options", "replaces", "size")

    def __init__(self, name: str, data: bytes, options: JobOptions, *, replaces: bool) -> None:
        self.name, self.data, self.options, self.replaces = name, data, options, replaces
        self.size = len(data) + len(options.wire_json)

    def append_to(self, args: list[Any]) -> None:
        options = self.options
        timestamp_ms, delay_ms, at_ms, priority = options.placement
        args.extend(
            (
                options.job_id or "",
                self.name,
                self.data,
                options.wire_json,
                "" if timestamp_ms is None else timestamp_ms,
                delay_ms,
                "" if at_ms is None else at_ms,
                priority,
                ("3" if options.lifo else "2") if self.replaces else "1" if options.lifo else "",
            )
        )

    def created(self, number: int, now_ms: int) -> JobRecord:
        """The record that the script stored."""
        options = self.options
        timestamp_ms, delay_ms, at_ms, priority = options.placement
        return JobRecord(
            options.job_id or str(number),
            {
                b"name": self.name.encode(),
                b"data": self.data,
                b"opts": options.wire_json,
                b"timestamp": b"%d" % (timestamp_ms or now_ms),
                b"delay": b"%d" % (delay_ms if at_ms is None else max(0, at_ms - now_ms)),
                b"priority": b"%d" % priority,
            },
        )


def check_job(name: str, data: Any, defaults: JobOptions, given: dict[str, Any]) -> tuple[str, bytes, JobOptions, bool]:
    """Name, data, options and whether a finished job is replaced, checked and encoded. Uses up `given`."""
    replaces = given.pop("replace_finished", False)
    if tracing.tracer is not None and "tm" not in given and (context := tracing.as_text(tracing.carrier())):
        given["tm"] = context
    options = make_options(defaults, **given) if given else defaults
    if replaces:
        require("replace_finished", replaces is True, "True or False", replaces)
        require("replace_finished", options.job_id is not None, "a job_id whose place is taken", replaces)
    raw = json.encode({} if data is None else data)
    json.check_payload_size(len(raw), len(options.wire_json))
    return check_job_name(name), raw, options, replaces


def add_keys(keys: QueueKeys, caller_id: str) -> list[str]:
    return [
        *(keys.meta, keys.id, keys.wait, keys.prioritized, keys.pc, keys.marker, keys.events, keys.active),
        keys.call(caller_id),
    ]


def add_arguments(keys: QueueKeys, jobs: Iterable[JobArguments], number: int, clock_offset_ms: int) -> list[Any]:
    args: list[Any] = [keys.base, clock_offset_ms, number, CALL_TTL_MS, VERSION_FIELD]
    for job in jobs:
        job.append_to(args)
    return args


def read_duplicates(taken: list[Any]) -> dict[int, tuple[bytes, list[bytes]]]:
    """State and stored fields of the jobs whose id was taken, by their place in the call."""
    return {taken[at] - 1: (taken[at + 1], taken[at + 2]) for at in range(0, len(taken), 3)}
