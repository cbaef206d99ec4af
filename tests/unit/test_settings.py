"""Settings: which source wins, and what the message says when a value cannot be used."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bullpen.errors import InvalidOption, NotConfigured
from bullpen.messages import SchedulerOptions
from bullpen.ops.alert_options import AlertTiming, SymptomLimits
from bullpen.outbox import DispatcherOptions
from bullpen.runs import RunOptions
from bullpen.settings import RedisSettings, Setting, Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory at which the search for files ends, so that files above it on this machine do not matter."""
    (tmp_path / ".git").mkdir()
    return tmp_path


def load(project: Path, environ: Mapping[str, str] | None = None, **arguments: object) -> Settings:
    return Settings.load(environ=environ or {}, start=project, **arguments)


def refusal(project: Path, environ: Mapping[str, str] | None = None, **arguments: object) -> InvalidOption:
    with pytest.raises(InvalidOption) as caught:
        load(project, environ, **arguments)
    return caught.value


class TestRedisAddress:
    TOML = '[redis]\nurl = "redis://from-file:1"\n'

    def test_an_argument_wins_over_everything(self, project: Path) -> None:
        (project / "bullpen.toml").write_text(self.TOML)
        environ = {"BULLPEN_REDIS_URL": "redis://from-url:2", "REDIS_HOST": "from-host"}

        settings = load(project, environ, redis_url="rediss://from-argument:3")

        assert settings.redis.url == "rediss://from-argument:3"
        assert str(settings.origins["redis.url"]) == "argument redis_url"

    def test_our_own_variable_wins_over_the_general_ones(self, project: Path) -> None:
        environ = {"BULLPEN_REDIS_URL": "redis://from-url:2", "REDIS_HOST": "from-host"}

        settings = load(project, environ)

        assert settings.redis.url == "redis://from-url:2"
        assert str(settings.origins["redis.url"]) == "environment variable BULLPEN_REDIS_URL"

    def test_host_and_port_win_over_the_file(self, project: Path) -> None:
        (project / "bullpen.toml").write_text(self.TOML)

        settings = load(project, {"REDIS_HOST": "cache", "REDIS_PORT": "7000"})

        assert settings.redis.url == "redis://cache:7000"
        assert str(settings.origins["redis.url"]) == "environment variable REDIS_HOST and REDIS_PORT"

    def test_the_file_wins_over_the_embedded_server(self, project: Path) -> None:
        (project / "bullpen.toml").write_text(self.TOML)

        settings = load(project)

        assert settings.connection_url() == "redis://from-file:1"
        assert str(settings.origins["redis.url"]) == f"redis.url in {project / 'bullpen.toml'}"

    def test_without_any_address_the_embedded_server_of_the_project_is_used(self, project: Path) -> None:
        settings = load(project)

        assert settings.redis.url is None
        assert settings.connection_url() == f"embedded://{project}/.bullpen"

    @pytest.mark.requirement("O-62", "X-26")
    @pytest.mark.parametrize(
        ("environ", "url"),
        [
            ({"REDIS_HOST": "cache"}, "redis://cache:6379"),
            ({"REDIS_PORT": "7000"}, "redis://localhost:7000"),
            ({"REDIS_HOST": "::1"}, "redis://[::1]:6379"),
            ({"REDIS_HOST": "", "REDIS_PORT": ""}, None),
        ],
    )
    def test_host_or_port_alone_is_enough(self, project: Path, environ: dict[str, str], url: str | None) -> None:
        assert load(project, environ).redis.url == url

    @pytest.mark.parametrize("host", ["redis://cache", "cache:6379", "two words", "user@cache"])
    def test_an_address_in_the_place_of_a_host_is_refused(self, project: Path, host: str) -> None:
        assert str(refusal(project, {"REDIS_HOST": host})) == (
            f"environment variable REDIS_HOST: expected a host name without scheme or port, got {host!r}"
        )

    @pytest.mark.parametrize("port", ["0", "65536", "-1", "abc", "6379 "])
    def test_a_port_that_cannot_be_is_refused(self, project: Path, port: str) -> None:
        assert str(refusal(project, {"REDIS_PORT": port})) == (
            f"environment variable REDIS_PORT: expected a port from 1 to 65535, got {port!r}"
        )

    def test_the_variable_that_kubernetes_injects_is_explained(self, project: Path) -> None:
        """A service called "redis" puts REDIS_PORT=tcp://… into every pod; that puzzles everyone once."""
        assert "enableServiceLinks: false" in str(refusal(project, {"REDIS_PORT": "tcp://10.0.0.1:6379"}))

    def test_what_is_not_used_is_not_checked(self, project: Path) -> None:
        environ = {"BULLPEN_REDIS_URL": "redis://cache", "REDIS_PORT": "tcp://10.0.0.1:6379"}

        assert load(project, environ).redis.url == "redis://cache"

    @pytest.mark.parametrize(
        "url",
        [
            "redis://cache:6379/1",
            "rediss://:secret@cache",
            "unix:///run/redis.sock",
            "redis+sentinel://a,b/main",
            "redis+cluster://a,b",
            "embedded:///var/lib/jobs",
        ],
    )
    def test_every_form_of_address_is_taken_as_it_is(self, project: Path, url: str) -> None:
        assert load(project, {"BULLPEN_REDIS_URL": url}).connection_url() == url

    @pytest.mark.parametrize("url", ["cache:6379", "http://cache", "redis://", "redis://a\nb"])
    def test_another_address_is_refused_with_the_forms_that_work(self, project: Path, url: str) -> None:
        error = refusal(project, {"BULLPEN_REDIS_URL": url})

        assert error.option == "environment variable BULLPEN_REDIS_URL"
        assert error.expected.startswith("an address that starts with redis://, rediss://, unix://")

    @pytest.mark.parametrize(
        "url", ["http://user:pa:ss@wo/rd@cache", "http://:pa:ss@wo/rd@cache", "http://cache?password=pa:ss@wo/rd"]
    )
    def test_a_refused_address_is_shown_without_its_password(self, project: Path, url: str) -> None:
        """The message ends in logs, and in reports that are sent to us."""
        error = refusal(project, {"BULLPEN_REDIS_URL": url})

        assert "wo/rd" not in str(error)
        assert "wo/rd" not in str(error.value)


