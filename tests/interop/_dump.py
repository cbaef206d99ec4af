"""Read everything a queue has in Redis, in a form that two runs can be compared in.

In: a client and the names of the queues. Out: `dump`, JSON-ready, with instants, tokens and stack texts replaced by
placeholders; `diff`, the list of differences between two dumps, less what we add on purpose (`OUR_ADDITIONS`).

A placeholder keeps what can be said about a value: a score that equals the job's `finishedOn` reads `finishedOn`, one
that equals its creation time plus its delay reads `timestamp+delay`; any other instant is `<ms>`.
"""

import difflib
import json
import re
from collections.abc import Collection, Sequence
from typing import Any, Protocol

Dump = dict[str, Any]

PREFIX = "bull"
_SEQUENCE = 4096  # delayed score = due ms x 4096 + sequence
_PRIORITY = 2**32  # prioritized score = priority x 2^32 + counter
_ROUNDED_MS = 1000  # a handler names the instant, the delay is what is then left of it
_MS_FIELDS = {"timestamp", "processedOn", "finishedOn", "prevTS", "prevMillis", "startDate", "endDate"}
_JSON_FIELDS = {"data", "opts", "parent", "progress", "returnvalue"}
_INT_FIELDS = {"ats", "atm", "stc", "ic", "priority", "delay", "count", "prevCount", "every", "limit"}
_SLOT = re.compile(r"repeat:([^:]+):(\d{13})")
_JOB_PARTS = {"lock", "logs", "dependencies", "processed", "failed", "unsuccessful"}

# Keys whose presence depends on whether an idle worker has just looked: hints and gates, never state.
TRANSIENT = frozenset({"marker", "pc", "stalled", "stalled-check"})


# One script, so that no worker changes anything between two keys. Reply: name, type, PTTL, value of every key.
_READ_ALL = """
local found = {}
for _, pattern in ipairs(ARGV) do
  for _, key in ipairs(redis.call("KEYS", pattern)) do
    local kind = redis.call("TYPE", key).ok
    local value
    if kind == "string" then value = redis.call("GET", key)
    elseif kind == "list" then value = redis.call("LRANGE", key, 0, -1)
    elseif kind == "set" then value = redis.call("SMEMBERS", key)
    elseif kind == "hash" then value = redis.call("HGETALL", key)
    elseif kind == "zset" then value = redis.call("ZRANGE", key, 0, -1, "WITHSCORES")
    elseif kind == "stream" then value = redis.call("XRANGE", key, "-", "+")
    end
    found[#found + 1] = { key, kind, redis.call("PTTL", key), value }
  end
end
return found
"""


class RedisReader(Protocol):
    """The one method of a blocking, undecoded redis-py client that a dump needs."""

    def execute_command(self, *args: Any) -> Any: ...


def dump(client: RedisReader, queues: Sequence[str], *, prefix: str = PREFIX, without: Collection[str] = ()) -> Dump:
    """All keys of the queues with type, value and whether they expire, and the event streams in order.

    `without` names suffixes that are left out, such as TRANSIENT.
    """
    patterns = [_glob_literal(f"{prefix}:{queue}:") + "*" for queue in queues]
    found = {
        _text(name): (_text(kind), ttl, value)
        for name, kind, ttl, value in client.execute_command("EVAL", _READ_ALL, 0, *patterns)
    }
    hashes = {name: _pairs(value) for name, (kind, _ttl, value) in found.items() if kind == "hash"}
    keys: dict[str, Any] = {}
    events: dict[str, Any] = {}
    for name, (kind, ttl, raw) in sorted(found.items()):
        _prefix, queue, suffix = name.split(":", 2)
        if suffix in without:
            continue
        if kind == "stream":
            events[queue] = [_event(_pairs(fields)) for _id, fields in raw]
            continue
        match kind:
            case "string":
                value: Any = _string(suffix, _text(raw))
            case "list":
                value = [_text(item) for item in raw]
            case "set":
                value = sorted(_text(item) for item in raw)
            case "hash":
                value = _hash(suffix, hashes[name])
            case _:
                value = _Scores(f"{prefix}:{queue}:", suffix, hashes, found).shown(raw)
        keys[f"{queue}:{suffix}"] = {"type": kind, "expires": ttl >= 0, "value": value}
    return _with_slots_numbered({"keys": keys, "events": events})  # type: ignore[no-any-return]  # the walk keeps the shape


def _hash(suffix: str, fields: dict[str, str]) -> dict[str, Any]:
    if suffix.rpartition(":")[2] in _JOB_PARTS and not suffix.startswith("metrics:"):
        # Children's results are JSON, their failures raw text; both are compared as they stand.
        return dict(sorted(fields.items()))
    return {name: _field(name, value, fields) for name, value in sorted(fields.items())}


