"""Runs over HTTP: every operation, every refusal, and a machine that tries what nobody thought of."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from bullpen.errors import InvalidOption, PermanentError
from bullpen.http.runs import Principal, Tokens, runs_api
from bullpen.ledger import RunStatus
from bullpen.ports.dead_letters import DeadLetter
from bullpen.queue import JobState
from bullpen.runs import Run
from tests.openapi import problems_of, served
from tests.runs.kit import ALICE, BOB, Stage, payload
from tests.runs.test_isolation import LONG
from tests.runs.test_lifecycle import audited

TOKENS = {
    "alice-token-0123456789": Principal(tenant_id=ALICE, actor="ada", may_test=True),
    "alice-viewer-0123456789": Principal(tenant_id=ALICE, actor="viewer", may_write=False),
    "bob-token-0123456789": Principal(tenant_id=BOB, actor="bob"),
}
ALICES, VIEWERS, BOBS = TOKENS


class Client:
    """A plain HTTP client against an ASGI application, without a network."""

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(
        self,
        method: str,
        path: str,
        *,
        token: str | None = ALICES,
        body: Any = None,
        headers: dict[str, str] | None = None,
        until: str | None = None,
        leave: asyncio.Event | None = None,
        begun: asyncio.Semaphore | None = None,
    ) -> tuple[int, Any]:
        """Status and decoded body; of a stream what came until `until` was in it, or until `leave`."""
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {**({} if token is None else {"authorization": f"Bearer {token}"}), **(headers or {})}
        where, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": where,
            "raw_path": where.encode(), "query_string": query.encode(), "root_path": "", "scheme": "http",
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "server": ("test", 80), "client": ("test", 1),
        }  # fmt: skip
        status, answer, seen = 0, bytearray(), asyncio.Event()
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": raw, "more_body": False}
            await (leave or seen).wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if begun is not None:
                    begun.release()
            else:
                answer.extend(message.get("body", b""))
                if not message.get("more_body") or (until is not None and until.encode() in answer):
                    seen.set()

        async with asyncio.timeout(20):
            await self._application(scope, receive, send)
        text = answer.decode()
        return status, json.loads(text) if until is None and text.startswith(("{", "[")) else text


@pytest.fixture
def client(lite: Stage) -> Client:
    return Client(runs_api(lite.service, Tokens(TOKENS), price=lambda _: 10, poll_ms=10))


async def start(client: Client, key: str = "order-1", **changes: Any) -> tuple[int, Any]:
    body = {"versionId": "v1", "definition": {"a": 1}, **changes}
    return await client("POST", "/runs", body=body, headers={"Idempotency-Key": key})


async def test_a_handler_that_no_database_takes_is_refused(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """Not answered as a mistake of ours, with a stack in the log."""
    client = Client(runs_api(stage.service, Tokens(TOKENS)))

    status, answer = await client("GET", "/runs?handler=a%00b")

    assert (status, answer["error"]) == (422, "invalid")
    assert "Traceback" not in caplog.text


@pytest.mark.requirement("R-54", "R-52", "X-16")
async def test_a_run_is_started_once_per_key_and_paid(lite: Stage, client: Client) -> None:
    await lite.service.grant(ALICE, 15, reference="g", actor="bank")

    first, again = await start(client), await start(client)
    too_much = await start(client, "order-2")
    other_body = await start(client, definition={"b": 2})

    assert (first[0], again[0]) == (201, 200)
    assert first[1]["id"] == again[1]["id"]
    assert (first[1]["status"], first[1]["cost"]) == ("QUEUED", 10)
    assert (too_much[0], too_much[1]["error"]) == (402, "insufficient_credits")
    assert (other_body[0], other_body[1]["error"]) == (409, "conflict")
    assert other_body[1]["message"].startswith("this Idempotency-Key has started a run with another body")
    assert await lite.service.balance(ALICE) == 5
    assert ("ada", "run.submit") in await audited(lite)


@pytest.mark.requirement("R-54", "R-53")
async def test_runs_are_listed_in_pages_and_inspected(lite: Stage, client: Client) -> None:
    ids = []
    for number in range(5):
        _, run = await start(client, f"order-{number}", isTestRun=True)
        ids.append(run["id"])
        await asyncio.sleep(0.002)

    status, page = await client("GET", "/runs?limit=2&status=QUEUED")
    _, rest = await client("GET", f"/runs?limit=200&cursor={page['next']}")
    one_status, one = await client("GET", f"/runs/{ids[0].upper()}")

    assert status == one_status == 200
    assert [run["id"] for run in page["runs"] + rest["runs"]] == ids[::-1]
    assert rest["next"] is None
    assert one["id"] == ids[0] and one["isTestRun"] is True


@pytest.mark.requirement("R-54", "R-15", "X-8", "X-40")
async def test_a_run_that_failed_is_shown_retried_and_cancelled(lite: Stage, client: Client) -> None:
    async def refuse(run: Run) -> None:
        raise PermanentError("password=hunter2 refused")

    wanted = payload(context_inputs={"token": "t0ps3cret"})
    await lite.service.submit(wanted)
    async with lite.working(refuse):
        await lite.until(wanted.run_id, RunStatus.FAILED)
        await lite.until_job(wanted.run_id, JobState.FAILED)

    _, shown = await client("GET", f"/runs/{wanted.run_id}")
    letters_status, letters = await client("GET", "/dead-letters")
    retried_status, retried = await client("POST", f"/runs/{wanted.run_id}/retry")
    conflict, why = await client("POST", f"/runs/{wanted.run_id}/retry")
    cancelled_status, cancelled = await client("POST", f"/runs/{wanted.run_id}/cancel")

    assert shown["status"] == "FAILED"
    assert shown["errorMessage"] == "Workflow execution failed after 1 attempts: password=*** refused"
    assert shown["retryHistory"][0]["error"] == "password=*** refused"
    assert (letters_status, letters["depth"]) == (200, 1)
    assert letters["deadLetters"][0]["runId"] == wanted.run_id
    assert "t0ps3cret" not in json.dumps(letters) and "hunter2" not in json.dumps(letters)
    assert "Traceback" not in json.dumps([shown, letters])
    assert (retried_status, retried["status"], retried["redrives"]) == (200, "QUEUED", 1)
    assert (conflict, why["error"]) == (409, "conflict")
    assert (cancelled_status, cancelled["status"]) == (200, "CANCELLED")
    assert ("ada", "run.redrive") in await audited(lite)


@pytest.mark.requirement("R-54")
async def test_a_run_is_followed_until_it_has_ended(lite: Stage, client: Client) -> None:
    wanted = payload()
    go_on = asyncio.Event()

    async def execute(run: Run) -> str:
        await run.progress(40)
        await go_on.wait()
        return "done"

    await lite.service.submit(wanted)
    following = asyncio.create_task(client("GET", f"/runs/{wanted.run_id}/events", until="never"))
    partly = asyncio.create_task(client("GET", f"/runs/{wanted.run_id}/events", until='"progress":40'))
    async with lite.working(execute):
        await partly  # a client that goes away early
        go_on.set()
        status, text = await following

    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert status == 200
    assert events[0]["status"] == "QUEUED"
    assert events[-1]["status"] == "COMPLETED" and events[-1]["result"] == "done"
    assert any(event["progress"] == 40 for event in events)


async def test_who_may_not_test_pays(lite: Stage, client: Client) -> None:
    """A test run costs nothing: whoever says that a run is one must be allowed to."""
    await lite.service.grant(BOB, 15, reference="g", actor="bank")

    async def begin(key: str, **changes: Any) -> tuple[int, Any]:
        body = {"versionId": "v1", "definition": {"a": 1}, **changes}
        return await client("POST", "/runs", token=BOBS, body=body, headers={"Idempotency-Key": key})

    refused, why = await begin("free", isTestRun=True)
    paid, _ = await begin("paid", isTestRun=False)

    assert (refused, why["error"]) == (403, "forbidden")
    assert paid == 201
    assert await lite.service.balance(BOB) == 5
    assert len((await client("GET", "/runs", token=BOBS))[1]["runs"]) == 1


async def test_a_principal_follows_a_few_runs_at_a_time(lite: Stage) -> None:
    """Each follower holds a connection and asks the database again and again; others have their own."""
    client = Client(runs_api(lite.service, Tokens(TOKENS), poll_ms=10, followers=2, all_followers=3))
    mine, bobs = payload(), payload(tenant_id=BOB)
    await lite.service.submit(mine)
    await lite.service.submit(bobs)
    go_away, begun = asyncio.Event(), asyncio.Semaphore(0)

    def follow(token: str, run_id: str) -> Any:
        return client("GET", f"/runs/{run_id}/events", token=token, until="never", leave=go_away, begun=begun)

    following = [asyncio.create_task(follow(ALICES, mine.run_id)) for _ in range(2)]
    for _ in following:
        await begun.acquire()
    too_many, text = await follow(ALICES, mine.run_id)
    await begun.acquire()
    following.append(asyncio.create_task(follow(BOBS, bobs.run_id)))
    await begun.acquire()
    too_many_of_all, _ = await follow(VIEWERS, mine.run_id)

    assert (too_many, json.loads(text)["error"], too_many_of_all) == (429, "too_many", 429)
    assert not any(task.done() for task in following)
    go_away.set()
    assert [(await task)[0] for task in following] == [200, 200, 200]
    last = asyncio.create_task(follow(ALICES, mine.run_id))  # there is room again
    assert (await last)[0] == 200


@pytest.mark.requirement("R-54", "X-41")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/runs"),
        ("GET", "/runs"),
        ("GET", "/runs/{id}"),
        ("POST", "/runs/{id}/cancel"),
        ("POST", "/runs/{id}/retry"),
        ("GET", "/runs/{id}/events"),
        ("GET", "/dead-letters"),
    ],
)
async def test_nobody_gets_in_without_a_token(client: Client, method: str, path: str) -> None:
    where = path.format(id=payload().run_id)

    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer "}, {"authorization": "Basic x"}):
        status, problem = await client(method, where, token=None, headers=headers)
        assert (status, problem["error"]) == (401, "unauthorized")
    if method == "POST" or path == "/dead-letters":
        status, problem = await client(method, where, token=VIEWERS)
        assert (status, problem["error"]) == (403, "forbidden")


@pytest.mark.requirement("R-54", "X-41", "X-115")
async def test_the_runs_of_another_tenant_do_not_exist(lite: Stage, client: Client) -> None:
    await lite.service.grant(ALICE, 100, reference="g", actor="bank")
    _, mine = await start(client)

    for method, path in (("GET", ""), ("POST", "/cancel"), ("POST", "/retry"), ("GET", "/events")):
        status, problem = await client(method, f"/runs/{mine['id']}{path}", token=BOBS)
        assert (status, problem["error"]) == (404, "not_found")
    assert (await client("GET", "/runs", token=BOBS))[1] == {"runs": [], "next": None}
    assert (await client("GET", "/dead-letters", token=BOBS))[1]["deadLetters"] == []
    assert (await client("GET", f"/runs/{mine['id']}"))[1]["status"] == "QUEUED"
    # The same key of another tenant is another run, and the tenant cannot be named in the body.
    body = {"versionId": "v1", "definition": {}, "tenantId": ALICE}
    assert (await client("POST", "/runs", token=BOBS, body=body, headers={"Idempotency-Key": "order-1"}))[0] == 422


@pytest.mark.parametrize(
    ("method", "path", "given", "status"),
    [
        ("POST", "/runs", {"body": {"versionId": "v", "definition": 1}}, 422),  # no key
        ("POST", "/runs", {"body": b"{", "headers": {"Idempotency-Key": "k"}}, 422),
        ("POST", "/runs", {"body": b"\xff", "headers": {"Idempotency-Key": "k"}}, 422),
        ("POST", "/runs", {"body": {"versionId": ""}, "headers": {"Idempotency-Key": "k"}}, 422),
        ("POST", "/runs", {"body": b"x" * (10 * 1024 * 1024 + 1), "headers": {"Idempotency-Key": "k"}}, 413),
        ("GET", "/runs?limit=0", {}, 422),
        ("GET", "/runs?limit=abc", {}, 422),
        ("GET", "/runs?limit=99999999999999999999", {}, 422),
        ("GET", "/runs?status=LOST", {}, 422),
        ("GET", "/runs?cursor=nonsense", {}, 422),
        ("GET", "/runs?cursor=MDAwMS0wMS0wMVQwMDowMDowMHxh", {}, 422),
        ("GET", "/runs/no-uuid", {}, 422),
        ("DELETE", "/runs", {}, 405),
        ("GET", "/nowhere", {}, 404),
    ],
)
async def test_what_cannot_be_used_is_told(
    client: Client, method: str, path: str, given: dict[str, Any], status: int
) -> None:
    answer, problem = await client(method, path, **given)

    assert answer == status
    assert problem["message"]


@pytest.mark.parametrize("depth", [101, 400, 900, 975, 990, 5_000, 200_000])
async def test_a_body_that_is_nested_too_deeply_is_the_clients_fault(lite: Stage, client: Client, depth: int) -> None:
    """At the door, with one limit: what reads it later has limits of its own, which are lower than the reader's."""
    nested = b'{"versionId": "v1", "definition": {"a": ' + b"[" * depth + b"]" * depth + b'}, "contextInputs": {}}'

    status, answer = await client("POST", "/runs", body=nested, headers={"Idempotency-Key": f"deep-{depth}"})

    assert status == 422, answer
    assert answer["message"]


