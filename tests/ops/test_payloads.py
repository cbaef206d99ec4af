"""A codec from the settings: apps use it, and the command line shows seals, keys in use and objects without a job."""

from __future__ import annotations

import asyncio
import json
import os
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bullpen import Bullpen, Codec, Job, Queue, Settings
from bullpen.cli.commands import run
from bullpen.errors import InvalidOption, PayloadUnavailable
from bullpen.settings import CodecSettings
from bullpen.testing import RedisServer

KEY, OLD = b64encode(bytes(range(32))).decode(), b64encode(bytes(range(32, 64))).decode()
SECRET = {"iban": "DE89 3704"}
Type = Callable[..., tuple[int, str, str]]


@pytest.fixture
def type_(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, redis_url: str, tmp_path: Path) -> Type:
    """Types a command where a codec is configured."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("BULLPEN_REDIS_URL", redis_url)
    monkeypatch.setenv("BULLPEN_CODEC_KEYS", f"k2:{KEY},k1:{OLD}")
    monkeypatch.setenv("BULLPEN_CODEC_STORE", f"file://{tmp_path}/payloads")
    monkeypatch.setenv("BULLPEN_CODEC_ABOVE", "100")

    def typed(*words: str) -> tuple[int, str, str]:
        code = run([*words])
        out, err = capsys.readouterr()
        return code, out, err

    return typed


def test_the_command_line_shows_seals_and_opens_when_asked(
    type_: Type, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator who looks for a stuck job must not read salaries by accident, and not at all without a key."""
    code, out, _ = type_("jobs", "add", queue_name, "pay", "--data", json.dumps(SECRET))
    assert (code, "DE89" in out) == (0, False)
    type_("jobs", "add", queue_name, "pay", "--data", json.dumps({"text": "x" * 200}))

    _, listed, _ = type_("jobs", "list", queue_name)
    _, shown, _ = type_("jobs", "show", queue_name, "1")
    _, as_json, _ = type_("jobs", "show", queue_name, "1", "--json")
    _, opened, _ = type_("jobs", "show", queue_name, "1", "--open")

    assert "encrypted with key k2" in listed
    assert "encrypted with key k2, in the object store (239 bytes)" in listed
    assert "encrypted with key k2" in shown and "bpcodec" not in shown
    assert json.loads(as_json)["data"]["bpcodec"]["kid"] == "k2"
    assert "DE89 3704" in opened
    assert not any("DE89" in text for text in (listed, shown, as_json))
    monkeypatch.delenv("BULLPEN_CODEC_KEYS")
    monkeypatch.delenv("BULLPEN_CODEC_STORE")
    assert "encrypted with key k2" in type_("jobs", "show", queue_name, "1")[1]
    assert type_("jobs", "show", queue_name, "1", "--open")[0::2] == (
        2,
        "bullpen: --open needs a codec; set BULLPEN_CODEC_KEYS or BULLPEN_CODEC_STORE\n",
    )
    monkeypatch.setenv("BULLPEN_CODEC_KEYS", f"k3:{OLD}")
    assert "this codec has k3" in type_("jobs", "show", queue_name, "1", "--open")[2]


def test_dead_letters_show_seals(type_: Type, queue_name: str) -> None:
    type_("jobs", "add", queue_name, "pay", "--data", json.dumps(SECRET), "--attempts", "1")

    async def fail() -> None:
        async with Bullpen() as app:
            ended = asyncio.Event()

            async def handle(job: Job) -> None:
                assert job.data == SECRET
                raise ValueError("no")

            worker = app.worker(queue_name, handle, dead_letters=True)
            worker.on("failed", lambda *_: ended.set())
            async with worker:
                await asyncio.wait_for(ended.wait(), 60)

    asyncio.run(fail())
    entry = "dl-1-1"

    code, shown, _ = type_("dead-letters", "show", queue_name, entry)
    edited, _, why = type_("dead-letters", "edit", queue_name, entry, "--data", "{}", "--yes")

    assert code == 0 and "encrypted with key k2" in shown and "DE89" not in shown
    assert edited != 0 and "its payload is encrypted with key k2" in why
    assert type_("dead-letters", "redrive", queue_name, entry)[0] == 0


