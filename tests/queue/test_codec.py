"""Sealed payloads: what is stored, who can open it, and what becomes of a job that nobody here can open."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bullpen import DeadLetterConsole, make_edit, sync
from bullpen.errors import (
    ConnectionLost,
    DeadLetterNotEditable,
    InvalidOption,
    ObjectStoreFailed,
    PayloadMissing,
    PayloadTampered,
    PayloadTooLarge,
    PayloadUnavailable,
)
from bullpen.plugins.objects.files import FileStore
from bullpen.queue import Added, Deduplication, Flow, Job, JobState
from bullpen.queue.codec import Codec
from bullpen.wire.envelope import Envelope
from bullpen.worker import Taker
from tests.queue import _process_handlers
from tests.queue._kit import Failing, Gate, Kit, echo, nothing, soon

SECRET = {"iban": "DE89 3704 0044 0532 0130 00", "tenantId": "acme"}
OLD, NEW = bytes(range(32)), bytes(range(32, 64))


def codec(**options: Any) -> Codec:
    options.setdefault("keys", {"k1": OLD})
    return Codec(**options)


def inside(text: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(text)["bpcodec"]
    return value


def everything(kit: Kit) -> bytes:
    """All that the server stores about the queue and its dead letters. Short texts of hashes are not compressed."""
    names: Any = kit.redis.keys(f"bull:{kit.name}*")
    hashes = [kit.command("HGETALL", name) for name in names if kit.command("TYPE", name) == b"hash"]
    return b"".join(kit.command("DUMP", name) for name in names) + repr(hashes).encode()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "payloads")


def files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "payloads").rglob("*") if path.is_file())


# ---- encryption --------------------------------------------------------------------------------------------------


async def test_data_and_return_value_are_stored_encrypted_and_seen_plain(kit: Kit) -> None:
    """Whoever reads the server's memory, its disk or its backups reads nothing of the payload."""
    queue = kit.queue(codec=codec())
    added = await queue.add("pay", SECRET)

    told = await kit.drain(echo, 1, codec=codec(), dead_letters=True)

    stored = kit.fields(added.id)
    assert inside(stored["data"]).keys() == inside(stored["returnvalue"]).keys() == {"v", "q", "kid", "box"}
    assert (inside(stored["data"])["kid"], inside(stored["data"])["q"]) == ("k1", f"bull:{kit.name}")
    assert b"DE89" not in everything(kit) and b"acme" not in everything(kit)
    assert added.data == told.of("completed")[0][1] == SECRET
    assert told.of("completed")[0][0].return_value == SECRET
    assert await soon(added.result()) == SECRET
    read = await queue.get_job(added.id)
    assert read is not None and (read.data, read.return_value, read.is_sealed) == (SECRET, SECRET, True)


async def test_a_result_that_is_waited_for_arrives_opened(kit: Kit) -> None:
    queue = kit.queue(codec=codec())
    await kit.work(echo, codec=codec())

    job = await queue.add("pay", SECRET)

    assert await soon(job.result()) == SECRET
    assert "DE89" not in str(kit.events())


async def test_jobs_of_other_producers_are_taken_as_they_are(kit: Kit) -> None:
    """A codec is switched on while plain jobs still wait."""
    plain = await kit.queue().add("pay", SECRET)

    told = await kit.drain(echo, 1, codec=codec())

    assert told.of("completed")[0][1] == SECRET
    assert kit.fields(plain.id)["data"] == json.dumps(SECRET, separators=(",", ":"))


async def test_plain_jobs_can_be_refused(kit: Kit) -> None:
    """Else whoever may write to the server could hand work to a worker that trusts what was encrypted."""
    job = await kit.queue(attempts=5).add("pay", SECRET)

    await kit.drain(echo, 1, codec=codec(refuse_plain=True))

    assert kit.fields(job.id)["failedReason"] == (
        f"job '{job.id}' of queue '{kit.name}': its data is not encrypted, and this codec refuses that"
    )


async def test_an_old_key_opens_until_it_is_taken_away(kit: Kit) -> None:
    """Rotation: the new key seals, both open."""
    before = await kit.queue(codec=codec()).add("pay", SECRET)
    both = Codec({"k2": NEW, "k1": OLD})
    after = await kit.queue(codec=both).add("pay", SECRET)
    assert [inside(kit.fields(job.id)["data"])["kid"] for job in (before, after)] == ["k1", "k2"]
    assert (await kit.queue(codec=both).payload_report()).by_key == {"k1": 1, "k2": 1}

    told = await kit.drain(echo, 2, codec=both)

    assert [details[1] for details in told.of("completed")] == [SECRET, SECRET]
    assert inside(kit.fields(before.id)["returnvalue"])["kid"] == "k2"


