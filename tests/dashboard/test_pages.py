"""Every page and its JSON, without a browser."""

from __future__ import annotations

import asyncio
import re
from html import unescape
from typing import Any

import httpx
import pytest
import redis
from starlette.applications import Starlette
from starlette.routing import Mount

from bullpen import Bullpen, Job, Queue, Worker
from bullpen.dashboard import make_dashboard
from bullpen.dashboard._web import join, read_request, segment
from bullpen.ops.pauses import pause_queue, read_pause
from bullpen.settings import DashboardSettings
from tests.conftest import StartServer
from tests.dashboard._kit import HOST, HOSTILE, SAME, opened, settings, transport


async def fail_one(redis_url: str, queue: Queue, data: Any = None, *, error: str = "HTTP 503 from partner 9") -> Job:
    """A job that failed finally and left a dead letter."""

    async def handle(job: Job) -> None:
        await job.log("it begins")
        raise ValueError(error)

    job = await queue.add("send", data or {"order": 1, "password": "hunter2"}, attempts=1)
    async with Worker(queue.name, handle, connection=redis_url, dead_letters=True) as worker:
        task = asyncio.create_task(worker.run(signals=False))
        while (await queue.state_of(job.id)).value != "failed":  # noqa: ASYNC110 - the server does not tell us
            await asyncio.sleep(0.01)
        await worker.close()
        await task
    return job