def test_keys_in_use_are_counted(type_: Type, queue_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When may the old key go?"""
    type_("jobs", "add", queue_name, "pay", "--data", "{}")
    monkeypatch.setenv("BULLPEN_CODEC_KEYS", f"k1:{OLD}")
    type_("jobs", "add", queue_name, "pay", "--data", "{}")
    type_("jobs", "add", queue_name, "pay", "--data", "{}")

    code, table, _ = type_("payloads", "list", queue_name)
    _, as_json, _ = type_("payloads", "list", "--json")

    assert code == 0
    assert [line.split() for line in table.splitlines() if queue_name in line] == [
        [queue_name, "k1", "2"],
        [queue_name, "k2", "1", "not", "known", "here"],
    ]
    assert json.loads(as_json)["queues"][queue_name]["by_key"] == {"k1": 2, "k2": 1}


def test_a_sweep_counts_first_and_removes_when_told(
    type_: Type, queue_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        type_("jobs", "add", queue_name, "film", "--data", json.dumps("x" * 200), "--id", f"film-{number}")
    type_("jobs", "remove", queue_name, "film-1")
    files = [path for path in (tmp_path / "payloads").rglob("*") if path.is_file()]
    assert len(files) == 2
    for path in files:
        os.utime(path, (0, 0))

    _, counted, _ = type_("payloads", "sweep", queue_name)
    assert all(path.exists() for path in files)
    code, removed, _ = type_("payloads", "sweep", queue_name, "--delete", "--older-than", "2h", "--json")

    assert "without a job" in counted
    assert code == 0 and len(json.loads(removed)[queue_name]["orphans"]) == 1
    assert sum(path.exists() for path in files) == 1
    monkeypatch.delenv("BULLPEN_CODEC_STORE")
    assert type_("payloads", "sweep", queue_name)[0] == 2


async def test_queues_workers_and_tasks_of_an_app_use_its_codec(
    redis_url: str, redis_server: RedisServer, queue_name: str
) -> None:
    app = Bullpen(redis_url, codec=Codec({"k1": KEY}))

    @app.task(queue_name)
    async def pay(iban: str) -> dict[str, str]:
        return {"paid": iban}

    async with app:
        job = await pay.add(**SECRET)
        async with app.workers[0]:
            assert await job.result(timeout=60_000) == {"paid": SECRET["iban"]}
        blocking = await asyncio.to_thread(pay.add_sync, **SECRET)
        stored: Any = redis_server.client().hgetall(f"bull:{queue_name}:{blocking.id}")

    assert b'"kid":"k1"' in stored[b"data"] and b"DE89" not in stored[b"data"]


async def test_a_queue_may_have_a_codec_of_its_own(redis_url: str, queue_name: str) -> None:
    async with Bullpen(redis_url, codec=Codec({"k1": KEY})) as app:
        job = await app.queue(queue_name, codec=Codec({"k9": OLD})).add("pay", SECRET)
        async with Queue(queue_name, connection=redis_url, codec=app.codec) as other:
            with pytest.raises(PayloadUnavailable, match="key k9; this codec has k1"):
                await other.get_job(job.id)


def load(**environ: str) -> CodecSettings:
    return Settings.load(environ=environ, start=Path("/nonexistent")).codec


def test_settings_name_keys_store_and_limits() -> None:
    found = load(
        BULLPEN_CODEC_KEYS=f" k2:{KEY} , k1:{OLD}",
        BULLPEN_CODEC_STORE="s3://bucket/production",
        BULLPEN_CODEC_ABOVE="1000",
        BULLPEN_CODEC_MAX_BYTES="2000",
        BULLPEN_CODEC_REFUSE_PLAIN="true",
        BULLPEN_CODEC_S3_ENDPOINT="http://minio:9000",
        BULLPEN_CODEC_S3_REGION="eu-central-1",
    )

    assert list(found.key_ring.items()) == [("k2", KEY), ("k1", OLD)]
    assert (found.above, found.max_bytes, found.refuse_plain) == (1_000, 2_000, True)
    assert (found.s3_endpoint, found.s3_region) == ("http://minio:9000", "eu-central-1")
    assert KEY not in repr(found)


def test_settings_make_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    settings = Settings(
        codec=CodecSettings(
            keys=f"k2:{KEY},k1:{OLD}",
            store="s3://bucket/production",
            above=1_000,
            max_bytes=2_000,
            refuse_plain=True,
            s3_endpoint="http://minio:9000",
            s3_region="eu-central-1",
        )
    )

    codec = Bullpen(settings=settings).codec

    assert codec is not None and (codec.current_key, codec.key_ids) == ("k2", ("k2", "k1"))
    assert (codec.above, codec.max_bytes, codec.refuse_plain) == (1_000, 2_000, True)
    assert repr(codec.store) == "S3Store('bucket', endpoint='http://minio:9000')"
    assert vars(codec.store)["_region"] == "eu-central-1" and vars(codec.store)["_prefix"] == "production/"
    assert Bullpen(settings=Settings()).codec is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KEYS", "k1"),
        ("KEYS", f"k1:{KEY[:-4]}"),
        ("KEYS", f"k1={KEY}"),
        ("STORE", "/srv/payloads"),
        ("STORE", "s3://bucket/../x?y"),
        ("ABOVE", "-1"),
        ("MAX_BYTES", "0"),
        ("REFUSE_PLAIN", "perhaps"),
        ("S3_ENDPOINT", "minio:9000"),
    ],
)
def test_wrong_settings_name_the_variable_and_no_key(name: str, value: str) -> None:
    with pytest.raises(InvalidOption, match=f"BULLPEN_CODEC_{name}") as caught:
        load(**{f"BULLPEN_CODEC_{name}": value})

    assert KEY[:-4] not in str(caught.value)