class TestEmbedded:
    @pytest.mark.parametrize("source", ["argument", "environment", "file"])
    def test_without_an_address_never_means_an_error(self, project: Path, source: str) -> None:
        """In production a forgotten address must not start a private, empty server."""
        environ: dict[str, str] = {}
        arguments: dict[str, Any] = {}
        match source:
            case "argument":
                arguments["embedded_mode"] = "never"
            case "environment":
                environ["BULLPEN_EMBEDDED"] = "never"
            case _:
                (project / "bullpen.toml").write_text('[embedded]\nmode = "never"\n')
        settings = load(project, environ, **arguments)

        with pytest.raises(NotConfigured) as caught:
            settings.connection_url()

        assert str(settings.origins["embedded.mode"]) in str(caught.value)
        assert "set BULLPEN_REDIS_URL, or REDIS_HOST and REDIS_PORT" in str(caught.value)

    def test_another_mode_is_refused(self, project: Path) -> None:
        assert str(refusal(project, {"BULLPEN_EMBEDDED": "no"})) == (
            "environment variable BULLPEN_EMBEDDED: expected 'auto' or 'never', got 'no'"
        )

    @pytest.mark.parametrize("mark", ["pyproject.toml", ".git", ".bullpen"])
    def test_data_lies_beside_the_nearest_mark_of_a_project(self, tmp_path: Path, mark: str) -> None:
        """Producer and worker started in different folders of one project must find the same server."""
        (tmp_path / ".git").mkdir()
        inner, deep = tmp_path / "service", tmp_path / "service" / "a" / "b"
        deep.mkdir(parents=True)
        (inner / mark).mkdir() if mark != "pyproject.toml" else (inner / mark).touch()

        settings = load(deep)

        assert settings.embedded.data_dir == inner / ".bullpen"
        assert str(settings.origins["embedded.data_dir"]) == f"default (beside {inner / mark})"

    def test_outside_of_a_project_data_lies_in_the_working_directory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Path, "exists", lambda self: False)

        settings = Settings.load(environ={}, start=Path("/nowhere/at/all"))

        assert settings.embedded.data_dir == Path("/nowhere/at/all/.bullpen")
        assert str(settings.origins["embedded.data_dir"]) == "default (in the working directory)"

    def test_a_relative_directory_in_the_environment_starts_where_we_do(self, project: Path) -> None:
        assert load(project, {"BULLPEN_DATA_DIR": "data"}).embedded.data_dir == project / "data"

    def test_a_relative_directory_in_a_file_starts_at_the_file(self, project: Path) -> None:
        (project / "bullpen.toml").write_text('[embedded]\ndata_dir = "data"\n')
        (project / "deep").mkdir()

        assert load(project / "deep").embedded.data_dir == project / "data"

    def test_home_may_be_written_short(self, project: Path) -> None:
        assert load(project, embedded_data_dir="~/jobs").embedded.data_dir == Path.home() / "jobs"

    def test_a_directory_must_be_a_path(self, project: Path) -> None:
        assert str(refusal(project, embedded_data_dir=7)) == (
            "argument embedded_data_dir: expected the path of a directory, got 7"
        )


