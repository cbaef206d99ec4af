"""Edit and redrive: one console over stores that take an edit and stores that must not, and the command."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from bullpen import Bullpen, InvalidOption, Job, Queue, Worker
from bullpen.errors import DeadLetterNotEditable, DeadLetterNotFound
from bullpen.ledger import Ledger
from bullpen.ops.dead_letters import DeadLetterConsole
from bullpen.outbox.dead_letters import OutboxDeadLetters
from bullpen.ports.dead_letters import DeadLetter, DeadLetterStore
from bullpen.ports.edits import KEEP, make_edit
from bullpen.settings import Settings
from bullpen.testing import RedisServer
from tests.databases import MakeLedger, item
from tests.flows._cli import Answer, cli
from tests.flows._warm import Warm


async def fail_one(queue: Queue, data: Any, *, url: str, **options: Any) -> None:
    async def handle(job: Job) -> None:
        raise RuntimeError("no street")

    async with Worker(queue.name, handle, connection=url, dead_letters=True) as worker:
        failed = asyncio.Event()
        worker.on("failed", lambda *_: failed.set())
        await queue.add("parcel", data, attempts=1, **options)
        await asyncio.wait_for(failed.wait(), 15)


async def run_one(queue: Queue, *, url: str, attempts: list[int] | None = None) -> Job:
    """The job that ran; `attempts` gets those that were made before it ran."""
    done: asyncio.Queue[Job] = asyncio.Queue()

    async def handle(job: Job) -> None:
        if attempts is not None:
            attempts.append(job.attempts_made)
        done.put_nowait(job)

    async with Worker(queue.name, handle, connection=url):
        return await asyncio.wait_for(done.get(), 15)


@pytest.fixture
async def parcels(redis_url: str) -> AsyncIterator[Queue]:
    async with Queue("parcels", connection=redis_url) as queue:
        yield queue


@pytest.mark.requirement("X-40", "X-41")
async def test_an_edited_job_runs_once_with_its_id_and_a_note_of_the_edit(
    parcels: Queue, redis_url: str, redis_server: RedisServer
) -> None:
    await fail_one(parcels, {"to": "Ada", "street": ""}, url=redis_url, job_id="p-1")
    noted: list[tuple[str, str, Mapping[str, Any]]] = []

    async def audit(action: str, store: str, found: DeadLetter | None, by: str, detail: Mapping[str, Any]) -> None:
        noted.append((action, by, detail))

    console = DeadLetterConsole([parcels.dead_letters], audit=audit)

    found, edit = await console.edit("parcels-dlq", "dl-p-1-1", merge={"street": "Rue 1"}, why="form bug")
    assert found.letter.data == {"to": "Ada", "street": ""}
    assert await parcels.dead_letters.depth() == 1, "a preview changes nothing"
    assert await console.redrive_edited("parcels-dlq", "dl-p-1-1", edit, by="ada") == "p-1"
    with pytest.raises(DeadLetterNotFound):
        await console.redrive_edited("parcels-dlq", "dl-p-1-1", edit, by="ada")

    attempts: list[int] = []
    job = await run_one(parcels, url=redis_url, attempts=attempts)
    assert (job.id, job.data, attempts) == ("p-1", {"to": "Ada", "street": "Rue 1"}, [0])
    assert (await parcels.counts()).waiting == 0
    assert noted == [("edit", "ada", edit.note())]
    stored: Any = redis_server.client().hget(parcels.keys.job("p-1"), "bpredriven")
    (note,) = json.loads(stored)
    assert (note["by"], note["entry"], note["edit"]) == ("ada", "dl-p-1-1", edit.note())
    assert note["at"] > 0


@pytest.mark.requirement("X-40")
async def test_a_job_that_retention_removed_is_made_again_with_the_edited_payload(
    parcels: Queue, redis_url: str
) -> None:
    await fail_one(parcels, {"to": "Ada"}, url=redis_url, job_id="p-1", priority=3)
    await parcels.remove("p-1")
    (letter,) = await parcels.dead_letters.list()
    await parcels.dead_letters.redrive_edited(letter.id, make_edit(letter.data, data={"to": "Grace"}))

    job = await run_one(parcels, url=redis_url)
    assert (job.id, job.data, job.priority) == ("p-1", {"to": "Grace"}, 3)


async def test_a_payload_that_nobody_could_read_can_be_replaced(
    parcels: Queue, redis_url: str, redis_server: RedisServer
) -> None:
    await parcels.add("parcel", {}, job_id="odd", attempts=1)
    redis_server.client().hset(parcels.keys.job("odd"), "data", b"\xff{no json")

    async def handle(job: Job) -> None:
        raise AssertionError("it has no data to run with")

    async with Worker("parcels", handle, connection=redis_url, dead_letters=True) as worker:
        failed = asyncio.Event()
        worker.on("failed", lambda *_: failed.set())
        await asyncio.wait_for(failed.wait(), 15)
    (letter,) = await parcels.dead_letters.list()
    await parcels.dead_letters.redrive_edited(letter.id, make_edit(letter.data, data={"to": "Ada"}))

    assert (await run_one(parcels, url=redis_url)).data == {"to": "Ada"}


@pytest.mark.requirement("X-41")
async def test_a_tenant_edits_its_own_only_and_cannot_give_work_away(parcels: Queue, redis_url: str) -> None:
    await fail_one(parcels, {"tenantId": "acme", "n": 1}, url=redis_url, job_id="a")
    stores = [parcels.dead_letters]
    acme, zeta = (DeadLetterConsole(stores, tenant_id=tenant) for tenant in ("acme", "zeta"))

    with pytest.raises(DeadLetterNotFound):
        await zeta.edit("parcels-dlq", "dl-a-1", merge={"n": 2})
    with pytest.raises(InvalidOption, match="tenantId"):
        await acme.edit("parcels-dlq", "dl-a-1", merge={"tenantId": "zeta"})
    _, edit = await acme.edit("parcels-dlq", "dl-a-1", merge={"n": 2})
    with pytest.raises(DeadLetterNotFound):
        await zeta.redrive_edited("parcels-dlq", "dl-a-1", edit, by="eve")
    forged = make_edit({"n": 1}, data={"tenantId": "zeta", "n": 1})
    with pytest.raises(InvalidOption, match="tenantId"):
        await acme.redrive_edited("parcels-dlq", "dl-a-1", forged, by="eve")
    with pytest.raises(InvalidOption, match="the name of the person or program that acts"):
        await acme.redrive_edited("parcels-dlq", "dl-a-1", edit, by=" ")
    assert await acme.redrive_edited("parcels-dlq", "dl-a-1", edit, by="ada") == "a"


@pytest.mark.requirement("X-40", "X-41")
async def test_a_dead_row_is_replaced_and_never_changed(sqlite_url: str, make_ledger: MakeLedger) -> None:
    """The columns of a row's content are immutable; the edited message is another row with the same key."""
    ledger: Ledger = make_ledger(sqlite_url)
    await ledger.outbox.enqueue_many([item(1, ordering_key="order-1"), item(2, ordering_key="order-1")])
    (first,) = await ledger.outbox.claim_due_batch("w")
    await ledger.outbox.dead_letter(first, "no such address", code="HTTP_422")
    console = DeadLetterConsole([OutboxDeadLetters(ledger.outbox)])

    _, edit = await console.edit("integration_outbox", first.id, merge={"fixed": True}, why="bad address")
    new_id = await console.redrive_edited("integration_outbox", first.id, edit, by="ada")

    replacement = await ledger.outbox.get(new_id)
    assert replacement is not None and replacement.payload == {**first.payload, "fixed": True}
    assert replacement.idempotency_key == first.idempotency_key
    assert replacement.headers["editOf"] == first.id
    same = ("source_stream_id", "source_event_id", "integration_type", "event_type", "tenant_id", "ordering_key")
    assert [getattr(replacement, name) for name in same] == [getattr(first, name) for name in same]
    assert await ledger.outbox.get(first.id) is None
    (again,) = await ledger.outbox.enqueue_many([item(1, ordering_key="order-1")])
    assert not again.created, "the event does not come back by itself"
    audited = [entry for entry in await ledger.audit.read() if entry.action == "outbox.edit"]
    assert [(entry.actor, entry.subject) for entry in audited] == [("ada", first.id)]
    assert audited[0].detail["newId"] == new_id
    assert audited[0].detail["before"] == edit.before and audited[0].detail["why"] == "bad address"
    # It may die and be edited once more.
    claimed = {row.id: row for _ in range(2) for row in await _claim_and_send(ledger, keep=new_id)}
    await ledger.outbox.dead_letter(claimed[new_id], "still wrong", code="HTTP_422")
    _, second = await console.edit("integration_outbox", new_id, merge={"fixed": "really"})
    third = await console.redrive_edited("integration_outbox", new_id, second, by="ada")
    assert (await ledger.outbox.get(third)).idempotency_key == first.idempotency_key  # type: ignore[union-attr]