@pytest.mark.requirement("W-77")
@pytest.mark.requirement("D-10")
async def test_all_pages_answer_and_tell_the_same_as_their_json(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        job = await fail_one(redis_url, queue)
        await queue.upsert_scheduler("nightly", name="send", cron="0 3 * * *", tz="Europe/Berlin")
        async with opened(redis_url) as (http, _):
            groups = (await http.get("/api/v1/dead-letters")).json()["groups"]
            letter = groups[0]["example"]
            store = f"{queue_name}-dlq"
            for path, expected in {
                "/": queue_name,
                "/queues": queue_name,
                f"/queues/{queue_name}?state=failed": "HTTP 503",
                f"/queues/{queue_name}/jobs/{job.id}": "it begins",
                "/dead-letters": "HTTP 503",
                f"/dead-letters/{store}/groups/{groups[0]['fingerprint']}": letter,
                f"/dead-letters/{store}/{letter}": "HTTP 503",
                "/workers": "",
                "/schedules": "nightly",
                "/health": "",
                "/audit": "",
                "/operations": "",
                f"/search?q={queue_name[:6]}": "",
            }.items():
                page, data = await http.get(path), await http.get(f"/api/v1{path}")
                assert page.status_code in (200, 303), (path, page.text)
                assert data.headers["content-type"] == "application/json", path
                assert expected in page.text or page.status_code == 303, path
                assert expected in data.text, path


async def test_dead_letters_of_one_store_are_counted_for_themselves(redis_url: str, queue_name: str) -> None:
    other = f"{queue_name}-b"
    async with Queue(queue_name, connection=redis_url) as one, Queue(other, connection=redis_url) as two:
        await fail_one(redis_url, one)
        await fail_one(redis_url, two)
        await fail_one(redis_url, two, error="no route")
        async with opened(redis_url) as (http, _):
            found = (await http.get(f"/api/v1/dead-letters?store={other}-dlq&error=route")).json()
            chosen = (await http.get(f"/dead-letters?store={other}-dlq")).text
            filtered = (await http.get(f"/dead-letters?store={other}-dlq&error=route")).text
            group = (await http.get(f"/dead-letters/{other}-dlq/groups/{found['groups'][0]['fingerprint']}")).text

    assert (found["total"], found["grouped"], found["fitting"]) == (2, 2, 1)
    assert "no group" not in chosen, "letters of other stores are not missing"
    assert "1 of 2 fit the filter" in filtered
    assert f"bullpen dead-letters groups --store {other}-dlq" in chosen
    assert f"bullpen dead-letters redrive {other}-dlq --group " in group


@pytest.mark.requirement("D-119")
async def test_secrets_are_hidden_everywhere(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        job = await fail_one(redis_url, queue, error="login failed: password=hunter2 for https://u:hunter2@host/")
        async with opened(redis_url) as (http, _):
            letter = (await http.get("/api/v1/dead-letters")).json()["groups"][0]["example"]
            for path in (
                f"/queues/{queue_name}?state=failed",
                f"/queues/{queue_name}/jobs/{job.id}",
                f"/queues/{queue_name}/jobs/{job.id}/raw/data",
                "/dead-letters",
                "/dead-letters/export",
                f"/dead-letters/{queue_name}-dlq/{letter}",
                f"/dead-letters/{queue_name}-dlq/{letter}/edit",
            ):
                assert "hunter2" not in (await http.get(path)).text, path


@pytest.mark.parametrize(
    "stored",
    [
        rb'{"password":"hunter2-hunter","x":"\ud800"}',
        b'{"password":"hunter2-hunter"',
        b'{"password":"hunter2-hunter","n":NaN}',
        b'{"password":"hunter2-hunter","n":1e999}',
        b'{"password":"hunter2-hunter","n":"\xff"}',
    ],
)
async def test_secrets_are_hidden_in_what_other_clients_wrote(redis_url: str, queue_name: str, stored: bytes) -> None:
    """JSON that only lenient writers produce, and what is none."""
    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add("x", {}, job_id="a")
    fields: Any = {"data": stored, "returnvalue": stored}
    with redis.Redis.from_url(redis_url) as client:
        client.hset(f"bull:{queue_name}:a", mapping=fields)
    async with opened(redis_url) as (http, _):
        for path in (
            f"/queues/{queue_name}?state=waiting",
            f"/queues/{queue_name}/jobs/a",
            f"/queues/{queue_name}/jobs/a/raw/data",
            f"/queues/{queue_name}/jobs/a/raw/result",
        ):
            for address in (path, f"/api/v1{path}"):
                answer = await http.get(address)
                assert answer.status_code == 200, address
                assert "hunter2" not in answer.text, address
                assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.requirement("D-26")
async def test_a_queue_without_workers_and_a_paused_one_are_told_apart(redis_url: str, queue_name: str) -> None:
    async with (
        Queue(queue_name, connection=redis_url) as queue,
        Queue(f"{queue_name}-p", connection=redis_url) as paused,
    ):
        await queue.add("job", {})
        await paused.add("job", {})
        await paused.pause()
        async with opened(redis_url) as (http, _):
            rows = {row["queue"]: row for row in (await http.get("/api/v1/")).json()["queues"]}
    assert (rows[queue_name]["mark"], rows[queue_name]["severity"]) == ("no worker", 1)
    assert rows[f"{queue_name}-p"]["mark"] == ""
    assert rows[f"{queue_name}-p"]["trouble"] == ""
    assert rows[f"{queue_name}-p"]["paused"]


@pytest.mark.requirement("D-23")
async def test_dead_letters_need_attention(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        await fail_one(redis_url, queue)
        async with opened(redis_url) as (http, _):
            verdict = (await http.get("/api/v1/")).json()["verdict"]
    assert verdict["level"] == "attention"
    assert verdict["findings"][0]["rule"] == "dead_letters"


@pytest.mark.requirement("D-23")
async def test_nothing_at_all_is_well(redis_url: str) -> None:
    async with opened(redis_url) as (http, _):
        page = await http.get("/")
        assert "All well" in page.text
        assert "There are no queues yet" in page.text


@pytest.mark.requirement("D-12")
async def test_pages_lead_through_a_whole_list(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add_many([("job", {"n": number}) for number in range(120)])
        async with opened(redis_url) as (http, _):
            seen: list[str] = []
            path: str | None = f"/queues/{queue_name}?state=waiting"
            while path:
                page = (await http.get(path)).text
                seen += re.findall(r'id="j-(\d+)"', page)
                following = re.search(r'rel="next" href="([^"]+)"', page)
                path = unescape(following[1]) if following else None
    assert seen == [str(number) for number in range(1, 121)]


@pytest.mark.requirement("D-35")
async def test_the_pause_says_who_when_and_why(redis_url: str, queue_name: str) -> None:
    """And blames nobody for what another client did since."""
    async with Queue(queue_name, connection=redis_url) as queue, opened(redis_url) as (http, dashboard):
        await queue.add("job", {})

        async def note() -> dict[str, Any] | None:
            dashboard.desk.forget()  # another client's change is seen a moment later
            found: dict[str, Any] | None = (await http.get(f"/api/v1/queues/{queue_name}")).json()["paused"]
            return found

        async def act(verb: str, reason: str) -> None:
            await http.post(f"/queues/{queue_name}/act/{verb}", data={"reason": reason}, headers=SAME)

        await queue.pause()
        unknown = await note()
        await act("pause", "month end")
        known = await note()
        page = (await http.get(f"/queues/{queue_name}")).text
        await act("resume", "")
        resumed = await note()
        await queue.pause()
        again = await note()

    assert unknown is not None and unknown["by"] == "" and unknown["atMs"] > 0
    assert known is not None and known["reason"] == "month end" and known["atMs"] > unknown["atMs"]
    assert "month end" in page
    assert resumed is None
    assert again is not None and (again["by"], again["reason"]) == ("", "")
    assert again["atMs"] > known["atMs"]


@pytest.mark.requirement("D-35")
async def test_a_resume_of_another_client_voids_the_note(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add("job", {})
        await pause_queue(queue, by="ada", reason="month end")
        mine = await read_pause(queue)
        await queue.resume()
        none = await read_pause(queue)
        await queue.pause()
        strange = await read_pause(queue)

    assert mine is not None and (mine.by, mine.reason) == ("ada", "month end")
    assert none is None
    assert strange is not None and strange.by == "" and strange.at_ms >= mine.at_ms


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.requirement("D-20")
async def test_any_name_has_an_address_and_is_only_text(redis_url: str, text: str) -> None:
    """Queue names, job names, ids and data are of strangers."""
    name = "".join(char for char in text.replace(":", ";") if ord(char) >= 32 and ord(char) != 127).strip() or "x"
    async with Queue(name, connection=redis_url) as queue:
        job_id = "".join(char for char in f"job {text}".replace(":", ";") if ord(char) >= 32)
        job = await queue.add(text, {text: [text]}, job_id=job_id)
        async with opened(redis_url) as (http, _):
            address = join("", "queues", name, "jobs", job.id)
            found = await http.get(f"/api/v1{address}")
            assert found.status_code == 200, found.text
            assert found.json()["name"] == text
            for path in ("/", join("", "queues", name), address, join("", "search", q=job.id)):
                # Fields of forms carry the very text; all else shows what is not printable.
                page = re.sub(r' (?:value|data-copy|data-key)="[^"]*"', "", (await http.get(path)).text)
                if "<" in text:
                    assert text not in page
                assert "\u202e" not in page
                assert "\x1b" not in page


def test_segments_survive_every_text() -> None:
    for text in (*HOSTILE, "", "a b", "ü", "a?b#c", "~", "~~", "\udcff"):
        scope = {
            "method": "GET",
            "headers": [],
            "raw_path": f"/queues/{segment(text)}".encode(),
            "path": "",
            "query_string": b"",
        }
        assert read_request(scope, None).segments == ("queues", text)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", ["/ops/jobs", "/ops/jobs/"])
async def test_it_mounts_below_any_path(redis_url: str, queue_name: str, prefix: str) -> None:
    async with Bullpen(settings=settings(redis_url)) as app, Queue(queue_name, connection=redis_url) as queue:
        await queue.add("job", {})
        made = make_dashboard(app)
        host = Starlette(routes=[Mount(prefix.rstrip("/"), app=made)])  # type: ignore[arg-type]  # dict or mapping
        async with httpx.AsyncClient(transport=transport(host), base_url=HOST) as http:
            page = (await http.get(prefix, follow_redirects=True)).text
            links = set(re.findall(r'(?:href|src|action|data-stream)="(/[^"]*)"', page))
            assert links
            assert all(link.startswith("/ops/jobs/") for link in links), links
            assert (await http.get(f"/ops/jobs/queues/{queue_name}")).status_code == 200
        await made.aclose()


async def test_a_proxy_may_strip_the_prefix(redis_url: str) -> None:
    async with opened(redis_url) as (http, _):
        page = (await http.get("/", headers={"x-forwarded-prefix": "/tools/queue"})).text
        assert 'href="/tools/queue/queues"' in page
        page = (await http.get("/", headers={"x-forwarded-prefix": "//evil.example"})).text
        assert "evil" not in page


@pytest.mark.requirement("D-7")
@pytest.mark.requirement("D-104")
async def test_a_server_that_is_away_is_told_and_the_page_is_there(start_server: StartServer) -> None:
    server = start_server()
    async with opened(server.url) as (http, _):
        assert (await http.get("/")).status_code == 200
        server.stop()
        async with asyncio.timeout(20):
            while "Broken" not in (page := await http.get("/")).text:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.1)  # a snapshot is good for a second
            queue = await http.get("/queues/x")
        assert page.status_code == 200
        assert "Broken" in page.text
        assert queue.status_code == 503
        assert "does not answer" in queue.text
        assert "Traceback" not in queue.text


@pytest.mark.requirement("D-103")
async def test_problems_have_a_number_and_no_stack(redis_url: str) -> None:
    async with opened(redis_url) as (http, _):
        page = await http.get("/queues/nobody")
        data = await http.get("/api/v1/queues/nobody")
    assert page.status_code == data.status_code == 404
    assert page.headers["x-request-id"] in page.text
    assert data.headers["content-type"] == "application/problem+json"
    assert data.json()["requestId"] == data.headers["x-request-id"]


@pytest.mark.requirement("D-122")
async def test_the_first_visit_is_small(redis_url: str, queue_name: str) -> None:
    """As it is sent: pages, styles and scripts are compressed for whoever reads that."""
    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add_many([("job", {"order": number, "lines": ["a"] * 5}) for number in range(50)])
        async with opened(redis_url) as (http, _):
            for address in ("/", f"/queues/{queue_name}"):
                page = await http.get(address)
                files = {path for path in re.findall(r'(?:href|src)="([^"]+)"', page.text) if "/static/" in path}
                sizes = [await transferred(http, path) for path in (address, *sorted(files))]
                assert len(files) > 5
                assert sum(sizes) < 30_000, sizes
            plain = await http.get("/", headers={"accept-encoding": "identity"})
            assert "content-encoding" not in plain.headers


async def transferred(http: httpx.AsyncClient, path: str) -> int:
    async with http.stream("GET", path, headers={"accept-encoding": "gzip"}) as answer:
        raw = b"".join([part async for part in answer.aiter_raw()])
        assert answer.headers["content-encoding"] == "gzip" or len(raw) < 500, path
    return len(raw)


async def test_an_open_page_gets_its_content_only_when_it_changed(redis_url: str, queue_name: str) -> None:
    part = {"x-bullpen-part": "main"}
    async with Queue(queue_name, connection=redis_url) as queue, opened(redis_url) as (http, dashboard):
        await queue.add("job", {})
        address = f"/queues/{queue_name}?state=waiting"
        first = await http.get(address, headers=part)
        again = await http.get(address, headers={**part, "if-none-match": first.headers["etag"]})
        await queue.add("job", {})
        dashboard.desk.forget()
        changed = await http.get(address, headers={**part, "if-none-match": first.headers["etag"]})

    assert first.text.lstrip().startswith("<main")
    assert "</html>" not in first.text
    assert (again.status_code, again.content) == (304, b"")
    assert changed.status_code == 200
    assert changed.headers["etag"] != first.headers["etag"]


@pytest.mark.requirement("D-21")
async def test_the_label_stands_on_every_page(redis_url: str, queue_name: str) -> None:
    wanted = DashboardSettings(label="shop-prod", colour="red")
    async with Queue(queue_name, connection=redis_url) as queue, opened(redis_url, dashboard=wanted) as (http, _):
        await queue.add("job", {})
        for path in ("/", f"/queues/{queue_name}", f"/queues/{queue_name}/act/drain"):
            page = (await http.get(path)).text
            assert "shop-prod · bullpen</title>" in page
            assert 'class="label label-red">shop-prod' in page


@pytest.mark.requirement("D-14")
async def test_times_are_in_the_chosen_zone(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, opened(redis_url) as (http, _):
        await queue.add("job", {})
        same = {"sec-fetch-site": "same-origin"}
        assert (await http.post("/settings", data={"zone": "Nowhere/None"}, headers=same)).status_code == 422
        await http.post("/settings", data={"zone": "Asia/Tokyo", "theme": "dark"}, headers=same)
        page = (await http.get(f"/queues/{queue_name}")).text
        assert "data-zone-name>Asia/Tokyo</a>" in page
        assert 'data-theme="dark"' in page
        shown = re.search(r'<time datetime="\d+-\d+-\d+T(\d+):[^"]+">\d+-\d+-\d+ (\d+):', page)
        assert shown is not None
        assert (int(shown[1]) + 9) % 24 == int(shown[2])


@pytest.mark.requirement("D-80")
async def test_the_live_tail_shows_events_of_the_chosen_kind(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        job = await fail_one(redis_url, queue)
        await queue.add_many([("job", {})] * 200)
        async with opened(redis_url) as (http, _):
            every = (await http.get(f"/api/v1/live?queue={queue_name}")).json()
            failed = (await http.get(f"/api/v1/live?queue={queue_name}&kind=failed")).json()
            page = await http.get("/live")
            missing = await http.get("/live?queue=nothing")

    assert len(every["rows"]) == 150
    assert [(each["job"], each["word"]) for each in failed["rows"]] == [(job.id, "dead")]
    assert "HTTP 503" in failed["rows"][0]["detail"]
    assert (page.status_code, missing.status_code) == (200, 404)
