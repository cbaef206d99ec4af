"""What is kept beside the dead letters of a queue: counters by cause and tenant, and their order in time.

The scripts that write and remove entries keep it up. Other clients, and earlier releases of ours, know nothing of it,
so a reader compares it with the list of entries first, and catches up: what came is read once, what went is
forgotten. It is made from the entries, so it may vanish.
In: a filter. Out: ids of entries, newest first, and groups; both without reading the entries.
Elsewhere: the entries themselves (`operations`), what makes a cause (`bullpen._kernel.causes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

import msgspec

from bullpen._kernel import json
from bullpen._kernel.causes import LONGEST_SAMPLE
from bullpen._kernel.ids import decode_segment, encode_segment
from bullpen._kernel.scrub import summary
from bullpen.errors import InvalidOption
from bullpen.ports.dead_letters import DeadLetter, DeadLetterFilter, DeadLetterGroup, fingerprint
from bullpen.queue.actions import QueueActions, is_wrong_type
from bullpen.queue.lists import walk_line
from bullpen.wire.keys import QueueKeys
from bullpen.wire.records import read_int, read_score

__all__ = ["DeadLetterIndex", "facts_of"]

_IDS_PER_PAGE: Final = 1_000
_READ_AT_ONCE: Final = 100
_KEPT_S: Final = 7 * 24 * 3_600
_HOUR_MS: Final = 3_600_000
_MS: Final = 14
_PLACE: Final = _MS + 12
_PARTS: Final = ("facts", "index", "counts", "causes", "tenants")


def facts_of(letter: DeadLetter, failed_ms: int | None = None) -> bytes:
    """The arguments of the scripts about a dead letter, see `lib/letter_index`."""
    at = (letter.failed_ms or 0) if failed_ms is None else failed_ms
    sample = [letter.name[:LONGEST_SAMPLE], summary(letter.error_text, LONGEST_SAMPLE)]
    tenant = encode_segment(letter.tenant_id or "")
    return f"{fingerprint(letter)}:{max(0, at)}:{tenant}:".encode() + msgspec.json.encode(sample)


class DeadLetterIndex:
    """The index of one dead-letter queue."""

    def __init__(self, actions: QueueActions, entries: QueueKeys, source: str) -> None:
        self._actions, self._entries, self._source = actions, entries, source

    async def catch_up(self) -> None:
        """Compare, and read what is not known yet. Repeating it, also at the same time, changes nothing."""
        keys = self._entries
        depth, known = await self._tell(())
        if not depth and not known:
            return
        keep = [("EXPIRE", keys.letters(part), _KEPT_S) for part in (*_PARTS, "checked")]
        checked, *_ = await self._actions.commands([("GET", keys.letters("checked")), *keep], or_none=is_wrong_type)
        if depth - known != (read_int(checked) if checked else 0):
            await self._compare()

    async def count(self, tenant_id: str) -> int:
        """How many are this tenant's."""
        prefix = _prefix(None, tenant_id)
        return int(await self._actions.command("ZLEXCOUNT", self._entries.letters("index"), *_all_of(prefix)))

    async def ids(self, where: DeadLetterFilter, *, after: str | None, count: int) -> list[tuple[str, bytes]]:
        """Cursors and ids of the next ones, newest first. Name, error and cause of a filter are not checked."""
        prefix = _prefix(where.fingerprint, where.tenant_id)
        newest, oldest = f"({prefix};", f"[{prefix}:"
        if where.failed_before is not None:
            newest = f"({prefix}:{_place(where.failed_before)}"
        if where.failed_after is not None:
            oldest = f"[{prefix}:{_place(where.failed_after)}"
        if after is not None:
            if not after[:_PLACE].isdecimal() or after[_PLACE : _PLACE + 1] != ":":
                raise InvalidOption("after", "the `next` of the page before", after)
            newest = min(newest, f"({prefix}:{after}")
        found = await self._actions.command(
            *("ZRANGE", self._entries.letters("index"), _raw(newest), _raw(oldest), "BYLEX", "REV", "LIMIT", 0, count)
        )
        cut = len(_raw(prefix)) + 1
        return [(raw[cut:].decode("utf-8", "surrogateescape"), raw[cut + _PLACE + 1 :]) for raw in found]

    async def forget(self, gone: Sequence[bytes]) -> None:
        """Entries that were removed."""
        if gone:
            await self._tell((raw, b"") for raw in gone)

    async def groups(self, store: str, *, tenant_id: str | None, limit: int) -> list[DeadLetterGroup]:
        """The most frequent causes, from counters."""
        index, tenants = self._entries.letters("index"), await self._tenants()
        if tenant_id is None:
            flat = await self._actions.command(
                "ZRANGE", self._entries.letters("counts"), 0, limit - 1, "REV", "WITHSCORES"
            )
            counts = {mark.decode(): read_score(n) for mark, n in zip(flat[::2], flat[1::2], strict=True)}
        else:
            mine = {mark: told[tenant_id] for mark, told in tenants.items() if tenant_id in told}
            counts = dict(sorted(mine.items(), key=lambda pair: (-pair[1], pair[0]))[:limit])
        if not counts:
            return []
        prefixes = [_prefix(mark, tenant_id) for mark in counts]
        asked: list[tuple[str | bytes | int, ...]] = [("HMGET", self._entries.letters("causes"), *counts)]
        for prefix in prefixes:
            low, high = _all_of(prefix)
            asked += [
                ("ZRANGE", index, low, high, "BYLEX", "LIMIT", 0, 1),
                ("ZRANGE", index, high, low, "BYLEX", "REV", "LIMIT", 0, 1),
            ]
        causes, *ends = await self._actions.commands(asked)
        now_ms = int((await self._actions.command("TIME"))[0]) * 1000
        groups = []
        for number, (mark, count) in enumerate(counts.items()):
            first, last = ends[2 * number], ends[2 * number + 1]
            if not first or not last:
                continue  # the last of them went meanwhile
            cut = len(_raw(prefixes[number])) + 1
            first_ms, last_ms = (int(raw[0][cut : cut + _MS]) for raw in (first, last))
            name, error = _sample(causes[number])
            told = tenants.get(mark, {}) if tenant_id is None else {tenant_id: count}
            groups.append(
                DeadLetterGroup(
                    fingerprint=mark,
                    store=store,
                    name=name,
                    error=error if tenant_id is None else "",
                    count=count,
                    first_at=_iso(first_ms),
                    last_at=_iso(last_ms),
                    example=last[0][cut + _PLACE + 1 :].decode("utf-8", "surrogateescape"),
                    tenants=dict(sorted(told.items(), key=lambda pair: (-pair[1], pair[0]))[:5]),
                    trend=await self._trend(prefixes[number], now_ms, last_ms),
                )
            )
        return groups

    async def _trend(self, prefix: str, now_ms: int, last_ms: int) -> tuple[int, ...]:
        if last_ms <= now_ms - 24 * _HOUR_MS:
            return (0,) * 24
        index, bounds = self._entries.letters("index"), [now_ms - hours * _HOUR_MS for hours in range(24, -1, -1)]
        places = [_raw(f"[{prefix}:{max(0, at):0{_MS}d}") for at in bounds[:-1]] + [_raw(f"({prefix};")]
        found = await self._actions.commands(
            [("ZLEXCOUNT", index, low, b"(" + high[1:]) for low, high in pairwise(places)]
        )
        return tuple(map(int, found))

    async def _tenants(self) -> dict[str, dict[str, int]]:
        """Number of dead letters per cause and tenant."""
        flat = await self._actions.command("HGETALL", self._entries.letters("tenants"))
        found: dict[str, dict[str, int]] = {}
        for raw, count in zip(flat[::2], flat[1::2], strict=True):
            mark, _, tenant = raw.decode().partition(":")
            found.setdefault(mark, {})[decode_segment(tenant)] = read_int(count)
        return found

    # ---- catching up --------------------------------------------------------------------------------------------

    async def _compare(self) -> None:
        keys = self._entries
        there = 0
        async for ids in walk_line(self._actions, keys.base, keys.wait, per_page=_IDS_PER_PAGE):
            there += len(ids)
            known = await self._actions.command("HMGET", keys.letters("facts"), *ids)
            await self._learn([raw for raw, facts in zip(ids, known, strict=True) if facts is None])
        if int(await self._actions.command("HLEN", keys.letters("facts"))) > there:
            await self._forget_all_gone()
        # Entries that somebody works on are not in line, and known all the same: a difference that stays is none.
        depth, known = await self._tell(())
        await self._actions.command("SET", keys.letters("checked"), depth - known, "EX", _KEPT_S)

    async def _learn(self, ids: Sequence[bytes]) -> None:
        base = self._entries.base.encode()
        for start in range(0, len(ids), _READ_AT_ONCE):
            chunk = ids[start : start + _READ_AT_ONCE]
            rows = await self._actions.commands(
                [("HMGET", base + raw, "timestamp", "data") for raw in chunk], or_none=is_wrong_type
            )
            await self._tell(
                (raw, self._facts(raw, *row))
                for raw, row in zip(chunk, rows, strict=True)
                if row and row[1] is not None
            )

    def _facts(self, raw: bytes, timestamp: bytes | None, data: bytes) -> bytes:
        try:
            stored = json.decode(data)
        except ValueError:
            stored = None
        entry: dict[str, Any] = stored if isinstance(stored, dict) else {}
        letter = DeadLetter.from_entry(raw.decode("utf-8", "surrogateescape"), entry, source=self._source)
        return facts_of(letter, read_int(timestamp) if letter.failed_ms is None and timestamp else None)

    async def _forget_all_gone(self) -> None:
        cursor, base = b"0", self._entries.base.encode()
        while True:
            cursor, flat = await self._actions.command(
                "HSCAN", self._entries.letters("facts"), cursor, "COUNT", _IDS_PER_PAGE
            )
            exists = await self._actions.commands([("EXISTS", base + raw) for raw in flat[::2]])
            await self.forget([raw for raw, is_there in zip(flat[::2], exists, strict=True) if not is_there])
            if cursor == b"0":
                return

    async def _tell(self, letters: Iterable[tuple[bytes, bytes]]) -> tuple[int, int]:
        """Add these to the index; returns how many entries are listed, and how many are known."""
        keys, flat = self._entries, [part for letter in letters for part in letter]
        depth, known = await self._actions.evaluate("index_dead_letters", [keys.letters("facts")], [keys.base, *flat])
        return int(depth), int(known)


def _prefix(mark: str | None, tenant_id: str | None) -> str:
    """The part of the index that holds these, see `lib/letter_index`."""
    if tenant_id is None:
        return "a" if mark is None else f"c{mark}"
    tenant = encode_segment(tenant_id)
    return f"t{tenant}" if mark is None else f"x{mark}:{tenant}"


def _all_of(prefix: str) -> tuple[bytes, bytes]:
    return _raw(f"[{prefix}:"), _raw(f"({prefix};")


def _place(at: datetime) -> str:
    return f"{max(0, round(at.timestamp() * 1000)):0{_MS}d}"


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _sample(raw: bytes | None) -> tuple[str, str]:
    try:
        name, error = msgspec.json.decode(raw or b'["",""]', type=tuple[str, str])
    except msgspec.DecodeError:
        return "", ""
    return name, error


def _iso(epoch_ms: int) -> str:
    return datetime.fromtimestamp(epoch_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
