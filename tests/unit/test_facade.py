"""What `import bullpen` gives: few names, loaded late, and a default connection."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import bullpen
from bullpen import app, embedded, queue
from bullpen.queue import Queue
from bullpen.redis import Connection
from bullpen.settings import Settings
from bullpen.worker import Worker


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("BULLPEN_REDIS_URL", "BULLPEN_PREFIX", "BULLPEN_EMBEDDED", "REDIS_HOST", "REDIS_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BULLPEN_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


def fresh(source: str) -> str:
    """What a new interpreter prints: this one has loaded everything already."""
    answer = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    return answer.stdout.strip()


def test_every_listed_name_can_be_loaded_and_is_what_its_module_has() -> None:
    assert {name: getattr(bullpen, name).__name__ for name in bullpen.__all__ if name != "__version__"} == {
        name: name for name in bullpen.__all__ if name != "__version__"
    }
    assert dir(bullpen) == sorted(bullpen.__all__)


def test_the_tables_of_names_agree() -> None:
    """A name in `__all__` without a home would only fail when somebody uses it."""
    assert set(bullpen.__all__) == {*bullpen._HOME_OF, "__version__"}


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'bullpen' has no attribute 'Quue'"):
        bullpen.Quue  # type: ignore[attr-defined]  # noqa: B018 - that is the point


def test_importing_the_package_loads_no_client_and_no_event_loop() -> None:
    loaded = fresh(
        "import bullpen, sys; print([m for m in ('redis', 'hiredis', 'asyncio', 'msgspec') if m in sys.modules])"
    )

    assert loaded == "[]"


def test_who_adds_jobs_loads_neither_workers_nor_dead_letters() -> None:
    """A web process starts with each deployment; counted, since times depend on the machine. 86 when it was written:
    `from bullpen import Queue` took 0.95 of the processor time of PyPI's `from bullmq import Queue`."""
    loaded = fresh(
        "from bullpen import Queue; import sys; print(*(m for m in sys.modules if m[:7] == 'bullpen'))"
    ).split()

    assert "bullpen.queue.queue" in loaded
    assert len(loaded) <= 88
    beside = ("bullpen.queue.dead_letters", "bullpen.ports.dead_letters", "bullpen.queue.payloads", "bullpen.worker")
    assert [name for name in loaded if name.startswith(beside)] == []


def test_every_name_of_the_queue_core_can_be_loaded() -> None:
    """They are loaded late, like those of the façade."""
    assert set(queue.__all__) == set(queue._HOME_OF)
    assert {getattr(queue, name).__name__ for name in queue.__all__} == set(queue.__all__) == set(dir(queue))
    with pytest.raises(AttributeError, match=r"module 'bullpen\.queue' has no attribute 'Quue'"):
        queue.Quue  # type: ignore[attr-defined]  # noqa: B018 - that is the point


def test_importing_the_package_takes_less_than_50_ms() -> None:
    """Of the processor's time, and the best of five: other work on the machine is not ours."""
    source = "import time; t = time.process_time(); import bullpen; print(time.process_time() - t)"

    assert min(float(fresh(source)) for _ in range(5)) < 0.05


