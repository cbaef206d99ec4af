"""The flow of a job on the dashboard: its tree, how much of it is shown, and what holds it up."""

from __future__ import annotations

import asyncio

import pytest

from bullpen import Job, Queue, Worker
from bullpen.queue.flows import Flow
from tests.dashboard._kit import opened


@pytest.mark.requirement("W-77")
@pytest.mark.requirement("D-50")
async def test_a_flow_is_a_tree_over_queues(redis_url: str, queue_name: str) -> None:
    other = f"{queue_name}-other"
    async with Queue(queue_name, connection=redis_url) as queue:
        leaf = Flow("leaf", {}, queue=other, on_failure="fail_parent")
        middle = Flow("middle", {}, queue=other, children=[leaf], job_id="middle", on_failure="fail_parent")
        await queue.add_flow(Flow("top", {}, job_id="top", children=[middle]))
        async with opened(redis_url) as (http, _):
            found = (await http.get(f"/api/v1/queues/{queue_name}/jobs/top/flow")).json()
            page = await http.get(f"/queues/{other}/jobs/middle/flow")
            missing = await http.get(f"/queues/{queue_name}/jobs/nothing/flow")

    root = found["root"]
    assert (root["state"], root["total"], root["more"]) == ("waiting-children", 1, 0)
    (child,) = root["children"]
    assert (child["queue"], child["id"], child["state"]) == (other, "middle", "waiting-children")
    assert [each["state"] for each in child["children"]] == ["waiting"]
    assert "Up to its parent" in page.text
    assert missing.status_code == 404


@pytest.mark.requirement("D-50")
async def test_a_parent_that_waits_for_a_failed_child_says_so(redis_url: str, queue_name: str) -> None:
    async def fail(job: Job) -> None:
        raise ValueError("no")

    async with Queue(queue_name, connection=redis_url) as queue:
        child = Flow("child", {}, queue=f"{queue_name}-c", job_id="child", on_failure="wait", attempts=1)
        await queue.add_flow(Flow("top", {}, job_id="top", children=[child]))
        async with Worker(f"{queue_name}-c", fail, connection=redis_url) as worker:
            task = asyncio.create_task(worker.run(signals=False))
            async with Queue(f"{queue_name}-c", connection=redis_url) as below:
                while not (await below.counts()).failed:  # noqa: ASYNC110 - the server does not tell us
                    await asyncio.sleep(0.01)
            await worker.close()
            await task
        async with opened(redis_url) as (http, _):
            root = (await http.get(f"/api/v1/queues/{queue_name}/jobs/top/flow")).json()["root"]

    assert root["stuck"].startswith("It cannot run without your help: 1 child failed finally (child).")


@pytest.mark.requirement("D-49")
async def test_of_many_children_a_page_is_shown_and_all_can_be_reached(redis_url: str, queue_name: str) -> None:
    children = [
        Flow("child", {}, queue=f"{queue_name}-c", job_id=f"c{n}", on_failure="fail_parent") for n in range(180)
    ]
    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add_flow(Flow("top", {}, job_id="top", children=children))
        async with opened(redis_url) as (http, _):
            address = f"/api/v1/queues/{queue_name}/jobs/top/flow"
            first = (await http.get(address)).json()
            seen, after = set[str](), ""
            for _ in range(20):
                found = (await http.get(address, params={"kind": "pending", "after": after})).json()
                seen |= {each["id"] for each in found["root"]["children"]}
                if not (after := found["next"]):
                    break

    assert first["root"]["total"] == 180
    assert first["shown"] <= 120
    assert first["root"]["more"] == 180 - len(first["root"]["children"])
    assert seen == {f"c{n}" for n in range(180)}
