"""The object stores: files, and a server that speaks S3 (moto); signatures are compared with those of botocore."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bullpen.errors import InvalidOption, ObjectStoreFailed
from bullpen.plugins.objects.files import FileStore
from bullpen.plugins.objects.s3 import Credentials, S3Store, sign
from bullpen.testing.contracts.objects import ObjectStoreContract
from bullpen.testing.servers import free_port


class TestFiles(ObjectStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> FileStore:
        return FileStore(tmp_path / "payloads")

    async def test_nobody_else_can_read_them(self, store: FileStore, tmp_path: Path) -> None:
        await store.put("bull=3Aemails/owner/one", b"x")

        paths = list((tmp_path / "payloads").rglob("*"))
        assert [path.stat().st_mode & 0o077 for path in paths] == [0] * 3

    async def test_a_link_is_not_followed(self, store: FileStore, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        (tmp_path / "payloads/bull=3Aemails").mkdir(parents=True)
        os.symlink(tmp_path / "secret", tmp_path / "payloads/bull=3Aemails/link")

        with pytest.raises(ObjectStoreFailed):
            await store.get("bull=3Aemails/link", max_bytes=100)

    @pytest.mark.parametrize("way", ["a directory that all may write", "below one", "another user's"])
    async def test_a_place_of_somebody_else_is_refused(self, tmp_path: Path, way: str) -> None:
        """A link in it would lead what is stored, read and swept away to any place of ours."""
        open_to_all, victim = tmp_path / "open", tmp_path / "victim/emails"
        root = open_to_all / "payloads" if way == "below one" else open_to_all
        root.mkdir(parents=True)
        victim.mkdir(parents=True)
        (victim / "old").write_text("precious")
        os.symlink(victim.parent, root / "bull=3Aemails")
        if way == "another user's":
            if os.geteuid() != 0:
                pytest.skip("giving a directory away needs root")
            os.chown(root, 65_534, 65_534)
        else:
            open_to_all.chmod(0o777)
        store = FileStore(root)

        with pytest.raises(ObjectStoreFailed, match=r"written by others|another user"):
            await store.put("bull=3Aemails/emails/new", b"x")
        with pytest.raises(ObjectStoreFailed, match=r"written by others|another user"):
            await store.get("bull=3Aemails/emails/old", max_bytes=100)
        with pytest.raises(ObjectStoreFailed, match=r"written by others|another user"):
            await store.delete("bull=3Aemails/emails/old")
        with pytest.raises(ObjectStoreFailed, match=r"written by others|another user"):
            assert [found async for found in store.list("bull=3Aemails")]

        assert [path.name for path in victim.iterdir()] == ["old"]

    async def test_a_put_that_fails_leaves_nothing(self, store: FileStore, tmp_path: Path) -> None:
        (tmp_path / "payloads/bull=3Aemails/one").mkdir(parents=True)  # a directory stands in its place

        with pytest.raises(ObjectStoreFailed):
            await store.put("bull=3Aemails/one", b"x")

        assert [path.name for path in (tmp_path / "payloads/bull=3Aemails").iterdir()] == ["one"]

    def test_a_directory_must_be_named(self) -> None:
        with pytest.raises(InvalidOption):
            FileStore("")


@pytest.fixture(scope="module")
def s3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server as a process of its own."""
    port, said = free_port(), tmp_path_factory.mktemp("s3") / "log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    program = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with said.open("w") as log, subprocess.Popen(program, env=environment, stdout=log, stderr=log) as process:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                assert process.poll() is None, said.read_text()
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


ACCESS: dict[str, Any] = {"access_key": "AKIA", "secret_key": "secret"}


async def make_bucket(url: str, name: str) -> None:
    maker = S3Store(name, endpoint=url, **ACCESS)
    await maker._request("PUT", f"/{name}", expected=(200,))
    await maker.aclose()