async def test_a_body_as_deep_as_allowed_is_taken(lite: Stage, client: Client) -> None:
    deep: Any = []
    for _ in range(90):
        deep = [deep]
    await lite.service.grant(ALICE, 15, reference="g", actor="bank")

    status, answer = await start(client, key="deep", definition={"a": deep})

    assert status == 201, answer


async def test_a_database_that_is_away_is_not_the_clients_fault(lite: Stage, client: Client) -> None:
    async def away(tenant_id: str, fn: Any) -> Any:
        from bullpen.errors import DatabaseUnavailable

        raise DatabaseUnavailable("postgresql://app:secret@db/x refused")

    lite.ledger.transactions.run = away  # type: ignore[method-assign]  # the edge to the database
    status, problem = await client("GET", "/runs")

    assert (status, problem["error"]) == (503, "unavailable")
    assert "postgresql" not in problem["message"]


async def test_a_mistake_of_ours_tells_a_number_and_nothing_else(lite: Stage, client: Client) -> None:
    async def broken(tenant_id: str, fn: Any) -> Any:
        from bullpen.errors import LedgerError

        raise LedgerError("column secret_stuff does not exist")

    lite.ledger.transactions.run = broken  # type: ignore[method-assign]  # the edge to the database
    status, problem = await client("GET", "/runs")

    assert (status, problem["error"]) == (500, "internal")
    assert "secret_stuff" not in problem["message"] and "quote" in problem["message"]


