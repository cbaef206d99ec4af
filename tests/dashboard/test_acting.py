"""What people do: one path for pages, API and command line, written down before it is done, done once."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import httpx
import msgspec
import pytest

from bullpen import Bullpen, Queue
from bullpen.dashboard import Role, Visitor, make_dashboard
from bullpen.dashboard.access import local_visitor
from bullpen.errors import InvalidOption
from bullpen.ops.actions import ACTIONS, Actions, Actor, Deed, find_action
from bullpen.ops.operations import Operation
from bullpen.ops.views.queues import OPERATIONS
from bullpen.queue import JobState
from bullpen.queue.audit import AuditStreams
from bullpen.settings import DashboardSettings
from tests.dashboard._kit import HOST, SAME, As, opened, settings, transport
from tests.dashboard.test_pages import fail_one
from tests.flows._cli import cli


async def test_every_action_says_what_it_does() -> None:
    for name, action in ACTIONS.items():
        assert action.says.endswith("."), name
        assert action.undo.endswith("."), name
        assert action.role in ("operator", "admin"), name
        deed = Deed(action=action, queue="q", subject="1")
        assert deed.command == "" or deed.command.startswith("bullpen "), name
        assert not action.inverse or action.inverse in ACTIONS, name
    with pytest.raises(InvalidOption, match="action"):
        find_action("job.dance")


@pytest.mark.requirement("X-41")
@pytest.mark.requirement("D-92")
async def test_a_page_and_a_command_leave_the_same_entry(redis_url: str, queue_name: str, tmp_path: Path) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add("job", {}, delay=60_000, job_id="a")
        await queue.add("job", {}, delay=60_000, job_id="b")
        async with opened(redis_url, access=As(Visitor("ada", Role.OPERATOR))) as (http, _):
            answer = await http.post(f"/queues/{queue_name}/jobs/a/act/promote", data={"reason": "now"}, headers=SAME)
            assert answer.status_code == 303
        done = await asyncio.to_thread(
            cli, "jobs", "promote", queue_name, "b", cwd=tmp_path, env={"BULLPEN_REDIS_URL": redis_url}
        )
        assert done.code == 0, done.err

        entries = await AuditStreams(queue.connection, "bull").read(queue_name)

        by_command, by_page = entries
        assert [each.action for each in entries] == ["job.promote", "job.promote"]
        assert by_page.actor == "ada"
        assert by_page.subject == f"{queue_name}/a"
        assert by_page.detail["reason"] == "now"
        assert (by_page.detail["via"], by_page.detail["role"]) == ("dashboard", "operator")
        assert by_page.detail["address"] == "127.0.0.1"
        assert by_command.detail["via"] == "command"
        assert (await queue.counts()).waiting == 2


@pytest.mark.requirement("D-93")
async def test_what_cannot_be_written_down_is_not_done(redis_url: str, queue_name: str) -> None:
    class Full:
        kept = "nowhere"

        async def write(self, *_: object) -> None:
            raise OSError("full")

        async def read(self, *_: object, **__: object) -> list[object]:
            return []

    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add("job", {})
        actions = Actions(lambda _: queue, Full(), Actor("ada"))  # type: ignore[arg-type]
        with pytest.raises(OSError, match="full"):
            await actions.do("queue.pause", queue_name)
        assert not await queue.is_paused()


@pytest.mark.requirement("D-89")
async def test_sending_a_form_twice_does_it_once(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, opened(redis_url) as (http, _):
        await queue.add("job", {}, delay=60_000, job_id="a")
        page = (await http.get(f"/queues/{queue_name}/jobs/a/act/promote")).text
        nonce = re.search(r'name="nonce" value="([^"]+)"', page)
        assert nonce is not None
        for _ in range(2):
            answer = await http.post(f"/queues/{queue_name}/jobs/a/act/promote", data={"nonce": nonce[1]}, headers=SAME)
            assert answer.status_code == 303
        assert len(await AuditStreams(queue.connection, "bull").read(queue_name)) == 1
        again = await http.post(f"/queues/{queue_name}/jobs/a/act/promote", headers=SAME)
        assert again.status_code == 409


@pytest.mark.requirement("D-89")
async def test_a_double_click_at_two_processes_does_it_once(redis_url: str, queue_name: str) -> None:
    """Two dashboards behind one address get the same form at the same moment."""
    async with (
        Queue(queue_name, connection=redis_url) as queue,
        opened(redis_url) as (first, _),
        opened(redis_url) as (second, _),
    ):
        ids = [(await queue.add("job", {})).id for _ in range(3)]
        form = {"nonce": "n1", "priority": "7"}
        path = f"/queues/{queue_name}/jobs/{ids[0]}/act/priority"
        clicks = [http.post(path, data=form, headers=SAME) for http in (first, second, first, second)]

        answers = await asyncio.gather(*clicks)

        assert {answer.status_code for answer in answers} == {303}
        assert len(await AuditStreams(queue.connection, "bull").read(queue_name)) == 1
        selected = {"verb": "remove", "confirmed": "1", "id": ids[1], "nonce": "n2"}
        path = f"/queues/{queue_name}/selected"
        answers = await asyncio.gather(*(http.post(path, data=selected, headers=SAME) for http in (first, second)))
        assert len({answer.headers["location"] for answer in answers}) == 1
        started = await AuditStreams(queue.connection, "bull").read(queue_name)
        assert [each.action for each in started].count("operation.start") == 1


@pytest.mark.requirement("D-89")
async def test_what_a_dead_process_began_is_not_done_again_blindly(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, opened(redis_url) as (http, dashboard):
        await queue.add("job", {}, delay=60_000, job_id="a")
        died = dashboard.desk.do_once
        begun = asyncio.Event()

        async def never() -> list[str]:
            begun.set()
            await asyncio.Event().wait()
            return []

        sender = f"{local_visitor().name}\njob.promote {queue_name} a\nn1"
        running = asyncio.create_task(died.do(sender, never))
        await begun.wait()

        answer = await http.post(f"/queues/{queue_name}/jobs/a/act/promote", data={"nonce": "n1"}, headers=SAME)

        assert answer.status_code == 409
        assert "its outcome is unknown" in answer.text
        assert await queue.state_of("a") is JobState.DELAYED
        running.cancel()


@pytest.mark.requirement("D-45")
async def test_every_action_on_a_job_does_what_it_says(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        job = await fail_one(redis_url, queue)
        await queue.add("job", {}, delay=60_000, job_id="later")
        async with opened(redis_url) as (http, _):

            async def act(subject: str, verb: str, **fields: str) -> int:
                path = f"/api/v1/queues/{queue_name}/jobs/{subject}/act/{verb}"
                return (await http.post(path, json=fields)).status_code

            assert await act(job.id, "promote") == 409
            assert await act(job.id, "retry", reset="1") == 200
            assert await queue.state_of(job.id) is JobState.WAITING
            assert await act(job.id, "priority", priority="7") == 200
            assert await queue.state_of(job.id) is JobState.PRIORITIZED
            assert await act("later", "delay", delay="2h") == 200
            assert await act("later", "delay", delay="soon") == 422
            assert await act("later", "dance") == 404
            assert await act("later", "remove") == 200
            assert await act("later", "remove") == 404
            assert await queue.get_job("later") is None


@pytest.mark.requirement("D-34")
async def test_every_action_on_a_queue_does_what_it_says(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, opened(redis_url) as (http, _):
        await queue.add_many([("job", {}) for _ in range(3)])
        await queue.add("job", {}, delay=60_000)

        async def act(verb: str, **fields: str) -> int:
            return (await http.post(f"/api/v1/queues/{queue_name}/act/{verb}", json=fields)).status_code

        assert await act("pause") == 200
        assert await queue.is_paused()
        assert await act("resume") == 200
        assert not await queue.is_paused()
        assert await act("concurrency", most="3") == 200
        assert await queue.global_concurrency() == 3
        assert await act("concurrency") == 200
        assert await queue.global_concurrency() is None
        assert await act("rate", most="5", duration="1s") == 200
        rate = await queue.global_rate_limit()
        assert rate is not None and (rate.max, rate.duration_ms) == (5, 1000)
        assert await act("rate", most="x", duration="1s") == 422
        assert await act("rate") == 200
        await queue.rate_limit(60_000)
        assert await act("lift") == 200
        assert await queue.rate_limit_ttl() == 0
        assert await act("promote-all") == 200
        assert (await queue.counts()).waiting == 4
        assert await act("drain") == 422
        assert await act("drain", typed=queue_name) == 200
        assert (await queue.counts()).waiting == 0
        assert await act("obliterate", typed=queue_name) == 200
        assert (await http.get(f"/queues/{queue_name}")).status_code == 404


async def test_schedules_are_run_paused_and_removed(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, opened(redis_url) as (http, _):
        await queue.upsert_scheduler("nightly", name="send", cron="0 3 * * *")
        before = await queue.get_scheduler("nightly")
        assert before is not None
        path = f"/api/v1/queues/{queue_name}/schedules/nightly/act"

        assert (await http.post(f"{path}/pause")).status_code == 200
        paused = await queue.get_scheduler("nightly")
        assert paused is not None and paused.is_paused
        assert (await http.post(f"{path}/resume")).status_code == 200
        assert (await http.post(f"{path}/run")).status_code == 200
        after = await queue.get_scheduler("nightly")
        assert after is not None and after.next_ms == before.next_ms
        assert (await http.post(f"{path}/remove")).status_code == 200
        assert await queue.get_scheduler("nightly") is None


@pytest.mark.requirement("D-92")
async def test_somebody_who_tries_what_he_may_not_is_written_down(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add("job", {})
        async with opened(redis_url, access=As(Visitor("eve", Role.VIEWER))) as (http, _):
            assert (await http.post(f"/queues/{queue_name}/act/pause", headers=SAME)).status_code == 403
        (entry,) = await AuditStreams(queue.connection, "bull").read("dashboard")
    assert (entry.actor, entry.action) == ("eve", "refused")


# Operations ---------------------------------------------------------------------------------------------------------


async def ended(dashboard: object, number: str) -> object:
    operations = dashboard.desk.operations  # type: ignore[attr-defined]
    async with asyncio.timeout(30):
        while (found := await operations.get(number)) is None or found.is_open:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
    return found


@pytest.mark.requirement("X-40")
@pytest.mark.requirement("D-53")
@pytest.mark.requirement("D-84")
async def test_a_group_of_dead_letters_is_sent_back_as_an_operation(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        jobs = [await fail_one(redis_url, queue, {"n": number}, error=f"HTTP 503 from {number}") for number in range(3)]
        async with opened(redis_url) as (http, dashboard):
            (group,) = (await http.get("/api/v1/dead-letters")).json()["groups"]
            assert group["count"] == 3
            form = {"store": group["store"], "fingerprint": group["fingerprint"]}
            preview = (await http.get("/api/v1/dead-letters/act/redrive", params=form)).json()
            assert preview["count"] == 3 and len(preview["samples"]) == 3

            sent = await http.post(
                "/dead-letters/act/redrive", data={**form, "count": "3", "reason": "back"}, headers=SAME
            )

            number = sent.headers["location"].rpartition("/")[2]
            found = await ended(dashboard, number)
            assert (found.state, found.done) == ("completed", 3)  # type: ignore[attr-defined]
            assert (await queue.counts()).waiting == 3
            assert await queue.dead_letters.depth() == 0
            assert {(await queue.get_job(job.id)).attempts_made for job in jobs} == {0}  # type: ignore[union-attr]
            assert "3 of 3" in (await http.get("/operations")).text
            assert "What fails again is a new dead letter" in (await http.get(f"/operations/{number}")).text
            entries = await AuditStreams(queue.connection, "bull").read(f"{queue_name}-dlq")
            assert [each.action for each in entries] == ["operation.start"], "one action, one entry"


@pytest.mark.requirement("D-33")
async def test_selected_jobs_are_shown_first_and_then_removed(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, opened(redis_url) as (http, dashboard):
        ids = [(await queue.add("job", {})).id for _ in range(4)]
        body = f"verb=remove&state=waiting&id={ids[0]}&id={ids[2]}"
        form = {**SAME, "content-type": "application/x-www-form-urlencoded"}
        path = f"/queues/{queue_name}/selected"
        page = (await http.post(path, content=body, headers=form)).text
        assert "Remove 2 jobs" in page
        assert (await queue.counts()).waiting == 4

        sent = await http.post(path, content=f"{body}&confirmed=1", headers=form)

        found = await ended(dashboard, sent.headers["location"].rpartition("/")[2])
        assert found.done == 2  # type: ignore[attr-defined]
        assert (await queue.counts()).waiting == 2
        assert (await http.post(path, content="verb=remove", headers=form)).status_code == 422


@pytest.mark.requirement("D-87")
async def test_many_jobs_are_removed_only_by_an_admin_who_types_the_name(redis_url: str, queue_name: str) -> None:
    form = {**SAME, "content-type": "application/x-www-form-urlencoded"}
    path = f"/queues/{queue_name}/selected"

    def body(count: int, more: str = "") -> str:
        return "&".join(["verb=remove", "confirmed=1", *(f"id={number}" for number in range(count))]) + more

    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add("job", {})
        async with opened(redis_url, access=As(Visitor("o", Role.OPERATOR))) as (http, _):
            assert (await http.post(path, content=body(101), headers=form)).status_code == 403
            assert (await http.post(path, content=body(100), headers=form)).status_code == 303
        async with opened(redis_url) as (http, _):
            assert (await http.post(path, content=body(101), headers=form)).status_code == 422
            assert (await http.post(path, content=body(1_001), headers=form)).status_code == 422
            named = await http.post(path, content=body(101, f"&typed={queue_name}"), headers=form)
            assert named.status_code == 303


@pytest.mark.requirement("D-33")
@pytest.mark.requirement("D-85")
async def test_all_failed_jobs_are_retried_once(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        for number in range(3):
            await fail_one(redis_url, queue, {"n": number})
        async with opened(redis_url) as (http, dashboard):
            path = f"/queues/{queue_name}/matching/retry?state=failed"
            assert "Retry 3 failed jobs" in (await http.get(path)).text
            sent = await http.post(path, data={"most": "2"}, headers=SAME)
            found = await ended(dashboard, sent.headers["location"].rpartition("/")[2])
        assert found.done == 2  # type: ignore[attr-defined]
        counts = await queue.counts()
        assert (counts.waiting, counts.failed) == (2, 1)


@pytest.mark.requirement("D-84")
async def test_an_operation_can_be_stopped_and_another_process_goes_on(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        for number in range(3):
            await fail_one(redis_url, queue, {"n": number})
        # Stored by a process that died before it began.
        async with Bullpen(settings=settings(redis_url)) as app:
            stored = Operation(kind="redrive", by="ada", store=f"{queue_name}-dlq", total=3, rate=0.5)
            job = await app.queue(OPERATIONS).add("redrive", msgspec.to_builtins(stored))
        async with opened(redis_url) as (http, dashboard):
            assert "waiting" in (await http.get(f"/operations/{job.id}")).text
            assert (await http.post(f"/operations/{job.id}/stop", headers=SAME)).status_code == 303
            found = await ended(dashboard, job.id)
        assert found.state == "stopped"  # type: ignore[attr-defined]
        assert found.done < 3  # type: ignore[attr-defined]


async def left_behind(redis_url: str, queue_name: str) -> str:
    """An operation that a process stored before it died, and the id of its job."""
    async with Queue(queue_name, connection=redis_url) as queue:
        job = await queue.add("job", {}, job_id="chosen")
    async with Bullpen(settings=settings(redis_url)) as app:
        stored = Operation(kind="jobs", by="ada", queue=queue_name, verb="remove", ids=[job.id], total=1)
        return (await app.queue(OPERATIONS).add("jobs", msgspec.to_builtins(stored))).id


@pytest.mark.requirement("D-84")
async def test_what_a_dead_process_left_goes_on_when_the_next_one_starts(redis_url: str, queue_name: str) -> None:
    """Nobody has to open a page for it."""
    number = await left_behind(redis_url, queue_name)

    async with opened(redis_url) as (_, dashboard):
        found = await ended(dashboard, number)

    assert (found.state, found.done) == ("completed", 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_read_only", [True, False], ids=["read-only", "not started"])
async def test_looking_at_operations_runs_none(redis_url: str, queue_name: str, is_read_only: bool) -> None:
    """A viewer, or a dashboard that may change nothing, must not make something happen by looking."""
    number = await left_behind(redis_url, queue_name)
    wanted = DashboardSettings(read_only=is_read_only)
    async with Bullpen(settings=settings(redis_url)) as app:
        made = make_dashboard(app, access=As(Visitor("eve", Role.VIEWER)), settings=wanted)
        if is_read_only:
            await made.start()
        async with httpx.AsyncClient(transport=transport(made), base_url=HOST) as http:
            for path in ("/operations", f"/operations/{number}"):
                assert (await http.get(path)).status_code == 200
        assert [each.get_name() for each in asyncio.all_tasks() if "operations" in each.get_name()] == []
        assert (await app.queue(OPERATIONS).counts()).waiting == 1
        await made.aclose()


@pytest.mark.requirement("D-56")
@pytest.mark.requirement("D-87")
async def test_many_letters_are_thrown_away_only_by_an_admin_who_types_the_name(
    redis_url: str, queue_name: str
) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        await fail_one(redis_url, queue)
        form = {"store": f"{queue_name}-dlq", "count": "101"}
        async with opened(redis_url, access=As(Visitor("o", Role.OPERATOR))) as (http, _):
            assert (await http.post("/dead-letters/act/discard", data=form, headers=SAME)).status_code == 403
        async with opened(redis_url) as (http, _):
            assert (await http.post("/dead-letters/act/discard", data=form, headers=SAME)).status_code == 422
        assert await queue.dead_letters.depth() == 1


async def test_one_letter_is_changed_and_sent_back(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        job = await fail_one(redis_url, queue, {"order": 1, "password": "hunter2"})
        async with opened(redis_url) as (http, _):
            letter = (await http.get("/api/v1/dead-letters")).json()["groups"][0]["example"]
            path = f"/dead-letters/{queue_name}-dlq/{letter}/edit"
            wrong = await http.post(path, data={"patch": '{"order": 2,\n}'}, headers=SAME)
            assert wrong.status_code == 422 and "line 2" in wrong.text
            shown = (await http.post(path, data={"patch": '{"order": 2}'}, headers=SAME)).text
            assert "hunter2" not in shown
            before = re.search(r'name="before" value="([^"]+)"', shown)
            assert before is not None
            form = {"patch": '{"order": 2}', "before": before[1], "confirmed": "1"}
            assert (await http.post(path, data={**form, "before": "other"}, headers=SAME)).status_code == 409
            assert (await http.post(path, data=form, headers=SAME)).status_code == 303
        sent = await queue.get_job(job.id)
        assert sent is not None
        assert sent.data == {"order": 2, "password": "hunter2"}


@pytest.mark.requirement("X-41")
@pytest.mark.requirement("D-112")
async def test_a_tenant_sees_and_touches_his_letters_only(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        await fail_one(redis_url, queue, {"tenantId": "t1"}, error="first")
        await fail_one(redis_url, queue, {"tenantId": "t2"}, error="second")
        async with opened(redis_url) as (http, _):
            groups = {
                each["error"]: each["example"] for each in (await http.get("/api/v1/dead-letters")).json()["groups"]
            }
        async with opened(redis_url, access=As(Visitor("t", Role.ADMIN, ("t1",)))) as (http, _):
            found = (await http.get("/api/v1/dead-letters")).json()
            assert "first" in str(found)
            assert "second" not in str(found)
            assert found["total"] == 1
            store, other = f"{queue_name}-dlq", next(value for key, value in groups.items() if "second" in key)
            for path in (f"/dead-letters/{store}/{other}", f"/dead-letters/{store}/{other}/edit"):
                assert (await http.get(path)).status_code == 404
            sent = await http.post("/dead-letters/act/redrive", data={"store": store, "entry": other}, headers=SAME)
            assert sent.status_code == 404
            assert "second" not in (await http.get("/dead-letters/export")).text


def test_jobs_explain_tells_the_cause(redis_url: str, queue_name: str, tmp_path: Path) -> None:
    async def fill() -> None:
        async with Queue(queue_name, connection=redis_url) as queue:
            failed.append((await fail_one(redis_url, queue, error="no such address")).id)
            await queue.add("job", {}, job_id="a")

    failed: list[str] = []
    asyncio.run(fill())
    env = {"BULLPEN_REDIS_URL": redis_url}

    over = cli("jobs", "explain", queue_name, *failed, cwd=tmp_path, env=env)
    found = cli("jobs", "explain", queue_name, "a", "--json", cwd=tmp_path, env=env)
    missing = cli("jobs", "explain", queue_name, "nobody", cwd=tmp_path, env=env)

    assert json.loads(found.out)["cause"] == "no-worker"
    assert over.out.splitlines()[1:] == ["ValueError: no such address", f"bullpen jobs retry {queue_name} {failed[0]}"]
    assert missing.code == 1


@pytest.mark.requirement("D-35")
def test_queues_show_tells_who_paused_it(redis_url: str, queue_name: str, tmp_path: Path) -> None:
    env = {"BULLPEN_REDIS_URL": redis_url}
    cli("jobs", "add", queue_name, "job", cwd=tmp_path, env=env)
    cli("queues", "pause", queue_name, "--reason", "month end", cwd=tmp_path, env=env)

    shown = cli("queues", "show", queue_name, cwd=tmp_path, env=env)
    data = json.loads(cli("queues", "show", queue_name, "--json", cwd=tmp_path, env=env).out)

    assert re.search(r"paused by \S+ at .*Z: month end", shown.out)
    assert data["pause"]["reason"] == "month end"


@pytest.mark.requirement("D-37")
async def test_a_job_is_added_by_hand_once(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        first = await queue.add("send", {"order": 1})
        async with opened(redis_url) as (http, _):
            form = await http.get(f"/queues/{queue_name}/add?like={first.id}")
            wrong = await http.post(
                f"/queues/{queue_name}/add", data={"name": "send", "data": '{"a": 1,\n "b" 2}'}, headers=SAME
            )
            fields = {"name": "send", "data": '{"order": 2}', "priority": "3", "nonce": "n1"}
            done = [await http.post(f"/queues/{queue_name}/add", data=fields, headers=SAME) for _ in range(2)]
            limits = (await http.get(f"/api/v1/queues/{queue_name}/limits")).json()
            page = await http.get(f"/queues/{queue_name}/limits")
        counts = await queue.counts()

    assert "&#34;order&#34;: 1" in form.text
    assert wrong.status_code == 422
    assert "line 2, column 6" in wrong.text
    assert [each.status_code for each in done] == [303, 303]
    assert done[0].headers["location"] == done[1].headers["location"]
    assert (counts.waiting, counts.prioritized) == (1, 1)
    assert {each["state"]: each["count"] for each in limits["stored"]}["prioritized"] == 1
    assert page.status_code == 200


@pytest.mark.requirement("D-37")
async def test_data_with_secrets_is_not_offered_for_another_job(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        job = await queue.add("send", {"password": "hunter2"})
        async with opened(redis_url) as (http, _):
            form = await http.get(f"/queues/{queue_name}/add?like={job.id}")

    assert "hunter2" not in form.text
    assert "***" not in form.text
    assert "values that are hidden here" in form.text