async def test_the_report_counts_return_values_of_finished_jobs(kit: Kit) -> None:
    """Whoever removes a key by this report must not lose what a caller may still read."""
    only_results = Codec({"k1": OLD, "k2": NEW})
    await kit.queue(codec=Codec({"k2": NEW, "k1": OLD})).add("pay", SECRET)
    await kit.drain(echo, 1, codec=only_results)

    assert (await kit.queue(codec=codec()).payload_report()).by_key == {"k1": 1, "k2": 1}


async def test_the_report_counts_what_children_left_for_their_parent(kit: Kit) -> None:
    """The child itself may be gone, and the parent may run much later."""
    new_first = kit.queue(codec=Codec({"k2": NEW, "k1": OLD}))
    options: dict[str, Any] = {"on_failure": "fail_parent", "remove_on_complete": True}
    children = [Flow("part", SECRET, **options) for _ in range(150)]  # more than one step
    await new_first.add_flow(
        Flow("sum", SECRET, children=[*children, Flow("part", SECRET, on_failure="fail_parent", delay=3_600_000)])
    )
    await kit.drain(echo, 150, codec=Codec({"k1": OLD, "k2": NEW}), concurrency=50)

    assert (await new_first.payload_report()).by_key == {"k1": 150, "k2": 2}


async def test_a_parent_whose_children_cannot_be_opened_waits_and_counts_no_attempt(kit: Kit) -> None:
    queue = kit.queue(codec=Codec({"k2": NEW, "k1": OLD}))
    tree = await queue.add_flow(Flow("sum", {}, attempts=1, children=[Flow("part", SECRET, on_failure="fail_parent")]))

    async def collect(job: Job) -> Any:
        return list((await job.children_values()).values()) if job.name == "sum" else job.data

    child, old = tree.children[0].job, codec(keys={"k1": OLD, "k2": NEW})
    async with Taker(kit.name, connection=kit.url, codec=old) as taker:
        taken = await soon(taker.take())
        assert taken is not None and taken.id == child.id
        await taker.complete(taken, taken.data)

    told = await kit.work(collect, codec=Codec({"k2": NEW}))
    (given_back,) = await told.wait("returned")
    (error,) = await told.wait("error")
    await told.worker.close()

    assert given_back.id == tree.job.id
    assert isinstance(error, PayloadUnavailable) and error.key_id == "k1"
    stored = kit.fields(tree.job.id)
    assert await tree.job.state() is JobState.DELAYED
    assert stored.get("atm", "0") == "0" and "failedReason" not in stored
    await queue.promote(tree.job.id)
    right = await kit.drain(collect, 1, codec=old)
    assert right.of("completed")[0][1] == [SECRET]


def test_the_key_that_seals_can_be_chosen() -> None:
    """A new key is known to all before the first uses it."""
    assert Codec({"k2": NEW, "k1": OLD}, current="k1").current_key == "k1"


@pytest.mark.parametrize(
    "other", [Codec({"k2": NEW}), None, Codec(store=FileStore("unused"))], ids=["key", "no", "keys"]
)
async def test_a_job_whose_key_is_unknown_waits_and_counts_no_attempt(kit: Kit, other: Codec | None) -> None:
    """A worker that was deployed too early, or without its secrets, must not use up the jobs of others."""
    job = await kit.queue(codec=codec(), attempts=1).add("pay", SECRET)

    told = await kit.work(echo, codec=other)
    (given_back,) = await told.wait("returned")
    (error,) = await told.wait("error")
    await told.worker.close()

    assert given_back.id == job.id
    assert isinstance(error, PayloadUnavailable) and error.key_id == "k1"
    assert "encrypted with key k1" in str(error)
    assert "codec" in str(error)
    stored = kit.fields(job.id)
    assert await job.state() is JobState.DELAYED
    assert stored.get("atm", "0") == "0" and "failedReason" not in stored
    assert 4_000 < int(stored["delay"]) <= 5_000
    queue = kit.queue(codec=codec())
    await queue.promote(job.id)
    right = await kit.drain(echo, 1, codec=codec())
    assert right.of("completed")[0][1] == SECRET


async def test_a_job_that_cannot_be_opened_comes_back_more_and_more_rarely(kit: Kit) -> None:
    """A whole queue of such jobs must not keep a worker busy for nothing. It says so once, not for each."""
    queue = kit.queue(codec=codec())
    job = await queue.add("pay", SECRET)
    told = await kit.work(echo)
    waits = []
    for times in range(1, 10):
        await told.wait("returned", times)
        waits.append(int(kit.fields(job.id)["delay"]))
        await queue.promote(job.id)

    assert waits == [5_000, 10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 600_000, 600_000]
    assert len(told.of("error")) == 1


async def test_get_job_says_what_is_missing(kit: Kit) -> None:
    job = await kit.queue(codec=codec()).add("pay", SECRET)

    with pytest.raises(PayloadUnavailable, match="encrypted with key k1; this codec has k2"):
        await kit.queue(codec=Codec({"k2": NEW})).get_job(job.id)