def test_tokens_and_principals_are_checked() -> None:
    with pytest.raises(InvalidOption, match="at least 16"):
        Tokens({"short": Principal(tenant_id=ALICE, actor="ada")})
    with pytest.raises(InvalidOption, match="tenant_id"):
        Principal(tenant_id="", actor="ada")
    held = Tokens(TOKENS)
    assert ALICES not in repr(vars(held))


async def test_it_mounts_in_another_application(lite: Stage) -> None:
    outer = Client(Starlette(routes=[Mount("/api", app=runs_api(lite.service, Tokens(TOKENS)))]))

    status, document = await outer("GET", "/api/openapi.json", token=None)
    listed, page = await outer("GET", "/api/runs")

    assert (status, document["openapi"], document["servers"]) == (200, "3.1.0", [{"url": "/api"}])
    assert set(document["paths"]) == {
        "/runs",
        "/runs/{run_id}",
        "/runs/{run_id}/cancel",
        "/runs/{run_id}/retry",
        "/runs/{run_id}/events",
        "/dead-letters",
    }
    assert (listed, page["runs"]) == (200, [])


# ---- the machine -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def address(lite: Stage) -> AsyncIterator[str]:
    await lite.service.grant(ALICE, 10_000, reference="g", actor="bank")
    for number in range(3):
        await lite.service.submit(payload(run_id=f"00000000-0000-0000-0000-00000000000{number}"))
    async with served(runs_api(lite.service, Tokens(TOKENS), price=lambda _: 1, poll_ms=10)) as where:
        yield where