class TestNumbers:
    @pytest.mark.requirement("R-10")
    def test_run_concurrency_is_100_unless_told_otherwise(self, project: Path) -> None:
        assert load(project).runs.concurrency == 100
        assert load(project, {"WORKER_CONCURRENCY": "50"}).runs.concurrency == 50

    @pytest.mark.requirement("X-26", "X-116")
    @pytest.mark.parametrize("text", ["abc", "0", "-1", "1.5", "1_000", "٣", "NaN", "9" * 40])
    def test_a_concurrency_that_is_no_positive_whole_number_stops_the_start(self, project: Path, text: str) -> None:
        assert str(refusal(project, {"WORKER_CONCURRENCY": text})) == (
            f"environment variable WORKER_CONCURRENCY: expected a whole number of at least 1, or 'auto', got "
            f"{int(text) if text in ('0', '-1') else text!r}"
        )

    @pytest.mark.parametrize("value", [True, 1.0, "7"])
    def test_a_file_must_have_a_number_and_not_something_like_it(self, project: Path, value: object) -> None:
        path = project / "bullpen.toml"
        path.write_text(f"[runs]\nconcurrency = {str(value).lower() if value is True else repr(value)}\n")

        assert str(refusal(project)).startswith(
            f"runs.concurrency in {path}: expected a whole number of at least 1, or 'auto', got "
        )

    def test_an_argument_must_be_a_number_too(self, project: Path) -> None:
        assert str(refusal(project, runs_concurrency="7")) == (
            "argument runs_concurrency: expected a whole number of at least 1, or 'auto', got '7'"
        )

    @pytest.mark.parametrize("text", ["auto", " auto "])
    def test_run_concurrency_may_be_left_to_the_worker(self, project: Path, text: str) -> None:
        assert load(project, {"WORKER_CONCURRENCY": text}).runs.concurrency == "auto"

    def test_an_empty_variable_is_not_set(self, project: Path) -> None:
        """Compose files pass `${NAME:-}` on as an empty text."""
        assert load(project, {"WORKER_CONCURRENCY": ""}).runs.concurrency == 100

    def test_spaces_around_a_number_do_not_matter(self, project: Path) -> None:
        assert load(project, {"WORKER_CONCURRENCY": " 8 "}).runs.concurrency == 8


