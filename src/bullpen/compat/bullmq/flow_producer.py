"""Flows with PyPI's names: a tree of dictionaries becomes a tree of jobs, in one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import uuid4

from bullpen._kernel.json import NULL
from bullpen.compat.bullmq._connection import ARGUMENTS, connection_of, prefix_of
from bullpen.compat.bullmq._errors import as_pypi
from bullpen.compat.bullmq._names import COMMON, FLOW_NODE, QUEUE, check_backend, check_event, check_names
from bullpen.compat.bullmq._options import check_job_options, child_arguments, job_arguments, native_name
from bullpen.compat.bullmq.event_emitter import EventEmitter
from bullpen.compat.bullmq.job import Job
from bullpen.compat.bullmq.queue import Queue
from bullpen.errors import InvalidOption, JobNotFound
from bullpen.queue.flows import Flow, FlowNode
from bullpen.queue.queue import Queue as NativeQueue

__all__ = ["FlowProducer"]

_OF_OPTIONS = ("prefix", "connection", "backend", "skipVersionCheck")


class FlowProducer(EventEmitter):
    """Adds trees of jobs in which each parent waits for its children."""

    def __init__(self, redisOpts: Any = None, opts: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        if opts is None and isinstance(redisOpts, dict) and any(name in redisOpts for name in _OF_OPTIONS):
            self.opts: dict[str, Any] = dict(redisOpts)
        else:
            self.opts = dict(opts or {})
            if isinstance(redisOpts, dict):
                # Their words: a dictionary with none of the options is arguments of redis-py.
                check_names(redisOpts, ARGUMENTS, "an argument of redis.asyncio.Redis", meant=ARGUMENTS | COMMON)
            if redisOpts is not None:
                self.opts["connection"] = redisOpts
        check_names(self.opts, QUEUE, "an option of FlowProducer")
        check_backend(self.opts)
        self.prefix = prefix_of(self.opts)
        self.closing = False
        self._connection, self._owns_connection = connection_of(self.opts)
        self.native_queue = NativeQueue("__default__", connection=self._connection, prefix=self.prefix, attempts=1)
        self._queues: dict[tuple[str, str], Queue] = {}

    def on(self, event_name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Taken for `error` alone, as programs do; what happens to jobs is heard by QueueEvents."""
        check_event(event_name, ("error",), "FlowProducer; QueueEvents hears of jobs")
        return super().on(event_name, function)

    async def add(self, flow: Mapping[str, Any], opts: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Store one tree; returns `{"job", "children"}` for each of its jobs. None after `close`."""
        if self.closing:
            return None
        check_names(opts, ("queuesOptions",), "an option of add")
        given = (opts or {}).get("queuesOptions") or {}
        for queue, options in given.items():
            check_names(options, ("defaultJobOptions",), "an option of a queue in a flow", f"queuesOptions.{queue}")
            if options:
                place = f"queuesOptions.{queue}.defaultJobOptions"
                check_job_options(options.get("defaultJobOptions"), place)
        _check_node(flow, "flow")
        parent = (flow.get("opts") or {}).get("parent")
        with as_pypi("addJob", parent=f"{parent.get('queue')}:{parent.get('id')}" if parent else None):
            return self._shown(await self.native_queue.add_flow(self._flow(flow, given, is_root=True)), flow, given)

    async def addBulk(self, flows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """Store many trees, all or none; but one whose parent does not exist is left out, and nothing says so."""
        if self.closing:
            return None
        listed = list(flows)
        for position, flow in enumerate(listed):
            _check_node(flow, f"flows[{position}]")
        trees = [self._flow(flow, {}, is_root=True) for flow in listed]
        try:
            nodes: list[FlowNode[Any] | None] = list(await self.native_queue.add_flows(trees))
        except JobNotFound:
            nodes = [await self._add_if_wanted(tree) for tree in trees]
        return [
            {"job": Job(self._queue_of(flow), flow.get("name", ""), flow.get("data"), flow.get("opts"), uuid4().hex)}
            if node is None
            else self._shown(node, flow, {})
            for node, flow in zip(nodes, listed, strict=True)
        ]

    async def _add_if_wanted(self, tree: Flow) -> FlowNode[Any] | None:
        try:
            return await self.native_queue.add_flow(tree)
        except JobNotFound:
            return None

    async def close(self) -> None:
        """Let go of the connection."""
        self.closing = True
        for queue in self._queues.values():
            await queue.close()
        await self.native_queue.close()
        if self._owns_connection:
            await self._connection.aclose()

    async def disconnect(self) -> None:
        """The same: nothing is held back here that `close` would wait for."""
        await self.close()

    def _flow(self, node: Mapping[str, Any], given: Mapping[str, Any], *, is_root: bool = False) -> Flow:
        merged = _merged(node, given)
        return Flow(
            node.get("name", ""),
            NULL if node.get("data") is None else node["data"],
            queue=native_name(node["queueName"]) if "queueName" in node else None,
            prefix=node.get("prefix", self.prefix),
            children=[self._flow(child, given) for child in node.get("children") or ()],
            **(job_arguments if is_root else child_arguments)(merged),
        )

    def _shown(self, added: FlowNode[Any], node: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        job = Job(self._queue_of(node), node.get("name", ""), node.get("data"), _merged(node, given), added.job.id)
        job.id = added.job.id
        job.show(added.job.record)
        children = node.get("children") or ()
        if not children:
            return {"job": job}
        below = zip(added.children, children, strict=True)
        return {"job": job, "children": [self._shown(child, each, given) for child, each in below]}

    def _queue_of(self, node: Mapping[str, Any]) -> Queue:
        name, prefix = node.get("queueName", ""), node.get("prefix", self.prefix)
        if (prefix, name) not in self._queues:
            self._queues[prefix, name] = Queue(name, {"prefix": prefix, "connection": self._connection})
        return self._queues[prefix, name]


def _check_node(node: Mapping[str, Any], path: str) -> None:
    check_names(node, FLOW_NODE, "a part of a flow", path)
    if not isinstance(node.get("queueName"), str):
        raise InvalidOption(f"{path}.queueName", "the name of a queue", node.get("queueName"))
    check_job_options(node.get("opts"), f"{path}.opts")
    for position, child in enumerate(node.get("children") or ()):
        _check_node(child, f"{path}.children[{position}]")


def _merged(node: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    defaults = (given.get(node.get("queueName", "")) or {}).get("defaultJobOptions") or {}
    return {**defaults, **(node.get("opts") or {})}
