"""Random flows over two queues, added and worked by any of the three implementations, against a model of the rules.

50 in every run, 500 with BULLPEN_TEST_LONG=1. Each flow is added by one side, and two sides share the work of a queue.
"""

import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis

from ._dump import PREFIX
from ._sides import OurSide, PeerSide, Side
from ._wait import until

FLOWS = 500 if os.environ.get("BULLPEN_TEST_LONG") == "1" else 50
PER_ROUND = 25
QUEUES = ("model-a", "model-b")
POLICIES = {
    "fail_parent": "failParentOnFailure",
    "continue_parent": "continueParentOnFailure",
    "ignore": "ignoreDependencyOnFailure",
    "remove": "removeDependencyOnFailure",
    "wait": None,
}
# A parent that was released early waits again; a job without children has nothing to wait for.
BEHAVIOUR = {"byName": {"ok": {"kind": "wait_children"}, "bad": {"kind": "always_fail", "message": "no"}}}


# A job that a worker took and lost comes back while the test still waits.
SHORT_LOCKS = {"lockDuration": 4_000, "stalledInterval": 2_000}


@dataclass
class Node:
    """A job of a random flow."""

    id: str
    queue: str
    fails: bool
    policy: str
    children: list["Node"] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{PREFIX}:{self.queue}:{self.id}"

    def walk(self) -> Iterator["Node"]:
        yield self
        for child in self.children:
            yield from child.walk()

    def to_flow(self, *, is_root: bool = True) -> dict[str, Any]:
        opts: dict[str, Any] = {"jobId": self.id, "attempts": 1}
        if not is_root and (flag := POLICIES[self.policy]):
            opts[flag] = True
        flow = {"name": "bad" if self.fails else "ok", "queueName": self.queue, "data": {}, "opts": opts}
        return flow | {"children": [child.to_flow(is_root=False) for child in self.children]}

    @property
    def end(self) -> str:
        """Where the job is when nothing moves any more."""
        ends = {child.id: child.end for child in self.children}
        failed = [child for child in self.children if ends[child.id] == "failed"]
        if any(child.policy == "fail_parent" for child in failed):
            return "failed"
        if self.fails and any(child.policy == "continue_parent" for child in failed):
            return "failed"  # it was released at once and did not wait for the others
        if "waiting-children" in ends.values() or any(child.policy == "wait" for child in failed):
            return "waiting-children"
        return "failed" if self.fails else "completed"

    def families(self) -> Mapping[str, set[str]]:
        """What each part of its children must hold in the end."""
        by_end: dict[str, set[str]] = {
            "processed": set(),
            "dependencies": set(),
            "failed": set(),
            "unsuccessful": set(),
        }
        for child in self.children:
            end = child.end
            if end == "completed":
                by_end["processed"].add(child.key)
            elif end == "waiting-children" or child.policy == "wait":
                by_end["dependencies"].add(child.key)
            elif child.policy == "fail_parent":
                by_end["unsuccessful"].add(child.key)
            elif child.policy != "remove":
                by_end["failed"].add(child.key)
        return by_end


def random_flow(chance: random.Random, name: str) -> Node:
    number = iter(range(1_000))

    def node(depth: int) -> Node:
        made = Node(
            f"{name}-{next(number)}", chance.choice(QUEUES), chance.random() < 0.3, chance.choice(list(POLICIES))
        )
        if depth < 3:
            made.children = [node(depth + 1) for _ in range(chance.choice((0, 1, 2, 3)) if depth else 2)]
        return made

    return node(0)


def members(client: redis.Redis, key: str) -> set[str]:
    kind: Any = client.type(key)
    found: Any = ()
    match kind:
        case b"hash":
            found = client.hkeys(key)
        case b"set":
            found = client.smembers(key)
        case b"zset":
            found = client.zrange(key, 0, -1)
    return {raw.decode() for raw in found}


def state_of(client: redis.Redis, node: Node) -> str:
    for state in ("completed", "failed", "waiting-children"):
        if client.zscore(f"{PREFIX}:{node.queue}:{state}", node.id) is not None:
            return state
    return "moving"


def describe(client: redis.Redis, job: Node) -> str:
    fields: Any = client.hgetall(job.key)
    lines: Any = {line: client.lrange(f"{PREFIX}:{job.queue}:{line}", 0, -1) for line in ("wait", "active")}
    events: Any = client.xrange(f"{PREFIX}:{job.queue}:events")
    told = [event for _, event in events if event.get(b"jobId") == job.id.encode()]
    return f"{job.id} is {state_of(client, job)}, not {job.end}: {job} {fields} {lines} {told}"


@pytest.mark.requirement("W-84")
@pytest.mark.parametrize("number", range(FLOWS // PER_ROUND))
async def test_random_flows_end_as_the_rules_say(
    number: int, ours: OurSide, node: PeerSide, pypi: PeerSide, client: redis.Redis
) -> None:
    """Nothing lost, no parent stuck but by choice, and each parent knows what became of each child."""
    chance = random.Random(f"flows {number}")
    sides: list[Side] = [ours, node, pypi]
    for queue in QUEUES:
        for side in chance.sample(sides, 2):
            await side.start_worker(f"{side.name}-{queue}-{number}", queue, BEHAVIOUR, concurrency=3, **SHORT_LOCKS)

    flows = [random_flow(chance, f"f{number}-{index}") for index in range(PER_ROUND)]
    for flow in flows:
        await chance.choice(sides).add_flow(flow.to_flow())

    expected = {job.id: job.end for flow in flows for job in flow.walk()}
    nodes = [job for flow in flows for job in flow.walk()]

    def is_settled() -> bool:
        return all(state_of(client, job) == expected[job.id] for job in nodes) and not any(
            client.llen(f"{PREFIX}:{queue}:{line}") for queue in QUEUES for line in ("wait", "active")
        )

    try:
        await until(is_settled, "all jobs where the model says", timeout=40)
    except AssertionError:
        wrong = [job for job in nodes if state_of(client, job) != expected[job.id]]
        raise AssertionError(
            "\n".join(["differs from the model:", *(describe(client, job) for job in wrong)])
        ) from None
    for job in nodes:
        found = {part: members(client, f"{job.key}:{part}") for part in job.families()}
        assert found == job.families(), job