class TestS3(ObjectStoreContract):
    @pytest.fixture
    async def store(self, s3_url: str, request: pytest.FixtureRequest) -> AsyncIterator[S3Store]:
        bucket = f"b{abs(hash(request.node.name))}"
        await make_bucket(s3_url, bucket)
        store = S3Store(bucket, endpoint=s3_url, prefix="payloads/", **ACCESS)

        yield store

        await store.aclose()

    async def test_a_bucket_that_is_not_there_is_no_missing_object(self, s3_url: str) -> None:
        """A wrong setting must not use up the attempts of jobs."""
        store = S3Store("nowhere", endpoint=s3_url, **ACCESS)

        with pytest.raises(ObjectStoreFailed, match="no such bucket"):
            await store.get("bull=3Aemails/one", max_bytes=100)
        with pytest.raises(ObjectStoreFailed, match="404 NoSuchBucket"):
            await store.put("bull=3Aemails/one", b"x")

        await store.aclose()

    async def test_a_server_that_is_away_is_said(self) -> None:
        store = S3Store("bucket", endpoint="http://127.0.0.1:1", **ACCESS)

        with pytest.raises(ObjectStoreFailed, match="did not answer"):
            await store.get("bull=3Aemails/one", max_bytes=100)

        await store.aclose()

    async def test_an_answer_that_is_cut_is_no_content(self) -> None:
        """Half an object would pass for one that somebody changed, and fail its job for good."""

        async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            store = S3Store("bucket", endpoint=f"http://127.0.0.1:{port}", **ACCESS)
            with pytest.raises(ObjectStoreFailed, match="did not answer"):
                await store.get("bull=3Aemails/one", max_bytes=1_000)
            await store.aclose()

    async def test_a_server_that_hangs_is_left_after_the_timeout(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            store = S3Store("bucket", endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=50, **ACCESS)
            with pytest.raises(ObjectStoreFailed, match="within 50 ms"):
                await store.get("bull=3Aemails/one", max_bytes=1_000)
            await store.aclose()


# ---- signatures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "session"])
@pytest.mark.parametrize(
    ("method", "path", "query", "content"),
    [
        ("PUT", "/bucket/payloads/bull=3Aemails/x.y_z-1", {}, b"content"),
        ("GET", "/bucket/bull=3Aemails/x", {}, b""),
        ("GET", "/bucket", {"list-type": "2", "prefix": "a/b=3A/", "continuation-token": "1+/= ä"}, b""),
        ("DELETE", "/bucket/x", {}, b""),
    ],
)
def test_requests_are_signed_as_amazons_client_signs_them(
    method: str, path: str, query: dict[str, str], content: bytes, token: str | None
) -> None:
    """moto looks at no signature; Amazon refuses every request with a wrong one."""
    from urllib.parse import quote

    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials as Theirs

    from bullpen.plugins.objects.s3 import _query  # how it is written in the address

    url = f"https://s3.example.com:9000{quote(path)}" + (f"?{_query(query)}" if query else "")
    ours = sign(
        method,
        "s3.example.com:9000",
        path,
        query,
        content,
        Credentials("AKIA", "secret", token),
        region="eu-central-1",
        now=datetime.now(UTC),
    )
    request = AWSRequest(method=method, url=url, data=content)
    request.context["payload_signing_enabled"] = True
    signer = S3SigV4Auth(Theirs("AKIA", "secret", token), "s3", "eu-central-1")
    request.context["timestamp"] = ours["x-amz-date"]
    request.headers["x-amz-content-sha256"] = ours["x-amz-content-sha256"]
    request.headers["X-Amz-Date"] = ours["x-amz-date"]
    if token:
        request.headers["X-Amz-Security-Token"] = token

    text = signer.canonical_request(request)
    signature = signer.signature(signer.string_to_sign(request, text), request)

    assert ours["authorization"].endswith(f"Signature={signature}")


# ---- options -------------------------------------------------------------------------------------------------------


def test_keys_and_region_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIA",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_SESSION_TOKEN": "token",
        "AWS_REGION": "eu-central-1",
    }.items():
        monkeypatch.setenv(name, value)

    store = S3Store("bucket")

    assert store._credentials == Credentials("AKIA", "secret", "token")
    assert repr(store) == "S3Store('bucket', endpoint='https://s3.eu-central-1.amazonaws.com')"


@pytest.mark.parametrize(
    "options",
    [
        {"bucket": "a/b"},
        {"bucket": ""},
        {"bucket": "b", "prefix": "../x"},
        {"bucket": "b", "endpoint": "ftp://x"},
        {"bucket": "b", "endpoint": "https://user:password@x"},
        {"bucket": "b", "endpoint": "https://x/path"},
        {"bucket": "b", "timeout": 0},
        {"bucket": "b", "access_key": "only"},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    bucket = options.pop("bucket")

    with pytest.raises(InvalidOption):
        S3Store(bucket, **{**ACCESS, **options} if "access_key" not in options else options)
