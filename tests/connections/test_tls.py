"""TLS: verified unless told otherwise, for every connection that there is."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bullpen import sync
from bullpen.errors import ServerRefused
from bullpen.queue import Connection, Queue, Worker, _watch
from bullpen.testing import RedisServer, free_port, need
from tests.queue._kit import Gate, echo, nothing, soon

pytestmark = pytest.mark.requirement("W-72")


@dataclass(frozen=True)
class Pki:
    """An authority and what it signed."""

    directory: Path

    @property
    def ca(self) -> Path:
        return self.directory / "ca.pem"

    def files(self, name: str) -> tuple[Path, Path]:
        return self.directory / f"{name}.pem", self.directory / f"{name}.key"


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Certificates for `localhost`, for a name that is not this machine's, and for a client."""
    openssl = str(need("openssl"))
    made = Pki(tmp_path_factory.mktemp("pki"))
    new_key = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    ca_key = made.directory / "ca.key"
    as_authority = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"]
    subprocess.run(
        [openssl, *new_key, "-subj", "/CN=our authority", *as_authority, "-keyout", ca_key, "-out", made.ca],
        check=True,
        capture_output=True,
    )
    for name, alternative in (("server", "DNS:localhost"), ("elsewhere", "DNS:elsewhere.test"), ("client", "DNS:us")):
        certificate, key = made.files(name)
        signed = ["-CA", str(made.ca), "-CAkey", str(ca_key), "-addext", f"subjectAltName={alternative}"]
        signed += ["-addext", "basicConstraints=critical,CA:FALSE"]
        subprocess.run(
            [openssl, *new_key, "-subj", f"/CN={name}", *signed, "-keyout", key, "-out", certificate],
            check=True,
            capture_output=True,
        )
    return made


@pytest.fixture(scope="module")
def start_tls(pki: Pki) -> Iterator[Any]:
    """Start servers that speak TLS; the returned URL lacks only the query."""
    need("redis-7")
    started: list[RedisServer] = []

    def start(name: str = "server", *, clients: str = "no") -> str:
        port = free_port()
        certificate, key = pki.files(name)
        files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(pki.ca))
        args = ("--tls-port", str(port), *files, "--tls-auth-clients", clients)
        started.append(RedisServer.start("redis-7", port=False, args=args))
        return f"rediss://localhost:{port}"

    yield start

    for server in started:
        server.close()


@pytest.fixture(scope="module")
def url(start_tls: Any) -> str:
    started: str = start_tls()
    return started


async def round_trip(connection: str) -> Any:
    async with Queue("mail", connection=connection) as queue, Worker("mail", echo, connection=connection):
        return await (await queue.add("welcome", {"to": "ada"})).result(timeout=10_000)


async def test_a_certificate_of_a_known_authority_is_trusted(url: str, pki: Pki) -> None:
    assert await round_trip(f"{url}?ca={pki.ca}") == {"to": "ada"}


def test_adds_in_a_row_over_tls_never_watch(url: str, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a blocking TLS socket holds back cannot be asked for without sleeping."""
    monkeypatch.setattr(_watch, "WORTH_IT", float("inf"))
    monkeypatch.setattr(_watch, "IN_A_ROW_S", 60.0)
    with sync.Queue("row", connection=f"{url}?ca={pki.ca}") as queue:
        for _ in range(3 * _watch.TRIED):
            queue.add("mail")
        assert queue.counts().waiting == 3 * _watch.TRIED


async def test_a_certificate_of_nobody_we_know_is_refused_at_once(url: str) -> None:
    """Also by a producer, which would otherwise wait for its whole deadline; and the message says what to do."""
    worker = Worker("mail", nothing, connection=url)

    with pytest.raises(ServerRefused, match=r"the certificate of localhost:\d+ cannot be trusted.*\?ca=<file>"):
        await soon(worker.start())
    await worker.close()
    async with Queue("mail", connection=url) as queue:
        with pytest.raises(ServerRefused, match="cannot be trusted"):
            await soon(queue.add("welcome"))


async def test_a_certificate_for_another_name_is_refused(start_tls: Any, pki: Pki) -> None:
    elsewhere = start_tls("elsewhere")

    async with Queue("mail", connection=f"{elsewhere}?ca={pki.ca}") as queue:
        with pytest.raises(ServerRefused, match="cannot be trusted"):
            await soon(queue.add("welcome"))

    assert await round_trip(f"{elsewhere}?ca={pki.ca}&verify=ca") == {"to": "ada"}


async def test_verification_ends_only_where_the_url_says_so(url: str) -> None:
    assert await round_trip(f"{url}?verify=no") == {"to": "ada"}


async def test_a_server_that_asks_for_our_certificate_gets_it(start_tls: Any, pki: Pki) -> None:
    strict = start_tls(clients="yes")
    certificate, key = pki.files("client")

    assert await round_trip(f"{strict}?ca={pki.ca}&cert={certificate}&key={key}") == {"to": "ada"}


async def test_locks_are_renewed_over_tls(url: str, pki: Pki) -> None:
    """The thread that renews them has a client of another make; it must trust the same."""
    gate = Gate("done")
    connection = Connection(f"{url}?ca={pki.ca}")
    async with (
        Queue("slow", connection=connection) as queue,
        Worker("slow", gate, connection=connection, lock=400, stalled_interval=100) as worker,
    ):
        stalled: list[Any] = []
        worker.on("stalled", stalled.append)
        worker.on("lock_lost", lambda *told: stalled.append(told))
        job = await queue.add("welcome")
        await gate.reached()
        door = connection.shared_door()
        for _ in range(3):
            await wait_for_renewal(door, queue.keys.lock(job.id))
        gate.open()

        assert await job.result(timeout=10_000) == "done"
        assert stalled == []
    await connection.aclose()


async def wait_for_renewal(door: Any, lock: str) -> None:
    """Wait until the lock's remaining time has grown."""
    import asyncio

    before = await door.call("PTTL", lock)
    async with asyncio.timeout(10):
        while (now := await door.call("PTTL", lock)) <= before:
            assert now > 0, "the lock ran out"
            before = now
            await asyncio.sleep(0.01)