def test_a_queue_of_the_core_alone_has_no_default_connection() -> None:
    """Settings and embedded server stand above the queue; only the façade brings them together."""
    told = fresh(
        "from bullpen.queue import Queue\n"
        "try: Queue('emails')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )

    assert told.startswith("NotConfigured no connection given")


def test_naming_a_queue_or_worker_starts_no_server(tmp_path: Path) -> None:
    """Modules name their queues when they are imported; a tool that imports them must not start servers."""
    queue = bullpen.Queue("emails")
    worker = bullpen.Worker("emails", print)

    assert isinstance(queue, Queue)
    assert isinstance(worker, Worker)
    assert not (tmp_path / "data").exists()


async def test_a_queue_without_connection_uses_the_embedded_server(tmp_path: Path) -> None:
    async def double(job: bullpen.Job) -> int:
        return int(job.data["n"]) * 2

    async with bullpen.Queue("emails") as queue, bullpen.Worker("emails", double):
        job = await queue.add("double", {"n": 21})

        assert await job.result(timeout=10_000) == 42

    with embedded.acquire(tmp_path / "data") as server:
        assert server.directory == (tmp_path / "data").resolve()


async def test_an_embedded_url_names_the_directory(tmp_path: Path) -> None:
    async with bullpen.Queue("emails", connection=f"embedded://{tmp_path}/here") as queue:
        await queue.add("welcome")

        assert (await queue.counts()).waiting == 1
        assert (tmp_path / "here" / "server.json").exists()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"BULLPEN_REDIS_URL": "redis://one:7000", "REDIS_HOST": "two"}, "one:7000"),
        ({"REDIS_HOST": "two", "REDIS_PORT": "7001"}, "two:7001"),
    ],
)
def test_the_environment_names_the_server(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert str(app.connect().address) == expected
    assert str(app.connect("redis://three:7002").address) == "three:7002"


def test_the_configured_prefix_holds_for_queues_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BULLPEN_PREFIX", "shop")

    assert bullpen.Queue("emails").keys.base == "shop:emails:"
    assert bullpen.Queue("emails", prefix="other").keys.base == "other:emails:"
    assert bullpen.Bullpen().queue("emails").keys.base == "shop:emails:"


def test_without_address_and_embedded_server_the_queue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BULLPEN_EMBEDDED", "never")

    with pytest.raises(bullpen.NotConfigured, match="BULLPEN_REDIS_URL"):
        bullpen.Queue("emails")


def test_an_embedded_address_needs_its_slashes() -> None:
    with pytest.raises(bullpen.InvalidOption, match="embedded://<dir>"):
        app.connect("embedded:here")
    with pytest.raises(bullpen.InvalidOption, match="'everysec' or 'always'"):
        app.connect("embedded://here?appendfsync=no")


async def test_the_environment_lets_the_embedded_server_sync_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level fsync needs it; without it the add is refused and says so."""
    async with bullpen.Queue("emails") as queue:
        with pytest.raises(bullpen.InvalidOption, match="appendfsync always"):
            await queue.add("welcome", durability="fsync")
    monkeypatch.setenv("BULLPEN_EMBEDDED_APPENDFSYNC", "always")
    async with bullpen.Queue("emails") as queue:
        assert (await queue.add("welcome", durability="fsync")).durability == "fsync"


# The app ------------------------------------------------------------------------------------------------------------


def test_making_an_app_connects_to_nothing(tmp_path: Path) -> None:
    made = bullpen.Bullpen()
    made.queue("emails")
    made.worker("emails", print)

    assert not (tmp_path / "data").exists()


def test_an_app_takes_settings_or_a_connection() -> None:
    shared = Connection("redis://one:7000")

    assert bullpen.Bullpen(shared).connection is shared
    assert str(bullpen.Bullpen("redis://two:7001").connection.address) == "two:7001"
    given = Settings.load(redis_url="redis://three:7002", redis_prefix="shop")
    assert str(bullpen.Bullpen(settings=given).connection.address) == "three:7002"
    assert bullpen.Bullpen(settings=given).prefix == "shop"


def test_a_queue_of_an_app_is_one_object() -> None:
    made = bullpen.Bullpen()

    emails = made.queue("emails", attempts=5)

    assert made.queue("emails") is emails
    with pytest.raises(bullpen.InvalidOption, match="where it is first used"):
        made.queue("emails", attempts=2)


@pytest.mark.requirement("X-46", "X-47")
def test_a_second_worker_for_a_queue_is_refused() -> None:
    """Two handlers on one queue would each get a random half of its jobs."""
    made = bullpen.Bullpen()
    made.worker("emails", print)

    with pytest.raises(bullpen.InvalidOption, match="'emails' has one"):
        made.worker("emails", print)


def test_worker_options_are_checked_when_the_handler_is_registered() -> None:
    made = bullpen.Bullpen()

    with pytest.raises(bullpen.InvalidOption, match="concurrency"):
        made.handler("emails", concurrency=0)(print)

    assert made.workers == ()


async def test_an_app_without_anything_to_run_says_so() -> None:
    with pytest.raises(bullpen.NotConfigured, match=r"@app\.handler"):
        await bullpen.Bullpen().run()


async def test_an_app_runs_its_handlers_until_it_is_stopped() -> None:
    made = bullpen.Bullpen()
    seen: list[str] = []

    @made.handler("emails", concurrency=2)
    async def send(job: bullpen.Job) -> None:
        seen.append(job.name)

    @made.handler("reports")
    def build(job: bullpen.Job) -> None:
        seen.append(job.name)

    jobs = await made.queue("emails").add_many([("one", {}), ("two", {})])
    jobs.append(await made.queue("reports").add("build"))

    async def stop_when_done() -> None:
        await asyncio.gather(*(job.result(timeout=10_000) for job in jobs))
        await made.stop()

    await asyncio.gather(made.run(), stop_when_done())

    assert sorted(seen) == ["build", "one", "two"]


class Broken:
    """A part of an app that cannot go on."""

    closed = 0

    async def run(self, *, signals: bool | None = None) -> None:
        raise RuntimeError("no more disk")

    async def close(self, timeout: object = None) -> None:
        self.closed += 1


async def test_when_one_part_cannot_go_on_all_stop_and_its_error_is_raised() -> None:
    """A supervisor must see it; an app that limps on with half of its workers is noticed by nobody."""
    made, broken = bullpen.Bullpen(), Broken()
    worker = made.worker("emails", print)
    made.add(broken)

    with pytest.raises(RuntimeError, match="no more disk"):
        await made.run()

    assert broken.closed >= 1
    assert not worker.is_alive
