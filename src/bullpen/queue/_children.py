"""The jobs below a job in its flow: find them, and delete those that it still waits for.

In: something that can reach the server, and the key of a parent. Its children may be jobs of other queues.
Elsewhere: reading what became of them (`browse`), removing a job with all below it (`maintain`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final, Protocol

from bullpen.errors import ServerRefused

_SCAN_COUNT: Final = 1_000
_TOO_LARGE: Final = -20


class Server(Protocol):
    """Send a script or a command, again if its reply is lost."""

    async def evaluate(self, script: str, keys: list[str], args: list[Any]) -> Any: ...
    async def command(self, *command: str | bytes | int) -> Any: ...


async def children_of(actions: Server, job_key: str) -> AsyncIterator[str]:
    """Keys of all children of a job, whatever became of them."""
    for scan, part, stride in (
        ("SSCAN", "dependencies", 1),
        ("HSCAN", "processed", 2),
        ("HSCAN", "failed", 2),
        ("ZSCAN", "unsuccessful", 2),
    ):
        cursor: bytes = b"0"
        while True:
            cursor, elements = await actions.command(scan, f"{job_key}:{part}", cursor, "COUNT", _SCAN_COUNT)
            for key in elements[::stride]:
                yield key.decode("utf-8", "surrogateescape")
            if cursor == b"0":
                break


async def remove_pending_children(server: Server, parent_key: str, *, clock_offset_ms: int = 0) -> int:
    """Delete the pending children with all below them; one that runs, failed, or has such below it, stays."""
    removed, cursor = 0, b"0"
    while True:
        cursor, found = await server.command("SSCAN", f"{parent_key}:dependencies", cursor, "COUNT", _SCAN_COUNT)
        for raw in found:
            removed += await _remove_child(server, raw.decode("utf-8", "surrogateescape"), parent_key, clock_offset_ms)
        if cursor == b"0":
            return removed


async def split_key(server: Server, key: str) -> tuple[str, str]:
    """Base and id of a job's key. An id has one part or three, and a prefix may have colons too: where both are
    possible, the queue that exists decides."""
    head, _, last = key.rpartition(":")
    parts = key.rsplit(":", 3)
    if len(parts) == 4 and ":" in parts[0] and not await _is_queue(server, head) and await _is_queue(server, parts[0]):
        return f"{parts[0]}:", ":".join(parts[1:])
    return f"{head}:", last


async def _is_queue(server: Server, base: str) -> bool:
    try:
        return bool(await server.command("EXISTS", f"{base}:meta"))
    except ServerRefused:  # one of somebody whose keys we may not read
        return False


async def _remove_child(server: Server, key: str, parent_key: str, clock_offset_ms: int) -> int:
    base, child_id = await split_key(server, key)
    arguments = [base, clock_offset_ms, child_id]
    reply = await server.evaluate("remove", [key], [*arguments, "1", "1", parent_key])
    if reply == _TOO_LARGE:  # then from the leaves up, so that each step is small
        await remove_pending_children(server, key, clock_offset_ms=clock_offset_ms)
        reply = await server.evaluate("remove", [key], [*arguments, "", "1", parent_key])
    return int(reply == 1)