@pytest.mark.many
@pytest.mark.requirement("R-54")
@pytest.mark.timeout(900 if LONG else 240)
async def test_no_request_that_the_description_allows_makes_a_server_error(address: str) -> None:
    """And every answer is as the description says."""
    assert await problems_of(address, ALICES, examples=100 if LONG else 4) == []


async def _bury_data(stage: Stage, name: str, data: dict[str, Any]) -> None:
    letter = DeadLetter(
        id=f"dl-{name}-1", source=stage.runs.queue.name, message_id=name, name="workflow-run",
        data={**data, "tenantId": ALICE}, error_message="no", entry={"tenantId": ALICE},
    )  # fmt: skip
    await stage.runs.queue.dead_letters.put(letter)


async def _bury(stage: Stage, number: int, tenant_id: str = ALICE) -> str:
    entry = f"dl-run-{number}-1"
    letter = DeadLetter(
        id=entry, source=stage.runs.queue.name, message_id=f"run-{number}", name="workflow-run",
        data={"runId": f"run-{number}", "tenantId": tenant_id}, error_message="no", entry={"tenantId": tenant_id},
    )  # fmt: skip
    await stage.runs.queue.dead_letters.put(letter)
    return entry


@pytest.mark.requirement("X-40")
async def test_dead_letters_are_paged_newest_first_and_counted_truly(lite: Stage, client: Client) -> None:
    mine = [await _bury(lite, number) for number in range(120)]
    for number in range(1000, 1010):
        await _bury(lite, number, BOB)
    await lite.runs.dead_letter_queue.add("of somebody else", ["no entry"])
    odd = await lite.runs.dead_letter_queue.add("no JSON", None)
    odd_key = lite.runs.dead_letter_queue.keys.job(odd.id)
    await lite.connection.shared_door(odd_key).call("HSET", odd_key, "data", b"\xff{", "timestamp", "x")

    seen, cursor, depths = list[str](), "", set[int]()
    while True:
        status, page = await client("GET", f"/dead-letters?limit=50{cursor}")
        assert status == 200, page
        seen += [each["id"] for each in page["deadLetters"]]
        depths.add(page["depth"])
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"

    assert seen == mine[::-1]
    assert depths == {120}, "of the tenant, not of the page"


