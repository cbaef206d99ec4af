"""Every command on a terminal, as a person types it; and what each says to an argument that makes no sense.

A command that is not in the table fails the walk below: whoever adds one says here how it is used.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bullpen.cli.commands import tree
from bullpen.cli.tree import Argument
from bullpen.testing import RedisServer, need
from tests.flows._cli import Terminal, cli
from tests.flows._warm import Warm
from tests.flows._world import prepared

pytestmark = pytest.mark.requirement("X-40")


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """All commands that do something."""
    below = getattr(command, "commands", None)
    if below is None:
        yield " ".join(path), command
    for name, each in (below or {}).items():
        yield from walk(each, (*path, name))


COMMANDS = dict(walk(tree()))


@dataclass(frozen=True)
class Use:
    """How somebody uses a command."""

    words: str
    """What follows the command; names in braces are things of the small company."""
    shows: str
    """A pattern of what is then seen, on stdout or stderr."""
    code: int = 0
    typed: str = ""
    """What is typed when the pattern is seen, or, in a question, at once."""
    asks: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    says_why: bool = True
    """One line on stderr says why the code is not 0."""


USES: dict[str, Use] = {
    "run": Use("shop:app --only worker", r"Initialized Memory worker", typed="\x03"),
    "top": Use("emails", r"emails +\d+", typed="q"),
    "migrate": Use("--database sqlite:///{directory}/new.sqlite3", r"is up to date"),
    "doctor": Use("", r"jobs wait and no worker is connected", code=1, says_why=False),
    "exporter": Use("--http 127.0.0.1:0", r"serving http on port", typed="\x03"),
    "serve": Use("shop:api --http 127.0.0.1:0", r"serving http on port", typed="\x03"),
    "dashboard": Use("--http 127.0.0.1:0", r"dashboard: http://127\.0\.0\.1:\d+", typed="\x03"),
    "mark": Use("v2", r"marked: v2"),
    "bench": Use("--jobs 100 --yes", r"add in bulk"),
    "completion": Use("bash", r"complete -o nosort -F"),
    "config show": Use("", r"redis\.url +redis://"),
    "queues list": Use("", r"emails +\d"),
    "queues history": Use("emails", r"nothing ended|p95"),
    "queues show": Use("emails", r"waiting"),
    "queues pause": Use("drain", r"drain is paused"),
    "queues resume": Use("drain", r"drain is running"),
    "queues follow": Use("emails", r"following emails", code=130, typed="\x03"),
    "queues clean": Use("clean --state waiting", r"Delete at most 1 waiting job", typed="y\n", asks=True),
    "queues drain": Use("drain", r"Delete 1 waiting job of", typed="y\n", asks=True),
    "queues restore": Use("emails", r"restored: 0"),
    "queues obliterate": Use("obliterate", r"with 1 job for good", typed="y\n", asks=True),
    "jobs list": Use("emails --state failed", r"no stamp"),
    "jobs show": Use("emails c1", r"returnvalue"),
    "jobs add": Use("emails hello", r"added job \d+ to emails"),
    "jobs retry": Use("emails f0", r"retried: 1"),
    "jobs promote": Use("emails d0", r"promoted: 1"),
    "jobs change": Use("emails d1 --delay 2h", r"changed: 1"),
    "jobs explain": Use("emails w1", r"No worker is connected"),
    "jobs cancel": Use("emails d1 --reason again", r"cancelled: 1"),
    "queues limits set": Use("emails --concurrency 5", r"concurrency +5"),
    "queues limits show": Use("emails", r"concurrency +5"),
    "queues lanes list": Use("drain", r"no lanes in 'drain' yet"),
    "queues lanes set": Use("emails acme --weight 2", r"acme.*2"),
    "queues lanes pause": Use("emails acme", r"acme.*paused"),
    "queues lanes resume": Use("emails acme", r"lane 'acme'"),
    "queues lanes remove": Use("emails acme", r"acme"),
    "jobs remove": Use("emails w0", r"removed: 1"),
    "jobs follow": Use("emails c1 --wait", r"job c1 is completed: sent"),
    "jobs logs": Use("emails c1", r"a line"),
    "payloads list": Use("", r"no sealed payloads"),
    "payloads sweep": Use("", r"there is no object store", code=2),
    "workers list": Use("", r"no workers are connected"),
    "schedules list": Use("emails", r"every 60000 ms"),
    "schedules show": Use("emails beat", r"fires at:"),
    "schedules add": Use("emails nightly --cron @daily", r"nightly fires next at \d{4}-"),
    "schedules remove": Use("emails nobody", r"there is no scheduler 'nobody'", code=1),
    "schedules pause": Use("emails nobody", r"there is no scheduler 'nobody'", code=1),
    "schedules resume": Use("emails nobody", r"there is no scheduler 'nobody'", code=1),
    "schedules preview": Use("@daily-is-no-pattern", r"expected a cron pattern", code=2),
    "schedules run": Use("emails beat --early", r"runs now: repeat:beat:\d+"),
    "dead-letters stats": Use("", r"emails-dlq +\d"),
    "dead-letters groups": Use("", r"ValueError: no"),
    "dead-letters list": Use("emails", r"no stamp"),
    "dead-letters show": Use("emails {letter_f1}", r"ValueError"),
    "dead-letters redrive": Use("emails {letter_f2}", r"redriven: 1"),
    "dead-letters discard": Use("emails {letter_f3}", r"discarded: 1"),
    "dead-letters edit": Use("emails {letter_f4} --data 1", r"Send .* back", code=130, typed="n\n", asks=True),
    "operations list": Use("", r"no operations"),
    "operations show": Use("nothing", r"there is no operation 'nothing'", code=1),
    "operations stop": Use("nothing", r"there is no operation 'nothing'", code=1),
    "operations resume": Use("", r"nothing to do"),
    "alerts list": Use("", r"no incident is open"),
    "alerts silence": Use("dead_letters nobody --reason known", r"no incident 'dead_letters' of 'nobody'", code=1),
    "alerts unsilence": Use("dead_letters nobody", r"no incident 'dead_letters' of 'nobody'", code=1),
    "alerts test": Use("", r"stored: ", env={"BULLPEN_ALERTS_WEBHOOK_URL": "https://alerts.example.com/"}),
    "outbox list": Use("--status dead", r"HTTP_400|answered"),
    "outbox show": Use("{row_0}", r"attempts:"),
    "outbox redrive": Use("{row_1}", r"redriven: 1"),
    "outbox discard": Use("{row_2}", r"Delete 1 row for good", typed="y\n", asks=True),
    "outbox confirm": Use("{row_3}", r"confirmed: 1"),
    "outbox stats": Use("", r"PENDING"),
    "outbox follow": Use("{row_4}", r"is DEAD", code=1),
    "outbox tenants list": Use("", r"no tenant has settings"),
    "outbox tenants set": Use("acme --weight 3", r"acme"),
    "outbox tenants remove": Use("acme", r"acme"),
    "endpoints add": Use("acme https://hooks.example.com/a --event order.*", r"whsec_"),
    "endpoints list": Use("--tenant acme", r"hooks\.example\.com"),
    "endpoints show": Use("nothing", r"expected the id of an endpoint", code=2),
    "endpoints change": Use("nothing --description x", r"expected the id of an endpoint", code=2),
    "endpoints rotate": Use("nothing", r"expected the id of an endpoint", code=2),
    "endpoints enable": Use("nothing", r"expected the id of an endpoint", code=2),
    "endpoints pause": Use("nothing", r"expected the id of an endpoint", code=2),
    "endpoints disable": Use("nothing", r"expected the id of an endpoint", code=2),
    "endpoints remove": Use("nothing --yes", r"expected the id of an endpoint", code=2),
    "endpoints test": Use("nothing", r"expected the id of an endpoint", code=2),
    "endpoints attempts": Use("nothing", r"expected the id of an endpoint", code=2),
    "endpoints replay": Use("nothing --label again --yes", r"expected the id of an endpoint", code=2),
    "endpoints reseal": Use("", r"resealed: 0"),
    "init": Use("made", r"next: cd made && bullpen run"),
    "shell": Use("shop:app", r">>> ", typed="exit()\n"),
    "outbox destinations list": Use("", r"no destination has a problem"),
    "outbox destinations disable": Use("webhook:partnerY --reason moving", r"disabled: webhook:partnerY"),
    "outbox destinations enable": Use("webhook:partnerZ", r"nothing was changed", code=1),
    "outbox destinations test": Use("echo:x --app shop", r"Accepted"),
    "outbox destinations replay": Use(
        "webhook:partnerX --label again", r"Send again everything", typed="y\n", asks=True
    ),
    "projectors list": Use("shop", r"lag"),
    "projectors backfill": Use("shop payment --since 2", r"Send events since", typed="y\n", asks=True),
    "projectors parked list": Use("", r"ZeroDivision"),
    "projectors parked show": Use("1", r"payment"),
    "projectors parked retry": Use("1", r"retry: 1"),
    "projectors parked skip": Use("1", r"Skip these events", code=130, typed="n\n", asks=True),
    "workflows list": Use("shop", r"parcel"),
    "workflows show": Use("shop parcel", r"new +send +sent"),
    "workflows lint": Use("shop", r"nothing is doubtful"),
    "workflows diagram": Use("shop parcel", r"stateDiagram"),
    "workflows simulate": Use("shop parcel send", r"ends at sent"),
    "workflows history": Use("shop parcel urn:1", r"no history"),
    "workflows explain": Use("shop parcel urn:1", r"urn:1 is new"),
    "workflows send": Use("shop parcel send urn:1", r"sent: "),
    "workflows follow": Use("shop parcel urn:2", r"urn:2 is sent"),
    "workflows check": Use("shop", r"parcel +\S+ +ok"),
    "messages recipients import": Use("people.csv --dry-run", r"1"),
    "messages recipients list": Use("", r"person-1"),
    "messages recipients remove": Use("nobody", r"removed: 0", code=1),
    "messages recipients preview": Use("person-1 --days 400", r"birthday"),
    "messages lint": Use("", r"nobody|no "),
    "messages list": Use("", r"birthday"),
    "messages show": Use("{message_sent}", r"SENT"),
    "messages stats": Use("", r"FAILED|SENT"),
    "messages check": Use("", r"no run has succeeded yet", code=1),
    "messages plan": Use("", r"planned: "),
    "messages retry": Use("{message_failed}", r"retried: 1"),
    "messages confirm": Use("{message_parked}", r"confirmed: 1"),
    "messages cancel": Use("{message_created}", r"cancelled: 1"),
    "messages follow": Use("{message_sent}", r"SENT"),
    "runs list": Use("", r"alice"),
    "runs show": Use("{run_0}", r"QUEUED"),
    "runs start": Use("--tenant alice --version v1 --definition {{}}", r"started: "),
    "runs cancel": Use("{run_2} --tenant alice", r"cancelled: "),
    "runs retry": Use("{run_1} --tenant alice", r"retried: 1"),
    "runs sweep": Use("", r"examined \d"),
    "runs dead-letters list": Use("", r"depth of workflow-execution-dlq"),
    "runs credits show": Use("--tenant alice", r"alice: \d+ credits"),
    "runs credits grant": Use("5 --tenant alice --reference ticket-1", r"alice: \d+ credits"),
    "runs follow": Use("{run_0} --interval 100 --timeout 150", r"is still QUEUED", code=4),
}

ELSEWHERE = {"demo": "test_demo.py::test_on_a_terminal_it_draws_a_picture"}
"""Commands that take long and have a test on a terminal of their own."""


@pytest.fixture(scope="module")
def world(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[dict[str, str]]:
    need("valkey")
    directory = tmp_path_factory.mktemp("world")
    shutil.copy(sqlite_template, directory / "ledger.sqlite3")
    with RedisServer.start("valkey") as server:
        known = prepared(server, f"sqlite:///{directory}/ledger.sqlite3", directory)
        filled = warm.run(
            "projectors", "backfill", "shop", "payment", "--since", "beginning", "--yes", cwd=directory, env=_env(known)
        )
        assert filled.code == 0, filled
        yield known


def _env(known: dict[str, str]) -> dict[str, str]:
    return {
        "BULLPEN_REDIS_URL": known["redis"],
        "BULLPEN_DATABASE_URL": known["database"],
        "BULLPEN_DATA_DIR": f"{known['directory']}/data",
        "BULLPEN_EMBEDDED": "never",
        "BULLPEN_TRANSPORT": "memory",
        "TMPDIR": known["directory"],
    }


def test_every_command_has_its_use_here_and_there_is_no_other() -> None:
    assert {*USES, *ELSEWHERE} == set(COMMANDS)
    for place in ELSEWHERE.values():
        file, _, test = place.partition("::")
        text = (Path(__file__).parent / file).read_text()
        assert re.search(rf"def {test}\w*\(.*?Terminal\(", text, re.DOTALL)


def _nouns() -> dict[str, list[str]]:
    """Commands by the thing they are about; those about none are a group of their own."""
    found: dict[str, list[str]] = {}
    for command in USES:
        noun, _, verb = command.partition(" ")
        found.setdefault(noun if verb else "", []).append(command)
    return found


@pytest.mark.parametrize("noun", _nouns(), ids=lambda noun: noun or "no noun")
def test_every_command_does_its_work_on_a_terminal(noun: str, world: dict[str, str], warm: Warm) -> None:
    """One session for all commands of a noun, as somebody at work has it."""
    commands = _nouns()[noun]
    uses = [USES[command] for command in commands]
    lines = [
        [*command.split(), *(word.format(**world) for word in use.words.split())]
        for command, use in zip(commands, uses, strict=True)
    ]
    env = {name: value for use in uses for name, value in use.env.items()}

    terminal = warm.session(lines, cwd=Path(world["directory"]), env={**_env(world), **env})
    for at, use in enumerate(uses):
        if use.typed:
            terminal.wait_for_either(use.shows, part=at)
            terminal.type(use.typed)
    codes = terminal.codes()

    assert len(codes) == len(commands), f"{terminal.text}\n{terminal.error}"
    for at, (command, use) in enumerate(zip(commands, uses, strict=True)):
        out, err = terminal.part(at)
        seen = f"bullpen {command}\n{out}\n{err}"
        assert codes[at] == use.code, seen
        assert re.search(use.shows, err if use.asks else f"{out}\n{err}"), seen
        assert "Traceback" not in err, seen
        if use.says_why and use.code not in (0, 130):
            assert err.count("\n") == 1, f"one line says why: {seen}"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_that_nobody_knows_gets_one_line_and_exit_code_2(command: str, tmp_path: Path) -> None:
    answer = cli(*command.split(), "--no-such-option", cwd=tmp_path)

    assert answer.code == 2
    assert answer.out == ""
    told = r"bullpen: no such option '--no-such-option'(\. Did you mean '--[\w-]+'\?|;) see 'bullpen {}'\n"
    assert re.fullmatch(told.format(re.escape(f"{command} --help")), answer.err), answer.err


def _wrong_values() -> Iterator[tuple[str, str, str]]:
    """For every option with a type, something that is not of it."""
    for name, command in COMMANDS.items():
        for each in command.parameters:
            if isinstance(each.given, Argument) or each.given.hidden or each.kind is bool:
                continue
            if each.choices or each.kind in (int, float):
                yield name, each.option_names[0], "no-such-value"
            elif each.metavar == "TIME" and "ISO" not in each.given.help:
                yield name, each.option_names[0], "soon"


@pytest.mark.parametrize(("command", "option", "value"), list(_wrong_values()))
def test_a_value_that_makes_no_sense_gets_one_line_and_exit_code_2(
    command: str, option: str, value: str, tmp_path: Path
) -> None:
    """Before anything is opened: no server is there."""
    needed = {
        "runs start": ["--tenant", "a", "--version", "v", "--definition", "{}"],
        "runs retry": ["--tenant", "a", "x"],
        "runs credits grant": ["--tenant", "a", "--reference", "b"],
        "outbox destinations replay": ["--label", "x", "--yes"],
        "outbox redrive": ["--all"],
        "projectors backfill": ["--since", "0", "--yes"],
        "schedules preview": ["--every", "1m"],
        "schedules add": ["--every", "1m"],
    }
    arguments = [
        "shop" if each.metavar == "MODULE:APP" else "1"
        for each in COMMANDS[command].parameters
        if isinstance(each.given, Argument) and each.is_required
    ]
    (tmp_path / "shop.py").write_text("from bullpen import Bullpen\napp = Bullpen()\n")

    answer = cli(
        *command.split(), *arguments, *needed.get(command, []), option, value, cwd=tmp_path,
        env={"BULLPEN_REDIS_URL": "redis://127.0.0.1:1", "BULLPEN_DATABASE_URL": "sqlite:////nowhere/x"},
    )  # fmt: skip

    assert (answer.code, answer.out) == (2, ""), answer
    assert answer.err.startswith("bullpen: ")
    assert answer.err.count("\n") == 1
    assert f"'{option}'" in answer.err


def test_the_warm_process_shows_what_a_cold_start_shows(world: dict[str, str], warm: Warm) -> None:
    """All others here are forked from a process that has imported everything; this one shows that nothing is lost."""
    words = ("jobs", "list", "emails", "--state", "completed")
    cold = Terminal(*words, cwd=Path(world["directory"]), env=_env(world))
    code = cold.end()
    forked = warm.run(*words, cwd=Path(world["directory"]), env=_env(world))

    assert (forked.code, forked.out + forked.err) == (code, cold.text)