async def _claim_and_send(ledger: Ledger, *, keep: str) -> list[Any]:
    rows = [row for row in await ledger.outbox.claim_due_batch("w") if not row.is_announcement]
    for row in rows:
        if row.id != keep:
            await ledger.outbox.mark_sent(row)
    return rows


class _PlainStore:
    """The store of somebody who knows the six operations of every store, and no seventh."""

    name = "plain"

    async def get(self, entry_id: str) -> DeadLetter | None:
        return DeadLetter(id=entry_id, source="plain", message_id="1", data={"n": 1})


async def test_stores_that_take_no_edit_say_what_to_do(redis_url: str, sqlite_url: str) -> None:
    settings = Settings.load(redis_url=redis_url, ledger_url=sqlite_url)
    async with Bullpen(redis_url, settings=settings) as app:
        await app.prepare()
        message_queue = settings.rabbitmq.queue_name
        for queue in ("workflow-execution", message_queue, "mails"):
            letter = DeadLetter(id="dl-1-1", source=queue, message_id="1", name="x", data={"n": 1}, error_message="no")
            await app.queue(queue).dead_letters.put(letter)
        console = await app.dead_letters()

        for queue, advice in (("workflow-execution", "submit a new run"), (message_queue, "correct the recipient")):
            with pytest.raises(DeadLetterNotEditable, match=advice):
                await console.edit(f"{queue}-dlq", "dl-1-1", merge={"n": 2})
            edit = make_edit({"n": 1}, data={"n": 2})
            with pytest.raises(DeadLetterNotEditable, match=advice):
                await console.redrive_edited(f"{queue}-dlq", "dl-1-1", edit, by="ada")
            assert await console.redrive(f"{queue}-dlq", "dl-1-1", by="ada") == "1"
        with pytest.raises(InvalidOption, match="either data"):
            await console.edit("mails-dlq", "dl-1-1", data=KEEP)
        plain = DeadLetterConsole([cast("DeadLetterStore", _PlainStore())])
        with pytest.raises(DeadLetterNotEditable, match="cannot edit a payload"):
            await plain.edit("plain", "dl-1-1", merge={"n": 2})

        await console.discard("mails-dlq", "dl-1-1", by="grace")
        entries = [entry for entry in await app.ledger.audit.read() if entry.action.startswith("dead_letter.")]
        assert [(entry.action, entry.actor, entry.subject) for entry in entries] == [
            ("dead_letter.discard", "grace", "mails-dlq/dl-1-1"),
            ("dead_letter.redrive", "ada", f"{message_queue}-dlq/dl-1-1"),
            ("dead_letter.redrive", "ada", "workflow-execution-dlq/dl-1-1"),
        ]


