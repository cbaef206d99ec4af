"""The table of our Lua scripts: one entry per file of `lua/`, with the names of its keys and arguments.

In: nothing. Out: `Script` records whose body is ready to send (includes resolved) and whose `sha1` EVALSHA takes.
Elsewhere: sending them (`bullpen.redis.client`, `bullpen.redis.calls`), making key names (`keys`). A test compares
each entry with the header of its file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

__all__ = ["SCRIPTS", "Script", "assemble"]

_LUA = Path(__file__).with_name("lua")
_INCLUDE = re.compile(r"--#include (\S+)")
_SCOPE, _END = "--#scope", "--#end"


@dataclass(frozen=True)
class Script:
    """One atomic operation: `EVALSHA sha1 len(keys) *keys *args`.

    `args` are the leading arguments; a script that takes a list of jobs documents the rest in its header. A program
    uses few of the scripts: each is read when it is first sent.
    """

    name: str
    keys: tuple[str, ...]
    args: tuple[str, ...]

    @cached_property
    def body(self) -> bytes:
        return "\n".join(line for _, _, line in assemble(self.name)).encode()

    @cached_property
    def sha1(self) -> bytes:
        # Not a secret: the server names scripts by this digest.
        return hashlib.sha1(self.body, usedforsecurity=False).hexdigest().encode()


@cache
def _read(name: str) -> tuple[str, ...]:
    return tuple((_LUA / f"{name}.lua").read_text(encoding="utf-8").splitlines())


def assemble(name: str) -> Iterator[tuple[str, int, str]]:
    """Every line of a script as the server gets it, with the file and the number that it comes from.

    `--#include lib/x` stands for that file and, before it, for what that file includes. A file comes once: it is there
    for all that follows. Between `--#scope` and `--#end`, which enclose a block of Lua, includes are there for that
    block only: what few calls need is made only by those.
    """
    return _assemble(name, [set()])


def _assemble(name: str, scopes: list[set[str]]) -> Iterator[tuple[str, int, str]]:
    for number, line in enumerate(_read(name), start=1):
        if line == _SCOPE:
            scopes.append(set())
        elif line == _END:
            scopes.pop()
        elif (include := _INCLUDE.fullmatch(line)) is None:
            yield name, number, line
        elif not any(include[1] in known for known in scopes):
            scopes[-1].add(include[1])
            yield from _assemble(include[1], scopes)


_TABLE = (
    Script(
        "add",
        keys=("call",),
        args=("base", "call_number", "call_ttl_ms", "clock_and_version", "name", "opts", "place"),
    ),
    Script(
        "add_history",
        keys=("minutes", "quarters", "hours"),
        args=("minute_slot", "minute_ttl_s", "quarter_slot", "quarter_ttl_s", "hour_slot", "hour_ttl_s", "most_names"),
    ),
    Script("add_flow", keys=("call",), args=("call_number", "call_ttl_ms", "clock_and_version")),
    Script("leave_parent", keys=("job",), args=("clock_offset",)),
    Script(
        "exchange",
        keys=("call",),
        args=("base", "call_number", "call_ttl_ms", "token", "lock_ms", "take", "worker_name", "extras"),
    ),
    Script("renew", keys=("stalled",), args=("base", "lock_ms")),
    Script(
        "check_stalled",
        keys=("meta", "wait", "active", "stalled", "stalled_check", "events"),
        args=("base", "clock_offset", "interval_ms", "continuing", "lock_ms", "wary", "idle_ms"),
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
    Script("publish_event", keys=("events",), args=("base", "max_len")),
    Script("read_job", keys=("job",), args=("base", "job_id")),
    Script("read_sample", keys=("meta",), args=("base", "most_bytes")),
    Script("read_heads", keys=("meta",), args=("base", "most_bytes")),
    Script(
        "find_jobs",
        keys=("meta",),
        args=("base", "name", "text", "most_bytes", "attempts", "since_ms", "until_ms"),
    ),
    Script("seek", keys=("job", "line"), args=("base", "job_id", "passed")),
    Script("read_result", keys=("job", "completed", "failed"), args=("job_id",)),
    Script("read_events", keys=("events",), args=("after", "count")),
    Script(
        "upsert_scheduler",
        keys=("call",),
        args=(
            *(
                "base",
                "call_number",
                "call_ttl_ms",
                "clock_and_version",
                "scheduler_id",
                "every",
                "first_ms",
                "start_ms",
            ),
            *("offset", "opts_head", "data", "priority", "lifo", "later_ms", "digest"),
        ),
    ),
    Script(
        "advance_scheduler",
        keys=("repeat", "scheduler", "id", "job"),
        args=(
            *("base", "clock_offset", "scheduler_id", "slot", "next_ms", "next_head", "opts_head", "names_time"),
            *("later_ms", "priority", "lifo", "running"),
        ),
    ),
    Script("remove_scheduler", keys=("repeat", "scheduler", "delayed", "meta"), args=("base", "scheduler_id")),
    Script("pause_scheduler", keys=("repeat", "scheduler"), args=("base", "clock_offset", "scheduler_id")),
    Script(
        "resume_scheduler",
        keys=("repeat", "scheduler", "id"),
        args=(
            *("base", "clock_offset", "scheduler_id", "slot", "next_ms", "opts_head", "names_time", "later_ms"),
            *("priority", "lifo", "step"),
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
    Script(
        "sweep",
        keys=("failed", "meta"),
        args=("base", "clock_offset", "interval_ms", "from_ms", "skip", "with_cancelled"),
    ),
    Script("forget_lanes", keys=("meta",), args=()),
    Script("end_sweep", keys=("meta",), args=("until_ms",)),
    Script("sweep_dead_letters", keys=("meta", "failed", "entry_wait"), args=("base", "dead_letter_base", "most")),
    Script(
        "offer_dead_letter",
        keys=("job", "failed"),
        args=(
            *("base", "clock_offset", "job_id", "attempts_started", "dead_letter_base", "entry_id", "entry_name"),
            *("entry_head", "entry_tail", "entry_opts", "data_form", "entry_facts"),
        ),
    ),
    Script(
        "put_dead_letter",
        keys=("entry",),
        args=("dead_letter_base", "clock_offset", "entry_id", "entry_name", "data", "entry_opts", "entry_facts"),
    ),
    Script("index_dead_letters", keys=("facts",), args=("dead_letter_base",)),
    Script("discard", keys=("entry", "entry_wait", "entry_events"), args=("base", "entry_id")),
    Script("change_delay", keys=("job", "delayed"), args=("base", "clock_offset", "job_id", "delay_ms")),
    Script(
        "change_priority",
        keys=("job", "wait", "paused", "prioritized"),
        args=("base", "job_id", "priority", "lifo"),
    ),
    Script("promote", keys=("job", "delayed"), args=("base", "job_id")),
    Script("promote_all", keys=("delayed",), args=("base", "most")),
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
    Script("cancel", keys=("job", "cancels"), args=("base", "clock_offset", "job_id", "text", "reason", "rule")),
    Script("drain", keys=("state_key",), args=("base", "clock_offset", "is_list", "kept", "most")),
    Script(
        "clean",
        keys=("state_key",),
        args=("base", "clock_offset", "state", "grace_ms", "start", "most", "is_first"),
    ),
    Script("obliterate", keys=("meta", "active", "repeat"), args=("base", "clock_offset", "force", "most")),
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
    Script("read_seals", keys=(), args=("mark", "wrapped", "most", "results")),
    Script("read_result_seals", keys=("processed",), args=("cursor", "count", "mark", "most")),
    Script("count_priorities", keys=("prioritized",), args=("after",)),
    Script("hold_lock", keys=("lock",), args=("token", "lease_ms")),
    Script("release_lock", keys=("lock",), args=("token",)),
    Script(
        "commit_entity",
        keys=("entity", "applied", "outcomes", "history"),
        args=("version", "data", "keep_applied", "keep_history", "is_failed", "reason", "key_count", "tenant"),
    ),
    Script("delete_entity", keys=("entity", "applied", "outcomes", "history"), args=("tenant",)),
    Script("take_turn", keys=("turns",), args=("most", "window_ms")),
    Script(
        "configure",
        keys=("meta", "limiter", "wait", "prioritized", "limits_changed"),
        args=("base", "pause_ms"),
    ),
    Script("configure_lane", keys=("meta", "running", "rate", "size"), args=("base", "clock_offset", "lane")),
    Script("count_lanes", keys=("state_key",), args=("base", "is_list", "start", "count")),
)

SCRIPTS: dict[str, Script] = {script.name: script for script in _TABLE}
