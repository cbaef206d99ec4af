"""`bullpen messages`, as somebody types it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bullpen import Bullpen
from bullpen.cli.commands import run
from bullpen.errors import InvalidOption
from bullpen.ledger import Ledger
from bullpen.messages import Late, MessageRow, Messages, MessageStatus
from bullpen.plugins.channels.email import Email
from bullpen.plugins.transports.memory import MemoryClient
from bullpen.ports.dead_letters import DeadLetter
from tests.flows._cli import Terminal
from tests.messages.kit import person

Type = Callable[..., tuple[int, str, str]]

PEOPLE = """\
id,name,zone,channel,address,birthday
ada,Ada,Europe/London,email,ada@example.com,1815-12-10
bob,Bob,Nowhere,email,bob@example.com,1990-03-14
eve,Eve,Europe/Paris,email,eve@example.com,1990-02-30
"""


@pytest.fixture
def type_(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sqlite_url: str) -> Type:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("BULLPEN_DATABASE_URL", sqlite_url)

    def typed(*words: str) -> tuple[int, str, str]:
        code = run(["messages", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return typed


def act(url: str, work: Callable[[Messages], Any]) -> Any:
    """Do something with the messages of a database."""

    async def main() -> Any:
        async with Ledger(url) as ledger:
            messages = Messages(ledger, MemoryClient())
            try:
                return await work(messages)
            finally:
                await messages.aclose()

    return asyncio.run(main())


def tomorrow() -> str:
    return f"1990-{datetime.now(UTC) + timedelta(days=1):%m-%d}"


def with_status(url: str, status: str) -> str:
    """One message of this status; its id."""

    async def work(messages: Messages) -> str:
        await messages.recipients.save(person(zone="UTC", occasions={"birthday": tomorrow()}))
        await messages.planner().run_until_done()
        async with messages.store.database.transaction() as connection:
            await connection.exec_driver_sql(f"UPDATE bullpen_messages SET status = '{status}', last_error = 'why'")
        (row,) = await messages.store.find()
        return row.id

    found: str = act(url, work)
    return found


def test_a_file_is_imported_and_every_bad_line_is_told(type_: Type, tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text(PEOPLE)

    code, out, err = type_("recipients", "import", str(path))
    listed_code, listed, _ = type_("recipients", "list", "--json")

    assert code == 1
    assert out == "saved: 1\n"
    assert err.splitlines()[1:] == [
        "line 3: zone: expected an IANA time zone such as 'Europe/Paris', got 'Nowhere'",
        (
            "line 4: birthday: expected a date such as 1990-03-14, or --03-14 when the year is not known (day is out "
            "of range for month), got '1990-02-30'"
        ),
        "bullpen: not saved: 2 lines",
    ]
    assert listed_code == 0
    assert [one["id"] for one in json.loads(listed)] == ["ada"]
    assert json.loads(listed)[0]["occasions"] == "birthday 1815-12-10"


def test_a_dry_run_tells_the_same_and_saves_nothing(type_: Type, tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text(PEOPLE)

    code, out, err = type_("recipients", "import", str(path), "--dry-run", "--json")

    assert code == 1
    assert (json.loads(out)["saved"], json.loads(out)["good"]) == (0, 1)
    assert [one["line"] for one in json.loads(out)["problems"]] == [3, 4]
    assert err == ""
    assert type_("recipients", "list")[2].startswith("no recipients; ")


def test_bytes_that_are_no_text_are_a_bad_line(type_: Type, tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_bytes(b"id,zone,channel,address\na,UTC,email,\xff\xfe@x\nb,UTC,email,b@x\n")

    code, out, err = type_("recipients", "import", str(path))

    assert (code, out) == (1, "saved: 1\n")
    assert err.splitlines()[1].startswith("line 2: address: expected")


def test_what_cannot_be_imported_at_all_is_one_line(type_: Type, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("id,zone,channel,address,shoe_size\n")

    assert type_("recipients", "import", str(tmp_path / "none.csv"))[::2] == (
        1,
        f"bullpen: {tmp_path / 'none.csv'} cannot be read: No such file or directory\n",
    )
    code, _, err = type_("recipients", "import", str(wrong))
    assert code == 2
    assert err.startswith("bullpen: column: expected one of id, zone,")


def test_the_progress_of_a_long_import_is_seen_on_a_terminal(sqlite_url: str, tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    lines = [f"p{number},UTC,email,p{number}@x,1990-01-01\n" for number in range(2_000)]
    path.write_text("id,zone,channel,address,birthday\n" + "".join(lines))

    terminal = Terminal("messages", "recipients", "import", str(path), "--database", sqlite_url, cwd=tmp_path)
    code = terminal.end()

    assert code == 0
    assert "importing" in terminal.text
    assert "2000/2000" in terminal.text
    assert "saved: 2000" in terminal.text


def test_a_preview_shows_local_times_and_clock_changes(type_: Type, sqlite_url: str) -> None:
    act(sqlite_url, lambda messages: messages.recipients.save(person(zone="Europe/Paris")))

    code, out, _ = type_("recipients", "preview", "person-1", "--days", "800", "--json")
    table_code, table, _ = type_("recipients", "preview", "person-1")

    assert code == table_code == 0
    found = json.loads(out)
    assert [one["local"][4:] for one in found] == ["-03-14T09:00"] * 2
    assert {one["clock"] for one in found} == {"plain"}
    assert "local time" in table
    assert type_("recipients", "preview", "nobody")[::2] == (1, "bullpen: there is no recipient 'nobody'\n")


def test_lint_lists_who_is_inside_a_gap(type_: Type, sqlite_url: str) -> None:
    """Paris skips 02:30 on the last Sunday of March; whoever is born on all of these days is inside the gap once."""
    from bullpen.messages import Occasion
    from bullpen.messages.calendar import read_date, read_time

    dates = [
        Occasion(read_date("on", f"1990-03-{day}"), f"day {day}", read_time("send_at", "02:30"))
        for day in range(25, 32)
    ]
    act(
        sqlite_url,
        lambda messages: messages.recipients.save(person(zone="Europe/Paris", occasions={"birthday": dates})),
    )

    code, out, _ = type_("lint", "--json")

    assert code == 0
    assert len(json.loads(out)) == 1
    assert "02:30 does not exist in Europe/Paris" in json.loads(out)[0]["text"]
    assert "02:30 does not exist" in type_("lint")[1]
    assert type_("lint", "--tenant", "nobody")[1] == "no local time of the next 366 days is missing or occurs twice\n"


def test_messages_are_listed_and_shown(type_: Type, sqlite_url: str) -> None:
    message = with_status(sqlite_url, "FAILED")

    _, listed, _ = type_("list", "--status", "failed", "--json")
    _, table, _ = type_("list")
    _, shown, _ = type_("show", message, "--json")
    _, stats, _ = type_("stats", "--json")

    assert [row["id"] for row in json.loads(listed)] == [message]
    assert message in table and "why" in table
    assert (json.loads(shown)["status"], json.loads(shown)["lastError"]) == ("FAILED", "why")
    assert "FAILED" in type_("show", message)[1]
    assert [(one["status"], one["count"]) for one in json.loads(stats)] == [("FAILED", 1)]
    assert "birthday" in type_("stats")[1]
    assert type_("list", "--status", "sent")[2].startswith("no such messages; ")
    assert type_("list", "--status", "nope")[0] == 2
    assert type_("show", "nope")[::2] == (1, "bullpen: there is no message nope\n")


@pytest.mark.parametrize(
    ("command", "before", "after", "verb"),
    [
        ("retry", "FAILED", MessageStatus.CREATED, "retried"),
        ("retry", "PARKED", MessageStatus.CREATED, "retried"),
        ("confirm", "PARKED", MessageStatus.SENT, "confirmed"),
        ("cancel", "CREATED", MessageStatus.CANCELLED, "cancelled"),
    ],
)
def test_what_failed_is_mended_by_hand_and_noted(
    type_: Type, sqlite_url: str, command: str, before: str, after: MessageStatus, verb: str
) -> None:
    message = with_status(sqlite_url, before)

    first = type_(command, message)
    second = type_(command, message, "--json")

    async def look(messages: Messages) -> Any:
        async with messages.store.database.transaction() as connection:
            notes = (await connection.exec_driver_sql("SELECT actor, action, subject FROM bullpen_audit")).all()
        row = await messages.store.get(message)
        return row and row.status, [tuple(note) for note in notes]

    status, notes = act(sqlite_url, look)
    assert first == (0, f"{verb}: 1\n", "")
    assert (second[0], json.loads(second[1])) == (1, {verb: 0})
    assert status is after
    ((actor, action, subject),) = notes
    assert actor.startswith("cli")
    assert (action, subject) == (f"message.{command.replace('confirm', 'resolve')}", f"message/{message}")


def test_a_recipient_is_removed_with_its_messages(type_: Type, sqlite_url: str) -> None:
    with_status(sqlite_url, "CREATED")

    assert type_("recipients", "remove", "person-1") == (0, "removed: 1\n", "")
    assert type_("recipients", "remove", "person-1")[0] == 1

    found = act(sqlite_url, lambda messages: messages.store.find())
    assert [row.status for row in found] == [MessageStatus.CANCELLED]


def test_health_ends_with_one_when_a_run_was_missed(type_: Type, sqlite_url: str) -> None:
    code, out, err = type_("check")
    assert (code, err) == (1, "bullpen: no run has succeeded yet\n")
    assert "queueLagMs" in out

    act(sqlite_url, lambda messages: messages.scheduler().run_once())

    code, out, _ = type_("check", "--json")
    assert code == 0
    assert json.loads(out)["healthy"] is True


def test_kinds_of_a_program_are_known_when_it_is_named(
    type_: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sqlite_url: str
) -> None:
    (tmp_path / "greetings_app.py").write_text(
        "from bullpen import Bullpen\napp = Bullpen()\napp.use_messages().occasion('namesday', text='Hello {name}')\n"
    )
    people = tmp_path / "people.csv"
    people.write_text(f"id,zone,channel,address,namesday\nada,UTC,email,ada@x,{tomorrow()}\n")
    monkeypatch.chdir(tmp_path)

    without = type_("recipients", "import", str(people))
    code, out, _ = type_("recipients", "import", str(people), "--app", "greetings_app:app")
    planned = type_("plan", "--app", "greetings_app:app", "--json")

    assert without[0] == 2
    assert "attributes.<name>, got 'namesday'" in without[2]
    assert (code, out) == (0, "saved: 1\n")
    assert json.loads(planned[1]) == {"planned": 1}
    assert [row.occasion for row in act(sqlite_url, lambda messages: messages.store.find())] == ["namesday"]


def test_the_file_beside_the_embedded_server_is_made_on_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BULLPEN_DATABASE_URL", raising=False)
    monkeypatch.setenv("BULLPEN_DATA_DIR", str(tmp_path / "data"))

    code = run(["messages", "recipients", "list", "--json"])

    assert (code, capsys.readouterr().out) == (0, "[]\n")
    assert (tmp_path / "data" / "ledger.sqlite3").exists()


NOBODY = "no app has run on this ledger yet: birthdays and anniversaries are planned for 09:00"


def birthday_in(hours: float) -> tuple[str, str]:
    """A date and a local time in UTC that come in so many hours."""
    then = datetime.now(UTC) + timedelta(hours=hours)
    return f"1990-{then:%m-%d}", f"{then:%H:%M}"


def run_app(url: str, send_at: str, **options: Any) -> None:
    """An app starts on this ledger, works for one tick and stops."""

    async def work(messages: Messages) -> None:
        messages.occasion("birthday", text="Hello", send_at=send_at, **options)
        await messages.scheduler().run_once()

    act(url, work)


def planned_at(url: str) -> list[str]:
    found: list[MessageRow] = act(url, lambda messages: messages.store.find())
    return [row.local_at[-5:] for row in found if row.status is not MessageStatus.CANCELLED]


def test_plan_without_a_program_keeps_the_hour_of_the_app(type_: Type, sqlite_url: str) -> None:
    on, send_at = birthday_in(5)
    run_app(sqlite_url, send_at)
    act(sqlite_url, lambda messages: _save_as_app(messages, on, send_at))

    code, _, err = type_("plan")

    assert (code, err) == (0, "")
    assert planned_at(sqlite_url) == [send_at]


async def _save_as_app(messages: Messages, on: str, send_at: str) -> None:
    messages.occasion("birthday", text="Hello", send_at=send_at)
    await messages.recipients.save(person(zone="UTC", occasions={"birthday": on}))
    await messages.planner().run_until_done()


def test_import_and_preview_without_a_program_know_the_hour_of_the_app(
    type_: Type, sqlite_url: str, tmp_path: Path
) -> None:
    on, send_at = birthday_in(5)
    run_app(sqlite_url, send_at)
    path = tmp_path / "people.csv"
    path.write_text(f"id,zone,channel,address,birthday\nada,UTC,email,ada@example.com,{on}\n")

    assert type_("recipients", "import", str(path)) == (0, "saved: 1\n", "")
    _, shown, _ = type_("recipients", "preview", "ada", "--json")
    run_app(sqlite_url, send_at)

    assert json.loads(shown)[0]["local"].endswith(f"T{send_at}")
    assert planned_at(sqlite_url) == [send_at]


def test_an_app_that_starts_with_another_hour_moves_what_is_planned(type_: Type, sqlite_url: str) -> None:
    (on, before), (_, after) = birthday_in(26), birthday_in(27)
    run_app(sqlite_url, before)
    act(sqlite_url, lambda messages: _save_as_app(messages, on, before))

    run_app(sqlite_url, after, quiet_hours=None)

    assert planned_at(sqlite_url) == [after]


def test_an_import_before_any_app_ran_says_which_hour_it_takes(type_: Type, tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("id,zone,channel,address,birthday\nada,UTC,email,ada@example.com,1990-03-14\n")

    code, _, err = type_("recipients", "import", str(path))

    assert code == 0
    assert "no app has run on this ledger yet: birthdays and anniversaries are planned for 09:00" in " ".join(
        err.split()
    )


def test_kinds_of_the_app_are_known_without_naming_it(type_: Type, sqlite_url: str, tmp_path: Path) -> None:
    async def work(messages: Messages) -> None:
        messages.occasion("contract", text="Hello", repeats="monthly", short_month="skip", late=Late.skip(60_000),
                          gap="after", overlap="second", leap_day="mar1", quiet_hours=("21:00", "08:00"))  # fmt: skip
        await messages.scheduler().run_once()
        other = Messages(messages._ledger, MemoryClient())
        await other.kinds.read()
        kind, ours = other.occasions.get("contract"), messages.occasions.get("contract")
        assert replace(kind, texts=ours.texts) == ours, "every rule of time is kept"
        await other.aclose()

    act(sqlite_url, work)
    path = tmp_path / "people.csv"
    path.write_text("id,zone,channel,address,contract\nada,UTC,email,ada@example.com,1990-03-14\n")

    assert type_("recipients", "import", str(path)) == (0, "saved: 1\n", "")
    assert type_("lint")[0] == 0


def test_a_kind_that_nobody_knows_asks_for_the_program(type_: Type, sqlite_url: str, tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("id,zone,channel,address,contract\nada,UTC,email,ada@example.com,1990-03-14\n")

    async def work(messages: Messages) -> None:
        messages.occasion("contract", text="Hello")
        await messages.recipients.save(person(zone="UTC", occasions={"contract": "1990-03-14"}))

    act(sqlite_url, work)

    for words in (("recipients", "import", str(path)), ("lint",)):
        code, _, err = type_(*words)
        assert code == 2
        assert "--app MODULE:APP" in " ".join(err.split())


def test_lint_with_a_program_tells_channels_that_nobody_registered_and_ends_with_1(
    type_: Type, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "greet_of_lint.py").write_text(
        "from bullpen import Bullpen\napp = Bullpen()\n"
        "@app.use_messages().channel('email', after_crash='park')\nasync def send(message): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    act(sqlite_url, lambda messages: messages.recipients.save(person(zone="UTC", channel="pigeon")))

    code, out, err = type_("lint", "--app", "greet_of_lint")

    assert code == 1
    assert "have the channel 'pigeon', which is not registered; there is email" in " ".join(out.split())
    assert err == "bullpen: 1 findings that keep messages from being sent\n"


def test_a_message_that_is_retried_leaves_no_dead_letter(
    type_: Type, sqlite_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BULLPEN_REDIS_URL", redis_url)
    message = with_status(sqlite_url, "FAILED")

    async def letters(count: int) -> list[str]:
        async with Bullpen(redis_url) as app:
            queue = app.queue("birthday.messages.queue")
            if count:
                store = queue.dead_letters
                for one in (message, "other"):
                    data = {"urn": f"urn:message:{one}", "payload": {"messageId": one}}
                    await store.put(DeadLetter(id=f"dl-{one}-1", source=queue.name, message_id=one, data=data))
            return [letter.id for letter in await queue.dead_letters.list()]

    assert len(asyncio.run(letters(2))) == 2

    assert type_("retry", message) == (0, "retried: 1\n", "")

    assert asyncio.run(letters(0)) == ["dl-other-1"]


def test_an_address_that_its_channel_cannot_reach_is_a_bad_line(
    type_: Type, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a program that saves somebody like that is told at once, not on the day."""
    (tmp_path / "greet_by_mail.py").write_text(
        "from bullpen import Bullpen\nfrom bullpen.plugins.channels.email import Email\napp = Bullpen()\n"
        "app.use_messages().channel('email', Email('localhost', sender='a@example.com', security='none'))\n"
    )
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "people.csv"
    path.write_text("id,zone,channel,address,birthday\nada,UTC,email,not an address,1990-03-14\n")

    code, _, err = type_("recipients", "import", str(path), "--app", "greet_by_mail")

    assert code == 1
    assert err.splitlines()[0] == "line 2: address: expected one plain mail address, got 'not an address'"

    async def work(messages: Messages) -> None:
        wrong = person(zone="UTC", channel="email", address="not an address")
        await messages.recipients.save(wrong)
        messages.channel("email", Email("localhost", sender="a@example.com", security="none"))
        with pytest.raises(InvalidOption, match=f"address of recipient '{wrong.id}': expected one plain mail address"):
            await messages.recipients.save(wrong)
        (doubt,) = await messages.lint()
        assert doubt.code == "bad-address"

    act(sqlite_url, work)