async def test_what_cannot_be_written_down_is_not_done(parcels: Queue, redis_url: str) -> None:
    await fail_one(parcels, {"to": "Ada"}, url=redis_url)

    async def audit(*_: Any) -> None:
        raise ConnectionError("the database does not answer")

    console = DeadLetterConsole([parcels.dead_letters], audit=audit)
    _, edit = await console.edit("parcels-dlq", "dl-1-1", merge={"to": "Bob"})
    for act in (
        console.redrive_edited("parcels-dlq", "dl-1-1", edit, by="ada"),
        console.redrive("parcels-dlq", "dl-1-1", by="ada"),
        console.discard("parcels-dlq", "dl-1-1", by="ada"),
    ):
        with pytest.raises(ConnectionError):
            await act
    assert await parcels.dead_letters.depth() == 1


# The command --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X-40")
async def test_the_command_previews_sends_and_tells(parcels: Queue, redis_url: str, tmp_path: Path) -> None:
    await fail_one(parcels, {"to": "Ada", "street": ""}, url=redis_url)
    (tmp_path / "new.json").write_text('{"to": "Ada", "street": "Rue 1"}')

    async def run(*arguments: str, stdin: str = "") -> Answer:
        def call() -> Answer:
            env = {"BULLPEN_REDIS_URL": redis_url, "BULLPEN_EMBEDDED": "never"}
            return cli("dead-letters", *arguments, cwd=tmp_path, env=env, stdin=stdin)

        return await asyncio.to_thread(call)

    shown = await run("edit", "parcels", "dl-1-1", "--merge", '{"street": "Rue 1"}', "--dry-run")
    assert (shown.code, shown.out.strip()) == (0, "would be sent back to parcels: dl-1-1")
    assert '-  "street": ""' in shown.err and '+  "street": "Rue 1"' in shown.err
    dry = await run("edit", "parcels-dlq", "dl-1-1", "--data", "@new.json", "--dry-run", "--json")
    assert json.loads(dry.out)["changed"] == ["street"] and json.loads(dry.out)["id"] is None
    for arguments, problem in (
        (["--merge", "{}", "--data", "{}"], "pass only one of --data, --merge and --editor, not --data and --merge"),
        ([], "pass --data or --merge without a terminal to edit on"),
        (["--data", "{}"], "needs --yes without a terminal to confirm on"),
        (["--data", "{oops", "--yes"], "is not JSON"),
        (["--data", "@missing.json", "--yes"], "'missing.json' cannot be read as JSON"),
        (["--data", '{"to": "Ada", "street": ""}', "--yes"], "a payload that differs from the stored one"),
    ):
        wrong = await run("edit", "parcels", "dl-1-1", *arguments)
        assert (wrong.code, problem in wrong.err) == (2, True), wrong.err
    lost = await run("edit", "parcels", "dl-9-1", "--data", "{}", "--yes")
    assert (lost.code, "may have been redriven or discarded" in lost.err) == (1, True)
    foreign = await run("edit", "parcels", "dl-1-1", "--data", "{}", "--yes", "--tenant", "acme")
    assert foreign.code == 1
    assert await parcels.dead_letters.depth() == 1

    sent = await run("edit", "parcels", "dl-1-1", "--data", "-", "--yes", "--json", "--by", "ada", "--why", "form",
                     stdin='{"to": "Ada", "street": "Rue 2"}')  # fmt: skip
    told = json.loads(sent.out)
    assert (told["id"], told["store"], told["dryRun"], told["why"]) == ("1", "parcels-dlq", False, "form")
    assert (await run_one(parcels, url=redis_url)).data == {"to": "Ada", "street": "Rue 2"}