@pytest.mark.requirement("X-40")
async def test_payloads_of_dead_letters_show_no_card_and_no_account(lite: Stage, client: Client) -> None:
    numbers = {"text": "4111 1111 1111 1111", "number": 4111111111111111, "to": ["DE89370400440532013000"]}
    await _bury_data(lite, "cards", {**numbers, "at": 17171717})

    status, page = await client("GET", "/dead-letters")

    assert status == 200
    (shown,) = page["deadLetters"]
    assert {**shown["payload"], "tenantId": ""} == {
        "text": "***",
        "number": "***",
        "to": ["DE***"],
        "at": 17171717,
        "tenantId": "",
    }


@pytest.mark.requirement("X-40")
@pytest.mark.parametrize("depth", [50, 600, 900, 5_000])
async def test_a_deep_dead_letter_hides_no_other(lite: Stage, client: Client, depth: int) -> None:
    """It is the tenant's own, or of whoever may add jobs in its name."""
    entry = await _bury(lite, 1)
    queue = lite.runs.dead_letter_queue
    data = (
        f'{{"tenantId":"{ALICE}","originalJobId":"j","originalData":{{"a":{"[" * depth}1{"]" * depth}}},'
        '"failedAt":"2026-01-01T00:00:00Z"}'
    )
    deep = await queue.add("deep", {"tenantId": ALICE})
    await lite.connection.shared_door(queue.keys.job(deep.id)).call("HSET", queue.keys.job(deep.id), "data", data)

    status, page = await client("GET", "/dead-letters")

    assert status == 200
    assert entry in [each["id"] for each in page["deadLetters"]]
    assert ("1" if depth == 50 else "***" if depth < 1_000 else "null") in json.dumps(page["deadLetters"])


