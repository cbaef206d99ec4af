"""Endpoints over HTTP: every operation, every refusal, and a machine that tries what nobody thought of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from standardwebhooks import Webhook as Verifier
from starlette.applications import Starlette
from starlette.routing import Mount

from bullpen.http.endpoints import endpoints_api
from bullpen.http.runs import Principal, Tokens
from bullpen.ledger import Ledger
from bullpen.outbox import Endpoints
from bullpen.settings import Settings
from bullpen.testing.receivers import Answer, HttpReceiver
from bullpen.wiring.endpoints import make_endpoints
from tests.openapi import problems_of, served
from tests.outbox.conftest import MakeOutbox
from tests.outbox.test_endpoints import HERE, audited, deliver, publish
from tests.runs.test_http import Client

TOKENS = {
    "acme-token-0123456789": Principal(tenant_id="acme", actor="ada"),
    "acme-viewer-0123456789": Principal(tenant_id="acme", actor="viewer", may_write=False),
    "evil-token-0123456789": Principal(tenant_id="evil", actor="eve"),
}
ADAS, VIEWERS, EVES = TOKENS


@pytest.fixture
async def receiver() -> AsyncIterator[HttpReceiver]:
    async with HttpReceiver() as opened:
        yield opened


@pytest.fixture
async def endpoints(ledger: Ledger) -> AsyncIterator[Endpoints]:
    made = make_endpoints(Settings.load(environ={}, **HERE), ledger, None)
    yield made
    await made.aclose()


class Asked:
    """A client of the API."""

    def __init__(self, endpoints: Endpoints, **options: Any) -> None:
        self._client = Client(endpoints_api(endpoints, Tokens(TOKENS), **options))

    async def __call__(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        return await self._client(method, path, body=body, **{"token": ADAS, **options})


@pytest.fixture
def ask(endpoints: Endpoints) -> Asked:
    return Asked(endpoints)


async def test_a_customer_manages_an_endpoint(
    ledger: Ledger, endpoints: Endpoints, ask: Asked, receiver: HttpReceiver, make_outbox: MakeOutbox
) -> None:
    """From making it to its removal, as its owner's program does."""
    wanted = {"url": receiver.url, "events": ["order.*"], "headers": {"x-key": "h1dden"}, "rate": {"max": 50}}
    status, made = await ask("POST", "/endpoints", wanted)
    assert status == 201
    where = f"/endpoints/{made['endpoint']['id']}"
    assert made["endpoint"]["headerNames"] == ["x-key"]
    assert made["endpoint"]["rate"] == {"max": 50, "perMs": 1_000}

    await publish(ledger, make_outbox, event_id="e-1")
    await deliver(make_outbox, endpoints)
    Verifier(made["secret"]).verify(receiver.requests[0].body, dict(receiver.requests[0].headers))
    status, attempts = await ask("GET", f"{where}/attempts")
    assert [(each["outcome"], each["eventId"], each["receipt"]) for each in attempts["attempts"]] == [
        ("SENT", "e-1", "200")
    ]
    status, replayed = await ask("POST", f"{where}/replay", {"label": "again"})
    assert (status, replayed) == (200, {"count": 1})
    status, tested = await ask("POST", f"{where}/test", {"payload": {"n": 1}})
    assert tested == {"accepted": True, "result": "Accepted", "detail": "200", "errorCode": None}
    status, rotated = await ask("POST", f"{where}/secret", {"overlapMs": 5_000})
    assert rotated["secret"] not in (made["secret"], None)
    status, changed = await ask("PATCH", where, {"url": f"{receiver.url}/2", "rate": None})
    assert (changed["url"], changed["rate"], changed["events"]) == (f"{receiver.url}/2", None, ["order.*"])
    for deed, state in (("pause", "paused"), ("disable", "disabled"), ("enable", "enabled")):
        status, answer = await ask("POST", f"{where}/{deed}", {"reason": "because"})
        assert (status, answer["state"], answer["reason"]) == (200, state, "because")
    assert (await ask("DELETE", where))[0] == 204
    assert (await ask("GET", where))[0] == 404

    assert [action for action, actor, tenant in await audited(ledger) if (actor, tenant) == ("ada", "acme")] == [
        *("endpoint.create", "outbox.replay", "endpoint.rotate", "endpoint.update"),
        *("endpoint.paused", "endpoint.disabled", "endpoint.enabled", "endpoint.remove"),
    ]


