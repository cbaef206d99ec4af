"""`bullpen top` on a terminal, on a pipe and for programs; in small windows, with many queues, over a restart."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import get_args

import pytest

from bullpen.cli.show import width_of
from bullpen.cli.top import Sort, View
from bullpen.ops.overview import QueueSnapshot
from bullpen.queue import Queue
from tests.conftest import StartServer
from tests.flows._cli import cli
from tests.flows._warm import Warm

pytestmark = pytest.mark.requirement("X-40")


def fill(url: str, prefix: str = "bull", **waiting: int) -> None:
    async def run() -> None:
        for name, count in waiting.items():
            async with Queue(name, connection=url, prefix=prefix) as queue:
                await queue.add_many([("a", {})] * count)

    asyncio.run(run())


def test_a_terminal_is_redrawn_in_place_obeys_its_keys_and_is_given_back(
    redis_url: str, tmp_path: Path, warm: Warm
) -> None:
    fill(redis_url, emails=3, reports=1)

    terminal = warm.start("top", "--interval", "300", "--redis", redis_url, cwd=tmp_path)
    terminal.wait_for(r"2 queues, 4 waiting")
    terminal.wait_for(r"emails\s+3.*\n?\s*reports\s+1")
    fill(redis_url, emails=2)
    terminal.wait_for(r"emails\s+5\s")
    terminal.type("s")
    terminal.wait_for(r"now active")
    terminal.type("q")

    assert terminal.end() == 0
    assert terminal.error == ""
    assert b"\x1b[?1049h" in terminal.raw, "another screen, so that what stood there comes back"
    assert terminal.raw.rstrip().endswith(b"\x1b[?1049l")
    assert b"\x1b[?25h" in terminal.raw, "the cursor is back"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_the_terminal_as_it_was(
    number: signal.Signals, code: int, redis_url: str, tmp_path: Path, warm: Warm
) -> None:
    terminal = warm.start("top", "--redis", redis_url, cwd=tmp_path)
    terminal.wait_for("q quits")
    os.kill(terminal.pid, number)

    assert terminal.end() == code
    assert terminal.raw.rstrip().endswith(b"\x1b[?1049l")


def test_ctrl_c_ends_it_without_a_traceback(redis_url: str, tmp_path: Path, warm: Warm) -> None:
    terminal = warm.start("top", "--redis", redis_url, cwd=tmp_path)
    terminal.wait_for("q quits")
    terminal.type("\x03")

    assert terminal.end() == 130
    assert terminal.error == "bullpen: interrupted\n"
    assert terminal.raw.rstrip().endswith(b"\x1b[?1049l")


def test_a_server_that_is_killed_is_told_waited_for_and_met_again(
    start_server: StartServer, tmp_path: Path, warm: Warm
) -> None:
    server = start_server()
    fill(server.url, emails=1)
    terminal = warm.start("top", "--interval", "200", "--redis", server.url, cwd=tmp_path)
    terminal.wait_for(r"emails\s+1\s")

    server.kill()
    terminal.wait_for("server unreachable, trying again")
    seen = len(terminal.text)
    server.restart()
    fill(server.url, emails=7)
    terminal.wait_for(r"emails\s+[78]\s", after=seen)  # a server without persistence has forgotten the first
    terminal.type("q")

    assert terminal.end() == 0
    assert "Traceback" not in terminal.text + terminal.error


def test_a_server_that_hangs_is_told_and_q_still_quits(start_server: StartServer, tmp_path: Path, warm: Warm) -> None:
    server = start_server()
    fill(server.url, emails=1)
    terminal = warm.start("top", "--interval", "200", "--redis", server.url, cwd=tmp_path)
    terminal.wait_for(r"emails\s+1\s")

    with server.paused():
        terminal.wait_for("server unreachable, trying again; the numbers are [0-9]+ s old: no answer")
        terminal.type("q")
        assert terminal.end() == 0


def test_a_terminal_that_cannot_move_its_cursor_gets_tables(redis_url: str, tmp_path: Path, warm: Warm) -> None:
    fill(redis_url, emails=2)

    terminal = warm.start("top", "--interval", "200", "--redis", redis_url, cwd=tmp_path, env={"TERM": "dumb"})
    terminal.wait_for(r"(?s)emails\s+2.*emails\s+2")
    terminal.type("q")

    assert terminal.end() == 0
    assert b"\x1b" not in terminal.raw


def test_programs_get_a_document_a_line_also_while_the_server_is_away(
    start_server: StartServer, tmp_path: Path, warm: Warm
) -> None:
    server = start_server()
    fill(server.url, emails=2)

    program = warm.start("top", "--interval", "200", "--json", "--redis", server.url, cwd=tmp_path, columns=10_000)
    program.wait_for(r"(\{.*\n){2}")
    server.kill()
    program.wait_for(r'"problem": "')
    program.type("q")
    assert program.end() == 0
    first, second, *_, away = map(json.loads, program.text.splitlines())

    assert (first["total"], first["queues"][0]["waiting"]) == (1, 2)
    assert first["queues"][0]["donePerSecond"] is None
    assert second["queues"][0]["donePerSecond"] == 0
    assert away["queues"] == []
    assert first["at"].endswith("Z")


def test_once_prints_once(redis_url: str, tmp_path: Path) -> None:
    fill(redis_url, emails=2, reports=5)
    fill(redis_url, prefix="mine", other=1)

    def names(*options: str) -> list[str]:
        answer = cli("top", "--once", "--json", "--redis", redis_url, *options, cwd=tmp_path)
        assert (answer.code, answer.err, answer.out.count("\n")) == (0, "", 1)
        return [each["queue"] for each in json.loads(answer.out)["queues"]]

    assert names() == ["reports", "emails"]
    assert names("--sort", "name") == ["emails", "reports"]
    assert names("--limit", "1") == ["reports"]
    assert names("emails") == ["emails"]
    assert names("--prefix", "mine") == ["other"]
    text = cli("top", "--once", "--limit", "1", "--redis", redis_url, cwd=tmp_path).out
    assert "2 queues, 7 waiting" in text
    assert "emails" not in text
    assert "and 1 more" in text


def test_what_makes_no_sense_is_told(redis_url: str, tmp_path: Path) -> None:
    fast = cli("top", "--interval", "10", cwd=tmp_path)
    nobody = cli("top", "emials", "--redis", redis_url, cwd=tmp_path)
    away = cli("top", "--redis", "redis://127.0.0.1:1", cwd=tmp_path)

    assert (fast.code, fast.err) == (
        2,
        "bullpen: invalid value for '--interval': at least 200 ms; see 'bullpen top --help'\n",
    )
    assert (nobody.code, nobody.out) == (1, "")
    assert nobody.err.startswith("bullpen: there is no queue 'emials'")
    assert away.code == 3


# Drawing, without a terminal ----------------------------------------------------------------------------------------


def looks(count: int) -> list[QueueSnapshot]:
    return [
        QueueSnapshot(f"a-queue-with-a-long-name-{n:03}", waiting=n, active=count - n, failed=n % 3, oldest_ms=n * 1000)
        for n in range(count)
    ]


@pytest.mark.parametrize("width", [1, 8, 20, 40, 80, 200])
@pytest.mark.parametrize("height", [1, 3, 5, 24, 100])
@pytest.mark.parametrize("count", [0, 1, 30])
def test_every_window_is_large_enough(width: int, height: int, count: int) -> None:
    view = View("bullpen top", 2, looks=looks(count), at_ms=1, is_searching=False)

    lines = view.screen(width, height)

    assert len(lines) <= height
    assert all(width_of(line) <= width for line in lines)


def test_a_narrow_window_keeps_the_columns_that_matter_and_a_low_one_counts_the_rest() -> None:
    view = View("bullpen top", 2, looks=looks(30), at_ms=1, is_searching=False)

    wide, narrow = (view.table(width, 10)[0] for width in (200, 40))
    low = view.screen(80, 12)

    assert [word in wide for word in ("waiting", "done/s", "completed")] == [True, True, True]
    assert [word in narrow for word in ("waiting", "active", "done/s", "completed")] == [True, True, False, False]
    assert "and 23 more" in low
    assert low[-1].startswith("q quits")


def test_each_order_puts_the_largest_first() -> None:
    many = [
        QueueSnapshot("a", waiting=1, active=2, delayed=3, failed=4, oldest_ms=5, added_per_s=6, dead_letters=7),
        QueueSnapshot("b", waiting=2, active=3, delayed=4, failed=5, oldest_ms=6, added_per_s=7, dead_letters=8),
        QueueSnapshot("c"),
    ]

    for sort in get_args(Sort):
        ordered = View("bullpen top", 2, sort, looks=many).ordered()
        assert [look.queue for look in ordered] == (["a", "b", "c"] if sort == "name" else ["b", "a", "c"]), sort


def test_a_name_cannot_command_the_terminal() -> None:
    view = View("bullpen top", 2, looks=[QueueSnapshot("x\x1b[2J")], at_ms=1, is_searching=False)

    assert all("\x1b" not in line for line in view.screen(80, 24))


@pytest.mark.parametrize(
    ("look", "shown"),
    [
        (QueueSnapshot("q", waiting=99_999), " 99999 "),
        (QueueSnapshot("q", waiting=123_456), " 123k "),
        (QueueSnapshot("q", waiting=12_345_678), " 12M "),
        (QueueSnapshot("q", oldest_ms=7_200_000), " 2h "),
        (QueueSnapshot("q", added_per_s=0.25), " 0.2 "),
        (QueueSnapshot("q", added_per_s=250.4), " 250 "),
        (QueueSnapshot("q", paused=True), " paused"),
        (QueueSnapshot("q", problem="WRONGTYPE"), " unread"),
        (QueueSnapshot("q"), " ? "),
    ],
)
def test_numbers_stay_short(look: QueueSnapshot, shown: str) -> None:
    view = View("bullpen top", 2, looks=[look], at_ms=1, is_searching=False)

    assert shown in f"{view.table(200, 5)[1]} "
