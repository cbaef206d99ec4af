"""What the API takes: the address and the body are one form, and what is not understood is not done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from bullpen import Queue
from bullpen.dashboard import Dashboard
from tests.dashboard._kit import SAME, opened
from tests.dashboard.test_pages import fail_one

Client = tuple[httpx.AsyncClient, Dashboard]
ACT = "/api/v1/dead-letters/act"


@pytest.fixture
async def stores(redis_url: str, queue_name: str) -> AsyncIterator[tuple[Queue, Queue]]:
    """Two queues with two dead letters each."""
    async with (
        Queue(f"{queue_name}-a", connection=redis_url) as one,
        Queue(f"{queue_name}-b", connection=redis_url) as other,
    ):
        for queue in (one, other):
            for number in range(2):
                await fail_one(redis_url, queue, {"n": number})
        yield one, other


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Client]:
    async with opened(redis_url) as found:
        yield found


async def depths(stores: tuple[Queue, Queue]) -> list[int]:
    return [await queue.dead_letters.depth() for queue in stores]


async def ended(dashboard: Dashboard, number: str) -> tuple[str, int, int]:
    async with asyncio.timeout(30):
        while (found := await dashboard.desk.operations.get(number)) is None or found.is_open:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # nobody tells
    return found.state, found.done, found.total


@pytest.mark.parametrize("verb", ["redrive", "discard"])
async def test_a_deed_touches_only_what_its_address_names(
    stores: tuple[Queue, Queue], client: Client, verb: str
) -> None:
    http, dashboard = client
    path = f"{ACT}/{verb}?store={stores[0].name}-dlq"

    sent = await http.post(path, json={"most": 100})

    assert sent.status_code == 202, sent.text
    assert await ended(dashboard, sent.json()["operation"]) == ("completed", 2, 2)
    assert await depths(stores) == [0, 2]


@pytest.mark.parametrize("base", ["/api/v1", ""])
async def test_an_address_and_a_body_that_differ_are_refused(
    stores: tuple[Queue, Queue], client: Client, base: str
) -> None:
    http, _ = client
    for store in (f"{stores[1].name}-dlq", ""):
        path = f"{base}/dead-letters/act/discard?store={stores[0].name}-dlq"
        sent = await http.post(path, data={"most": "9", "store": store}, headers=SAME)
        assert sent.status_code == 400
        assert "in the address and" in sent.text
    assert await depths(stores) == [2, 2]


async def test_a_body_names_what_an_address_could_name(stores: tuple[Queue, Queue], client: Client) -> None:
    http, dashboard = client

    sent = await http.post("/api/v1/queues-act/pause", json={"name": stores[0].name})

    await ended(dashboard, sent.json()["operation"])
    assert [await queue.is_paused() for queue in stores] == [True, False]


async def test_unknown_and_missing_fields_are_refused_by_name(stores: tuple[Queue, Queue], client: Client) -> None:
    http, _ = client
    queue = stores[0].name
    for path, fields, told in (
        ("dead-letters/act/discard", {"store": f"{queue}-dlq", "reason": "t"}, "Missing: most"),
        ("dead-letters/act/discard", {"most": 1, "reson": "t"}, "did you mean 'reason'?"),
        ("dead-letters/act/discard", {"at_most": 5, "nonsense": True}, "did you mean 'most'?"),
        ("dead-letters/act/discard?stores=x", {"most": 1}, "did you mean 'store'?"),
        (f"queues/{queue}/act/pause", {"reson": "typo"}, "did you mean 'reason'?"),
        (f"queues/{queue}/act/pause", {"most": 1}, "There is no field 'most'"),
        (f"queues/{queue}/jobs/x/act/delay", {}, "Missing: delay."),
        (f"queues/{queue}/matching/remove", {}, "Missing: state."),
        (f"queues/{queue}/matching/remove", {"state": "failed", "start": 1}, "There is no field 'start'"),
        (f"queues/{queue}/selected", {}, "Missing: verb, id."),
        (f"queues/{queue}/add", {"nam": "x"}, "did you mean 'name'?"),
        ("charts/mark", {}, "Missing: text."),
        ("queues-act/pause", {"nmae": queue}, "did you mean 'name'?"),
    ):
        sent = await http.post(f"/api/v1/{path}", json=fields)
        assert sent.status_code == 400, (path, sent.text)
        assert told in sent.json()["title"], path
    assert await depths(stores) == [2, 2]
    assert not await stores[0].is_paused()
    refused = await http.post(f"/api/v1/queues/{queue}/matching/remove", json={"state": "failed", "age": "old"})
    assert refused.status_code == 422


async def test_nothing_to_do_is_no_operation(stores: tuple[Queue, Queue], client: Client) -> None:
    http, _ = client
    form = {"store": f"{stores[0].name}-dlq", "fingerprint": "none", "most": 5}
    assert (await http.post(f"{ACT}/redrive", json=form)).status_code == 404


async def test_lists_and_objects_are_taken_as_json(stores: tuple[Queue, Queue], client: Client) -> None:
    http, dashboard = client
    path = f"/api/v1/queues/{stores[0].name}"
    made = await http.post(f"{path}/add", json={"name": "n", "data": {"to": ["x"]}})
    job = await stores[0].get_job(made.json()["id"])
    assert job is not None and job.data == {"to": ["x"]}

    sent = await http.post(f"{path}/selected", json={"verb": "remove", "id": [job.id], "confirmed": True})

    await ended(dashboard, sent.json()["operation"])
    assert await stores[0].get_job(job.id) is None


async def test_the_fields_are_described(client: Client) -> None:
    paths = (await client[0].get("/api/v1/openapi.json")).json()["paths"]
    bodies = {
        path: methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, methods in paths.items()
        if "post" in methods
    }
    assert {"store", "most", "entry"} <= bodies["/dead-letters/act/{verb}"]["properties"].keys()
    assert bodies["/queues/{queue}/add"]["required"] == ["name"]
    assert {"delay", "reason", "typed"} <= bodies["/queues/{queue}/act/{verb}"]["properties"].keys()
    assert all(each["additionalProperties"] is False for each in bodies.values())


async def test_every_change_of_the_api_names_its_fields(client: Client) -> None:
    browsers = {"/login", "/logout", "/settings"}
    changes = [route for route in client[1].routes if route.method == "POST" and route.pattern not in browsers]
    assert changes
    assert [route.pattern for route in changes if route.fields is None] == []