async def test_a_secret_is_in_one_answer_only(ask: Asked) -> None:
    body = {"url": "https://example.com/", "headers": {"authorization": "Bearer h1dden"}}
    _, made = await ask("POST", "/endpoints", body)
    where = f"/endpoints/{made['endpoint']['id']}"

    later = [await ask("GET", "/endpoints"), await ask("GET", where), await ask("PATCH", where, {"description": "x"})]

    assert made["secret"].startswith("whsec_")
    assert made["secret"] not in json.dumps(later)
    assert "h1dden" not in json.dumps([made, *later])


async def test_a_repeated_request_makes_one_endpoint(ask: Asked) -> None:
    """The answer was lost, and the customer's program asks again. The secret was shown to whoever got the answer."""
    body, headers = {"url": "https://example.com/"}, {"Idempotency-Key": "k-1"}
    first = await ask("POST", "/endpoints", body, headers=headers)
    again = await ask("POST", "/endpoints", body, headers=headers)
    other = await ask("POST", "/endpoints", body, headers={"Idempotency-Key": "k-2"})
    evil = await ask("POST", "/endpoints", body, headers=headers, token=EVES)

    assert [status for status, _ in (first, again, other, evil)] == [201, 200, 201, 201]
    assert again[1]["endpoint"]["id"] == first[1]["endpoint"]["id"]
    assert again[1]["secret"] is None
    assert len({answer["endpoint"]["id"] for _, answer in (first, other, evil)}) == 3


async def test_tokens_decide_who_may_do_what(ask: Asked) -> None:
    _, made = await ask("POST", "/endpoints", {"url": "https://example.com/"})
    where = f"/endpoints/{made['endpoint']['id']}"
    changing = [
        *(("POST", "/endpoints"), ("PATCH", where), ("DELETE", where), ("POST", f"{where}/secret")),
        *(("POST", f"{where}/{deed}") for deed in ("enable", "pause", "disable", "test", "replay")),
    ]
    reading = [("GET", "/endpoints"), ("GET", where), ("GET", f"{where}/attempts")]

    for method, path in [*changing, *reading]:
        for token in (None, "", "acme-token-012345678", "Bearer"):
            assert (await ask(method, path, {}, token=token))[0] == 401, (method, path)
    for method, path in changing:
        assert (await ask(method, path, {}, token=VIEWERS))[0] == 403, (method, path)
    for method, path in reading:
        assert (await ask(method, path, token=VIEWERS))[0] == 200, (method, path)


