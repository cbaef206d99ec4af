"""A customer's address must not lead into our own network, however it is written and whatever answers.

A trap listens where nobody may go. Every way to write its address, to lead there by name, by redirect, by a proxy or
by a name server that changes its mind, must end without one connection to it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import pytest

from bullpen.errors import InvalidOption
from bullpen.plugins.channels.slack import Slack
from bullpen.plugins.channels.sms import Sms
from bullpen.plugins.channels.webhook import Webhook
from bullpen.ports.channel import Accepted, Message, Refused, SendResult, Unavailable
from bullpen.testing.receivers import Answer, HttpReceiver, Request

ALLOWED = "127.0.0.2"


class Trap:
    """Counts connections, on IPv4 and IPv6 of this machine."""

    def __init__(self) -> None:
        self.hits = 0
        self.port = 0
        self._servers: list[asyncio.Server] = []

    async def open(self) -> None:
        first = await asyncio.start_server(self._hit, "127.0.0.1", 0)
        self.port = first.sockets[0].getsockname()[1]
        self._servers.append(first)
        try:
            self._servers.append(await asyncio.start_server(self._hit, "::1", self.port))
        except OSError:
            pass  # a machine without IPv6; then nothing can be trapped there either

    async def close(self) -> None:
        for server in self._servers:
            server.close()
            await server.wait_closed()

    async def _hit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.hits += 1
        writer.close()


@pytest.fixture
async def trap() -> AsyncIterator[Trap]:
    trap = Trap()
    await trap.open()
    yield trap
    await trap.close()


HOSTS = [
    # As it is, and as a number in every base that resolvers read.
    *("127.0.0.1", "127.1", "127.0.1", "0x7f.0.0.1", "0x7f.1", "0177.0.0.1", "0177.1", "017700000001"),
    *("2130706433", "0x7f000001", "0x7F.0x0.0x0.0x1", "127.0.0.1.", "127.000.000.001", "0", "0.0.0.0", "0x0"),
    *("127.255.255.254", "127.127.127.127"),
    # Inside IPv6.
    *("[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:7f00:0001]"),
    *("[::127.0.0.1]", "[64:ff9b::7f00:1]", "[64:ff9b::127.0.0.1]", "[2002:7f00:1::]", "[2001:0:0:0:0:0:80ff:fffe]"),
    *("[fe80::1]", "[fe80::1%25lo]", "[fc00::1]", "[fd00:ec2::254]"),
    # By name.
    *("localhost", "LOCALHOST", "localhost.", "ip6-localhost", "localhost.localdomain"),
    # Characters that become digits or dots on the way.
    *("①②⑦.⓪.⓪.①", "１２７.0.0.1", "127。0。0。1", "127%2e0%2e0%2e1", "%31%32%37.0.0.1", "①27.0.0.1"),
    # What others keep for themselves.
    *("169.254.169.254", "169.254.170.2", "100.100.100.200", "192.168.0.1", "10.0.0.1", "172.31.255.255"),
    *("0251.0376.0251.0376", "0xa9fea9fe", "2852039166", "168.63.129.16", "0xa83f8110"),
    *("[::ffff:0:127.0.0.1]", "[::ffff:0:a9fe:a9fe]"),
]  # fmt: skip

SHAPES = [
    "http://{host}:{port}/",
    "http://{host}:{port}/?https://partner.example/",
    "http://partner.example@{host}:{port}/",
    "http://partner.example:80@{host}:{port}/",
    "http://{host}:{port}#@partner.example/",
    "http://partner.example\\@{host}:{port}/",
    "http:///{host}:{port}/",
    "http:/{host}:{port}/",
    "http:{host}:{port}",
    "//{host}:{port}/",
    " http://{host}:{port}/",
    "http://{host}:{port}/\r\nHost: partner.example",
    "http://{host}\t:{port}/",
    "gopher://{host}:{port}/_POST",
    "file://{host}/etc/passwd",
    "unix://{host}:{port}/",
    "http+unix://{host}:{port}/",
]


def message() -> Message:
    return Message(
        id="1", integration_type="webhook:x", event_type="e", payload={"text": "x", "to": "+4930123456"},
        idempotency_key="k", source_stream_id="s", source_event_id="k",
    )  # fmt: skip


MAKERS: dict[str, Callable[..., Any]] = {
    "webhook": lambda url, **options: Webhook(url, allow_http=True, timeout_ms=2_000, **options),
    "slack": lambda url, **options: Slack(url, allow_http=True, timeout_ms=2_000, **options),
    "sms": lambda url, **options: Sms(
        url, account="a", token="t", sender="x", allow_http=True, timeout_ms=2_000, **options
    ),
}


async def attempt(kind: str, url: str, **options: Any) -> SendResult | InvalidOption:
    try:
        channel = MAKERS[kind](url, **options)
    except InvalidOption as error:
        return error
    try:
        result: SendResult = await channel.send(message())
        return result
    finally:
        await channel.aclose()


@pytest.mark.parametrize("kind", list(MAKERS))
async def test_no_way_to_write_an_address_reaches_the_trap(trap: Trap, kind: str) -> None:
    """Either the address is refused, or nobody can resolve it; nothing else is possible."""
    urls = [SHAPES[0].format(host=host, port=trap.port) for host in HOSTS]
    urls += [shape.format(host=host, port=trap.port) for shape in SHAPES[1:] for host in ("127.0.0.1", "[::1]")]

    results = {url: await attempt(kind, url) for url in urls}

    wrong = {url: result for url, result in results.items() if isinstance(result, Accepted)}
    assert (trap.hits, wrong) == (0, {})
    assert all(isinstance(result, Refused | Unavailable | InvalidOption) for result in results.values())
    # Most are refused for what they are, not because nobody could resolve them.
    refused = [url for url, result in results.items() if isinstance(result, Refused | InvalidOption)]
    assert len(refused) >= 0.75 * len(urls)


async def test_the_trap_would_be_hit_if_it_were_allowed(trap: Trap) -> None:
    """The suite above proves nothing if the trap cannot be reached at all."""
    await attempt("webhook", f"http://127.0.0.1:{trap.port}/", allowed_networks=["127.0.0.1/32"])

    assert trap.hits >= 1


@pytest.mark.parametrize("status", [300, 301, 302, 303, 305, 307, 308])
@pytest.mark.parametrize("kind", list(MAKERS))
async def test_no_redirect_leads_to_the_trap(trap: Trap, kind: str, status: int) -> None:
    """The first address is allowed, so that only the redirect is at stake."""
    where = f"http://127.0.0.1:{trap.port}/"
    headers = {"location": where, "refresh": f"0; url={where}", "link": f"<{where}>; rel=canonical"}
    async with OtherReceiver(Answer(status, headers=headers)) as receiver:
        result = await attempt(
            kind, f"http://{ALLOWED}:{receiver.port}/", allowed_networks=[f"{ALLOWED}/32", "127.0.0.1/32"]
        )

    assert isinstance(result, Refused)
    assert "redirects are not followed" in result.reason
    assert (trap.hits, len(receiver.requests)) == (0, 1)


class OtherReceiver(HttpReceiver):
    """On another address of the loopback network than the trap."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, ALLOWED, 0)
        return self


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Let every name lead to these addresses, another list each time, the last one for ever."""
    asked: list[str] = []
    queue = list(answers)

    def answer(host: str, port: int, **_: object) -> list[Any]:
        asked.append(host)
        addresses = queue.pop(0) if len(queue) > 1 else queue[0]
        return [
            (socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return asked


@pytest.mark.parametrize(
    "bad",
    [
        "127.0.0.1",
        "::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "0.0.0.0",
        "169.254.169.254",
        "fe80::1%lo",
        "168.63.129.16",
        "2001:4860::5efe:7f00:1",  # ISATAP: the IPv4 address stands at the end
        "2001:4860::200:5efe:a00:1",
        "::ffff:0:7f00:1",
    ],
)
async def test_no_name_leads_to_the_trap(trap: Trap, monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    resolving(monkeypatch, [bad])

    result = await attempt("webhook", f"http://partner.example:{trap.port}/")

    assert isinstance(result, Refused)
    assert (trap.hits, result.code) == (0, "ADDRESS_REFUSED")
    assert bad.partition("%")[0] not in result.reason, "whoever reads the row would map our network"


async def test_an_address_inside_is_not_told_when_nobody_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, ["127.0.0.1"])

    result = await attempt("webhook", "http://partner.example:1/", allowed_networks=["127.0.0.0/8"])

    assert isinstance(result, Unavailable)
    assert "partner.example does not accept connections" in result.reason
    assert "127.0.0.1" not in result.reason


class SlowNames:
    """A resolver of the system that does not answer for some names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.release = threading.Event()

        def answer(host: str, port: int, **_: object) -> list[Any]:
            self.asked.append(host)
            if host.startswith("slow"):
                self.release.wait(30)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ALLOWED, port))]

        monkeypatch.setattr(socket, "getaddrinfo", answer)


