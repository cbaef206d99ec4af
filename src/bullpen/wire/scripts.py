"""The table of our Lua scripts: one entry per file of `lua/`, with the names of its keys and arguments.

In: nothing. Out: `Script` records whose body is ready to send (includes resolved) and whose `sha1` EVALSHA takes.
Elsewhere: sending them (`bullpen.queue._redis`, `bullpen.queue._caller`), making key names (`keys`). A test compares
each entry with the header of its file.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

__all__ = ["SCRIPTS", "Script"]

_INCLUDE = re.compile(r"^--#include (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """One atomic operation: `EVALSHA sha1 len(keys) *keys *args`.

    `args` are the leading arguments; a script that takes a list of jobs documents the rest in its header.
    """

    name: str
    keys: tuple[str, ...]
    args: tuple[str, ...]
    body: bytes = field(init=False, repr=False)
    sha1: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        body = _assemble(self.name).encode()
        object.__setattr__(self, "body", body)
        # Not a secret: the server names scripts by this digest.
        object.__setattr__(self, "sha1", hashlib.sha1(body, usedforsecurity=False).hexdigest().encode())


@cache
def _read(name: str) -> str:
    return (resources.files(__package__) / "lua" / f"{name}.lua").read_text(encoding="utf-8")


def _assemble(name: str) -> str:
    """Replace each `--#include lib/x` by that file. Includes are not nested: their order stands in the script."""
    return _INCLUDE.sub(lambda match: _read(match[1]).rstrip("\n"), _read(name))


_TABLE = (
    Script(
        "add",
        keys=("call",),
        args=("base", "call_number", "call_ttl_ms", "clock_and_version", "name", "opts", "place"),
    ),
    Script(
        "exchange",
        keys=("call",),
        args=("base", "call_number", "call_ttl_ms", "token", "lock_ms", "take", "worker_name", "extras"),
    ),
    Script("renew", keys=("stalled",), args=("base", "lock_ms")),
    Script(
        "check_stalled",
        keys=("meta", "wait", "active", "stalled", "stalled_check", "events"),
        args=("base", "clock_offset", "interval_ms", "continuing", "lock_ms", "wary"),
    ),
    Script(
        "judge_suspect",
        keys=("job", "lock"),
        args=("token", "attempts_started", "stalled_count", "attempts_made", "limit"),
    ),
    Script("begin_solo", keys=("job", "lock"), args=("token", "attempts_started", "stalled_count", "attempts_made")),
    Script(
        "retire",
        keys=("set",),
        args=("base", "clock_offset", "option", "count", "age_ms", "needs_letters", "after_id", "after_score"),
    ),
    Script("pause", keys=("meta", "marker", "events"), args=("base",)),
    Script("resume", keys=("meta", "wait", "paused", "prioritized", "events"), args=("base",)),
    Script("update_progress", keys=("job", "meta", "events"), args=("job_id", "progress")),
    Script("update_data", keys=("job",), args=("data",)),
    Script("add_log", keys=("job", "logs"), args=("line", "keep")),
    Script("read_job", keys=("job",), args=("base", "job_id")),
    Script("seek", keys=("job", "line"), args=("base", "job_id", "passed")),
    Script("read_result", keys=("job", "completed", "failed"), args=("job_id",)),
    Script("read_events", keys=("events",), args=("after", "count")),
    Script(
        "advance_scheduler",
        keys=("repeat", "scheduler", "id", "events"),
        args=(
            *("base", "clock_offset", "scheduler_id", "job_id", "pattern_next_ms"),
            *("opts", "name", "data", "every", "offset", "limit", "end_ms"),
        ),
    ),
    Script(
        "redrive",
        keys=("entry", "job", "failed"),
        args=(
            *("base", "clock_offset", "dead_letter_base", "entry_id", "job_id", "name", "data", "opts", "timestamp"),
            *("priority", "lifo", "attempts_started", "history", "note", "edited"),
        ),
    ),
    Script(
        "redrive_failed",
        keys=("job", "failed"),
        args=(
            *("base", "clock_offset", "dead_letter_base", "job_id", "attempts_started", "note"),
            *("data", "data_digest"),
        ),
    ),
    Script("discard_failed", keys=("job", "failed"), args=("base", "clock_offset", "job_id", "attempts_started")),
    Script(
        "put_failed",
        keys=("job", "failed", "meta", "events"),
        args=(
            *("clock_offset", "job_id", "name", "data", "opts", "timestamp", "finished_on", "attempts_started"),
            *("attempts_made", "failed_reason", "stacktrace", "version"),
        ),
    ),
    Script("sweep", keys=("failed", "meta"), args=("base", "clock_offset", "interval_ms", "from_ms", "skip")),
    Script("end_sweep", keys=("meta",), args=("until_ms",)),
    Script("sweep_letters", keys=("meta", "failed", "entry_wait"), args=("base", "dead_letter_base", "most")),
    Script(
        "offer_dead_letter",
        keys=("job", "failed"),
        args=(
            *("base", "clock_offset", "job_id", "attempts_started", "dead_letter_base", "entry_id", "entry_name"),
            *("entry_head", "entry_tail", "entry_opts", "data_form"),
        ),
    ),
    Script("discard", keys=("entry", "entry_wait", "entry_events"), args=("base", "entry_id")),
    Script("change_delay", keys=("job", "delayed"), args=("base", "clock_offset", "job_id", "delay_ms")),
    Script(
        "change_priority",
        keys=("job", "wait", "paused", "prioritized"),
        args=("base", "job_id", "priority", "lifo"),
    ),
    Script("promote", keys=("job", "delayed"), args=("base", "job_id")),
    Script("promote_all", keys=("delayed",), args=("base",)),
    Script(
        "retry",
        keys=("job", "finished"),
        args=("base", "job_id", "state", "resets_attempts", "dead_letter_base"),
    ),
    Script(
        "retry_all",
        keys=("finished",),
        args=("base", "clock_offset", "state", "until_ms", "most", "resets_attempts", "dead_letter_base"),
    ),
    Script(
        "remove", keys=("job",), args=("base", "clock_offset", "job_id", "with_children", "only_unfinished", "parent")
    ),
    Script("drain", keys=("state_key",), args=("base", "clock_offset", "is_list", "kept", "most")),
    Script(
        "clean",
        keys=("state_key",),
        args=("base", "clock_offset", "state", "grace_ms", "start", "most", "is_first"),
    ),
    Script("obliterate", keys=("meta", "active", "repeat"), args=("base", "clock_offset", "force")),
    Script(
        "remove_orphans",
        keys=("meta", "wait", "paused", "active"),
        args=("base", "clock_offset", "search", "not_met", "mode"),
    ),
    Script(
        "read_line",
        keys=("line", "twin"),
        args=("base", "count", "newest_first", "strict", "position", "around"),
    ),
    Script("count_priorities", keys=("prioritized",), args=("after",)),
    Script("hold_lock", keys=("lock",), args=("token", "lease_ms")),
    Script("release_lock", keys=("lock",), args=("token",)),
    Script(
        "commit_entity",
        keys=("entity", "applied", "outcomes", "history"),
        args=("version", "data", "keep_applied", "keep_history", "is_failed", "reason", "key_count", "tenant"),
    ),
    Script("take_turn", keys=("turns",), args=("most", "window_ms")),
    Script(
        "configure",
        keys=("meta", "limiter", "wait", "prioritized", "limits_changed"),
        args=("base", "pause_ms"),
    ),
)

SCRIPTS: dict[str, Script] = {script.name: script for script in _TABLE}
