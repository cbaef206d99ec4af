"""CSV files as people send them: good lines are saved, bad ones are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from bullpen.errors import InvalidOption
from bullpen.ledger import Ledger
from bullpen.messages import Imported, LineProblem, Occasions, read_csv
from tests.messages.conftest import MakeMessages
from tests.messages.kit import at, rows, set_clock

GOOD = """\
id,name,zone,channel,address,locale,birthday,birthday.send_at,anniversary,attributes.city
ada,"Ada, Countess",Europe/London,email,ada@example.com,en-GB,1815-12-10,,,London
bob,Bob,America/New_York,sms,+15550100,,--02-29,08:30,2010-06-01,
"""


def problems(text: str, **options: str) -> list[tuple[int, str]]:
    found = [one for _, one in read_csv(text.splitlines(keepends=True), Occasions(), **options)]
    return [(one.line, one.reason) for one in found if isinstance(one, LineProblem)]


async def test_a_file_is_imported_and_again_without_effect(make_messages: MakeMessages, ledger: Ledger) -> None:
    messages = make_messages()
    set_clock(ledger, at("2026-02-27 12:00"))
    seen: list[int] = []

    first = await messages.import_csv(GOOD.splitlines(), on_progress=lambda done: seen.append(done.saved))
    await messages.planner().run_until_done()
    planned = await rows(messages)
    again = await messages.import_csv(GOOD.splitlines())
    await messages.planner().run_until_done()

    assert (first.saved, first.problems, first.lines, again.saved) == (2, [], 2, 2)
    assert seen == [2]
    ada, bob = await messages.recipients.find()
    assert (ada.name, ada.attributes, ada.locale) == ("Ada, Countess", {"city": "London"}, "en-GB")
    assert (bob.channel, sorted(bob.occasions)) == ("sms", ["anniversary", "birthday"])
    assert [(row.recipient_id, row.local_at) for row in planned] == [("bob", "2026-02-28T08:30")]
    assert [row.id for row in await rows(messages)] == [row.id for row in planned]


async def test_a_bad_line_keeps_no_good_one_out(make_messages: MakeMessages, ledger: Ledger) -> None:
    lines = [
        "id,zone,address,birthday",
        "a,Europe/Paris,a@x,1990-03-14",
        "b,Paris,b@x,1990-03-14",
        "c,Europe/Paris,c@x,14.3.1990",
        "d,Europe/Paris,d@x",
        "",
        "e,Europe/Paris,,1990-03-14",
        "f\0,Europe/Paris,f@x,",
        "a,Europe/Paris,a@x,1990-03-14",
        "g,Europe/Paris,g@x,",
    ]
    messages = make_messages()

    result = await messages.import_csv((f"{line}\n" for line in lines), channel="email", tenant_id="t")

    assert [one.key for one in await messages.recipients.find()] == [("t", "a"), ("t", "g")]
    told = {problem.line: problem.reason for problem in result.problems}
    assert sorted(told) == [3, 4, 5, 7, 8, 9]
    assert "IANA time zone" in told[3]
    assert told[4].startswith("birthday: expected a date such as 1990-03-14")
    assert told[5] == "line: expected 4 columns, got 3"
    assert told[7] == "address: expected a text that is not empty, got ''"
    assert "on one line" in told[8]
    assert told[9] == "id: expected each recipient once, got 'a'"


async def test_a_dry_run_saves_nothing(make_messages: MakeMessages, ledger: Ledger) -> None:
    messages = make_messages()

    result = await messages.import_csv(GOOD.splitlines(), dry_run=True)

    assert result.saved == 2
    assert await messages.recipients.find() == []


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("", "a CSV file with a header line"),
        ("id,zone,address", "a column 'channel'"),
        ("id,zone,channel", "a column 'address'"),
        ("id,zone,channel,address,wedding", "one of id, zone, .*birthday, anniversary, attributes.<name>"),
        ("id,id,zone,channel,address", "each column once"),
        ("id,zone,channel,address,attributes.", "one of id"),
    ],
)
def test_a_header_that_cannot_be_used_ends_it(header: str, problem: str) -> None:
    with pytest.raises(InvalidOption, match=problem):
        list(read_csv([header] if header else [], Occasions()))


def test_quotes_that_never_close_are_told() -> None:
    text = 'id,zone,channel,address\na,UTC,email,"a@x" oops\nb,UTC,email,b@x\n'

    assert [line for line, _ in problems(text)] == [2]
    assert problems('id,zone,channel,address\na,UTC,email,"open\n')[0][1].startswith("no CSV: ")


def test_a_mark_at_the_beginning_and_capital_names_are_no_problem() -> None:
    text = "\ufeffID,Zone,Channel,Address\r\na,UTC,email,a@x\r\n"

    assert problems(text) == []


@pytest.mark.many
async def test_a_large_file_goes_in_batches(make_messages: MakeMessages, ledger: Ledger, tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    with path.open("w") as file:
        file.write("id,zone,channel,address,birthday\n")
        file.writelines(f"p{number},UTC,email,p{number}@x,1990-01-01\n" for number in range(1_200))
    messages, seen = make_messages(), list[int]()

    def note(done: Imported) -> None:
        seen.append(done.lines)

    with path.open() as file:
        await messages.import_csv(file, on_progress=note)

    assert seen == [500, 1_000, 1_200]
    assert len(await messages.recipients.find(limit=2_000)) == 1_200