@pytest.mark.requirement("X-40")
async def test_what_happens_to_dead_letters_elsewhere_is_seen_in_the_next_page(lite: Stage, client: Client) -> None:
    """The index is only a hint: somebody redrives, discards or removes entries past it, and new ones come."""
    mine = [await _bury(lite, number) for number in range(5)]
    _, first = await client("GET", "/dead-letters?limit=2")
    await lite.runs.queue.dead_letters.discard(mine[4])
    await lite.runs.queue.dead_letters.discard(mine[1])
    mine.append(await _bury(lite, 5))
    odd = await lite.runs.dead_letter_queue.add("of a client without a clock", {})
    odd_key = lite.runs.dead_letter_queue.keys.job(odd.id)
    await lite.connection.shared_door(odd_key).call("HSET", odd_key, "timestamp", "x")

    _, after = await client("GET", "/dead-letters")
    _, second = await client("GET", f"/dead-letters?cursor={first['next']}")

    assert [each["id"] for each in first["deadLetters"]] == [mine[4], mine[3]]
    assert ([each["id"] for each in after["deadLetters"]], after["depth"]) == ([mine[5], mine[3], mine[2], mine[0]], 4)
    assert ([each["id"] for each in second["deadLetters"]], second["next"]) == ([mine[2], mine[0]], None)


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=201", "limit=x", f"limit=000000001{'0' * 4_400}", "cursor=x", "cursor=Zm9v"]
)
async def test_wrong_pages_are_refused(client: Client, query: str) -> None:
    """Also a number that Python itself refuses to read."""
    assert (await client("GET", f"/dead-letters?{query}"))[0] == 422
    assert (await client("GET", f"/runs?{query}"))[0] == 422


@pytest.mark.parametrize("value", [b"[]", b"0", b'""', b'{"a":{}}', b'{"\\\\":"\\""}'])
async def test_many_small_values_are_refused_before_they_are_made(client: Client, value: bytes) -> None:
    """Ten megabytes of `[],` held the loop of all clients for six seconds, for a tenant without credits too."""
    body = b'{"versionId":"v","definition":[' + (value + b",") * (9_900_000 // (len(value) + 1)) + b"1]}"
    began = time.process_time()
    status, problem = await client("POST", "/runs", body=body, headers={"Idempotency-Key": "k"})

    assert (status, problem["error"]) == (422, "invalid")
    assert "100,000 values" in problem["message"]
    assert time.process_time() - began < 1  # of the processor: other load does not count


@pytest.mark.parametrize("text", [",[{" * 1_000_000, '\\",[' * 300_000, '\\\\",' * 50_000])
async def test_what_stands_in_texts_is_no_value(lite: Stage, client: Client, text: str) -> None:
    """A document with many commas is one value."""
    await lite.service.grant(ALICE, 15, reference="g", actor="bank")

    assert (await start(client, definition={"text": text, "more": [text, 1]}))[0] == 201


async def test_an_answer_never_quotes_the_payload(lite: Stage, client: Client) -> None:
    """A number that JSON readers would change, a version that is too long: named by their place, not shown."""
    for key, body in (
        ("a", {"versionId": "v1", "definition": {"card": 4111_1111_1111_1111_9999}}),
        ("b", {"versionId": "4111111111111111" * 20, "definition": {}}),
    ):
        status, problem = await client("POST", "/runs", body=body, headers={"Idempotency-Key": key})
        assert status == 422
        assert "4111" not in problem["message"]
        assert "expected" in problem["message"]
