"""A job with those below it in its flow, read level by level.

In: a job. Out: a tree of at most 120 jobs, with how many more there are under each, and which of them can never end by
itself. A flow of ten thousand jobs costs as much as one of a hundred: what is not shown is only counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from bullpen.dashboard._web import PageProblem
from bullpen.dashboard.desk import Desk
from bullpen.errors import InvalidOption
from bullpen.ops.status import counted, job_status
from bullpen.queue import JobState
from bullpen.queue.children import PARTS
from bullpen.queue.heads import JobHead
from bullpen.wire.keys import QueueKeys

__all__ = ["FlowBranch", "FlowView", "read_flow"]

_MOST_NODES: Final = 120
_MOST_CHILDREN: Final = 50
_DEEPEST: Final = 12
_ORDER: Final = ("failed", "ignored", "pending", "processed")
"""Children that need somebody first."""
_SETS: Final = (JobState.COMPLETED, JobState.FAILED, JobState.DELAYED, JobState.WAITING_CHILDREN)
_STATE_OF: Final = {"processed": JobState.COMPLETED, "ignored": JobState.FAILED, "failed": JobState.FAILED}


class FlowBranch(msgspec.Struct, rename="camel", frozen=True):
    """One job of a flow and what is shown of those below it."""

    queue: str
    id: str
    name: str
    state: str
    word: str
    took_ms: int | None
    kind: str
    """What it is to its parent: `pending`, `processed`, `ignored` or `failed`; empty for the root."""
    stuck: str
    """Why it will never run by itself; empty: it may."""
    total: int
    """Its children, whatever became of them."""
    more: int
    """Children that are not shown."""
    children: tuple[FlowBranch, ...]


class FlowView(msgspec.Struct, rename="camel", frozen=True):
    """A flow from one job downwards."""

    root: FlowBranch
    counts: dict[str, int]
    """The children of the root by what became of them."""
    shown: int
    parent: str
    parent_queue: str
    next: str
    """Where the next children of the root are; empty: all are shown."""
    kind: str
    """Children of this kind alone are shown; empty: of all."""


@dataclass(slots=True)
class _FlowNode:
    keys: QueueKeys
    id: str
    kind: str
    head: JobHead | None = None
    state: JobState = JobState.UNKNOWN
    counts: dict[str, int] = field(default_factory=dict)
    children: list[_FlowNode] = field(default_factory=list)
    after: str = ""

    @property
    def key(self) -> str:
        return self.keys.job(self.id)


async def read_flow(desk: Desk, queue: str, job_id: str, *, kind: str = "", after: str = "") -> FlowView:
    """The flow below a job; with `kind` its children of one kind alone, from a place on. Raises PageProblem 404."""
    key = ("flow", queue, job_id, kind, after)
    return await desk.within(desk.once(key, lambda: _read(desk, queue, job_id, kind, after)))


async def _read(desk: Desk, queue: str, job_id: str, kind: str, after: str) -> FlowView:
    root = _FlowNode(desk.queue(queue).keys, job_id, "")
    level, shown, depth = [root], 0, 0
    while level:
        await _look(desk, level)
        level = [node for node in level if node.head is not None]
        if root.head is None:
            await desk.must_exist(queue)
            raise PageProblem(404, f"There is no job {job_id!r} in {queue!r}.")
        shown += len(level)
        depth += 1
        if depth > _DEEPEST or shown >= _MOST_NODES:
            break
        parents = [node for node in level if sum(node.counts.values())]
        room = _MOST_NODES - shown
        most = min(_MOST_CHILDREN, max(1, room // len(parents))) if parents else 0
        for place, parent in enumerate(parents):
            if place * most >= room:
                break
            await _open(desk, parent, most, kind if parent is root else "", after if parent is root else "")
        level = [child for parent in parents for child in parent.children]
    assert root.head is not None
    record = root.head.record
    base, _, parent_id = (record.parent_key or "").rpartition(":")
    drawn = _drawn(root)
    return FlowView(
        root=drawn,
        counts=root.counts,
        shown=_size(drawn),
        parent=parent_id,
        parent_queue=base.removeprefix(f"{root.keys.prefix}:"),
        next=root.after,
        kind=kind,
    )


async def _look(desk: Desk, nodes: list[_FlowNode]) -> None:
    """Heads, states and counts of children of the jobs of one level: a few calls for each queue of it."""
    for keys, mine in _by_queue(nodes):
        heads = {head.record.id: head for head in await desk.queue(keys.name).heads_of([node.id for node in mine])}
        for node in mine:
            node.head = heads.get(node.id)
        there = [node for node in mine if node.head is not None]
        for node, replies in zip(there, await _ask(desk, keys, [_questions(node) for node in there]), strict=True):
            is_parent, *found = replies
            node.counts = {"": is_parent} if is_parent else {}
            node.state = _state(node, found)
        parents = [node for node in there if node.counts]
        sizes = [[(part.size, f"{node.key}:{part.suffix}") for part in PARTS.values()] for node in parents]
        for node, replies in zip(parents, await _ask(desk, keys, sizes), strict=True):
            node.counts = {kind: size for kind, size in zip(PARTS, replies, strict=True) if size}


async def _ask(desk: Desk, keys: QueueKeys, each: Sequence[Sequence[tuple[str, ...]]]) -> list[list[Any]]:
    """The answers to several questions about each of some jobs, in one write."""
    commands = [command for one in each for command in one]
    replies = iter(await desk.app.connection.shared_door(keys.base).call_many(commands) if commands else [])
    found = [[next(replies) for _ in one] for one in each]
    for reply in (reply for one in found for reply in one):
        if isinstance(reply, Exception):
            raise reply
    return found


def _questions(node: _FlowNode) -> list[tuple[str, ...]]:
    """Whether it has children, and where it is as far as its parent does not know that."""
    parts = ("EXISTS", *(f"{node.key}:{part.suffix}" for part in PARTS.values()))
    if node.kind in _STATE_OF:
        return [parts]
    keys = node.keys
    sets = (keys.completed, keys.failed, keys.delayed, keys.waiting_children)
    return [parts, ("EXISTS", f"{node.key}:lock"), *(("ZSCORE", name, node.id) for name in sets)]


def _state(node: _FlowNode, found: list[Any]) -> JobState:
    assert node.head is not None
    if node.kind in _STATE_OF:
        return _STATE_OF[node.kind]
    lock, *scores = found
    known = next((state for state, score in zip(_SETS, scores, strict=True) if score is not None), None)
    otherwise = JobState.PRIORITIZED if node.head.record.priority else JobState.WAITING
    return known or (JobState.ACTIVE if lock else otherwise)


async def _open(desk: Desk, parent: _FlowNode, most: int, only: str, after: str) -> None:
    """The first children of a job; those that are not shown have a place where they begin."""
    door = desk.app.connection.shared_door(parent.keys.base)
    for kind in _ORDER:
        if (only and kind != only) or not parent.counts.get(kind) or len(parent.children) >= most:
            continue
        cursor, skip = _place(after if kind == only else "")
        part = PARTS[kind]
        reply = await door.call(part.scan, f"{parent.key}:{part.suffix}", cursor, "COUNT", str(most))
        cursor_after, flat = reply
        keys = list(part.read(flat))
        room = most - len(parent.children)
        taken = keys[skip : skip + room]
        if skip + room < len(keys):
            parent.after = f"{cursor}-{skip + room}"
        elif cursor_after != b"0":
            parent.after = f"{cursor_after.decode()}-0"
        parent.children += [node for key in taken if (node := _child(key, parent.keys.prefix, kind)) is not None]


def _place(text: str) -> tuple[str, int]:
    """A cursor of the server, and how many of what it answers were seen already."""
    cursor, _, skip = text.partition("-")
    is_right = cursor.isascii() and cursor.isdigit() and len(cursor) < 21 and skip.isascii() and skip.isdigit()
    return (cursor, min(int(skip), 1_000_000)) if is_right and len(skip) < 8 else ("0", 0)


def _child(key: str, prefix: str, kind: str) -> _FlowNode | None:
    """A job by its full key; None for one under another prefix, which is of another dashboard."""
    if not key.startswith(f"{prefix}:"):
        return None
    name, _, job_id = key.removeprefix(f"{prefix}:").partition(":")
    try:
        return _FlowNode(QueueKeys(prefix, name), job_id, kind)
    except InvalidOption:
        return None


def _by_queue(nodes: Iterable[_FlowNode]) -> list[tuple[QueueKeys, list[_FlowNode]]]:
    found: dict[str, tuple[QueueKeys, list[_FlowNode]]] = {}
    for node in nodes:
        found.setdefault(node.keys.base, (node.keys, []))[1].append(node)
    return list(found.values())


def _drawn(node: _FlowNode) -> FlowBranch:
    assert node.head is not None
    record = node.head.record
    children = tuple(_drawn(child) for child in node.children if child.head is not None)
    total, began, ended = sum(node.counts.values()), record.processed_on, record.finished_on
    word = job_status(node.state.value, attempts_made=record.attempts_made, has_failed=bool(record.raw_failed_reason))
    return FlowBranch(
        queue=node.keys.name,
        id=record.id,
        name=record.name,
        state=node.state.value,
        word=word.value,
        took_ms=ended - began if ended and began and ended >= began else None,
        kind=node.kind,
        stuck=_stuck(node),
        total=total,
        more=max(0, total - len(children)),
        children=children,
    )


def _stuck(node: _FlowNode) -> str:
    """A parent that waits for a child which failed finally waits for ever: nothing tells it."""
    if node.state is not JobState.WAITING_CHILDREN:
        return ""
    failed = [child.id for child in node.children if child.kind == "pending" and child.state is JobState.FAILED]
    gone = [child.id for child in node.children if child.kind == "pending" and child.head is None]
    if failed:
        told = counted(len(failed), "child", "children")
        return (
            f"It cannot run without your help: {told} failed finally ({', '.join(failed[:3])}). Retry or remove them."
        )
    if gone:
        return (
            f"It cannot run without your help: the child {gone[0]} is gone. "
            "Remove the job, and add it again without this child."
        )
    return ""


def _size(branch: FlowBranch) -> int:
    return 1 + sum(_size(child) for child in branch.children)