class TestMessages:
    @pytest.mark.requirement("S-20", "S-41", "S-42")
    def test_defaults(self, project: Path) -> None:
        messages = load(project).messages

        assert (messages.concurrency, messages.max_retries, messages.retry_delay_ms) == (5, 5, 2_000)
        assert messages.retry_backoff == "exponential"

    @pytest.mark.requirement("S-20", "S-41", "S-42", "X-26")
    def test_each_value_has_its_variable(self, project: Path) -> None:
        environ = {
            "QUEUE_CONCURRENCY": "7",
            "QUEUE_MAX_RETRIES": "0",
            "QUEUE_RETRY_DELAY": "50",
            "QUEUE_RETRY_BACKOFF": "linear",
        }

        messages = load(project, environ).messages

        assert (messages.concurrency, messages.max_retries, messages.retry_delay_ms) == (7, 0, 50)
        assert messages.retry_backoff == "linear"

    @pytest.mark.requirement("S-42")
    def test_another_backoff_is_refused(self, project: Path) -> None:
        assert str(refusal(project, {"QUEUE_RETRY_BACKOFF": "fixed"})) == (
            "environment variable QUEUE_RETRY_BACKOFF: expected 'exponential' or 'linear', got 'fixed'"
        )

    @pytest.mark.requirement("X-2")
    def test_five_retries_are_six_attempts(self, project: Path) -> None:
        assert load(project, {"QUEUE_MAX_RETRIES": "5"}).messages.max_attempts == 6

    @pytest.mark.requirement("X-27")
    def test_the_two_concurrencies_do_not_touch_each_other(self, project: Path) -> None:
        settings = load(project, {"QUEUE_CONCURRENCY": "7", "WORKER_CONCURRENCY": "9"})

        assert (settings.messages.concurrency, settings.runs.concurrency) == (7, 9)


