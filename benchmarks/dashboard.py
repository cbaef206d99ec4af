"""How fast the dashboard's pages are, what twenty viewers cost, and what a visit transfers.

    python -m benchmarks.dashboard                                  # 1,000,000 jobs, 100,000 letters, 1,000,000 rows
    python -m benchmarks.dashboard --scale 0.05 --requests 50       # a twentieth of it, on a busy machine

In: a server and a ledger of its own, filled to size. Out: one JSON object: milliseconds of each page (median, 95th
percentile), CPU time and commands of the server per job with and without viewers (interleaved pairs), bytes, memory.
Pages are called in this process without a network, so a time is that of the server side alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import httpx
import sqlalchemy as sa

from bullpen import Bullpen, Job, Queue, Worker
from bullpen._kernel.policy import DeadLetterPolicy
from bullpen.dashboard import Dashboard, Role, Visitor, make_dashboard
from bullpen.http.serve import HttpService
from bullpen.ledger import Ledger, OutboxItem
from bullpen.settings import Settings
from bullpen.testing import RedisServer

QUEUE: Final = "orders"
HOST: Final = "http://127.0.0.1:9467"
PAIRS: Final = 5
VIEWERS: Final = 20


async def fill_queue(url: str, scale: float) -> None:
    """Half of the jobs ready, four tenths done, a tenth failed, and dead letters of a few causes."""
    ready, done, failed, letters = (round(count * scale) for count in (500_000, 400_000, 100_000, 100_000))
    async with Queue(QUEUE, connection=url) as queue, Queue(f"{QUEUE}-dlq", connection=url) as dead:
        for first in range(0, ready, 5_000):
            await queue.add_many([("send", {"order": each}) for each in range(first, min(ready, first + 5_000))])
        await queue.add("large", {"text": "x" * (10 * 1024 * 1024 - 1_000)}, job_id="large")
        await _one_letter(url, queue)
        data = json.loads(await _pattern(dead))
        now = int(time.time() * 1000)
        door = queue.connection.shared_door(queue.keys.base)
        ended = (("returnvalue", queue.keys.completed, done), ("failedReason", queue.keys.failed, failed))
        for state, key, count in ended:
            for first in range(0, count, 2_000):
                commands: list[tuple[Any, ...]] = []
                for each in range(first, min(count, first + 2_000)):
                    job_id = f"{state[0]}{each}"
                    fields = ("name", "send", "data", '{"order":1}', "opts", "{}", "timestamp", str(now - each * 10))
                    ends = ("processedOn", str(now - each * 10), "finishedOn", str(now - each * 10), state, '"done"')
                    commands.append(("HSET", queue.keys.job(job_id), *fields, *ends))
                    commands.append(("ZADD", key, str(now - each * 10), job_id))
                await door.call_many(commands)
        for first in range(0, letters, 5_000):
            some = range(first, min(letters, first + 5_000))
            await dead.add_many([("send", {**data, "error": f"HTTP 503 from partner {each % 7}"}) for each in some])


async def _pattern(dead: Queue) -> str:
    """What the letter of a real failure holds."""
    from bullpen.queue import JobState

    (head,) = await dead.heads(JobState.WAITING, count=1)
    job = await dead.get_job(head.record.id)
    assert job is not None
    return (job.record.raw_data or b"{}").decode()


async def _one_letter(url: str, queue: Queue) -> None:
    async def fail(job: Job) -> None:
        raise ValueError("HTTP 503 from partner 9")

    async with Queue("seed", connection=url) as seed:
        await seed.add("send", {"order": 1}, attempts=1)
        policy = DeadLetterPolicy(store="queue", name=f"{queue.name}-dlq")
        async with Worker("seed", fail, connection=url, dead_letters=policy) as worker:
            task = asyncio.create_task(worker.run(signals=False))
            while not (await seed.counts()).failed:  # noqa: ASYNC110 - the server does not tell us
                await asyncio.sleep(0.02)
            await worker.close()
            await task


async def fill_ledger(ledger: Ledger, scale: float) -> None:
    await ledger.migrate()
    count = round(1_000_000 * scale)
    for first in range(0, count, 2_000):
        await ledger.outbox.enqueue_many(
            [
                OutboxItem(
                    integration_type="email" if each % 3 else "webhook:partnerX",
                    event_type="order.paid.v1",
                    source_stream_id=f"order-{each}",
                    source_event_id=f"{each}",
                    payload={"order": each},
                    tenant_id=f"t{each % 50}",
                    correlation_id=f"c-{each // 3}",
                )
                for each in range(first, min(count, first + 2_000))
            ]
        )
    async with ledger.database.transaction_without_tenant() as connection:
        table = ledger.database.table("integration_outbox")
        await connection.execute(sa.text(f"UPDATE {table} SET status = 'SENT' WHERE seq % 10 <> 0"))


async def time_pages(pages: Dashboard, app: Bullpen, requests: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each page. Between two requests what pages remember is forgotten: each is as for a new viewer."""
    (row,) = await app.ledger.outbox.find(limit=1)
    async with Queue(QUEUE, connection=app.connection) as queue:
        last = max(0, (await queue.counts()).waiting // 50 * 50 - 50)
    paths = {
        "overview": "/",
        "queue": f"/queues/{QUEUE}?state=waiting",
        "queue, last page": f"/queues/{QUEUE}?state=waiting&start={last}",
        "done": f"/queues/{QUEUE}?state=completed",
        "failed, filtered": f"/queues/{QUEUE}?state=failed&name=send",
        "job": f"/queues/{QUEUE}/jobs/1",
        "job of 10 MiB": f"/queues/{QUEUE}/jobs/large",
        "limits": f"/queues/{QUEUE}/limits",
        "dead letters": "/dead-letters",
        "outbox": "/outbox",
        "outbox, newest": "/outbox?order=newest",
        "outbox, PENDING": "/outbox?status=PENDING",
        "outbox row": f"/outbox/{row.id}",
        "chain": "/chains/c-1",
        "destinations": "/destinations",
        "live": f"/live?queue={QUEUE}",
        "schedules": "/schedules",
        "charts": "/charts?range=24h",
        "chart": f"/charts?queue={QUEUE}&range=30d",
        "audit": "/audit",
        "workers": "/workers",
        "health": "/health",
        "search": "/search?q=nothing",
    }
    found = {}
    async with httpx.AsyncClient(transport=_transport(pages), base_url=HOST) as http:
        for name, path in paths.items():
            await http.get(path)
            took = []
            for _ in range(requests):
                pages.desk.forget()
                pages.rates._left.clear()
                began = time.perf_counter()
                answer = await http.get(path)
                took.append((time.perf_counter() - began) * 1000)
                assert answer.status_code == 200, (path, answer.status_code, answer.text[:300])
            took.sort()
            found[name] = {"median": round(statistics.median(took), 1), "p95": round(took[len(took) * 95 // 100], 1)}
            print(
                f"{name:18} median {found[name]['median']:8.1f} ms   p95 {found[name]['p95']:8.1f} ms", file=sys.stderr
            )
    return found


async def compare_viewers(url: str, jobs: int) -> dict[str, Any]:
    """CPU time and commands of the server per job of two busy workers, without viewers and with twenty."""
    pairs = []
    for _ in range(PAIRS):
        without = await _round(url, jobs, viewers=0)
        with_them = await _round(url, jobs, viewers=VIEWERS)
        pairs.append({"without": without, "with": with_them})
    ratios = {
        key: round(statistics.median(pair["with"][key] / pair["without"][key] for pair in pairs), 4)
        for key in ("cpu_us", "commands", "jobs_per_s")
    }
    return {"jobs": jobs, "viewers": VIEWERS, "pairs": pairs, "ratio": ratios}


async def _round(url: str, jobs: int, *, viewers: int) -> dict[str, float]:
    async def work(job: Job) -> None:
        await asyncio.sleep(0.001)

    async with Queue("busy", connection=url) as queue:
        for first in range(0, jobs, 5_000):
            await queue.add_many([("send", {"n": each}) for each in range(first, min(jobs, first + 5_000))])
        watchers = await _start_watchers(url, viewers) if viewers else None
        door = queue.connection.shared_door(queue.keys.base)
        before, began = await _costs(door), time.perf_counter()
        async with (
            Worker("busy", work, connection=url, concurrency=20) as one,
            Worker("busy", work, connection=url, concurrency=20) as two,
        ):
            tasks = [asyncio.create_task(each.run(signals=False)) for each in (one, two)]
            while (await queue.counts()).completed < jobs:  # noqa: ASYNC110 - the server does not tell us
                await asyncio.sleep(0.1)
            took, after = time.perf_counter() - began, await _costs(door)
            await asyncio.gather(one.close(), two.close())
            await asyncio.gather(*tasks)
        if watchers is not None:
            watchers.terminate()
            await watchers.wait()
        await queue.obliterate(force=True)
    return {
        "cpu_us": (after[0] - before[0]) * 1e6 / jobs,
        "commands": (after[1] - before[1]) / jobs,
        "jobs_per_s": jobs / took,
    }


async def _start_watchers(url: str, viewers: int) -> asyncio.subprocess.Process:
    """The dashboard and its viewers in a process of their own: they must not slow the workers' loop."""
    command = ("-m", "benchmarks.dashboard", "--watch", url, "--viewers", str(viewers))
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    return process


async def watch(url: str, viewers: int) -> None:
    """Serve the pages and look at them until this process is ended."""
    async with Bullpen(settings=Settings.load(environ={}, redis_url=url)) as app:
        service = HttpService(make_dashboard(app, access=lambda _: Visitor("ada", Role.ADMIN)), "127.0.0.1", 0)
        serving = asyncio.create_task(service.run())
        watching = [asyncio.create_task(_view(f"http://127.0.0.1:{service.port}", each)) for each in range(viewers)]
        await asyncio.sleep(2.0)
        print("watching", flush=True)
        await asyncio.gather(serving, *watching)


async def _costs(door: Any) -> tuple[float, int]:
    told = (await door.call("INFO")).decode()
    lines = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
    cpu = float(lines["used_cpu_user"]) + float(lines["used_cpu_sys"])
    return cpu, int(lines["total_commands_processed"])


async def _view(address: str, place: int) -> None:
    """A browser: it keeps a stream open, and fetches its page again when told, at most once in 700 ms."""
    path, stream = [("/", "/stream"), ("/queues/busy", "/stream/busy"), ("/queues/busy/jobs/1", "/stream/busy")][
        place % 3
    ]
    headers = {"x-bullpen-part": "main"}
    async with httpx.AsyncClient(base_url=address, timeout=None) as http, http.stream("GET", stream) as news:
        last = 0.0
        async for line in news.aiter_lines():
            if line.startswith("event:"):
                await asyncio.sleep(max(0.0, last + 0.7 - time.monotonic()))
                last = time.monotonic()
                answer = await http.get(path, headers=headers)
                headers["if-none-match"] = answer.headers.get("etag", "")


async def measure_transfer(pages: Dashboard) -> dict[str, int]:
    """Compressed bytes of a first visit: the page, the style sheet and all scripts."""
    from bullpen.dashboard.render import STATIC

    headers = {"accept-encoding": "gzip"}
    async with httpx.AsyncClient(transport=_transport(pages), base_url=HOST, headers=headers) as http:
        answer = await http.get("/")
        page = int(answer.headers.get("content-length", len(answer.content)))
    files = {
        name: len(each.packed) for name, each in STATIC.files.items() if not name.endswith(".css") or name == "app.css"
    }
    return {"page": page, "files": sum(files.values()), "together": page + sum(files.values())}


def _transport(application: Any) -> httpx.ASGITransport:
    return httpx.ASGITransport(application)


async def measure_memory(pages: Dashboard, views: int) -> dict[str, float]:
    """Megabytes of this process after so many page views, and after twice as many."""
    async with httpx.AsyncClient(transport=_transport(pages), base_url=HOST) as http:
        found = {"before": _resident_mb()}
        for turn in ("after", "after twice as many"):
            for each in range(views):
                pages.rates._left.clear()
                await http.get(("/", f"/queues/{QUEUE}", f"/queues/{QUEUE}/jobs/1")[each % 3])
            found[turn] = _resident_mb()
    return found


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * 4096 / 1e6, 1)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full size")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=20_000, help="jobs of a round with or without viewers")
    parser.add_argument("--views", type=int, default=10_000)
    parser.add_argument("--database", help="URL of a PostgreSQL database; SQLite in a temporary file otherwise")
    parser.add_argument("--watch", help=argparse.SUPPRESS)
    parser.add_argument("--viewers", type=int, default=VIEWERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.watch:
        await watch(given.watch, given.viewers)
        return 0
    with tempfile.TemporaryDirectory() as directory, RedisServer.start("valkey") as server:
        url = given.database or f"sqlite:///{directory}/ledger.db"
        settings = Settings.load(environ={}, redis_url=server.url, ledger_url=url)
        began = time.monotonic()
        await fill_queue(server.url, given.scale)
        async with Bullpen(settings=settings) as app:
            await fill_ledger(app.ledger, given.scale)
            print(f"filled in {time.monotonic() - began:.0f} s", file=sys.stderr)
            pages = make_dashboard(app, access=lambda _: Visitor("ada", Role.ADMIN))
            found: dict[str, Any] = {"scale": given.scale, "requests": given.requests}
            found["transfer"] = await measure_transfer(pages)
            found["pages_ms"] = await time_pages(pages, app, given.requests)
            found["memory_mb"] = await measure_memory(pages, given.views)
            await pages.aclose()
        found["viewers"] = await compare_viewers(server.url, given.jobs)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