async def test_lists_show_envelopes_until_a_job_is_opened(kit: Kit) -> None:
    """A page of jobs must not fetch a page of objects."""
    queue = kit.queue(codec=codec())
    await queue.add("pay", SECRET)

    (job,) = await queue.jobs()
    assert job.record.seal_words == "encrypted with key k1"
    assert "DE89" not in str(job.to_json())

    assert (await queue.open(job)).data == SECRET
    assert job.is_sealed and job.record.seal_words is None


@pytest.mark.parametrize(
    "change",
    [
        lambda envelope: replace(envelope, box=envelope.box[:-1] + bytes([envelope.box[-1] ^ 1])),
        lambda envelope: replace(envelope, box=envelope.box[:20]),
        lambda envelope: replace(envelope, box=b""),
        lambda envelope: replace(envelope, key_id="k2"),
        lambda envelope: replace(envelope, queue="bull:another"),
    ],
    ids=["bit", "cut", "empty", "key", "queue"],
)
async def test_a_tampered_payload_fails_its_job_without_running_it(
    kit: Kit, change: Callable[[Envelope], Envelope]
) -> None:
    queue = kit.queue(codec=codec(), attempts=5)
    job = await queue.add("pay", SECRET)
    envelope = Envelope.parse(kit.fields(job.id)["data"].encode())
    kit.redis.hset(kit.base + job.id, "data", change(envelope).to_bytes())

    told = await kit.drain(echo, 1, codec=Codec({"k1": OLD, "k2": NEW}), dead_letters=True)

    assert told.ids("failed") == [job.id]
    (letter,) = await queue.dead_letters.list()
    assert letter.cause == "permanent"
    assert "was not sealed with key" in letter.error_message or "was sealed for" in letter.error_message


async def test_a_payload_of_another_queue_is_refused_unless_named(kit: Kit) -> None:
    """Whoever may write to the server cannot have a worker open what was meant for another one."""
    elsewhere = kit.queue(f"{kit.name}-other", codec=codec())
    moved = await elsewhere.add("pay", SECRET)
    kit.seed("moved", data=kit.fields(moved.id, f"{kit.name}-other")["data"])
    queue = kit.queue(codec=codec())
    with pytest.raises(PayloadTampered, match=f"sealed for 'bull:{kit.name}-other'; name that in also_from"):
        await queue.get_job("moved")

    told = await kit.drain(echo, 1, codec=codec(also_from=[f"bull:{kit.name}-other"]))

    assert told.of("completed")[0][1] == SECRET


async def test_a_return_value_does_not_pass_for_data(kit: Kit) -> None:
    queue = kit.queue(codec=codec())
    job = await queue.add("pay", SECRET)
    await kit.drain(echo, 1, codec=codec())
    kit.seed("forged", data=kit.fields(job.id)["returnvalue"])

    with pytest.raises(PayloadTampered, match="was not sealed with key 'k1'"):
        await queue.get_job("forged")


@pytest.mark.parametrize(
    "text",
    [
        '{"bpcodec":{}}',
        '{"bpcodec":{"v":2,"q":"bull:x","kid":"k1","box":""}}',
        '{"bpcodec":{"v":1,"kid":"k1","box":""}}',
        '{"bpcodec":{"v":1,"q":"bull:x","kid":"../k1","box":""}}',
        '{"bpcodec":{"v":1,"q":"bull:x","kid":"k1","box":"%"}}',
        '{"bpcodec":{"v":1,"q":"bull:x","box":""}}',
        '{"bpcodec":{"v":1,"q":"bull:x","kid":"k1"}}',
        '{"bpcodec":{"v":1,"q":"bull:x","kid":"k1","box":""},"more":1}',
        '{"bpcodec":{"v":1,',
    ],
)
async def test_an_envelope_of_another_form_fails_its_job(kit: Kit, text: str) -> None:
    """Any producer may write anything there; it harms its own job only, and the reason shows nothing of it."""
    kit.seed("odd", data=text)

    await kit.drain(nothing, 1, codec=codec())

    reason = kit.fields("odd")["failedReason"]
    assert "cannot be read" in reason and "%" not in reason


# ---- retry, redrive, changes ---------------------------------------------------------------------------------------


async def test_retries_and_redrives_keep_the_envelope(kit: Kit) -> None:
    """Nobody who moves a job needs a key."""
    job = await kit.queue(codec=codec(), attempts=2, backoff=1).add("pay", SECRET)
    sealed = kit.fields(job.id)["data"]
    await kit.drain(Failing(ValueError("no"), ValueError("no")), 1, codec=codec(), dead_letters=True)
    keyless = kit.queue()
    (letter,) = await keyless.dead_letters.list()
    assert letter.data == json.loads(sealed)
    assert b"DE89" not in everything(kit) and b"acme" not in everything(kit)

    await keyless.dead_letters.redrive(letter.id)

    assert kit.fields(job.id)["data"] == sealed
    told = await kit.drain(echo, 1, codec=codec())
    assert told.of("completed")[0][1] == SECRET