class _Scores:
    """Says what the scores of one sorted set mean, given the job hashes beside it."""

    def __init__(self, base: str, suffix: str, hashes: dict[str, dict[str, str]], found: dict[str, Any]) -> None:
        self._base, self._suffix, self._hashes, self._found = base, suffix, hashes, found

    def shown(self, flat: list[Any]) -> list[list[Any]]:
        rows = [
            [_text(member), self._meaning(_text(member), float(score))]
            for member, score in zip(flat[::2], flat[1::2], strict=True)
        ]
        # Sets scored by "now" order their members by chance when two share a millisecond; the events tell the order.
        return rows if self._suffix in {"prioritized", "delayed", "marker"} else sorted(rows)

    def _meaning(self, member: str, score: float) -> Any:
        job = self._hashes.get(self._base + member, {})
        match self._suffix:
            case "prioritized":
                return {"priority": int(score // _PRIORITY), "counter": int(score % _PRIORITY)}
            case "delayed":
                due, sequence = divmod(int(score), _SEQUENCE)
                # Only a delay that was given at the add counts from the creation; a retry's or a released parent's
                # counts from then, which on a fast machine may be the same millisecond.
                is_first = "processedOn" not in job and self._base + member + ":processed" not in self._found
                planned = int(job.get("timestamp", 0)) + int(job.get("delay", 0))
                return {"due": "timestamp+delay" if is_first and due == planned else "<ms>", "sequence": sequence}
            case "completed" | "failed":
                return "finishedOn" if job.get("finishedOn") == str(int(score)) else "<ms>"
            case "waiting-children":
                return "timestamp" if job.get("timestamp") == str(int(score)) else "<ms>"
            case "marker" if score:
                _kind, _ttl, delayed = self._found.get(self._base + "delayed", ("zset", -1, []))
                return "first due" if delayed and float(delayed[1]) // _SEQUENCE == score else "<ms>"
            case "marker":
                return 0
            case "repeat":
                return str(int(score))  # equals the ms of an iteration's id, and is numbered with them
            case _:
                return "<ms>"


def _text(raw: Any) -> str:
    return raw.decode() if isinstance(raw, bytes) else str(raw)


def _pairs(raw: Any) -> dict[str, str]:
    if isinstance(raw, dict):
        return {_text(name): _text(value) for name, value in raw.items()}
    return {_text(name): _text(value) for name, value in zip(raw[::2], raw[1::2], strict=True)}


def _glob_literal(text: str) -> str:
    return re.sub(r"([\[\]?*\\])", r"\\\1", text)


def _string(suffix: str, value: str) -> str:
    if suffix.endswith(":lock"):
        return "<token>"
    return "<ms>" if suffix == "stalled-check" else value


def _field(name: str, value: str, fields: dict[str, str]) -> Any:
    if name == "stacktrace":
        return f"<{len(json.loads(value))} stacks>"
    if name == "version":
        return "<version>"
    if name == "offset" and "every" in fields:
        return "<ms>"
    if name in _MS_FIELDS:
        return "<ms>" if value.isdecimal() and int(value) > 1e12 else value
    if name == "opts":
        return _options(json.loads(value))
    if name in _JSON_FIELDS:
        return json.loads(value)
    if name == "delay" and "processedOn" in fields and int(value) > _ROUNDED_MS:
        return round(int(value) / _ROUNDED_MS) * _ROUNDED_MS
    if name in _INT_FIELDS:
        return int(value)
    return value


def _options(opts: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {name: "<ms>" if name in _MS_FIELDS else value for name, value in sorted(opts.items())}
    if "repeat" in shown:
        # How long until the next slot depends on the minute of the recording.
        varying = _MS_FIELDS | {"offset"}
        shown["repeat"] = {name: "<ms>" if name in varying else v for name, v in sorted(opts["repeat"].items())}
        if shown.get("delay"):
            shown["delay"] = "<ms>"
    return shown


def _event(fields: dict[str, str]) -> dict[str, Any]:
    shown: dict[str, Any] = dict(fields)
    match fields.get("event"):
        case "delayed":
            shown["delay"] = "<ms>" if int(fields["delay"]) > 1e12 else fields["delay"]
        case "progress":
            shown["data"] = json.loads(fields["data"])
        case "completed":
            shown["returnvalue"] = json.loads(fields["returnvalue"])
    return shown


def _with_slots_numbered(tree: Any) -> Any:
    """Replace the ms in ids of scheduler iterations by `<slot n>`, 1 being the earliest of its scheduler.

    Each scheduler has numbers of its own: whether two of them share a millisecond is chance.
    """
    slots: dict[str, set[str]] = {}
    for scheduler, ms in _SLOT.findall(json.dumps(tree)):
        slots.setdefault(scheduler, set()).add(ms)
    numbers = {
        scheduler: {ms: f"<slot {number}>" for number, ms in enumerate(sorted(found), start=1)}
        for scheduler, found in slots.items()
    }

    def walk(node: Any) -> Any:
        match node:
            case dict():
                renamed = {walk(key): walk(value) for key, value in node.items()}
                if "rjk" in renamed and renamed.get("delay"):
                    renamed["delay"] = "<ms>"
                return renamed
            case [str() as scheduler, str() as score] if score in numbers.get(scheduler, {}):
                return [scheduler, numbers[scheduler][score]]
            case list():
                return [walk(item) for item in node]
            case str():
                return _SLOT.sub(lambda found: f"repeat:{found[1]}:{numbers[found[1]][found[2]]}", node)
        return node

    return walk(tree)


# --- comparing ----------------------------------------------------------------------------------------------------

OUR_EVENT_FIELDS = {
    "active": {"attemptsMade", "workerId"},
    "completed": {"attemptsMade"},
    "failed": {"attemptsMade", "stacktrace"},
    "retry": {"attemptsMade"},
    "stalled": {"attemptsMade"},
}
_DEFAULTED_OPTIONS = {"attempts", "backoff"}

OUR_ADDITIONS = """
What our queues hold beyond Node's, all of it ignored by Node:
- keys `Q:bp:...`, and hash fields (of jobs and meta) that begin with `bp`;
- the field `attemptsMade` in the events active, completed, failed and stalled, `workerId` in active, `stacktrace` in
  failed, and an event `retry` per retry;
- attempts and backoff in opts where the caller gave none (Node writes attempts 0, and none for schedulers);
- `version` in meta where Node's flow producers and workers write none;
and what they lack: the `failedReason` of a job that completed in the end.
"""


def diff(expected: Dump, actual: Dump) -> list[str]:
    """What differs between Node's dump and ours, one line each; empty if only OUR_ADDITIONS do."""
    found: list[str] = []
    wanted_keys = expected["keys"]
    our_keys = {key: value for key, value in actual["keys"].items() if not key.partition(":")[2].startswith("bp:")}
    for key in sorted(wanted_keys.keys() | our_keys.keys()):
        if key not in our_keys:
            found.append(f"{key}: missing, expected {_short(wanted_keys[key])}")
        elif key not in wanted_keys:
            found.append(f"{key}: not expected, is {_short(our_keys[key])}")
        else:
            wanted = wanted_keys[key]
            found += _value_diff(key, wanted, _less_our_fields(wanted, our_keys[key]))
    for queue in sorted(expected["events"].keys() | actual["events"].keys()):
        found += _event_diff(queue, expected["events"].get(queue, []), actual["events"].get(queue, []))
    return found


def _less_our_fields(wanted: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    if ours["type"] != "hash" or wanted["type"] != "hash":
        return ours
    expected, value = wanted["value"], {name: v for name, v in ours["value"].items() if not name.startswith("bp")}
    if "version" not in expected:
        value.pop("version", None)
    if isinstance(value.get("opts"), dict):
        value["opts"] = _less_default_options(expected.get("opts") or {}, value["opts"])
        if "opts" not in expected and not value["opts"]:
            del value["opts"]
    if "returnvalue" in value and "failedReason" not in value and "failedReason" in expected:
        value["failedReason"] = expected["failedReason"]
    return {**ours, "value": value}


def _less_default_options(expected: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    given = {name for name in _DEFAULTED_OPTIONS if expected.get(name)}
    kept = {name: value for name, value in ours.items() if name not in _DEFAULTED_OPTIONS or name in given}
    return kept | {name: expected[name] for name in _DEFAULTED_OPTIONS & expected.keys() if name not in given}


def _value_diff(path: str, wanted: Any, ours: Any) -> list[str]:
    if isinstance(wanted, dict) and isinstance(ours, dict):
        found = []
        for name in sorted(wanted.keys() | ours.keys()):
            if name not in ours:
                found.append(f"{path}/{name}: missing, expected {_short(wanted[name])}")
            elif name not in wanted:
                found.append(f"{path}/{name}: not expected, is {_short(ours[name])}")
            else:
                found += _value_diff(f"{path}/{name}", wanted[name], ours[name])
        return found
    return [] if wanted == ours else [f"{path}: expected {_short(wanted)}, is {_short(ours)}"]


def _event_diff(queue: str, wanted: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    def lines(entries: list[dict[str, Any]]) -> list[str]:
        return [json.dumps(entry, sort_keys=True) for entry in entries]

    ours = [_less_our_event_fields(entry) for entry in ours if entry["event"] != "retry"]
    changes = difflib.ndiff(lines(wanted), lines(ours))
    return [f"{queue}:events: {line}" for line in changes if line[0] in "+-"]


def _less_our_event_fields(entry: dict[str, Any]) -> dict[str, Any]:
    ours = OUR_EVENT_FIELDS.get(entry["event"], set())
    return {name: value for name, value in entry.items() if name not in ours}


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 300 else text[:300] + "…"
