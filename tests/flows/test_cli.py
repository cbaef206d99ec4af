"""The command line: what it prints, what it changes, and how it fails."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bullpen import _version
from bullpen.queue import Job, Queue
from bullpen.worker import Worker
from tests.flows._cli import COMMAND, Terminal, cli, cli_process, environment

T = TypeVar("T")


def on(redis_url: str, queue: str, action: Callable[[Queue], Awaitable[T]]) -> T:
    """Do something with a queue from outside of the command."""

    async def run() -> T:
        async with Queue(queue, connection=redis_url) as opened:
            return await action(opened)

    return asyncio.run(run())


def bury(redis_url: str, queue: str, count: int) -> None:
    """Make dead letters."""

    async def fail(job: Job) -> None:
        raise ValueError(f"no stamp for {job.data['to']}")

    async def run() -> None:
        async with Queue(queue, connection=redis_url) as opened:
            jobs = await opened.add_many([("letter", {"to": f"person-{n}"}) for n in range(count)])
            policy = {"dead_letters": True, "permanent_errors": (ValueError,), "concurrency": 10}
            async with Worker(queue, fail, connection=redis_url, **policy):  # type: ignore[arg-type]  # a plain dict
                await asyncio.gather(*(job.result(timeout=20_000) for job in jobs), return_exceptions=True)

    asyncio.run(run())


# Failing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("nonsense", "no such command 'nonsense'"),
        ("queues --colour", "no such option '--colour'"),
        ("queues --redis localhost", "--redis: expected an address that starts with redis://"),
        ("queues --prefix bull:", "--prefix: expected"),
        ("jobs sohw emails 5", "no such command 'sohw'; did you mean 'show'? see 'bullpen jobs --help'"),
        ("jobs emails", "no such command 'emails'; there is list, show, follow, logs, add, retry, promote, change, "),
        ("queues drian emails", "no such command 'drian'; there is list, "),
        ("jobs remvoe emails 5", "no such command 'remvoe'; there is list, "),
        ("jobs list emails --state gone", "'gone' is not one of"),
        ("jobs list", "missing argument 'QUEUE'"),
        ("jobs add emails", "missing argument 'NAME'"),
        ("jobs add emails hi --data {", "invalid value for '--data': { is not JSON"),
        ("jobs add emails hi --delay soon", "invalid value for '--delay': 'soon' is no duration"),
        (
            "dead-letters redrive emails",
            "select them with --name, --error, --group or --older-than, or pass --all",
        ),
        ("dead-letters redrive emails dl-1-1 --all", "name the entries, select them"),
        ("dead-letters redrive emails --all --name hi", "name the entries, select them"),
        ("dead-letters discard emails --all", "needs --yes without a terminal to confirm on"),
        ("run", "missing argument 'MODULE:APP'"),
        ("run shop:app --concurrency many", "--concurrency: a number of at least 1, or auto, not 'many'"),
        ("run shop:app --concurrency 0", "--concurrency: a number of at least 1, or auto, not '0'"),
        ("run nowhere:app", "there is no module 'nowhere'"),
        ("demo --jobs 0", "invalid value for '--jobs'"),
        ("demo --stay --json", "choose one"),
    ],
)
def test_a_wrong_command_gets_one_line_and_exit_code_2(arguments: str, told: str, tmp_path: Path) -> None:
    answer = cli(*arguments.split(), cwd=tmp_path)

    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("bullpen: ")
    assert told in answer.err
    assert answer.err.count("\n") == 1


def test_options_of_jobs_are_checked_as_in_a_program(redis_url: str, tmp_path: Path) -> None:
    answer = cli("jobs", "add", "emails", "hi", "--attempts", "0", "--redis", redis_url, cwd=tmp_path)

    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "bullpen: attempts: expected a whole number, at least 1, got 0\n"


def test_a_real_process_answers_the_same(tmp_path: Path) -> None:
    """Most tests here run the command in their own process; this one shows that nothing is lost by that."""
    wrong = cli_process("queues", "--colour", cwd=tmp_path)
    away = cli_process("queues", "--redis", "redis://127.0.0.1:1", cwd=tmp_path)

    assert wrong == cli("queues", "--colour", cwd=tmp_path)
    assert away == cli("queues", "--redis", "redis://127.0.0.1:1", cwd=tmp_path)
    assert (wrong.code, away.code) == (2, 3)


@pytest.mark.parametrize("command", ["queues", "jobs list emails", "dead-letters list emails", "demo"])
def test_a_server_that_is_not_there_gets_one_line_and_exit_code_3(command: str, tmp_path: Path) -> None:
    """At once: a person at a prompt does not want to wait the minute that a program would."""
    answer = cli(*command.split(), "--redis", "redis://127.0.0.1:1", cwd=tmp_path)

    assert (answer.code, answer.out) == (3, "")
    assert answer.err.startswith("bullpen: cannot connect to 127.0.0.1:1")
    assert answer.err.count("\n") == 1


def test_without_the_extra_the_command_prints_the_pip_line(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['click'] = None; import bullpen.cli; bullpen.cli.main()"

    answer = subprocess.run([sys.executable, "-c", hidden], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert answer.returncode == 2
    assert answer.stderr == 'bullpen: the command line needs the extra "cli": pip install "bullpen-mq[cli]"\n'


def test_an_error_of_our_own_is_not_mistaken_for_the_missing_extra(tmp_path: Path) -> None:
    broken = (
        "import sys; sys.modules['msgspec'] = None; sys.argv = ['', 'queues']; import bullpen.cli; bullpen.cli.main()"
    )

    answer = subprocess.run([sys.executable, "-c", broken], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert "msgspec" in answer.stderr
    assert "pip install" not in answer.stderr


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_a_reader_that_has_seen_enough_is_no_error(form: list[str], redis_url: str, tmp_path: Path) -> None:
    on(redis_url, "emails", lambda queue: queue.add_many([("welcome" * 20, {"to": "x" * 200})] * 500))
    listing = shlex.join([*COMMAND, "jobs", "list", "emails", "--limit", "500", "--redis", redis_url, *form])

    answer = subprocess.run(
        ["bash", "-c", f"{listing} | head -c 10; exit ${{PIPESTATUS[0]}}"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert len(answer.stdout) == 10
    assert (answer.returncode, answer.stderr) == (0, "")


# Looking and changing -----------------------------------------------------------------------------------------------


def test_the_version_is_printed(tmp_path: Path) -> None:
    assert cli_process("--version", cwd=tmp_path).out == f"bullpen {_version.__version__}\n"


def test_help_names_every_command(tmp_path: Path) -> None:
    answer = cli("--help", cwd=tmp_path)

    assert answer.code == 0
    for command in ("demo", "run", "queues", "jobs", "dead-letters", "config"):
        assert command in answer.out


def test_a_job_is_added_listed_and_shown(redis_url: str, tmp_path: Path) -> None:
    def run(*arguments: str, stdin: str = "") -> Any:
        answer = cli(*arguments, "--redis", redis_url, "--json", cwd=tmp_path, stdin=stdin)
        assert (answer.code, answer.err) == (0, "")
        return json.loads(answer.out)

    assert run("jobs", "add", "emails", "welcome", "--data", '{"to": "ada"}') == {"id": "1", "added": "created"}
    run("jobs", "add", "emails", "later", "--delay", "2h", "--attempts", "7")
    run("jobs", "add", "emails", "soon", "--priority", "3", "--id", "my-own", "--data", "-", stdin="[1, 2]")

    listed = run("jobs", "list", "emails")
    assert [(job["id"], job["name"], job["state"]) for job in listed] == [
        ("1", "welcome", "waiting"),
        ("my-own", "soon", "prioritized"),
        ("2", "later", "delayed"),
    ]
    assert listed[0]["data"] == {"to": "ada"}
    assert listed[2]["opts"]["attempts"] == 7
    assert listed[2]["delay"] == 7_200_000
    assert [job["id"] for job in run("jobs", "list", "emails", "--state", "delayed")] == ["2"]

    shown = run("jobs", "show", "emails", "my-own")
    assert (shown["state"], shown["data"], shown["logs"]) == ("prioritized", [1, 2], [])

    (queue,) = run("queues")
    assert (queue["queue"], queue["waiting"], queue["prioritized"], queue["delayed"]) == ("emails", 1, 1, 1)


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ("--ttl 15m", {"ttl": 900_000}),
        ("--urgency 2097151", {"priority": 1}),
        ("--lifo", {"lifo": True}),
        ("--backoff 5s", {"backoff": {"type": "fixed", "delay": 5_000}}),
        ("--backoff exponential:1m", {"backoff": {"type": "exponential", "delay": 60_000}}),
        ("--keep-completed 7", {"removeOnComplete": 7}),
        ("--keep-failed 0", {"removeOnFail": 0}),
    ],
)
def test_options_of_a_job_are_those_of_a_program(
    redis_url: str, tmp_path: Path, options: str, stored: dict[str, Any]
) -> None:
    added = cli("jobs", "add", "emails", "hi", *options.split(), "--redis", redis_url, "--json", cwd=tmp_path)

    assert (added.code, added.err) == (0, "")
    shown = cli("jobs", "show", "emails", json.loads(added.out)["id"], "--redis", redis_url, "--json", cwd=tmp_path)
    opts = json.loads(shown.out)["opts"]
    assert {name: opts.get(name) for name in stored} == stored


def test_a_job_may_be_added_for_a_time_of_the_clock(redis_url: str, tmp_path: Path) -> None:
    at = ("--at", "2100-01-01T00:00:00Z", "--redis", redis_url, "--json")
    added = json.loads(cli("jobs", "add", "emails", "hi", *at, cwd=tmp_path).out)

    shown = cli("jobs", "show", "emails", added["id"], "--redis", redis_url, "--json", cwd=tmp_path)
    job = json.loads(shown.out)

    assert job["state"] == "delayed"
    assert job["timestamp"] + job["delay"] == pytest.approx(4_102_444_800_000, abs=120_000)


def test_a_level_that_the_server_cannot_keep_is_told(redis_url: str, tmp_path: Path) -> None:
    answer = cli("jobs", "add", "emails", "hi", "--durability", "replicated(9)", "--redis", redis_url, cwd=tmp_path)

    assert answer.code == 2
    assert "at least 9 connected replicas" in answer.err


def test_a_finished_job_is_replaced_when_that_is_said(redis_url: str, tmp_path: Path) -> None:
    async def finish() -> None:
        async with Queue("emails", connection=redis_url) as queue:
            job = await queue.add("hi", job_id="a-1")
            await job.cancel()

    asyncio.run(finish())
    common = ("jobs", "add", "emails", "hi", "--id", "a-1", "--redis", redis_url)

    assert cli(*common, cwd=tmp_path).code == 1
    replaced = cli(*common, "--replace-finished", cwd=tmp_path)

    assert (replaced.code, replaced.out) == (0, "added job a-1 to emails\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--at tomorrow", "'tomorrow' is not a time with a zone"),
        ("--ttl soon", "'soon' is no duration"),
        ("--backoff exponential", "'exponential' is no duration"),
        ("--durability disk", "durability: expected"),
        ("--urgency 1 --priority 1", "urgency: expected"),
    ],
)
def test_options_that_make_no_sense_are_told(redis_url: str, tmp_path: Path, options: str, said: str) -> None:
    answer = cli("jobs", "add", "emails", "hi", *options.split(), "--redis", redis_url, cwd=tmp_path)

    assert answer.code == 2
    assert said in answer.err


def test_a_second_job_with_the_same_id_is_refused_with_its_state(redis_url: str, tmp_path: Path) -> None:
    first = cli("jobs", "add", "emails", "welcome", "--id", "a-1", "--redis", redis_url, cwd=tmp_path)

    second = cli("jobs", "add", "emails", "welcome", "--id", "a-1", "--redis", redis_url, cwd=tmp_path)

    assert first.out == "added job a-1 to emails\n"
    assert second.code == 1
    assert second.err == "bullpen: job 'a-1' exists in 'emails' already and is waiting; nothing was changed\n"


def test_finished_jobs_show_why_they_failed_and_what_they_returned(redis_url: str, tmp_path: Path) -> None:
    async def work(job: Job) -> str:
        await job.log("opened the letter")
        if job.name == "bad":
            raise ValueError("[red] ink")
        return "stamped"

    async def run(queue: Queue) -> None:
        jobs = await queue.add_many([("good", {}), ("bad", {})])
        async with Worker("emails", work, connection=redis_url, permanent_errors=(ValueError,)):
            await asyncio.gather(*(job.result(timeout=10_000) for job in jobs), return_exceptions=True)

    on(redis_url, "emails", run)

    listed = cli("jobs", "list", "emails", "--redis", redis_url, cwd=tmp_path).out
    shown = cli("jobs", "show", "emails", "2", "--redis", redis_url, cwd=tmp_path).out

    assert "completed" in listed
    assert "stamped" in listed
    assert "[red] ink" in listed
    assert "failed" in shown
    assert "opened the letter" in shown
    assert "Traceback" in shown


def test_a_job_that_does_not_exist_is_exit_code_1(redis_url: str, tmp_path: Path) -> None:
    on(redis_url, "emails", lambda queue: queue.add("welcome"))

    answer = cli("jobs", "show", "emails", "77", "--redis", redis_url, cwd=tmp_path)

    assert (answer.code, answer.out) == (1, "")
    assert "job '77' of queue 'emails' does not exist" in answer.err


def test_jobs_are_retried_promoted_and_removed(redis_url: str, tmp_path: Path) -> None:
    bury(redis_url, "letters", 1)
    on(redis_url, "letters", lambda queue: queue.add("later", delay=3_600_000))
    redis = ("--redis", redis_url)

    retried = cli("jobs", "retry", "letters", "1", "7", *redis, cwd=tmp_path)
    promoted = cli("jobs", "promote", "letters", "2", *redis, "--json", cwd=tmp_path)
    promoted_again = cli("jobs", "promote", "letters", "2", *redis, "--json", cwd=tmp_path)
    removed = cli("jobs", "remove", "letters", "1", "2", *redis, cwd=tmp_path)
    removed_again = cli("jobs", "remove", "letters", "1", *redis, cwd=tmp_path)

    assert (retried.code, retried.out) == (1, "retried: 1\n")
    assert "job '7' of queue 'letters' does not exist" in retried.err
    assert (promoted.code, json.loads(promoted.out)) == (0, {"promoted": ["2"], "skipped": {}})
    assert (promoted_again.code, list(json.loads(promoted_again.out)["skipped"])) == (1, ["2"])
    assert (removed.code, removed.out) == (0, "removed: 2\n")
    assert removed_again.code == 1
    assert on(redis_url, "letters", lambda queue: queue.dead_letters.depth()) == 0


def test_empty_lists_say_so_to_people_and_are_empty_for_programs(redis_url: str, tmp_path: Path) -> None:
    redis = ("--redis", redis_url)

    assert cli("queues", *redis, cwd=tmp_path).err.startswith("no queues yet; `bullpen jobs add QUEUE NAME`")
    assert json.loads(cli("queues", *redis, "--json", cwd=tmp_path).out) == []
    on(redis_url, "emails", lambda queue: queue.add("welcome"))
    cli("jobs", "remove", "emails", "1", *redis, cwd=tmp_path)
    assert cli("jobs", "list", "emails", *redis, cwd=tmp_path).err == (
        "no jobs in 'emails'; `bullpen jobs add emails NAME` adds one\n"
    )
    assert cli("dead-letters", "list", "emails", *redis, cwd=tmp_path).err == (
        "no dead letters of 'emails'; `bullpen dead-letters stats` counts all\n"
    )


def test_a_queue_is_paused_and_resumed(redis_url: str, tmp_path: Path) -> None:
    on(redis_url, "emails", lambda queue: queue.add("welcome"))

    paused = cli("queues", "pause", "emails", "--redis", redis_url, cwd=tmp_path)
    shown = cli("queues", "show", "emails", "--redis", redis_url, cwd=tmp_path)
    was_paused = on(redis_url, "emails", lambda queue: queue.is_paused())
    resumed = cli("queues", "resume", "emails", "--redis", redis_url, "--json", cwd=tmp_path)

    assert paused.out == "emails is paused\n"
    assert "paused" in shown.out.splitlines()[1]
    assert was_paused
    assert json.loads(resumed.out) == {"queue": "emails", "paused": False}
    assert not on(redis_url, "emails", lambda queue: queue.is_paused())


def test_a_misspelt_queue_is_neither_paused_nor_made(redis_url: str, tmp_path: Path) -> None:
    answer = cli("queues", "pause", "emials", "--redis", redis_url, cwd=tmp_path)

    assert answer.code == 1
    assert "there is no queue 'emials' under the prefix 'bull'" in answer.err
    assert json.loads(cli("queues", "--redis", redis_url, "--json", cwd=tmp_path).out) == []


@pytest.mark.parametrize(
    "command",
    [
        ("jobs", "list", "emials"),
        ("jobs", "show", "emials", "1"),
        ("jobs", "retry", "emials", "1"),
        ("queues", "restore", "emials"),
        ("dead-letters", "list", "emials"),
        ("dead-letters", "list", "emials-dlq"),
        ("schedules", "list", "emials"),
    ],
    ids=" ".join,
)
def test_a_misspelt_queue_is_no_empty_one(redis_url: str, tmp_path: Path, command: tuple[str, ...]) -> None:
    """A script that lists what failed must not go on because of a typing error, and a person wants the right name."""
    for queue in ("emails", "orders"):
        cli("jobs", "add", queue, "one", "--redis", redis_url, cwd=tmp_path)

    answer = cli(*command, "--redis", redis_url, cwd=tmp_path)
    as_json = cli(*command, "--redis", redis_url, "--json", cwd=tmp_path)
    far = cli(*(word.replace("emials", "zzz") for word in command), "--redis", redis_url, cwd=tmp_path)

    assert (answer.code, as_json.code, as_json.out) == (1, 1, "")
    assert "there is no queue 'emials' under the prefix 'bull'; did you mean 'emails'?" in answer.err
    assert "there is emails, orders" in far.err


def test_a_queue_that_is_empty_is_an_empty_list(redis_url: str, tmp_path: Path) -> None:
    cli("jobs", "add", "emails", "one", "--redis", redis_url, cwd=tmp_path)

    listed = cli("jobs", "list", "emails", "--state", "failed", "--redis", redis_url, "--json", cwd=tmp_path)
    letters = cli("dead-letters", "list", "emails", "--redis", redis_url, "--json", cwd=tmp_path)

    assert (listed.code, listed.out, letters.code, letters.out) == (0, "[]\n", 0, "[]\n")


def test_only_queues_under_the_prefix_are_seen(redis_url: str, tmp_path: Path) -> None:
    cli("jobs", "add", "emails", "one", "--redis", redis_url, cwd=tmp_path)
    cli("jobs", "add", "orders", "two", "--redis", redis_url, "--prefix", "shop", cwd=tmp_path)

    found = json.loads(cli("queues", "--redis", redis_url, "--prefix", "shop", "--json", cwd=tmp_path).out)

    assert [queue["queue"] for queue in found] == ["orders"]


def test_the_environment_configures_the_command(redis_url: str, tmp_path: Path) -> None:
    env = {"BULLPEN_REDIS_URL": redis_url, "BULLPEN_PREFIX": "shop"}
    cli("jobs", "add", "orders", "two", cwd=tmp_path, env=env)

    found = json.loads(cli("queues", "--json", cwd=tmp_path, env=env).out)

    assert [queue["queue"] for queue in found] == ["orders"]


def test_without_any_configuration_the_embedded_server_keeps_the_jobs_between_commands(tmp_path: Path) -> None:
    """Each command starts the server and lets it end; what was added is still there for the next one."""
    env = {"BULLPEN_DATA_DIR": str(tmp_path / "data")}
    added = cli_process("jobs", "add", "emails", "welcome", cwd=tmp_path, env=env)

    listed = cli_process("jobs", "list", "emails", "--json", cwd=tmp_path, env=env)

    assert added.out == "added job 1 to emails\n"
    again = cli_process("jobs", "list", "emails", cwd=tmp_path, env=env)
    assert "using the embedded server in" in added.err
    assert again.err == "", "whoever types ten commands knows after the first one"
    assert [job["name"] for job in json.loads(listed.out)] == ["welcome"]
    assert listed.err == ""


def test_commands_tell_of_a_server_nearby_only_the_first_time(tmp_path: Path) -> None:
    for name in ("shop", "worker"):
        (tmp_path / name).mkdir()
    cli_process("jobs", "add", "emails", "welcome", cwd=tmp_path / "shop")

    first = cli_process("jobs", "add", "emails", "welcome", cwd=tmp_path / "worker")
    again = cli_process("jobs", "list", "emails", cwd=tmp_path / "worker")

    assert f"another embedded server has its data in {tmp_path / 'shop' / '.bullpen'}" in first.err
    assert again.err == ""


def test_the_configuration_is_shown_with_its_origins_and_without_passwords(tmp_path: Path) -> None:
    env = {"BULLPEN_REDIS_URL": "redis://:hunter2@example:6379"}

    shown = cli("config", "show", cwd=tmp_path, env=env)
    described = json.loads(cli("config", "show", "--json", "--prefix", "shop", cwd=tmp_path, env=env).out)

    assert "redis://:***@example:6379" in shown.out
    assert "environment variable BULLPEN_REDIS_URL" in shown.out
    assert "hunter2" not in shown.out
    by_key = {each["key"]: each for each in described}
    assert (by_key["redis.prefix"]["value"], by_key["redis.prefix"]["origin"]) == ("shop", "argument redis_prefix")


def test_a_variable_without_our_prefix_is_told_of(redis_url: str, tmp_path: Path) -> None:
    """QUEUE_CONCURRENCY of another program on the same machine changes ours, and nobody would look for it there."""
    env = {"QUEUE_CONCURRENCY": "50", "BULLPEN_EMBEDDED": "never"}
    told = "taken from QUEUE_CONCURRENCY, which has no prefix and may have been set for another program"

    shown = cli("config", "show", cwd=tmp_path, env=env)
    described = json.loads(cli("config", "show", "--json", cwd=tmp_path, env=env).out)
    advice = json.loads(cli("doctor", "--json", "--redis", redis_url, cwd=tmp_path, env=env).out)
    meant = cli("config", "show", cwd=tmp_path, env={**env, "BULLPEN_MESSAGES_CONCURRENCY": "5"})

    assert f"messages.concurrency: {told}; BULLPEN_MESSAGES_CONCURRENCY takes precedence" in shown.err
    assert [each["key"] for each in described if each["isGeneral"]] == ["messages.concurrency"]
    assert [(each["level"], each["message"]) for each in advice if each["subject"] == "settings"] == [("unknown", told)]
    assert meant.err == ""


# Dead letters -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X-40", "X-42")
def test_dead_letters_are_listed_shown_redriven_and_discarded(redis_url: str, tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        answer = cli("dead-letters", *arguments, "--redis", redis_url, "--json", cwd=tmp_path)
        assert (answer.code, answer.err) == (0, "")
        return json.loads(answer.out)

    bury(redis_url, "letters", 4)

    listed = run("list", "letters")
    assert sorted(entry["originalData"]["to"] for entry in listed) == [f"person-{n}" for n in range(4)]
    first, second = listed[0]["id"], listed[1]["id"]
    assert run("show", "letters", first)["error"]["message"].endswith(f"no stamp for {listed[0]['originalData']['to']}")
    (queue,) = json.loads(cli("queues", "--redis", redis_url, "--json", cwd=tmp_path).out)
    assert (queue["queue"], queue["failed"], queue["deadLetters"]) == ("letters", 4, 4)

    done = {"matched": 1, "dryRun": False, "skipped": {}}
    assert run("redrive", "letters", first, "--by", "ada") == {**done, "redriven": 1}
    assert run("discard", "letters", second) == {**done, "discarded": 1}
    assert run("redrive", "letters", "--error", "stamp", "--dry-run") == {
        "matched": 2,
        "redriven": 0,
        "dryRun": True,
        "skipped": {},
    }
    assert run("redrive", "letters", "--name", "parcel")["matched"] == 0
    assert run("redrive", "letters", "--all", "--rate", "50")["redriven"] == 2

    counts = on(redis_url, "letters", lambda opened: opened.counts())
    assert (counts.waiting, counts.failed) == (3, 1)
    assert run("list", "letters") == []


def test_an_entry_that_is_gone_is_told_and_keeps_no_other_from_being_redriven(redis_url: str, tmp_path: Path) -> None:
    bury(redis_url, "letters", 1)
    redis = ("--redis", redis_url)
    (entry,) = json.loads(cli("dead-letters", "list", "letters", *redis, "--json", cwd=tmp_path).out)

    answer = cli("dead-letters", "redrive", "letters", "dl-9-9", entry["id"], *redis, cwd=tmp_path)
    programs = cli("dead-letters", "discard", "letters", "dl-9-9", *redis, "--json", cwd=tmp_path)

    assert (answer.code, answer.out) == (1, "redriven: 1\n")
    assert "'dl-9-9'" in answer.err
    assert programs.code == 1
    assert list(json.loads(programs.out)["skipped"]) == ["dl-9-9"]


def test_people_read_dead_letters_too(redis_url: str, tmp_path: Path) -> None:
    bury(redis_url, "letters", 3)
    redis = ("--redis", redis_url)

    listed = cli("dead-letters", "list", "letters", "--limit", "2", *redis, cwd=tmp_path)
    entry = listed.out.splitlines()[1].split()[0]
    shown = cli("dead-letters", "show", "letters", entry, *redis, cwd=tmp_path)

    none = cli("dead-letters", "list", "letters", "--error", "no ink", *redis, cwd=tmp_path)
    counted = cli("dead-letters", "discard", "letters", "--all", "--dry-run", *redis, cwd=tmp_path)

    assert "no stamp for" in listed.out
    assert "there are more; --limit shows more at once, --after " in listed.err
    assert none.err == "no dead letters of 'letters' like that; `bullpen dead-letters stats` counts all\n"
    assert counted.out == "would be discarded: 3\n"
    assert "originalData" in shown.out
    assert "Traceback" in shown.out


# On a terminal ------------------------------------------------------------------------------------------------------


def test_discarding_everything_asks_first(redis_url: str, tmp_path: Path) -> None:
    bury(redis_url, "letters", 25)

    refusing = Terminal("dead-letters", "discard", "letters", "--all", "--redis", redis_url, cwd=tmp_path)
    refusing.wait_for("for good")
    refusing.type("n\n")
    refused = refusing.end()
    left = on(redis_url, "letters", lambda queue: queue.dead_letters.depth())
    agreeing = Terminal("dead-letters", "discard", "letters", "--all", "--redis", redis_url, cwd=tmp_path)
    agreeing.wait_for("for good")
    agreeing.type("y\n")
    agreed = agreeing.end()

    assert (refused, left) == (130, 25)
    assert agreed == 0
    assert "discarded: 25" in agreeing.text
    assert on(redis_url, "letters", lambda queue: queue.dead_letters.depth()) == 0


def test_on_a_terminal_json_is_indented_and_tables_fit(redis_url: str, tmp_path: Path) -> None:
    on(redis_url, "emails", lambda queue: queue.add("welcome", {"to": "x" * 300}))

    listed = Terminal("jobs", "list", "emails", "--redis", redis_url, cwd=tmp_path)
    shown = Terminal("queues", "--json", "--redis", redis_url, cwd=tmp_path)

    assert (listed.end(), shown.end()) == (0, 0)
    assert max(map(len, listed.text.splitlines())) <= 100
    assert '\n    "queue": "emails"' in shown.text


def test_a_variable_that_nobody_reads_is_told(redis_url: str, tmp_path: Path) -> None:
    """In a file a wrong name is refused; a variable may be somebody else's, so only what looks misspelt is told."""
    env = {"BULLPEN_OUTBOX_LEAS_MS": "5", "BULLPEN_SERVICE_HOST": "10.0.0.1", "BULLPEN_REDIS_URL": redis_url}

    shown = cli("config", "show", cwd=tmp_path, env=env)
    advice = json.loads(cli("doctor", "--json", cwd=tmp_path, env=env).out)

    told = "BULLPEN_OUTBOX_LEAS_MS is not a setting and has no effect; did you mean BULLPEN_OUTBOX_LEASE_MS?"
    assert [line for line in shown.err.splitlines() if "not a setting" in line] == [told]
    (warning,) = [each for each in advice if each["subject"] == "settings" and each["level"] == "warning"]
    assert (warning["check"], warning["fix"]) == ("BULLPEN_OUTBOX_LEAS_MS", "set BULLPEN_OUTBOX_LEASE_MS")
