"""`bullpen endpoints`, as somebody types it."""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bullpen.cli.commands import run
from bullpen.ledger import Ledger
from bullpen.outbox import Outbox
from bullpen.outbox.endpoints import ENDPOINTS
from bullpen.settings import Settings
from bullpen.testing.receivers import HttpReceiver
from bullpen.wiring.endpoints import make_endpoints
from tests.outbox.test_endpoints import HERE

Type = Callable[..., tuple[int, str, str]]


@pytest.fixture
def type_(sqlite_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Type:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("BULLPEN_DATABASE_URL", sqlite_url)
    for name, value in HERE.items():
        monkeypatch.setenv(f"BULLPEN_{name.upper()}", str(value).lower())

    def typed(*words: str) -> tuple[int, str, str]:
        code = run(["endpoints", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return typed


@pytest.fixture
def made(type_: Type) -> dict[str, Any]:
    code, out, _ = type_("add", "acme", "https://example.com/t0ken", "--event", "order.*", "--json")
    assert code == 0
    made: dict[str, Any] = json.loads(out)
    return made


def shown(type_: Type, made: dict[str, Any]) -> dict[str, Any]:
    code, out, _ = type_("show", made["id"], "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_an_endpoint_is_made_listed_changed_and_removed(type_: Type, made: dict[str, Any]) -> None:
    assert made["secret"].startswith("whsec_")
    assert "secret" not in shown(type_, made)
    code, table, _ = type_("list")
    assert (code, made["id"] in table, "order.*" in table, made["secret"] in table) == (0, True, True, False)

    code, _, _ = type_(
        "change", made["id"], "--url", "https://example.com/2", "--rate", "5", "--headers", '{"x-a": "b"}'
    )
    assert code == 0
    changed = shown(type_, made)
    assert (changed["url"], changed["rateMax"], changed["rateMs"]) == ("https://example.com/2", 5, 1_000)
    assert (changed["headerNames"], changed["events"]) == (["x-a"], ["order.*"])
    type_("change", made["id"], "--rate", "0", "--event", "a", "--event", "b.*", "--description", "shop")
    changed = shown(type_, made)
    assert ("rateMax" in changed, changed["events"], changed["description"]) == (False, ["a", "b.*"], "shop")

    code, _, err = type_("remove", made["id"])
    assert (code, "--yes" in err) == (2, True)
    assert type_("remove", made["id"], "--yes")[0] == 0
    code, _, err = type_("show", made["id"])
    assert (code, "there is no endpoint" in err) == (1, True)


def test_states_are_set_and_filtered(type_: Type, made: dict[str, Any]) -> None:
    for deed, state in (("pause", "paused"), ("disable", "disabled"), ("enable", "enabled")):
        assert type_(deed, made["id"], "--reason", "moving")[0] == 0
        found = shown(type_, made)
        assert (found["state"], found["reason"]) == (state, "moving")
        assert found["stateBy"].startswith("cli")
        listed = json.loads(type_("list", "--state", state, "--tenant", "acme", "--json")[1])
        assert [each["id"] for each in listed] == [made["id"]]
    assert json.loads(type_("list", "--state", "paused", "--json")[1]) == []
    assert json.loads(type_("list", "--tenant", "other", "--json")[1]) == []
    assert json.loads(type_("list", "--after", made["id"], "--json")[1]) == []


def test_secrets_are_rotated_and_read_from_files(type_: Type, made: dict[str, Any], tmp_path: Path) -> None:
    code, out, err = type_("rotate", made["id"], "--overlap", "1h")
    assert (code, "whsec_" in out, "never shown again" in err) == (0, True, True)
    assert "oldSecretUntil" in shown(type_, made)

    file = tmp_path / "secret"
    file.write_text(f"whsec_{base64.b64encode(b'k' * 24).decode()}\n")
    rotated = json.loads(type_("rotate", made["id"], "--overlap", "0", "--secret", str(file), "--json")[1])
    assert rotated["secret"] == file.read_text().strip()
    assert "oldSecretUntil" not in shown(type_, made)
    added = json.loads(type_("add", "acme", "https://example.com/", "--secret", str(file), "--json")[1])
    assert added["secret"] == file.read_text().strip()
    assert type_("reseal")[:2] == (0, "resealed: 0\n"), "there are no keys"


def test_messages_are_tested_listed_and_sent_again(type_: Type, sqlite_url: str) -> None:
    async def with_receiver(act: Callable[[str], Any]) -> tuple[Any, list[str]]:
        async with HttpReceiver() as receiver:
            return await asyncio.to_thread(act, receiver.url), [each.body.decode() for each in receiver.requests]

    def first(url: str) -> str:
        endpoint_id: str = json.loads(type_("add", "acme", url, "--json")[1])["id"]
        assert type_("test", endpoint_id, "--payload", '{"hello": 1}')[:2] == (0, "Accepted 200\n")
        asyncio.run(send(sqlite_url))
        tried = json.loads(type_("attempts", endpoint_id, "--json")[1])
        assert [(each["outcome"], each["eventId"], each["receipt"]) for each in tried] == [("SENT", "e-1", "200")]
        assert json.loads(type_("attempts", endpoint_id, "--before", str(tried[0]["number"]), "--json")[1]) == []
        again = ("replay", endpoint_id, "--label", "again", "--yes")
        assert type_(*again)[:2] == (0, "replayed: 1\n")
        assert type_(*again)[:2] == (0, "replayed: 0\n")
        assert type_("replay", endpoint_id, "--label", "f", "--failed", "--yes")[:2] == (0, "replayed: 0\n")
        assert type_("replay", endpoint_id, "--label", "s", "--before", "2020-01-01", "--yes")[:2] == (
            0,
            "replayed: 0\n",
        )
        return endpoint_id

    endpoint_id, bodies = asyncio.run(with_receiver(first))

    assert '"hello":1' in bodies[0]
    code, out, err = type_("test", endpoint_id)
    assert (code, "NO_CONNECTION" in out, "not delivered" in err) == (1, True, True)


async def send(url: str) -> None:
    async with Ledger(url) as ledger:
        endpoints = make_endpoints(Settings.load(environ={}, **HERE), ledger, None)
        outbox = Outbox(ledger, {ENDPOINTS: endpoints.route})
        async with ledger.database.transaction() as connection:
            await outbox.publish(connection, tenant_id="acme", event_type="order.paid.v1", event_id="e-1")
        async with outbox.dispatcher() as dispatcher:
            await dispatcher.tick()
            await dispatcher.idle()
        await outbox.aclose()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("add", "acme", "http://10.0.0.1/"), 2, "public"),
        (("add", "acme", "nonsense"), 2, "url"),
        (("add", "acme", "https://example.com/", "--event", "*x"), 2, "events"),
        (("add", "acme", "https://example.com/", "--headers", "[]"), 2, "JSON object"),
        (("add", "acme", "https://example.com/", "--secret", "/nowhere"), 2, "cannot be read"),
        (("show", "x"), 2, "UUID"),
        (("show", "00000000-0000-4000-8000-000000000000"), 1, "there is no endpoint"),
        (("list", "--state", "broken"), 2, "enabled, paused, disabled"),
        (("change", "00000000-0000-4000-8000-000000000000"), 2, "name what to change"),
    ],
)
def test_a_mistake_is_one_line(type_: Type, words: tuple[str, ...], code: int, said: str) -> None:
    found, out, err = type_(*words)

    assert (found, out) == (code, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_secret_or_an_overlap_that_cannot_be_is_one_line(type_: Type, made: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("whsec_é", encoding="utf-8")

    for words in (("--secret", str(file)), ("--overlap", "99999999d")):
        code, out, err = type_("rotate", made["id"], *words)
        assert (code, out, err.count("\n")) == (2, "", 1), err


def test_a_list_that_is_narrow_does_not_say_that_there_are_none(type_: Type, made: dict[str, Any]) -> None:
    assert "makes one" not in "".join(map(str, type_("list", "--state", "disabled")))
    type_("remove", made["id"], "--yes")
    assert "makes one" in "".join(map(str, type_("list")))


def test_the_commands_of_the_guide_are_commands(type_: Type, made: dict[str, Any]) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/endpoints.md").read_text(encoding="utf-8")
    lines = [line.split(maxsplit=2)[2] for line in guide.splitlines() if line.startswith("    bullpen endpoints ")]
    assert len(lines) == 3
    assert type_("change", made["id"], "--url", "http://127.0.0.1:9/")[0] == 0  # where nobody listens
    for line in lines:
        typed = [made["id"] if word.startswith("2f0c") else word for word in shlex.split(line)]
        code, _, err = type_(*typed)
        if typed[0] == "test":
            assert (code, "was not delivered" in err) == (1, True), err
        else:
            assert code == 0, err


def test_the_command_of_destinations_names_the_one_for_endpoints(
    type_: Type, made: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A paused endpoint for which messages wait is among the destinations, but is switched on as an endpoint."""
    type_("pause", made["id"])

    assert run(["outbox", "destinations", "enable", f"endpoint:{made['id']}"]) == 1
    assert f"bullpen endpoints enable {made['id']}" in capsys.readouterr().err


def test_another_tenant_named_by_mistake_finds_nothing(type_: Type, made: dict[str, Any]) -> None:
    code, _, err = type_("disable", made["id"], "--tenant", "other")

    assert (code, "bullpen_endpoints has no row" in err) == (1, True)
    assert shown(type_, made)["state"] == "enabled"