@pytest.mark.parametrize("has_queue", [True, False], ids=["dead-letter queue", "failed set"])
async def test_a_sealed_dead_letter_cannot_be_edited(kit: Kit, has_queue: bool) -> None:
    """What would be stored is plain, or a mixture of both."""
    job = await kit.queue(codec=codec(), attempts=1).add("pay", SECRET)
    await kit.drain(Failing(ValueError("no")), 1, codec=codec(), dead_letters=has_queue)
    queue = kit.queue()
    letters = queue.dead_letters if has_queue else queue.failed_set
    (letter,) = await letters.list()
    edit = make_edit(letter.data, data={"iban": "another"})

    with pytest.raises(DeadLetterNotEditable, match="its payload is encrypted with key k1; redrive it as it is"):
        await letters.redrive_edited(letter.id, edit)
    with pytest.raises(DeadLetterNotEditable, match="encrypted with key k1"):
        await DeadLetterConsole([letters]).get_editable(letters.name, letter.id)

    await letters.redrive(letter.id)
    assert await job.state() is JobState.WAITING


async def test_data_that_a_handler_changes_is_sealed_too(kit: Kit) -> None:
    async def change(job: Job) -> Any:
        if job.attempts_made == 0:
            await job.update_data({**job.data, "step": 2})
            raise ValueError("once more")
        return job.data

    job = await kit.queue(codec=codec(), attempts=2, backoff=1).add("pay", SECRET)

    told = await kit.drain(change, 1, codec=codec())

    assert told.of("completed")[0][1] == {**SECRET, "step": 2}
    assert inside(kit.fields(job.id)["data"])["kid"] == "k1"


async def test_handlers_in_threads_and_processes_get_open_data(kit: Kit) -> None:
    queue = kit.queue(codec=codec())
    job = await queue.add("echo", SECRET)

    told = await kit.drain(_process_handlers.echoing, 1, codec=codec(), processes=True)

    assert told.of("completed")[0][1] == SECRET
    assert inside(kit.fields(job.id)["returnvalue"])["kid"] == "k1"


async def test_jobs_of_a_scheduler_are_sealed(kit: Kit) -> None:
    queue = kit.queue(codec=codec())
    await queue.upsert_scheduler("nightly", "pay", SECRET, every=3_600_000)

    told = await kit.drain(echo, 1, codec=codec())

    assert told.of("completed")[0][1] == SECRET
    assert b"DE89" not in everything(kit)


