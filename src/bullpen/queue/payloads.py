"""Which keys sealed what is stored in a queue, and which objects no job needs any more.

In: a queue with a codec. Out: a report per key, for the one who wants to remove an old key; or the orphans of the
object store, removed. Elsewhere: sealing (`codec`), the command line (`bullpen payloads`).

An object whose job is wrongly taken for removed is a lost payload, and jobs change during the search. So:

- Only objects that are older than `older_than` count: an add stores its object first, and its job within seconds.
- Only objects of this very queue count (`bpstore` in its meta), not those of one with the same name elsewhere.
- Every key of the queue and of its dead letters is scanned. SCAN meets each key that is there all the time, whatever
  state the job is in. A job may move to the dead letters or back meanwhile, so both are scanned twice, in turn.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from bullpen._kernel.duration import to_ms
from bullpen.errors import InvalidOption
from bullpen.ports.objects import ObjectStore, StoredObject
from bullpen.queue.actions import QueueActions
from bullpen.queue.base import literally
from bullpen.queue.children import PARTS
from bullpen.queue.codec import OWNER_FIELD
from bullpen.wire.envelope import SEALED, directory_of
from bullpen.wire.keys import QueueKeys

__all__ = ["PayloadReport", "SweepReport", "report_payloads", "sweep_payloads"]

_SCAN_COUNT: Final = 1_000
_KEYS_PER_CALL: Final = 200
_RESULTS_PER_STEP: Final = 100
_PROCESSED: Final = f":{PARTS['processed'].suffix}".encode()
_HEAD_BYTES: Final = 4_096
"""Enough for queue, key id and reference, which stand before the box."""
_WRAPPED: Final = b'{"originalData":' + SEALED
_SHORTEST_MS: Final = 60_000
_KEY_ID: Final = re.compile(rb'"kid":"([^"\\]*)"')
_REF: Final = re.compile(rb'"ref":"([^"\\]*)"')


@dataclass(frozen=True, slots=True)
class PayloadReport:
    """What is sealed in a queue and its dead letters now: data of jobs, schedulers and entries, return values of jobs,
    and those that children have left for their parents."""

    by_key: dict[str, int]
    """How many payloads each key has encrypted."""
    in_store: int
    """How many of all are in the object store."""
    unencrypted_in_store: int
    """How many of those are not encrypted."""


@dataclass(slots=True)
class SweepReport:
    """What a sweep of the object store found."""

    in_use: int = 0
    young: int = 0
    """Younger than `older_than`: whether a job needs them was not asked."""
    foreign: int = 0
    """Below this queue's name, but stored by another queue of that name: on another server, or before this one was
    deleted and made again. They are never removed here."""
    orphans: list[StoredObject] = field(default_factory=list)
    """Objects that no job needs any more; with `dry_run` they are still there."""


async def report_payloads(actions: QueueActions, own: QueueKeys, letters: QueueKeys) -> PayloadReport:
    """Count sealed payloads by key. When no payload has a key any more, and no other queue either, it may go."""
    keys, in_store, plain = Counter[str](), 0, 0
    for place in (own, letters):
        async for head in _heads(actions, place, results=True):
            key_id, ref = _KEY_ID.search(head), _REF.search(head)
            if key_id is not None:
                keys[key_id[1].decode("utf-8", "replace")] += 1
            in_store += ref is not None
            plain += ref is not None and key_id is None
    return PayloadReport(dict(sorted(keys.items())), in_store, plain)


async def sweep_payloads(
    actions: QueueActions, own: QueueKeys, letters: QueueKeys, *, older_than: int | timedelta, dry_run: bool
) -> SweepReport:
    """Remove the objects of this queue that no job, scheduler or dead letter names. May run at any time, beside
    producers and workers, and in several processes."""
    store = None if actions.sealer is None else actions.sealer.codec.store
    if store is None:
        raise InvalidOption("codec", "a queue whose codec has a store", None)
    age_ms = to_ms("older_than", older_than, minimum=_SHORTEST_MS)
    owner = await actions.command("HGET", own.meta, OWNER_FIELD)
    report, candidates = SweepReport(), dict[str, StoredObject]()
    directory = directory_of(own.base.removesuffix(":"))
    mine = None if owner is None else f"{directory}/{owner.decode()}/"
    before_ms = time.time() * 1000 - age_ms
    async for found in store.list(directory):
        if mine is None or not found.key.startswith(mine):
            report.foreign += 1
        elif found.stored_ms >= before_ms:
            report.young += 1
        else:
            candidates[found.key] = found
    if candidates:
        for place in (own, letters, own, letters):
            async for head in _heads(actions, place):
                if (ref := _REF.search(head)) is not None:
                    report.in_use += candidates.pop(ref[1].decode("ascii", "replace"), None) is not None
    report.orphans = list(candidates.values())
    if not dry_run:
        await _remove(store, report.orphans)
    return report


async def _remove(store: ObjectStore, orphans: list[StoredObject]) -> None:
    for orphan in orphans:
        await store.delete(orphan.key)


async def _heads(actions: QueueActions, keys: QueueKeys, *, results: bool = False) -> AsyncIterator[bytes]:
    """The beginning of every sealed payload below the base of a queue; with `results` also of return values, which are
    never in an object store."""
    pattern, cursor = f"{literally(keys.base)}*", b"0"
    while True:
        cursor, found = await actions.command("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT, "TYPE", "hash")
        for first in range(0, len(found), _KEYS_PER_CALL):
            page = found[first : first + _KEYS_PER_CALL]
            for head in await actions.evaluate("read_seals", page, [SEALED, _WRAPPED, _HEAD_BYTES, int(results)]):
                yield head
        for key in found if results else ():
            if key.endswith(_PROCESSED):
                async for head in _result_heads(actions, key):
                    yield head
        if cursor == b"0":
            return


async def _result_heads(actions: QueueActions, processed: bytes) -> AsyncIterator[bytes]:
    """The beginning of every sealed return value that waits for a parent."""
    cursor = b"0"
    while True:
        args = [cursor, _RESULTS_PER_STEP, SEALED, _HEAD_BYTES]
        cursor, *heads = await actions.evaluate("read_result_seals", [processed], args)
        for head in heads:
            yield head
        if cursor == b"0":
            return
