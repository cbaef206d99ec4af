"""Trees of jobs in which each parent waits for its children.

In: a `Flow`, checked here before anything is sent. Out: the jobs, stored by one script: all of them or none. The jobs
of a flow may be in any queues under any prefixes; on a cluster all in one slot, because one script must reach them.
Elsewhere: what a finished child does to its parent (`bullpen.wire.lua.lib.parents`), children that a handler adds
(`parent=` of `Queue.add`), chains, groups and chords of tasks (`canvas`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeVar, Unpack, cast

from bullpen._kernel import tracing
from bullpen._kernel.duration import check_int, check_texts
from bullpen._kernel.ids import check_queue_name, random_id
from bullpen.errors import DurabilityUnknown, InvalidOption, JobNotFound, ServerRefused, require
from bullpen.queue.actions import QueueActions, is_wrong_type
from bullpen.queue.arguments import NewJobArguments
from bullpen.queue.base import QueuePart, id_of
from bullpen.queue.children import PARTS, children_of, split_key
from bullpen.queue.codec import Sealer
from bullpen.queue.durability import MEMORY, Durability, DurableCalls, NotDurableInTime
from bullpen.queue.flow_entries import FlowEntry, flow_arguments
from bullpen.queue.job import Added, BlockedBy, Job
from bullpen.queue.packing import (
    PackedJob,
    call_ttl_ms,
    clock_and_version,
    pack_job,
    read_add_deadline,
    refusal,
    size_of,
    stored_fields,
)
from bullpen.queue.sealed_add import NOTHING_WRITTEN, forget_each, seal_each
from bullpen.queue.states import JobState
from bullpen.redis import calls
from bullpen.redis.client import Connection, Door
from bullpen.wire.keys import QueueKeys
from bullpen.wire.links import JobKey
from bullpen.wire.options import DEFAULT_OPTIONS, JobArguments, JobOptions
from bullpen.wire.records import JobRecord, LateRecord
from bullpen.wire.scripts import SCRIPTS

if TYPE_CHECKING:
    import typing_extensions  # as in `job`

    JobT_co = typing_extensions.TypeVar("JobT_co", covariant=True, default=Job)
else:
    JobT_co = TypeVar("JobT_co", covariant=True)

__all__ = [
    "BlockedParent",
    "ChildrenPage",
    "Flow",
    "FlowNode",
    "FlowSender",
    "Flows",
    "QueueLike",
    "pack_flows",
]

MOST_JOBS: Final = 20_000
MOST_BYTES: Final = 64 * 1024 * 1024
"""Of one flow: a script holds up the server as long as it runs. Measured on a busy machine of two cores: 60 ms for a
thousand jobs, 500 to 700 ms for ten thousand."""
_CHILDREN_LOOKED_AT: Final = 1_000
_PARENTS_PER_PAGE: Final = 100

ChildKind = Literal["processed", "pending", "ignored", "failed"]


class QueueLike(Protocol):
    """A queue object, with or without an event loop."""

    @property
    def keys(self) -> QueueKeys: ...
    @property
    def defaults(self) -> JobOptions: ...


class Flow:
    """One job of a flow and the flows that it waits for: it runs when all its children are done.

    `queue` and `prefix` are those of its parent unless given, and those of the queue it is added to for the root; a
    `Queue` as `queue` gives its name, prefix and default options. `options` are job options. Each child must say
    `on_failure`: what its final failure does to its parent.
    """

    __slots__ = ("children", "data", "name", "options", "prefix", "queue")

    def __init__(
        self,
        name: str,
        data: Any = None,
        *,
        queue: str | QueueLike | None = None,
        prefix: str | None = None,
        children: Iterable[Flow] = (),
        **options: Unpack[JobArguments],
    ) -> None:
        self.name, self.data = name, data
        self.queue, self.prefix = queue, prefix
        self.children: tuple[Flow, ...] = tuple(children)
        self.options = options
        for child in self.children:
            require("children", isinstance(child, Flow), "flows", child)

    def __repr__(self) -> str:
        return f"Flow({self.name!r}, children={len(self.children)})"


@dataclass(frozen=True, slots=True)
class FlowNode(Generic[JobT_co]):
    """A job of a flow, as it was added or read, and the jobs below it."""

    job: JobT_co
    children: tuple[FlowNode[JobT_co], ...]

    def jobs(self) -> Iterator[JobT_co]:
        """All jobs of the tree, parents before their children."""
        below: list[FlowNode[JobT_co]] = [self]
        while below:
            node = below.pop()
            yield node.job
            below += reversed(node.children)


@dataclass(frozen=True, slots=True)
class ChildrenPage:
    """Some children of a job, by their full keys, and where the next page begins."""

    children: dict[str, Any]
    """What each returned, why it failed, or None."""
    cursor: str | None
    """For the next call; None when there is nothing more."""


@dataclass(frozen=True, slots=True)
class BlockedParent(Generic[JobT_co]):
    """A job that waits for children, some of which cannot end without help."""

    job: JobT_co
    failed: tuple[str, ...]
    """Keys of pending children that failed finally: retry or remove them."""
    missing: tuple[str, ...]
    """Keys of pending children that do not exist any more."""


def pack_flows(flows: Iterable[Flow], keys: QueueKeys, defaults: JobOptions) -> list[FlowEntry]:
    """Check and encode all jobs of all flows, parents before children."""
    entries: list[FlowEntry] = []
    seen: set[tuple[str, str]] = set()
    for flow in flows:
        require("flow", isinstance(flow, Flow), "a Flow", flow)
        waiting: list[tuple[Flow, int | None]] = [(flow, None)]
        while waiting:
            node, parent = waiting.pop()
            entry = _pack_node(node, parent, None if parent is None else entries[parent], keys, defaults)
            place = (entry.keys.base, entry.packed.job_id)
            require("job_id", place not in seen, "an id that no other job of the flow has", entry.packed.job_id)
            seen.add(place)
            waiting += [(child, len(entries)) for child in reversed(node.children)]
            entries.append(entry)
    expected = f"at most {MOST_JOBS} jobs and {MOST_BYTES >> 20} MiB in one call; add more with parent="
    fits = len(entries) <= MOST_JOBS and size_of([entry.packed for entry in entries]) <= MOST_BYTES
    require("flow", fits, expected, len(entries))
    return entries


def _pack_node(
    node: Flow, place: int | None, parent: FlowEntry | None, keys: QueueKeys, defaults: JobOptions
) -> FlowEntry:
    above = keys if parent is None else parent.keys
    own, own_defaults = _place_of(node, above, keys, defaults)
    given = cast("NewJobArguments", dict(node.options))
    require("deduplication", given.get("deduplication") is None, "none in a flow", given.get("deduplication"))
    require("replace_finished", not given.get("replace_finished"), "none in a flow", given.get("replace_finished"))
    require("at", not (node.children and given.get("at")), "a delay, which starts when the children are done", node)
    given["job_id"] = given.get("job_id") or random_id()
    if parent is not None:
        require("parent", given.get("parent") is None, "none inside a flow", given.get("parent"))
        given["parent"] = JobKey(parent.packed.job_id, parent.keys.base[:-1])
    return FlowEntry(own, pack_job(node.name, node.data, own_defaults, given), place, bool(node.children))


def _place_of(node: Flow, above: QueueKeys, keys: QueueKeys, defaults: JobOptions) -> tuple[QueueKeys, JobOptions]:
    """The queue of a node and its default options."""
    if node.queue is not None and not isinstance(node.queue, str):
        require("prefix", node.prefix is None, "none together with a Queue, which has its own", node.prefix)
        return node.queue.keys, node.queue.defaults
    if node.queue is None and node.prefix is None:
        own = above
    else:
        name = above.name if node.queue is None else check_queue_name(node.queue)
        own = QueueKeys(above.prefix if node.prefix is None else node.prefix, name)
    return own, defaults if own == keys else DEFAULT_OPTIONS


class FlowSender:
    """On an event loop: numbered calls, as many at once as there are callers."""

    def __init__(self, connection: Connection, door: Door, keys: QueueKeys, clock_offset_ms: int) -> None:
        self._connection, self._door, self._keys = connection, door, keys
        self._clock = clock_and_version(clock_offset_ms)
        self._free: list[calls.Caller] = []

    async def send(self, entries: Sequence[FlowEntry], level: Durability, deadline_s: float) -> tuple[Any, bool]:
        """The reply, and whether its durability was not confirmed in time."""
        self._connection.require_one_slot(self._keys.base, *(entry.keys.base for entry in entries))
        ttl_ms = call_ttl_ms(deadline_s)
        make = partial(flow_arguments, entries, self._clock, ttl_ms)
        if level is not MEMORY:
            return await self._send_durably(make, level, ttl_ms, deadline_s)
        caller = self._free.pop() if self._free else calls.Caller(self._door, SCRIPTS["add_flow"])
        reply = await caller.call([self._keys.call(caller.id)], make, queue=self._keys.name, deadline_s=deadline_s)
        self._free.append(caller)  # not one whose call was given up: its number may still be under way
        return reply, False

    async def _send_durably(
        self, make: Callable[[int], list[Any]], level: Durability, ttl_ms: int, deadline_s: float
    ) -> tuple[Any, bool]:
        door = Door(self._connection, key=self._keys.base)  # waiting for a disk blocks a connection
        durable = DurableCalls(door, calls.Caller(door, SCRIPTS["add_flow"]))
        names = [self._keys.call(durable.caller_id)]
        try:
            return await durable.call(level, names, ttl_ms, make, queue=self._keys, deadline_s=deadline_s), False
        except NotDurableInTime as error:
            return error.args[0], True
        finally:
            durable.close()


class Flows(QueuePart):
    """The flows of a `Queue`."""

    async def add_flow(
        self,
        flow: Flow,
        *,
        durability: Durability | str | None = None,
        add_deadline: int | timedelta | None = None,
    ) -> FlowNode:
        """Store a job with all jobs that it waits for, in one atomic step, and return them as a tree.

        When a job with the id of the root exists, nothing is stored, and the returned root is that job: its `added` is
        DUPLICATE and it has no children here. So adding a flow again is safe if its root has a `job_id`. A leaf whose
        id exists becomes a child, with its state; raises JobStateConflict, with nothing stored, when it is
        another's child. Else raises as `add`.
        """
        return (await self.add_flows([flow], durability=durability, add_deadline=add_deadline))[0]

    async def add_flows(
        self,
        flows: Iterable[Flow],
        *,
        durability: Durability | str | None = None,
        add_deadline: int | timedelta | None = None,
    ) -> list[FlowNode]:
        """Store several flows in one atomic step."""
        actions = self._ready()
        level = self._durability if durability is None else Durability.read(durability)
        with tracing.sending(*("bullmq", self._keys.name, "addFlow"), bullmq__queue__name=self._keys.name):
            entries = pack_flows(flows, self._keys, self._defaults)
            if not entries:
                return []
            deadline_s = read_add_deadline(add_deadline) or self._deadline_s
            if actions.sealer is None:
                reply, is_late = await self._flow_sender().send(entries, level, deadline_s)
                nodes = _read_reply(reply, entries, self._actions_of)
            else:
                nodes, is_late = await self._send_sealed(entries, level, deadline_s)
        if is_late:
            raise DurabilityUnknown(actions.name, nodes[0].job, str(level))
        if level is not MEMORY:
            for node in nodes:
                for job in node.jobs():
                    job.durability = str(level)
        return nodes

    async def _send_sealed(
        self, entries: list[FlowEntry], level: Durability, deadline_s: float
    ) -> tuple[list[FlowNode], bool]:
        """As above with this queue's codec, which seals each payload for the queue of its job."""
        sealers = [self._actions_of(entry.keys).sealer for entry in entries]
        packed = await self._seal_each(sealers, [entry.packed for entry in entries])
        sealed = [entry._replace(packed=one) for entry, one in zip(entries, packed, strict=True)]
        try:
            reply, is_late = await self._flow_sender().send(sealed, level, deadline_s)
            nodes = _read_reply(reply, sealed, self._actions_of)
        except NOTHING_WRITTEN:
            await forget_each(sealers, packed)
            raise
        plain = {(entry.keys.name, entry.packed.job_id): entry.packed.data for entry in entries}
        jobs = {(job.queue_name, job.id): job for node in nodes for job in node.jobs()}
        for sealer, one, entry in zip(sealers, packed, entries, strict=True):
            job = jobs.get(place := (entry.keys.name, entry.packed.job_id))
            if job is not None and job.added is Added.CREATED:
                job.record = job.record.opened(plain[place], None)
            else:  # it was there before, or its root was
                await forget_each([sealer], [one])
        return nodes, is_late

    async def _seal_each(self, sealers: Sequence[Sealer | None], packed: Sequence[PackedJob]) -> list[PackedJob]:
        return await seal_each(sealers, packed)

    async def get_flow(self, job: str | Job, *, depth: int = 10, max_children: int = 20) -> FlowNode | None:
        """A job and its descendants in its flow, as they are stored now; None when there is no such job.

        At most `max_children` of each kind (processed, pending, ignored, failed) per job, `depth` levels in all. A
        child that was removed is left out, and so is one that is in the tree already: anybody may have written what a
        job lists as its children.
        """
        check_int("depth", depth, minimum=1)
        check_int("max_children", max_children, minimum=1)
        return await self._read_node(self._keys, id_of(job), depth, max_children, set())

    async def _read_node(self, keys: QueueKeys, job_id: str, depth: int, most: int, seen: set[str]) -> FlowNode | None:
        seen.add(keys.job(job_id))
        actions = self._actions_of(keys)
        found = await actions.read(job_id)
        if found is None:
            return None
        children: list[FlowNode] = []
        if depth > 1:
            async for key in children_of(actions, keys.job(job_id), most=most):
                base, child_id = await split_key(actions, key)
                child_keys = None if key in seen else _keys_of(base)
                if child_keys is None:
                    continue
                child = await self._read_node(child_keys, child_id, depth - 1, most, seen)
                if child is not None:
                    children.append(child)
        return FlowNode(Job(actions, found[1]), tuple(children))

    async def children_page(
        self, job: str | Job, kind: ChildKind, *, cursor: str | None = None, count: int = 100
    ) -> ChildrenPage:
        """A page of a job's children of one kind: about `count` of them, from `cursor` on. A child may come twice when
        others change their kind meanwhile. Raises JobNotFound."""
        require("kind", kind in PARTS, ", ".join(map(repr, PARTS)), kind)
        check_int("count", count, minimum=1)
        job_id, actions = id_of(job), self._ready()
        if not await actions.command("EXISTS", self._keys.job(job_id)):
            raise JobNotFound(self._keys.name, job_id)
        part = PARTS[kind]
        key = f"{self._keys.job(job_id)}:{part.suffix}"
        after, flat = await actions.command(part.scan, key, cursor or "0", "COUNT", count)
        return ChildrenPage(part.read(actions.open_children(kind, flat)), None if after == b"0" else after.decode())

    async def jobs_at(self, keys: Iterable[str]) -> list[Job]:
        """The jobs of these full keys `<prefix>:<queue>:<id>`, in whichever queues they are: those of a page of
        children, for one. What is gone is left out."""
        found: list[Job] = []
        for key in check_texts("keys", keys):
            base, job_id = await split_key(self._ready(), key)
            job_keys = _keys_of(base)
            stored = None if job_keys is None else await self._actions_of(job_keys).read(job_id)
            if job_keys is not None and stored is not None:
                found.append(Job(self._actions_of(job_keys), stored[1]))
        return found

    async def blocked_parents(self) -> AsyncIterator[BlockedParent]:
        """Jobs of this queue that wait for children which failed finally without a rule for that, or are gone.

        Such a parent waits until the child is retried or removed. Of each parent the first 1000 pending children
        are checked. Reads in pages; nothing is changed.
        """
        actions, start = self._ready(), 0
        while ids := await actions.command("ZRANGE", self._keys.waiting_children, start, start + _PARENTS_PER_PAGE - 1):
            start += len(ids)
            for raw in ids:
                blocked = await self._read_parent(actions, raw.decode("utf-8", "surrogateescape"))
                if blocked is not None:
                    yield blocked

    async def _read_parent(self, actions: QueueActions, job_id: str) -> BlockedParent | None:
        scan = ("SSCAN", self._keys.dependencies(job_id), "0", "COUNT", _CHILDREN_LOOKED_AT)
        (page,) = await actions.commands([scan], or_none=is_wrong_type)
        keys = [raw.decode("utf-8", "surrogateescape") for raw in (page[1][:_CHILDREN_LOOKED_AT] if page else ())]
        if not keys:
            return None
        places = [await split_key(actions, key) for key in keys]
        # A child may be listed whose keys we may not read, or that are of another type: nobody knows what became of it.
        exist = await actions.commands([("EXISTS", key) for key in keys], or_none=_is_refused)
        in_failed = [("ZSCORE", f"{base}failed", child_id) for base, child_id in places]
        scores = await actions.commands(in_failed, or_none=_is_refused)
        missing = tuple(key for key, is_there in zip(keys, exist, strict=True) if is_there == 0)
        failed = tuple(key for key, score in zip(keys, scores, strict=True) if score is not None)
        found = await actions.read(job_id) if missing or failed else None
        return None if found is None else BlockedParent(Job(actions, found[1]), failed, missing)