async def test_logs_show_no_ids_of_a_sealed_payload(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    await kit.queue(codec=codec(), attempts=1).add("pay", SECRET)

    await kit.drain(Failing(ValueError("no")), 1, codec=codec())

    assert not [record for record in caplog.records if "acme" in str(vars(record))]


async def test_the_blocking_queue_seals_and_opens(kit: Kit, store: FileStore, tmp_path: Path) -> None:
    both = codec(store=store, above=100)
    with sync.Queue(kit.name, connection=kit.url, codec=both) as queue:
        small = queue.add("pay", SECRET)
        large, again = queue.add_many([("pay", {"text": "x" * 200}), ("pay", SECRET)])
        assert (small.data, large.data) == (SECRET, {"text": "x" * 200})
        read = queue.get_job(large.id)
        assert read is not None and read.data == {"text": "x" * 200}
        assert inside(kit.fields(small.id)["data"])["kid"] == "k1" and len(files(tmp_path)) == 1
        queue.upsert_scheduler("nightly", "pay", SECRET, every=3_600_000)
        assert b"DE89" not in everything(kit)
        kit.queue()
        told = await kit.drain(echo, 3, codec=both)
        assert sorted(str(details[1]) for details in told.of("completed"))
        assert again.result(timeout=10_000) == SECRET


def test_the_blocking_queue_seals_flows_and_changed_data_and_sweeps(
    redis_url: str, queue_name: str, store: FileStore, tmp_path: Path
) -> None:
    """Whatever a store or a cipher needs a loop for has one, also where the caller has none."""
    both = codec(store=store, above=100)
    with sync.Queue(queue_name, connection=redis_url, codec=both) as queue:
        tree = queue.add_flow(Flow("sum", SECRET, children=[Flow("part", {"text": "x" * 200}, on_failure="ignore")]))
        (child,) = tree.children
        assert (tree.job.data, child.job.data) == (SECRET, {"text": "x" * 200})
        tree.job.update_data({"text": "y" * 200})
        read = queue.get_job(tree.job.id)
        assert read is not None and read.data == {"text": "y" * 200}
        listed = queue.jobs(JobState.WAITING)[0]
        assert listed.is_sealed and queue.open(listed).data == {"text": "x" * 200}
        assert queue.payload_report().in_store == 2
        report = queue.sweep_payloads(older_than=60_000, dry_run=True)
        assert (report.young, report.orphans) == (2, [])
        assert len(files(tmp_path)) == 2


# ---- claim check ---------------------------------------------------------------------------------------------------


async def test_large_data_is_in_the_store_and_small_data_is_not(kit: Kit, store: FileStore, tmp_path: Path) -> None:
    only_store = Codec(store=store, above=1_000)
    queue = kit.queue(codec=only_store)
    small, large = await queue.add_many([("small", "x" * 990), ("large", "y" * 1_000)])

    told = await kit.drain(echo, 2, codec=only_store, concurrency=2)

    assert kit.fields(small.id)["data"] == json.dumps("x" * 990)
    (path,) = files(tmp_path)
    assert path.read_bytes() == json.dumps("y" * 1_000).encode()
    assert inside(kit.fields(large.id)["data"])["ref"] == path.relative_to(tmp_path / "payloads").as_posix()
    assert sorted(details[1] for details in told.of("completed")) == ["x" * 990, "y" * 1_000]
    assert kit.fields(large.id)["returnvalue"] == json.dumps("y" * 1_000)  # return values stay in the job
    (listed,) = [job for job in await queue.jobs() if job.id == large.id]
    assert listed.record.seal_words == "in the object store (1002 bytes)"
    assert path.stat().st_mode & 0o077 == 0


async def test_with_keys_the_object_is_encrypted(kit: Kit, store: FileStore, tmp_path: Path) -> None:
    both = codec(store=store, above=0)
    job = await kit.queue(codec=both).add("pay", SECRET)

    (path,) = files(tmp_path)
    assert b"DE89" not in path.read_bytes()
    assert inside(kit.fields(job.id)["data"]).keys() == {"v", "q", "kid", "ref", "size", "sha256"}
    told = await kit.drain(echo, 1, codec=both)
    assert told.of("completed")[0][1] == SECRET


async def test_a_payload_above_ten_megabytes_passes_through_the_store(kit: Kit, store: FileStore) -> None:
    """The limit of a job is for what stands in the server."""
    queue = kit.queue(codec=codec(store=store))
    text = "x" * 11_000_000
    job = await queue.add("film", text)

    found = await queue.get_job(job.id)

    assert found is not None and found.data == text
    with pytest.raises(PayloadTooLarge, match="10"):
        await kit.queue(codec=codec()).add("film", text)


async def test_max_bytes_bounds_what_is_stored_and_what_is_read(kit: Kit, store: FileStore) -> None:
    """A reader must not be filled up by what a foreign producer put there."""
    generous = Codec(store=store, above=10, max_bytes=20_000)
    job = await kit.queue(codec=generous).add("film", "x" * 15_000)

    with pytest.raises(PayloadTampered, match="max_bytes of this codec is 10000"):
        await kit.queue(codec=Codec(store=store, max_bytes=10_000)).get_job(job.id)
    with pytest.raises(PayloadTooLarge, match="20000"):
        await kit.queue(codec=generous).add("film", "x" * 20_000)


@pytest.mark.parametrize(
    "ref",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "{directory}/../../../etc/passwd",
        "{directory}/./x",
        "{directory}/.hidden",
        "{directory}//x",
        "{directory}",
        "{directory}-other/x/y",
        "bull=3Aanother/x/y",
        "http://169.254.169.254/latest/meta-data",
        "{directory}/x?versionId=1",
        "{directory}/x%2F..%2Fy",
        "{directory}/x\\..\\y",
        "{directory}/x\x00y",
        "{directory}/" + "x" * 300,
    ],
)
async def test_a_hostile_reference_reaches_no_store(kit: Kit, tmp_path: Path, ref: str) -> None:
    """Any producer may write an envelope: it can name neither another path nor another host nor another queue's."""

    class Untouchable(FileStore):
        async def get(self, key: str, *, max_bytes: int) -> bytes | None:
            raise AssertionError(f"asked for {key!r}")

    directory = f"bull=3A{kit.name}"
    envelope = Envelope(f"bull:{kit.name}", None, None, ref.format(directory=directory), 10, "0" * 64)
    kit.seed("hostile", data=envelope.to_bytes())

    told = await kit.drain(echo, 1, codec=Codec(store=Untouchable(tmp_path)))

    assert told.ids("failed") == ["hostile"]
    assert "its reference is not one of an object of that queue" in kit.fields("hostile")["failedReason"]


async def test_an_object_that_was_changed_fails_its_job(kit: Kit, store: FileStore, tmp_path: Path) -> None:
    only_store = Codec(store=store, above=10)
    queue = kit.queue(codec=only_store, attempts=5)
    jobs = await queue.add_many([("a", "x" * 100), ("b", "y" * 100)])
    changed, longer = files(tmp_path)
    changed.write_bytes(changed.read_bytes().replace(b"x", b"z").replace(b"y", b"z"))
    longer.write_bytes(longer.read_bytes() + b"more")

    told = await kit.drain(echo, 2, codec=only_store)

    assert sorted(told.ids("failed")) == sorted(job.id for job in jobs)
    assert "is not the object that was stored" in kit.fields(jobs[0].id)["failedReason"]