@pytest.mark.requirement("X-41")
async def test_the_command_takes_the_names_of_the_overview_and_writes_down_who_did_what(
    parcels: Queue, redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    for number in range(2):
        await fail_one(parcels, {"n": number}, url=redis_url, job_id=f"p-{number}")
    env = {"BULLPEN_REDIS_URL": redis_url, "BULLPEN_DATABASE_URL": sqlite_url}

    async def run(*arguments: str) -> Answer:
        return await asyncio.to_thread(lambda: cli("dead-letters", *arguments, cwd=tmp_path, env=env))

    assert len(json.loads((await run("list", "parcels-dlq", "--json")).out)) == 2, "as overview and alerts name it"
    outbox = await run("list", "integration_outbox")
    assert (outbox.code, "no dead letters of 'integration_outbox'" in outbox.err) == (0, True)
    misspelt = await run("redrive", "parcel", "--all")
    assert (misspelt.code, "did you mean 'parcels'" in misspelt.err) == (1, True), "nothing redriven is no success"
    assert (await run("redrive", "parcels", "--all", "--dry-run")).code == 0
    assert (await run("redrive", "parcels", "dl-p-0-1", "--by", "ada")).code == 0
    assert (await run("discard", "parcels-dlq", "--all", "--yes")).code == 0

    async with Ledger(sqlite_url) as ledger:
        entries = await ledger.audit.read(subject="parcels-dlq")
    assert [(entry.action, entry.detail) for entry in entries] == [
        ("dead_letter.discard", {"count": 1}),
        ("dead_letter.redrive", {"count": 1, "entries": ["dl-p-0-1"]}),
    ]
    assert (entries[1].actor, entries[0].actor.startswith("cli")) == ("ada", True)


async def test_an_editor_opens_on_a_terminal_and_nothing_is_sent_unasked(
    parcels: Queue, redis_url: str, tmp_path: Path, warm: Warm
) -> None:
    await fail_one(parcels, {"to": "Ada", "street": ""}, url=redis_url)
    editor = tmp_path / "editor.sh"
    # First it leaves something that is not JSON, then it mends the street; what it was given stays for the test.
    editor.write_text(
        '#!/bin/sh\ncp "$1" given.json; stat -c %a "$1" > mode\n'
        'if [ -e broken ]; then sed "s/oops//; s/\\"street\\": \\"\\"/\\"street\\": \\"Rue 3\\"/" -i "$1"\n'
        'else touch broken; echo oops >> "$1"; fi\n'
    )
    editor.chmod(0o755)
    env = {"BULLPEN_REDIS_URL": redis_url, "BULLPEN_EMBEDDED": "never", "EDITOR": str(editor), "VISUAL": ""}

    def on_terminal(answer: str, editor_env: Mapping[str, str] = env) -> tuple[int, str]:
        terminal = warm.start("dead-letters", "edit", "parcels", "dl-1-1", cwd=tmp_path, env=editor_env)
        terminal.wait_for_either("Edit it again")
        terminal.type("y\n")
        terminal.wait_for_either("Send dl-1-1 back to 'parcels' with this payload")
        terminal.type(answer)
        return terminal.end(), terminal.text + terminal.error

    refused, text = await asyncio.to_thread(on_terminal, "n\n")
    assert refused == 130 and '+  "street": "Rue 3"' in text
    assert json.loads((tmp_path / "given.json").read_text().replace("oops", "")) == {"to": "Ada", "street": ""}
    assert (tmp_path / "mode").read_text().strip() == "600"
    assert await parcels.dead_letters.depth() == 1
    (tmp_path / "broken").unlink()
    agreed, text = await asyncio.to_thread(on_terminal, "y\n")
    assert agreed == 0 and "sent back to parcels: 1" in text
    assert (await run_one(parcels, url=redis_url)).data == {"to": "Ada", "street": "Rue 3"}


@pytest.mark.parametrize(
    ("editor", "said"), [("true", "nothing was changed"), ("false", "failed"), ("/no/such/editor", "pass --data")]
)
async def test_an_editor_that_changes_nothing_or_fails_sends_nothing(
    parcels: Queue, redis_url: str, tmp_path: Path, warm: Warm, editor: str, said: str
) -> None:
    await fail_one(parcels, {"to": "Ada"}, url=redis_url)
    env = {"BULLPEN_REDIS_URL": redis_url, "BULLPEN_EMBEDDED": "never", "EDITOR": editor, "VISUAL": ""}

    def run() -> tuple[int, str]:
        terminal = warm.start("dead-letters", "edit", "parcels", "dl-1-1", cwd=tmp_path, env=env)
        return terminal.end(), terminal.text + terminal.error

    code, text = await asyncio.to_thread(run)

    assert (code, said in text) == (1, True), text
    assert await parcels.dead_letters.depth() == 1


@pytest.mark.requirement("X-40")
async def test_of_two_that_send_one_letter_back_at_the_same_time_one_is_told_that_it_is_gone(
    parcels: Queue, redis_url: str
) -> None:
    """Also when both ask for the same: who counts what was sent back would count one job twice."""
    for name in ("a", "b"):
        await fail_one(parcels, {"to": "Ada"}, url=redis_url, job_id=name)
    letters = parcels.dead_letters
    edit = make_edit({"to": "Ada"}, merge={"street": "Rue 1"})

    redriven = await asyncio.gather(*(letters.redrive("dl-a-1", by=who) for who in "xy"), return_exceptions=True)
    edited = await asyncio.gather(
        *(letters.redrive_edited("dl-b-1", edit, by="x") for _ in range(2)), return_exceptions=True
    )

    assert sorted(type(each).__name__ for each in redriven) == ["DeadLetterNotFound", "str"]
    assert sorted(type(each).__name__ for each in edited) == ["DeadLetterNotFound", "str"]
    assert (await parcels.counts()).waiting == 2
