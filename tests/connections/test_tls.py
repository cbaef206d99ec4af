"""TLS: verified unless told otherwise, for every connection that there is."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bullpen import sync
from bullpen.errors import ServerRefused
from bullpen.queue import Queue
from bullpen.redis import Connection
from bullpen.redis import spin as _watch
from bullpen.testing import RedisServer, free_port, need
from bullpen.worker import Worker
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
    _sign(openssl, made, "expired", days=-1)
    foreign, foreign_key = made.files("foreign")
    subprocess.run(
        [openssl, *new_key, "-subj", "/CN=foreign", "-keyout", foreign_key, "-out", foreign],
        check=True,
        capture_output=True,
    )
    return made


def _sign(openssl: str, pki: Pki, name: str, *, days: int) -> None:
    """A certificate for localhost, also one that ended before it began: `req -x509` refuses to make that."""
    certificate, key = pki.files(name)
    request, extensions = pki.directory / f"{name}.csr", pki.directory / f"{name}.ext"
    extensions.write_text("subjectAltName=DNS:localhost")
    signing: list[str | Path] = [
        "x509",
        "-req",
        "-in",
        request,
        "-CA",
        pki.ca,
        "-CAkey",
        pki.directory / "ca.key",
        "-CAcreateserial",
    ]
    asking: list[str | Path] = ["req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"]
    for command in (
        [*asking, "-keyout", key, "-out", request],
        [*signing, "-days", str(days), "-extfile", extensions, "-out", certificate],
    ):
        subprocess.run([openssl, *command], check=True, capture_output=True)


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


MISTAKES = {
    "no certificate of ours": r"localhost:\d+ requires a client certificate: set \?cert=<file>&key=<file>",
    "a foreign one of ours": r"localhost:\d+ refused the client certificate \(unknown ca\): .* signed by an authority",
    "an expired one of ours": r"localhost:\d+ refused the client certificate because it has expired",
    "another name": r"the certificate of localhost:\d+ cannot be trusted: it is for another name .*\?verify=ca",
    "an expired server": r"the certificate of localhost:\d+ cannot be trusted: it has expired",
    "plain to TLS": r"localhost:\d+ requires TLS: use rediss:// instead of redis://",
    "TLS to plain": r"localhost:\d+ does not use TLS: use redis:// instead of rediss://",
}


@pytest.fixture(scope="module")
def mistakes(start_tls: Any, url: str, pki: Pki) -> Iterator[dict[str, str]]:
    strict = f"{start_tls(clients='yes')}?ca={pki.ca}"
    ours = {name: "&cert={}&key={}".format(*pki.files(name)) for name in ("foreign", "expired")}
    with RedisServer.start() as plain:
        yield {
            "no certificate of ours": strict,
            "a foreign one of ours": strict + ours["foreign"],
            "an expired one of ours": strict + ours["expired"],
            "another name": f"{start_tls('elsewhere')}?ca={pki.ca}",
            "an expired server": f"{start_tls('expired')}?ca={pki.ca}",
            "plain to TLS": url.replace("rediss://", "redis://"),
            "TLS to plain": f"rediss://localhost:{plain.port}",
        }


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_each_mistake_is_told_in_its_own_words_and_in_time(mistakes: dict[str, str], mistake: str) -> None:
    """Not "connection reset by peer", and not after a minute."""
    worker = Worker("mail", nothing, connection=mistakes[mistake])
    began = time.monotonic()

    with pytest.raises(ServerRefused, match=MISTAKES[mistake]):
        await soon(worker.start())
    took_s = time.monotonic() - began
    await worker.close()
    assert took_s < 20  # connecting may take 2, and a busy machine longer


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_blocking_queue_tells_the_same(mistakes: dict[str, str], mistake: str) -> None:
    with (
        sync.Queue("mail", connection=mistakes[mistake]) as queue,
        pytest.raises(ServerRefused, match=MISTAKES[mistake]),
    ):
        queue.add("welcome")