def _is_refused(error: Exception) -> bool:
    return isinstance(error, ServerRefused)


def _keys_of(base: str) -> QueueKeys | None:
    """None: no queue can have that name, so nothing is there."""
    prefix, _, name = base[:-1].rpartition(":")
    try:
        return QueueKeys(prefix, name)
    except InvalidOption:
        return None


def _read_reply(
    reply: Any, entries: Sequence[FlowEntry], actions_of: Callable[[QueueKeys], QueueActions]
) -> list[FlowNode]:
    """The trees that were stored. Raises what the script refused."""
    if isinstance(reply, list) and isinstance(reply[0], int):
        code, index = reply
        entry = entries[index - 1]
        raise refusal(b"%d" % code, entry.packed, entry.keys.name)
    now, taken = (reply, []) if isinstance(reply, bytes) else reply
    jobs = [
        Job(actions_of(keys), LateRecord(packed.job_id, partial(stored_fields, packed, now)))
        for keys, packed, _, _ in entries
    ]
    rest, there = iter(taken), set[int]()
    for index, _, state, flat in zip(rest, rest, rest, rest, strict=True):
        entry = entries[index - 1]
        job = jobs[index - 1] = Job(actions_of(entry.keys), JobRecord.parse(entry.packed.job_id, flat))
        job.added, job.blocked_by = Added.DUPLICATE, BlockedBy(job.id, JobState(state.decode()))
        there.add(index - 1)
    children: list[list[FlowNode]] = [[] for _ in entries]
    roots: list[FlowNode] = []
    for place in reversed(range(len(entries))):  # children before their parents
        own = () if place in there else tuple(reversed(children[place]))
        node, parent = FlowNode(jobs[place], own), entries[place].parent
        (roots if parent is None else children[parent]).append(node)
    return roots[::-1]