@pytest.mark.many
async def test_names_that_nobody_resolves_hold_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six of them filled the default executor of the loop, and with it all that needs a thread in this process."""
    names = SlowNames(monkeypatch)
    async with OtherReceiver() as receiver:
        options: dict[str, Any] = {"allow_http": True, "allowed_networks": [f"{ALLOWED}/32"], "timeout_ms": 20_000}
        channels = [Webhook(f"http://slow-{number % 40}.example:{receiver.port}/", **options) for number in range(80)]
        waiting = [asyncio.create_task(channel.send(message())) for channel in channels]
        try:
            async with asyncio.timeout(10):
                while len(set(names.asked)) < 40:  # noqa: ASYNC110 - threads tell nobody
                    await asyncio.sleep(0.005)
                good = await attempt(
                    "webhook", f"http://good.example:{receiver.port}/", allowed_networks=[f"{ALLOWED}/32"]
                )
                thread = await asyncio.get_running_loop().run_in_executor(None, lambda: "free")
        finally:
            names.release.set()
            results = await asyncio.gather(*waiting)
            for channel in channels:
                await channel.aclose()

    assert (isinstance(good, Accepted), thread) == (True, "free")
    assert all(isinstance(result, Accepted) for result in results)
    assert len(names.asked) == 41, "one question at a time for one name"


@pytest.mark.parametrize("host", ["slow.evil.example", "slow-{}.evil.example", "slow-{}.evil.co.uk"])
async def test_names_of_one_customer_take_few_threads(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """One name on 200 ports had 200 threads, and then no name was resolved for anybody, and no address called. What
    exceeds the share of a domain waits for its turn, as long as its delivery may take."""
    names, most = SlowNames(monkeypatch), 10 if "{" in host else 1
    async with OtherReceiver() as receiver:
        options: dict[str, Any] = {"allow_http": True, "allowed_networks": [f"{ALLOWED}/32"]}
        channels = [Webhook(f"http://{host.format(n)}:{61_100 + n}/", timeout_ms=20_000, **options) for n in range(220)]
        waiting = [asyncio.create_task(channel.send(message())) for channel in channels]
        try:
            async with asyncio.timeout(10):
                while len(names.asked) < most:  # noqa: ASYNC110 - threads tell nobody
                    await asyncio.sleep(0.005)
            good = [
                await attempt("webhook", f"http://{other}:{receiver.port}/", allowed_networks=[f"{ALLOWED}/32"])
                for other in ("good.example", "good.co.uk", ALLOWED)
            ]
            asked_meanwhile = [name for name in names.asked if name.startswith("slow")]
        finally:
            names.release.set()
            results = await asyncio.gather(*waiting)
            for channel in channels:
                await channel.aclose()

    assert all(isinstance(result, Accepted) for result in good)
    assert len(asked_meanwhile) == most
    assert ALLOWED not in names.asked, "an address needs no name server"
    # Resolved in the end, and nobody listens at those ports.
    assert {type(result) for result in results} == {Unavailable}
    assert not [result for result in results if "does not accept" not in str(result)]


async def test_one_that_gives_up_waiting_for_a_name_ends_it_for_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    names = SlowNames(monkeypatch)
    async with OtherReceiver() as receiver:
        url = f"http://slow.example:{receiver.port}/"
        options: dict[str, Any] = {"allow_http": True, "allowed_networks": [f"{ALLOWED}/32"]}
        patient, hasty = Webhook(url, timeout_ms=20_000, **options), Webhook(url, timeout_ms=50, **options)
        waiting = asyncio.create_task(patient.send(message()))
        gave_up = await hasty.send(message())
        names.release.set()
        result = await waiting
        await patient.aclose()
        await hasty.aclose()

    assert isinstance(gave_up, Unavailable)
    assert isinstance(result, Accepted)


async def test_a_name_server_that_changes_its_mind_wins_nothing(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rebinding: the first answer is good, every later one is the trap. Each connection uses the answer that was
    checked for it, and a kept connection leads where it led."""

    def close(request: Request) -> Answer:
        return Answer(headers={"connection": "close"})

    async with OtherReceiver(close) as receiver:
        # The trap listens on the same port as the good one, or a hit would be impossible.
        rebound = await asyncio.start_server(trap._hit, "127.0.0.1", receiver.port)
        asked = resolving(monkeypatch, [ALLOWED], ["127.0.0.1"])
        channel = Webhook(
            f"http://partner.example:{receiver.port}/", allow_http=True, allowed_networks=[f"{ALLOWED}/32"]
        )
        results = [await channel.send(message()) for _ in range(5)]
        await channel.aclose()
        rebound.close()
        await rebound.wait_closed()

    assert isinstance(results[0], Accepted)
    assert all(isinstance(result, Refused) for result in results[1:])
    assert (trap.hits, len(receiver.requests)) == (0, 1)
    assert len(asked) == 5  # once for each connection, never twice


async def test_a_good_and_a_bad_address_together_are_bad(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    async with OtherReceiver() as receiver:
        resolving(monkeypatch, [ALLOWED, "127.0.0.1"])
        result = await attempt(
            "webhook", f"http://partner.example:{receiver.port}/", allowed_networks=[f"{ALLOWED}/32"]
        )

    assert isinstance(result, Refused)
    assert (trap.hits, receiver.requests) == (0, [])


async def test_a_proxy_of_the_environment_is_not_asked(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would connect for us to wherever it likes."""
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{trap.port}")

    async with OtherReceiver() as receiver:
        result = await attempt("webhook", f"http://{ALLOWED}:{receiver.port}/", allowed_networks=[f"{ALLOWED}/32"])

    assert isinstance(result, Accepted)
    assert trap.hits == 0
