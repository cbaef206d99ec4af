"""The children of a job in its flow: find them, read their results, delete those that it still waits for.

In: something that can reach the server, and the key of a parent. Its children may be jobs of other queues.
Elsewhere: adding flows (`flows`), removing a job with all below it (`maintain`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from bullpen._kernel import json
from bullpen.errors import NotJson, ServerRefused

_SCAN_COUNT: Final = 1_000
_TOO_LARGE: Final = -20


class ScriptRunner(Protocol):
    """Send a script or a command, again if its reply is lost."""

    async def evaluate(self, script: str, keys: list[str], args: list[Any]) -> Any: ...
    async def command(self, *command: str | bytes | int) -> Any: ...


@dataclass(frozen=True, slots=True)
class ChildrenCounts:
    """How many children of a job are in which condition."""

    processed: int
    """Completed."""
    pending: int
    """Not finished, or failed without a rule for that case: the parent waits for them."""
    ignored: int
    """Failed, and the parent continues without them."""
    failed: int
    """Failed, and the parent fails with them."""


@dataclass(frozen=True, slots=True)
class Children:
    """The children of a job, by their full keys `<prefix>:<queue>:<id>`."""

    processed: dict[str, Any]
    """What each completed child returned."""
    pending: tuple[str, ...]
    ignored: dict[str, str]
    """Why each ignored child failed."""
    failed: tuple[str, ...]


class Part(NamedTuple):
    """Where a parent keeps its children of one kind."""

    suffix: str
    scan: str
    """The command that reads it in steps."""
    size: str
    read: Callable[[list[bytes]], dict[str, Any]]
    """What was read, by the keys of the children."""


def _values(flat: list[bytes]) -> dict[str, Any]:
    return {text(key): _json_or(raw) for key, raw in zip(flat[::2], flat[1::2], strict=True)}


def _reasons(flat: list[bytes]) -> dict[str, str]:
    return {text(key): reason.decode("utf-8", "replace") for key, reason in zip(flat[::2], flat[1::2], strict=True)}


def _keys(flat: list[bytes]) -> dict[str, None]:
    return dict.fromkeys(map(text, flat))


def _scored_keys(flat: list[bytes]) -> dict[str, None]:
    return dict.fromkeys(map(text, flat[::2]))


PARTS: Final = {
    "processed": Part("processed", "HSCAN", "HLEN", _values),
    "pending": Part("dependencies", "SSCAN", "SCARD", _keys),
    "ignored": Part("failed", "HSCAN", "HLEN", _reasons),
    "failed": Part("unsuccessful", "ZSCAN", "ZCARD", _scored_keys),
}
"""In the order of `ChildrenCounts`."""


def text(raw: bytes) -> str:
    """A key as text that can be sent again."""
    return raw.decode("utf-8", "surrogateescape")


def _json_or(raw: bytes) -> Any:
    """The value; text that is not JSON as it stands: other clients may have written it."""
    try:
        return json.decode(raw)
    except NotJson:
        return raw.decode("utf-8", "replace")


async def read_part(server: ScriptRunner, job_key: str, kind: str) -> list[bytes]:
    """All children of one kind, as they are stored, in steps."""
    part, found, cursor = PARTS[kind], list[bytes](), b"0"
    while True:
        cursor, elements = await server.command(part.scan, f"{job_key}:{part.suffix}", cursor, "COUNT", _SCAN_COUNT)
        found += elements
        if cursor == b"0":
            return found


async def children_of(actions: ScriptRunner, job_key: str, *, most: int | None = None) -> AsyncIterator[str]:
    """Keys of all children of a job in any state; `most` limits each kind."""
    for part in PARTS.values():
        cursor, left = b"0", most
        while True:
            count = _SCAN_COUNT if left is None else min(_SCAN_COUNT, left)
            cursor, elements = await actions.command(part.scan, f"{job_key}:{part.suffix}", cursor, "COUNT", count)
            for key in list(part.read(elements))[:left]:
                yield key
                left = None if left is None else left - 1
            if cursor == b"0" or left == 0:
                break


async def remove_pending_children(server: ScriptRunner, parent_key: str, *, clock_offset_ms: int = 0) -> int:
    """Delete the pending children with all below them; one that runs, failed, or has such below it, stays."""
    removed, cursor = 0, b"0"
    while True:
        cursor, found = await server.command("SSCAN", f"{parent_key}:dependencies", cursor, "COUNT", _SCAN_COUNT)
        for raw in found:
            removed += await _remove_child(server, raw.decode("utf-8", "surrogateescape"), parent_key, clock_offset_ms)
        if cursor == b"0":
            return removed


async def split_key(server: ScriptRunner, key: str) -> tuple[str, str]:
    """Base and id of a job's key. An id has one part or three, and a prefix may have colons too: where both are
    possible, the queue that exists decides."""
    head, _, last = key.rpartition(":")
    parts = key.rsplit(":", 3)
    if len(parts) == 4 and ":" in parts[0] and not await _is_queue(server, head) and await _is_queue(server, parts[0]):
        return f"{parts[0]}:", ":".join(parts[1:])
    return f"{head}:", last


async def _is_queue(server: ScriptRunner, base: str) -> bool:
    try:
        return bool(await server.command("EXISTS", f"{base}:meta"))
    except ServerRefused:  # one of somebody whose keys we may not read
        return False


async def _remove_child(server: ScriptRunner, key: str, parent_key: str, clock_offset_ms: int) -> int:
    base, child_id = await split_key(server, key)
    arguments = [base, clock_offset_ms, child_id]
    reply = await server.evaluate("remove", [key], [*arguments, "1", "1", parent_key])
    if reply == _TOO_LARGE:  # then from the leaves up, so that each step is small
        await remove_pending_children(server, key, clock_offset_ms=clock_offset_ms)
        reply = await server.evaluate("remove", [key], [*arguments, "", "1", parent_key])
    return int(reply == 1)