async def test_a_missing_object_is_an_error_that_is_tried_again(kit: Kit, store: FileStore, tmp_path: Path) -> None:
    """A store that replicates may be late, so the job's own attempts decide; the entry can be redriven afterwards."""
    only_store = Codec(store=store, above=10)
    queue = kit.queue(codec=only_store, attempts=2, backoff=1)
    job = await queue.add("film", "x" * 100)
    (path,) = files(tmp_path)
    content = path.read_bytes()
    path.unlink()

    told = await kit.drain(echo, 1, codec=only_store, dead_letters=True)

    assert len(told.of("retrying")) == 1 and told.ids("failed") == [job.id]
    assert "the object store has no object" in kit.fields(job.id)["failedReason"]
    with pytest.raises(PayloadMissing):
        await queue.get_job(job.id)
    path.write_bytes(content)
    (letter,) = await queue.dead_letters.list()
    await queue.dead_letters.redrive(letter.id)
    again = await kit.drain(echo, 1, codec=only_store)
    assert again.of("completed")[0][1] == "x" * 100


async def test_a_store_that_is_away_costs_no_attempt(kit: Kit, store: FileStore, tmp_path: Path) -> None:
    """A volume that is not mounted, a network that is cut: nothing is wrong with the job."""
    only_store = Codec(store=store, above=10)
    queue = kit.queue(codec=only_store, attempts=1)
    job = await queue.add("film", "x" * 100)
    os.rename(tmp_path / "payloads", tmp_path / "unmounted")

    told = await kit.work(echo, codec=only_store)
    await told.wait("returned")

    assert isinstance(told.of("error")[0][0], PayloadUnavailable)
    os.rename(tmp_path / "unmounted", tmp_path / "payloads")
    await queue.promote(job.id)
    await told.wait("completed")
    assert told.of("completed")[0][1] == "x" * 100


async def test_a_store_that_refuses_lets_nothing_be_added(kit: Kit, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    queue = kit.queue(codec=Codec(store=FileStore(tmp_path / "file"), above=10))

    with pytest.raises(ObjectStoreFailed, match=r"Not a directory|File exists"):
        await queue.add("film", "x" * 100)

    assert (await queue.counts()).waiting == 0


# ---- objects without a job -----------------------------------------------------------------------------------------


async def test_a_repeated_add_leaves_no_second_object(kit: Kit, store: FileStore, tmp_path: Path) -> None:
    """Whoever retries a request adds the same id again."""
    queue = kit.queue(codec=Codec(store=store, above=10))
    first = await queue.add("film", "x" * 100, job_id="one")

    second = await queue.add("film", "y" * 100, job_id="one")

    assert (first.added, second.added) == (Added.CREATED, Added.DUPLICATE)
    assert len(files(tmp_path)) == 1
    assert (await queue.open(second)).data == "x" * 100


async def test_an_add_that_certainly_failed_leaves_no_object(kit: Kit, store: FileStore, tmp_path: Path) -> None:
    queue = kit.queue(connection="redis://127.0.0.1:1", codec=Codec(store=store, above=10), add_deadline=100)
    good = kit.queue(codec=Codec(store=store, above=10))
    await good.add("film", "x" * 100)

    with pytest.raises(ConnectionLost):
        await queue.add("film", "x" * 100)

    assert len(files(tmp_path)) == 1


def make_old(path: Path, days: float = 2) -> None:
    then = path.stat().st_mtime - days * 86_400
    os.utime(path, (then, then))


async def test_a_sweep_removes_what_no_job_needs_and_nothing_else(kit: Kit, store: FileStore, tmp_path: Path) -> None:
    """Jobs end by retention, by Node, by hand; a producer dies between object and job. What it stored is found here,
    and what a job in any state, a scheduler or a dead letter still names is never touched."""
    both = codec(store=store, above=10)
    queue = kit.queue(codec=both, attempts=1)
    await queue.add("dies", "x" * 100)
    await kit.drain(Failing(ValueError("no")), 1, codec=both, dead_letters=True, remove_on_fail=True)
    await queue.upsert_scheduler("nightly", "pay", "s" * 100, every=3_600_000)
    await queue.add("waits", "w" * 100)
    await queue.add("later", "l" * 100, delay=3_600_000)
    needed = files(tmp_path)
    removed = await queue.add("removed", "r" * 100)
    await queue.remove(removed.id)
    await kit.queue(f"{kit.name}-other", codec=both).add("other", "o" * 100)
    assert len(files(tmp_path)) == len(needed) + 2
    assert (await queue.sweep_payloads()).young == len(needed) + 1
    for path in files(tmp_path):
        make_old(path)

    dry = await queue.sweep_payloads(dry_run=True)
    report = await queue.sweep_payloads(older_than=60_000)

    assert len(needed) == 4  # the one that failed is only in its dead letter
    assert (dry.in_use, len(dry.orphans)) == (report.in_use, len(report.orphans)) == (4, 1)
    assert set(needed) < set(files(tmp_path)) and len(files(tmp_path)) == len(needed) + 1
    assert (await queue.sweep_payloads()).orphans == []
    with pytest.raises(InvalidOption, match="60000"):
        await queue.sweep_payloads(older_than=1_000)
    with pytest.raises(InvalidOption, match="a queue whose codec has a store"):
        await kit.queue().sweep_payloads()


async def test_a_sweep_against_the_wrong_server_removes_nothing(kit: Kit, store: FileStore, tmp_path: Path) -> None:
    """The command line with another address than the producers, and the same bucket: the payloads of a whole company
    would be gone."""
    queue = kit.queue(codec=Codec(store=store, above=10))
    await queue.add("film", "x" * 100)
    for path in files(tmp_path):
        make_old(path)
    kit.redis.flushdb()  # as if it were another server
    await queue.add("film", "y" * 100)

    report = await queue.sweep_payloads()

    assert (report.foreign, report.young, report.orphans) == (1, 1, [])
    assert len(files(tmp_path)) == 2


# ---- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "keys, a store, or both"),
        ({"keys": {}}, "at least one"),
        ({"keys": {"k1": b"short"}}, "32 random bytes"),
        ({"keys": {"k1": "no base64"}}, "32 random bytes"),
        ({"keys": {"k 1": OLD}}, "key ids"),
        ({"keys": {"k1": OLD}, "current": "k2"}, "one of the key ids k1"),
        ({"store": FileStore("x"), "current": "k2"}, "keys to choose from"),
        ({"store": "x"}, "an object store"),
        ({"keys": {"k1": OLD}, "above": -1}, "above"),
        ({"keys": {"k1": OLD}, "max_bytes": 0}, "max_bytes"),
        ({"keys": {"k1": OLD}, "also_from": "bull:x"}, "also_from"),
        ({"store": FileStore("x"), "refuse_plain": True}, "keys to open"),
    ],
)
def test_wrong_options_are_refused_and_show_no_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message) as caught:
        Codec(**options)

    assert "short" not in str(caught.value)