class TestFile:
    def test_pyproject_configures_us_in_its_tool_table(self, project: Path) -> None:
        path = project / "pyproject.toml"
        path.write_text('[project]\nname = "x"\n[tool.bullpen.redis]\nprefix = "{bull}"\n')

        settings = load(project)

        assert settings.redis.prefix == "{bull}"
        assert str(settings.origins["redis.prefix"]) == f"tool.bullpen.redis.prefix in {path}"

    def test_our_own_file_wins_over_pyproject(self, project: Path) -> None:
        (project / "pyproject.toml").write_text('[tool.bullpen.redis]\nprefix = "a"\n')
        (project / "bullpen.toml").write_text('[redis]\nprefix = "b"\n')

        assert load(project).redis.prefix == "b"

    def test_the_nearest_file_wins_and_one_without_our_table_is_passed_over(self, project: Path) -> None:
        (project / "bullpen.toml").write_text('[redis]\nprefix = "outer"\n')
        inner = project / "a" / "b"
        inner.mkdir(parents=True)
        (inner / "pyproject.toml").write_text('[project]\nname = "x"\n')

        assert load(inner).redis.prefix == "outer"

        (project / "a" / "bullpen.toml").write_text('[redis]\nprefix = "inner"\n')
        assert load(inner).redis.prefix == "inner"

    def test_a_file_is_parsed_once_and_again_when_it_has_changed(
        self, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each queue without a prefix asks, and the pyproject.toml of an application may be long."""
        parsed: list[str] = []
        parse = tomllib.loads

        def loads(text: str) -> dict[str, Any]:
            parsed.append(text)
            return parse(text)

        monkeypatch.setattr(tomllib, "loads", loads)
        (project / "pyproject.toml").write_text('[tool.bullpen.redis]\nprefix = "one"\n')

        assert {load(project).redis.prefix for _ in range(3)} == {"one"}
        assert len(parsed) == 1
        (project / "pyproject.toml").write_text('[tool.bullpen.redis]\nprefix = "two"\n')
        assert load(project).redis.prefix == "two"

    def test_the_search_ends_with_the_repository(self, project: Path) -> None:
        """A file that somebody left in a directory above must not redirect the jobs of this project."""
        (project / "bullpen.toml").write_text('[redis]\nprefix = "outer"\n')
        inner = project / "checkout"
        (inner / ".git").mkdir(parents=True)

        assert load(inner).redis.prefix == "bull"

    def test_a_wrong_section_names_the_nearest_right_one(self, project: Path) -> None:
        path = project / "bullpen.toml"
        path.write_text("[rediss]\n")

        sections = ", ".join(entry.name for entry in dataclasses.fields(Settings) if entry.name != "origins")
        assert str(refusal(project)) == (
            f"a section of the file in {path}: expected one of {sections}, got 'rediss'; did you mean 'redis'?"
        )

    def test_a_wrong_key_names_the_nearest_right_one(self, project: Path) -> None:
        path = project / "pyproject.toml"
        path.write_text('[tool.bullpen.redis]\nprefx = "a"\n')

        assert str(refusal(project)) == (
            f"a key of tool.bullpen.redis in {path}: expected one of url, prefix, got 'prefx'; did you mean 'prefix'?"
        )

    @pytest.mark.parametrize(
        ("content", "option"),
        [
            ("redis = 7\n", "redis"),
            ("tool.bullpen = 7\n", "tool.bullpen"),
            ("tool.bullpen.redis = 7", "tool.bullpen.redis"),
        ],
    )
    def test_a_section_that_is_no_table_is_refused(self, project: Path, content: str, option: str) -> None:
        path = project / ("pyproject.toml" if content.startswith("tool") else "bullpen.toml")
        path.write_text(content)

        assert str(refusal(project)) == f"{option} in {path}: expected a table, got 7"

    @pytest.mark.parametrize("content", [b"[redis\n", b"\xff\xfe"])
    def test_a_file_that_cannot_be_read_is_named(self, project: Path, content: bytes) -> None:
        path = project / "bullpen.toml"
        path.write_bytes(content)

        assert str(refusal(project)).startswith(f"{path}: expected a readable TOML file, got ")


class TestNames:
    def test_every_setting_has_a_variable_with_our_prefix(self) -> None:
        assert [each.key for each in Settings().describe() if not str(each.variable).startswith("BULLPEN_")] == []

    @pytest.mark.requirement("X-26")
    def test_names_without_a_prefix_are_those_of_the_requirements(self) -> None:
        """Another program's QUEUE_… must not change how this one works; what users were promised stays."""
        listed = " ".join(
            entry["sentence"]
            for entry in tomllib.loads((ROOT / "tests" / "requirements.toml").read_text())["requirements"]
        )

        general = [name for each in Settings().describe() for name in re.findall(r"[A-Z]+_[A-Z_]+", each.general or "")]

        assert len(general) > 15
        assert [name for name in general if name not in listed] == []

    TWO_VALUES: ClassVar = {
        "messages.schedule": ("* * * * *", "0 * * * *"),
        "messages.retry_backoff": ("linear", "exponential"),
        "rabbitmq.url": ("amqp://theirs", "amqp://ours"),
        "events.connection_string": ("esdb://theirs", "esdb://ours"),
        "kafka.brokers": ("theirs:1", "ours:1"),
    }

    @pytest.mark.parametrize(
        "each",
        [each for each in Settings().describe() if each.general is not None and each.key != "redis.url"],
        ids=lambda each: each.key,
    )
    def test_the_name_with_our_prefix_wins(self, project: Path, each: Setting) -> None:
        plain = ("7", "8") if each.value.isdecimal() else ("theirs", "ours")
        theirs, ours = self.TWO_VALUES.get(each.key, plain)
        assert each.general is not None and each.variable is not None

        def taken(environ: dict[str, str]) -> Setting:
            return next(found for found in load(project, environ).describe() if found.key == each.key)

        alone, both = taken({each.general: theirs}), taken({each.general: theirs, each.variable: ours})

        assert (alone.value, str(alone.origin), alone.is_general) == (
            theirs,
            f"environment variable {each.general}",
            True,
        )
        assert (both.value, str(both.origin), both.is_general) == (ours, f"environment variable {each.variable}", False)


class TestYesOrNo:
    @pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), (" False ", False), ("0", False)])
    def test_a_variable_says_it_in_words_or_digits(self, project: Path, text: str, value: bool) -> None:
        assert load(project, {"BULLPEN_OUTBOX_FAIR_TENANTS": text}).outbox.fair_tenants is value

    def test_another_word_is_refused(self, project: Path) -> None:
        assert str(refusal(project, {"BULLPEN_OUTBOX_FAIR_TENANTS": "maybe"})) == (
            "environment variable BULLPEN_OUTBOX_FAIR_TENANTS: expected true or false, got 'maybe'"
        )