async def test_another_tenants_endpoint_does_not_exist(ask: Asked) -> None:
    """And the answer does not differ from that of an id which nobody has."""
    _, made = await ask("POST", "/endpoints", {"url": "https://example.com/"})

    async def answers(endpoint_id: str) -> list[tuple[int, Any]]:
        where = f"/endpoints/{endpoint_id}"
        found = [await ask("GET", path, token=EVES) for path in (where, f"{where}/attempts")]
        for method, path, body in (
            ("PATCH", where, {"url": "https://evil.example/"}),
            ("DELETE", where, None),
            *(("POST", f"{where}/{deed}", {}) for deed in ("secret", "enable", "pause", "disable", "test")),
            ("POST", f"{where}/replay", {"label": "x"}),
        ):
            found.append(await ask(method, path, body, token=EVES))
        return [(status, json.loads(json.dumps(answer).replace(endpoint_id, "ID"))) for status, answer in found]

    hers = await answers(made["endpoint"]["id"])

    assert {status for status, _ in hers} == {404}
    assert hers == await answers("00000000-0000-4000-8000-000000000000")
    assert (await ask("GET", "/endpoints", token=EVES))[1] == {"endpoints": [], "next": None}
    assert len((await ask("GET", "/endpoints"))[1]["endpoints"]) == 1


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "", {"url": "http://10.0.0.1/"}),
        ("POST", "", {"url": "ftp://example.com/"}),
        ("POST", "", {"url": "https://example.com/", "secret": "whsec_c2hvcnQ="}),
        ("POST", "", {"url": "https://example.com/", "events": ["a*b"]}),
        ("POST", "", {"url": "https://example.com/", "headers": {"host": "x"}}),
        ("POST", "", {"url": "https://example.com/", "surprise": 1}),
        ("POST", "", {"url": "https://example.com/\u0000"}),
        ("POST", "", []),
        ("POST", "", b"{"),
        ("PATCH", "/ID", {}),
        ("PATCH", "/ID", {"url": None}),
        ("PATCH", "/ID", {"rate": {"max": 0}}),
        ("PATCH", "/not-an-id", {"url": "https://example.com/"}),
        ("GET", "/%00", None),
        ("GET", "?limit=0", None),
        ("GET", "?limit=201", None),
        ("GET", "?state=broken", None),
        ("GET", "?cursor=x", None),
        ("GET", "/ID/attempts?cursor=-1", None),
        ("GET", "/ID/attempts?cursor=1e3", None),
        ("POST", "", {"url": "https://example.com/", "secret": "whsec_é"}),
        ("POST", "", {"url": "https://example.com/", "headers": {"x-key": "x" * 1_000_000}}),
        ("POST", "/ID/secret", {"secret": "whsec_é"}),
        ("POST", "/ID/secret", {"overlapMs": 10**15}),
        ("POST", "/ID/replay", {"label": "\n"}),
        ("POST", "/ID/replay", {"label": "x" * 41}),
        ("POST", "/ID/replay", {"label": "x", "since": "2026-01-01T00:00:00"}),
        ("POST", "/ID/secret", {"secret": "x"}),
        ("POST", "/ID/secret", {"overlapMs": -1}),
    ],
)
async def test_a_bad_request_is_the_clients(
    ask: Asked, method: str, path: str, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, made = await ask("POST", "/endpoints", {"url": "https://example.com/"})

    status, answer = await ask(method, f"/endpoints{path}".replace("ID", made["endpoint"]["id"]), body)

    assert (status, answer["error"]) == (422, "invalid"), answer
    assert "Traceback" not in caplog.text


async def test_a_cursor_that_is_too_large_is_called_by_its_name(ask: Asked) -> None:
    _, made = await ask("POST", "/endpoints", {"url": "https://example.com/"})

    status, answer = await ask("GET", f"/endpoints/{made['endpoint']['id']}/attempts?cursor={'9' * 18}")

    assert status == 422
    assert "cursor" in str(answer)
    assert "before" not in str(answer)


async def test_a_large_body_is_refused(ask: Asked) -> None:
    status, answer = await ask("POST", "/endpoints", b'{"url": "' + b"x" * 1_100_000 + b'"}')

    assert (status, answer["error"]) == (413, "too_large")


async def test_pages_end(ask: Asked) -> None:
    made = [
        (await ask("POST", "/endpoints", {"url": f"https://example.com/{n}"}))[1]["endpoint"]["id"] for n in range(5)
    ]
    await ask("POST", f"/endpoints/{made[2]}/disable")

    seen, cursor = [], ""
    for _ in range(4):
        _, page = await ask("GET", f"/endpoints?limit=2{cursor}")
        seen += [each["id"] for each in page["endpoints"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"

    assert seen == made
    _, off = await ask("GET", "/endpoints?state=disabled")
    assert [each["id"] for each in off["endpoints"]] == [made[2]]


async def test_tests_of_one_tenant_are_bounded(endpoints: Endpoints, receiver: HttpReceiver) -> None:
    """Each is a request of ours to an address of the customer's choice."""
    ask = Asked(endpoints, tests=1)
    receiver.default = Answer(delay_s=0.2)
    _, made = await ask("POST", "/endpoints", {"url": receiver.url})
    where = f"/endpoints/{made['endpoint']['id']}/test"

    answers = await asyncio.gather(*(ask("POST", where) for _ in range(3)))

    assert sorted(status for status, _ in answers) == [200, 429, 429]
    assert (await ask("POST", where))[0] == 200


# A machine that reads the description -------------------------------------------------------------------------------


@pytest.mark.many
async def test_no_request_that_the_description_allows_makes_a_server_error(sqlite_url: str) -> None:
    """And every answer is as the description says. Tests call whatever address they are given, so not those."""
    async with Ledger(sqlite_url) as ledger:
        made = make_endpoints(Settings.load(environ={}), ledger, None)
        await made.create("acme", "https://example.com/", by="ada")
        async with served(endpoints_api(made, Tokens(TOKENS))) as address:
            found = await problems_of(address, ADAS, examples=4, without={"/endpoints/{endpoint_id}/test"})

    assert found == []


async def test_the_description_fits_where_it_is_mounted(endpoints: Endpoints) -> None:
    mounted = Client(Starlette(routes=[Mount("/webhooks", endpoints_api(endpoints, Tokens(TOKENS)))]))

    status, described = await mounted("GET", "/webhooks/openapi.json")

    assert status == 200
    assert described["servers"] == [{"url": "/webhooks"}]
    assert "/endpoints/{endpoint_id}/attempts" in described["paths"]