def test_a_key_may_be_given_as_base64() -> None:
    made = Codec({"k1": b64encode(OLD).decode()})
    key_id, box = made.encrypt(b"plain", "data", "bull:x")

    assert key_id == "k1" and codec().decrypt(Envelope("bull:x", "k1", box), box, "data", "it") == b"plain"
    assert b64encode(OLD).decode() not in repr(made)


async def test_sealed_data_is_not_sealed_again(kit: Kit) -> None:
    queue = kit.queue(codec=codec())
    job = await queue.add("pay", SECRET)

    with pytest.raises(InvalidOption, match="not sealed already"):
        await queue.add("pay", json.loads(kit.fields(job.id)["data"]))
    with pytest.raises(InvalidOption, match="codec: expected a Codec"):
        kit.queue(codec="k1")
    assert (
        len(b64decode(inside(kit.fields(job.id)["data"])["box"])) == len(json.dumps(SECRET, separators=(",", ":"))) + 28
    )


# ---- faults --------------------------------------------------------------------------------------------------------


async def test_a_producer_that_dies_between_object_and_job_loses_nothing(
    kit: Kit, store: FileStore, tmp_path: Path
) -> None:
    """Its object is an orphan, found by a sweep; no job ever waits for a payload that was not stored."""
    program = """
import asyncio, os, sys
from bullpen import Codec, FileStore, Queue

class Dying(FileStore):
    async def put(self, key, content):
        await super().put(key, content)
        if int(sys.argv[3]):
            os.kill(os.getpid(), 9)

async def main():
    codec = Codec(store=Dying(sys.argv[4]), above=10)
    async with Queue(sys.argv[1], connection=sys.argv[2], codec=codec) as queue:
        await queue.add("film", "x" * 100)

asyncio.run(main())
"""
    codes = []
    for dies in ("1", "0"):
        arguments = [sys.executable, "-c", program, kit.name, kit.url, dies, str(tmp_path / "payloads")]
        process = await asyncio.create_subprocess_exec(*arguments)
        codes.append(await soon(process.wait()))
    assert codes == [-9, 0] and len(files(tmp_path)) == 2
    for path in files(tmp_path):
        make_old(path)
    codec_here = Codec(store=store, above=10)

    report = await kit.queue(codec=codec_here).sweep_payloads()
    told = await kit.drain(echo, 1, codec=codec_here)

    assert (report.in_use, len(report.orphans)) == (1, 1)
    assert told.of("completed")[0][1] == "x" * 100