class TestArguments:
    def test_none_is_not_given(self, project: Path) -> None:
        """A command line passes all its options on, and most of them are None."""
        assert load(project, {"BULLPEN_PREFIX": "jobs"}, redis_prefix=None).redis.prefix == "jobs"

    def test_a_wrong_name_is_refused_even_without_a_value(self, project: Path) -> None:
        error = refusal(project, redis_ulr=None)

        assert error.suggestion == "redis_url"
        assert error.option == "an argument of Settings.load"

    @pytest.mark.parametrize("prefix", ["bull:", " bull", "bu\nll", 7])
    def test_a_prefix_that_keys_cannot_have_is_refused(self, project: Path, prefix: object) -> None:
        assert refusal(project, redis_prefix=prefix).option == "argument redis_prefix"


class TestShowing:
    def test_every_value_is_shown_with_its_origin_and_its_variable(self, project: Path) -> None:
        settings = load(project, {"WORKER_CONCURRENCY": "50"})

        shown = {setting.key: setting for setting in settings.describe()}

        assert set(shown) == set(settings.origins)
        concurrency = shown["runs.concurrency"]
        assert (concurrency.value, concurrency.variable) == ("50", "BULLPEN_RUNS_CONCURRENCY")
        assert (concurrency.general, concurrency.is_general) == ("WORKER_CONCURRENCY", True)
        assert str(concurrency.origin) == "environment variable WORKER_CONCURRENCY"
        assert (shown["redis.url"].value, str(shown["redis.url"].origin)) == ("", "default")

    @pytest.mark.requirement("O-64")
    def test_a_password_is_never_shown(self, project: Path) -> None:
        settings = load(project, redis_url="redis://ada:pa:ss@word@cache:6379/1")

        shown = {setting.key: setting.value for setting in settings.describe()}

        assert shown["redis.url"] == "redis://ada:***@cache:6379/1"
        assert "ss@word" not in repr(settings)

    def test_settings_made_by_hand_can_be_shown_and_used(self) -> None:
        settings = Settings(redis=RedisSettings(url="redis://cache"))

        assert settings.connection_url() == "redis://cache"
        assert {str(setting.origin) for setting in settings.describe()} == {"default"}


def test_settings_cannot_be_changed_after_they_were_checked(project: Path) -> None:
    settings = load(project)

    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.runs.concurrency = 0  # type: ignore[misc]  # that is the point
    with pytest.raises(TypeError):
        settings.origins["redis.url"] = settings.origins["redis.prefix"]  # type: ignore[index]  # that is the point


def test_the_environment_and_directory_of_the_process_are_used_unless_given(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setenv("WORKER_CONCURRENCY", "12")

    settings = Settings.load()

    assert settings.runs.concurrency == 12
    assert settings.embedded.data_dir == project / ".bullpen"


class TestOwners:
    def test_a_section_inherits_the_options_of_their_owner(self, project: Path) -> None:
        """Written once: default, limit and meaning stand where they are used."""
        alerts = load(project, {"BULLPEN_ALERTS_QUEUE_LATE_MS": "5", "BULLPEN_ALERTS_GROWTH": "7"}).alerts

        assert isinstance(alerts, SymptomLimits)
        assert isinstance(alerts, AlertTiming)
        assert (alerts.queue_late_ms, alerts.growth, alerts.hold_ms) == (5, 7, AlertTiming().hold_ms)
        assert refusal(project, {"BULLPEN_ALERTS_GROWTH": "0"}).expected == "a whole number of at least 1"

    @pytest.mark.parametrize(
        ("section", "owner"), [("outbox", DispatcherOptions), ("messages", SchedulerOptions), ("runs", RunOptions)]
    )
    def test_what_an_owner_has_too_has_its_default(self, section: str, owner: type[Any]) -> None:
        """These owners need a database driver, so their sections cannot inherit from them."""
        ours = getattr(Settings(), section)
        shared = {entry.name for entry in dataclasses.fields(owner)} & {
            entry.name for entry in dataclasses.fields(ours)
        }

        assert shared
        assert {name: getattr(ours, name) for name in shared} == {name: getattr(owner(), name) for name in shared}
