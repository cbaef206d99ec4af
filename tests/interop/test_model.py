"""The model of a queue with Node as a third party: it adds, pauses, promotes, retries, reorders and removes beside us.

The rules, the faults and the model are those of `tests/chaos/test_model`; after each step of Node's the queue must be
where the model is, our worker must have been woken, and Node must name the same states.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import rule

from bullpen.testing import FaultProxy
from tests.chaos.arena import scaled
from tests.chaos.test_model import ADDS, LATER_MS, Addition, ModelJob, QueueMachine, run_machine
from tests.conftest import StartServer

from ._node import NodePeer, NodeTools


class Change(NamedTuple):
    which: int
    how: str
    priority: int


CHANGES = st.builds(
    Change,
    which=st.integers(0, 50),
    how=st.sampled_from(["promote", "retry", "reorder", "remove"]),
    priority=st.sampled_from([0, 1, 7]),
)


class SharedMachine(QueueMachine):
    """Node works through its own connection, without our faults; its process and loop outlive the examples."""

    node: ClassVar[NodePeer]
    shared_runner: ClassVar[asyncio.Runner]

    def _open_runner(self) -> asyncio.Runner:
        return self.shared_runner

    def _close_runner(self) -> None:
        pass

    async def _finish(self) -> None:
        await super()._finish()
        await self._call("reset")

    async def _call(self, op: str, **fields: Any) -> Any:
        return await self.node.call(op, queue=self.name, **fields)

    @rule(steps=st.lists(st.one_of(ADDS, CHANGES), min_size=3, max_size=8))
    def node_works(self, steps: list[Addition | Change]) -> None:
        for step in steps:
            self.runner.run(self._node_adds(step) if isinstance(step, Addition) else self._node_changes(step))

    @rule(paused=st.booleans())
    def node_pauses_or_resumes(self, paused: bool) -> None:
        self.model.paused = paused
        self.model.take()
        self.runner.run(self._node_does("pause" if paused else "resume"))

    @rule()
    def node_names_the_same_states(self) -> None:
        self.runner.run(self._node_looks())

    async def _node_does(self, op: str, **fields: Any) -> None:
        await self._call(op, **fields)
        await self._compare()

    async def _node_adds(self, new: Addition) -> None:
        """One at a time: many in one call are many steps, and our worker takes between them."""
        lifo = new.lifo and not new.priority
        opts: dict[str, Any] = {"attempts": new.attempts, "backoff": {"type": "fixed", "delay": LATER_MS}, "lifo": lifo}
        if new.priority:
            opts["priority"] = new.priority
        if new.own_id:
            opts["jobId"] = new.own_id
        if new.later:
            opts["delay"] = LATER_MS
        job_id = await self._call("add", name="work", data={}, opts=opts)
        if job_id not in self.model.jobs:
            job = self.model.jobs[job_id] = ModelJob(job_id, new.priority, lifo, new.attempts)
            if new.later:
                self.model.delayed.add(job_id)
            else:
                self.model.ready(job)
        self.model.take()
        await self._compare()

    async def _node_changes(self, change: Change) -> None:
        model = self.model
        waiting = [*model.wait, *(job_id for _, _, job_id in model.prioritized)]
        candidates = {
            "promote": sorted(model.delayed),
            "retry": sorted(model.failed),
            "reorder": sorted(waiting),
            "remove": sorted({*waiting, *model.delayed, *model.completed, *model.failed}),
        }[change.how]
        if not candidates:
            return
        job = model.jobs[candidates[change.which % len(candidates)]]
        self._take_out(job.id)
        match change.how:
            case "promote":
                self._place(job)
                await self._call("promote", jobId=job.id)
            case "retry":
                model.ready(job)
                await self._call("retryJob", jobId=job.id, state="failed")
            case "reorder":
                job.priority = change.priority
                self._place(job)
                await self._call("changePriority", jobId=job.id, opts={"priority": change.priority})
            case "remove":
                del model.jobs[job.id]
                await self._call("remove", jobId=job.id)
        model.take()
        await self._compare()

    def _take_out(self, job_id: str) -> None:
        model = self.model
        model.wait = [one for one in model.wait if one != job_id]
        model.prioritized = [entry for entry in model.prioritized if entry[2] != job_id]
        for state in (model.delayed, model.completed, model.failed):
            state.discard(job_id)

    def _place(self, job: ModelJob) -> None:
        """At the end of its class: who is promoted or reordered by hand has no place at the front."""
        if job.priority:
            self.model.ready(job)
        else:
            self.model.wait.append(job.id)

    async def _node_looks(self) -> None:
        await self._compare()
        model = self.model
        expected = {
            **dict.fromkeys(model.wait, "waiting"),
            **{job_id: "prioritized" for _, _, job_id in model.prioritized},
            **dict.fromkeys(model.delayed, "delayed"),
            **dict.fromkeys(model.running, "active"),
            **dict.fromkeys(model.completed, "completed"),
            **dict.fromkeys(model.failed, "failed"),
        }
        found = {job_id: await self._call("getState", jobId=job_id) for job_id in expected}
        assert found == expected


@pytest.fixture
def machine(start_server: StartServer, node_tools: NodeTools) -> Iterator[type[SharedMachine]]:
    """On a server of its own: it forgets scripts on purpose, which the Node of other tests does not expect."""
    server = start_server()
    with asyncio.Runner() as runner, FaultProxy(server) as proxy:
        node = NodePeer(server.url, node_tools)
        runner.run(_start(node))
        SharedMachine.server, SharedMachine.proxy = server, proxy
        SharedMachine.node, SharedMachine.shared_runner = node, runner
        yield SharedMachine
        runner.run(node.close())


async def _start(node: NodePeer) -> None:
    await node.start()


@pytest.mark.requirement("Q-14", "Q-25", "Q-26", "Q-31", "Q-32", "Q-39", "Q-65", "X-31")
def test_any_sequence_of_our_and_nodes_operations_matches_the_model(machine: type[SharedMachine]) -> None:
    run_machine(machine, examples=scaled(8, 300))