async def test_results_of_children_are_opened_for_their_parent(kit: Kit) -> None:
    """A child of another queue sealed its value for that queue."""
    other = f"{kit.name}-other"
    queue = kit.queue(codec=codec())
    job = await kit.queue(other, codec=codec()).add("child", SECRET)
    await kit.drain(echo, 1, codec=codec(), queue=other)
    sealed = kit.fields(job.id, other)["returnvalue"]
    kit.seed("parent", to="waiting-children", score=0)
    kit.redis.hset(f"{kit.base}parent:processed", f"bull:{other}:{job.id}", sealed)

    children = await queue.children("parent")

    assert children.processed == {f"bull:{other}:{job.id}": SECRET}


async def test_many_jobs_are_sealed_or_none_is_added(kit: Kit, store: FileStore, tmp_path: Path) -> None:
    """One payload that cannot be stored takes back those that were."""
    queue = kit.queue(codec=Codec(store=store, above=10, max_bytes=11_000_000))

    with pytest.raises(PayloadTooLarge):
        await queue.add_many([("a", "x" * 100), ("b", "y" * 100), ("c", "z" * 11_000_000)])

    assert (await queue.counts()).waiting == 0 and files(tmp_path) == []


# ---- flows and deduplication -----------------------------------------------------------------------------------------


async def test_jobs_of_a_flow_are_sealed_each_for_its_queue(kit: Kit, store: FileStore, tmp_path: Path) -> None:
    """And what children return reaches their parent opened, also in a child process of the worker."""
    other = f"{kit.name}-other"
    both = codec(store=store, above=100)
    large = {"text": "x" * 200}
    queue = kit.queue(codec=both)
    flow = Flow(
        "sum",
        SECRET,
        children=[
            Flow("part", large, queue=other, on_failure="fail_parent"),
            Flow("part", SECRET, queue=other, on_failure="fail_parent"),
        ],
    )
    tree = await queue.add_flow(flow)
    assert [job.data for job in tree.jobs()] == [SECRET, large, SECRET]
    assert len(files(tmp_path)) == 1 and b"DE89" not in everything(kit)
    assert inside(kit.fields(tree.children[0].job.id, other)["data"])["q"] == f"bull:{other}"

    async def collect(job: Job) -> Any:
        return sorted(map(str, (await job.children_values()).values()))

    await kit.drain(echo, 2, codec=both, queue=other)
    told = await kit.drain(collect, 1, codec=both)

    expected = sorted([str(large), str(SECRET)])
    assert told.of("completed")[0][1] == expected
    page = await queue.children_page(tree.job, "processed")
    assert sorted(map(str, page.children.values())) == expected
    assert b"DE89" not in everything(kit)


async def test_a_flow_that_is_there_already_leaves_no_object(kit: Kit, store: FileStore, tmp_path: Path) -> None:
    queue = kit.queue(codec=Codec(store=store, above=10))

    def flow() -> Flow:
        return Flow("root", "x" * 100, job_id="root", children=[Flow("leaf", "y" * 100, on_failure="fail_parent")])

    await queue.add_flow(flow())
    again = await queue.add_flow(flow())

    assert again.job.added is Added.DUPLICATE
    assert len(files(tmp_path)) == 2


async def test_a_job_that_is_kept_for_later_keeps_its_object(kit: Kit, store: FileStore, tmp_path: Path) -> None:
    """The last of those that came while the first one ran is run after it."""
    only_store = Codec(store=store, above=10)
    queue = kit.queue(codec=only_store)
    gate = Gate()
    seen: list[Any] = []

    async def handle(job: Job) -> None:
        seen.append(job.data)
        await gate(job)

    rule = Deduplication("one", keep_last_if_active=True)
    await queue.add("film", "x" * 100, deduplication=rule)
    told = await kit.work(handle, codec=only_store)
    await gate.reached()
    later = await queue.add("film", "y" * 100, deduplication=rule)
    assert later.added is Added.DEDUPLICATED
    for path in files(tmp_path):
        make_old(path)
    assert (await queue.sweep_payloads()).in_use == 2

    gate.open()
    await told.finished(2)

    assert seen == ["x" * 100, "y" * 100]


async def test_a_result_that_cannot_be_opened_here_is_an_error_of_who_waits(kit: Kit) -> None:
    """Whether it comes by an event or is read where it is stored."""
    queue = kit.queue(codec=Codec({"k2": NEW}))
    job = await queue.add("pay", SECRET)
    waiting = asyncio.ensure_future(job.result())
    await kit.drain(echo, 1, codec=Codec({"k1": OLD, "k2": NEW}))

    with pytest.raises(PayloadUnavailable, match=r"return value of a job .* encrypted with key k1"):
        await soon(waiting)
    with pytest.raises(PayloadUnavailable, match="encrypted with key k1"):
        await soon(job.result())
