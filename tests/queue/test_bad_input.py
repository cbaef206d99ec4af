"""What callers get wrong is refused at the door.

The message names option, expectation and value, and nothing is written.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any

import pytest

from bullpen import Bullpen, Depends, next_runs
from bullpen._kernel import json
from bullpen._kernel.backoff import Backoff
from bullpen._kernel.keep import KeepJobs
from bullpen._kernel.policy import DeadLetterPolicy
from bullpen.errors import InvalidOption, JobNotFound, JobStateConflict, NotJson, PayloadTooLarge
from bullpen.queue import Flow, Job, JobState, NewJob, Queue, QueueEvents, RateLimit
from bullpen.redis import Connection
from bullpen.worker import BatchOptions, Taker, Worker
from tests.queue._kit import Kit, nothing


async def takes_a_token(job: Job, token: str) -> None:
    """As `process` of PyPI `bullmq`."""


async def takes_nothing() -> None:
    pass


async def takes_more(job: Job, token: str = "", **more: Any) -> None:
    pass


async def takes_a_session(job: Job, session: Annotated[Connection, Depends()], other: Any = Depends(nothing)) -> None:
    pass


class Callable_:  # noqa: N801 - an object that can be called
    async def __call__(self, job: Job) -> None:
        pass


WRONG_OPTIONS: list[tuple[dict[str, Any], str, str]] = [
    # options, the option that the error names, a part of what it expected
    ({"delay": -1}, "delay", "at least 0"),
    ({"delay": 1.5}, "delay", "whole milliseconds"),
    ({"delay": True}, "delay", "whole milliseconds"),
    ({"delay": timedelta(seconds=-1)}, "delay", "at least 0"),
    ({"delay": math.nan}, "delay", "whole milliseconds"),
    ({"delay": 2**53}, "delay", "at most"),
    ({"at": datetime(2030, 1, 1)}, "at", "time zone"),  # noqa: DTZ001 - the mistake under test
    ({"at": "tomorrow"}, "at", "time zone"),
    ({"at": datetime.fromisoformat("2030-01-01T00:00:00+00:00"), "delay": 5}, "at", "not together with delay"),
    ({"priority": -1}, "priority", "at least 0"),
    ({"priority": 2_097_152}, "priority", "at most 2097151"),
    ({"priority": "high"}, "priority", "a whole number"),
    ({"urgency": 2_097_152}, "urgency", "at most 2097151"),
    ({"urgency": 3, "priority": 3}, "urgency", "not together with priority"),
    ({"attempts": 0}, "attempts", "at least 1"),
    ({"attempts": -3}, "attempts", "at least 1"),
    ({"attempts": "3"}, "attempts", "a whole number"),
    ({"attempts": math.nan}, "attempts", "a whole number"),
    ({"backoff": {"type": "zigzag", "delay": 5}}, "backoff", "fixed"),
    ({"backoff": {"type": "fixed", "delay": 0}}, "backoff", "more than 0"),
    ({"backoff": {"type": "exponential", "delay": -5}}, "backoff", "more than 0"),
    ({"backoff": Backoff.linear(5)}, "backoff.type", "'fixed', 'exponential' or Backoff.custom"),
    ({"lifo": "yes"}, "lifo", "True or False"),
    ({"remove_on_complete": -1}, "remove_on_complete", "from 0"),
    ({"remove_on_fail": 1.5}, "remove_on_fail", "from 0"),
    ({"keep_logs": -1}, "keep_logs", "at least 0"),
    ({"stack_trace_limit": -1}, "stack_trace_limit", "at least 0"),
    ({"timestamp": 0}, "timestamp", "at least 1"),
    ({"tm": b"bytes"}, "tm", "text"),
    ({"remove_on_complete": 20_000, "large_retention": "refuse"}, "remove_on_complete", "at most 10000"),
]

WRONG_IDS = [
    *("", "123", "-7", "0", "meta", "wait", "events", "stalled-check", "lock", "a:b", "a:b:c:d", "0:a:b"),
    *("repeat:x:1", "a:b:lock", "line\nbreak", "x" * 501, 7),
]

WRONG_NAMES = ["a:b", "", " padded ", "line\nbreak", None, 7]


@pytest.fixture
def nothing_written(kit: Kit) -> Any:
    yield
    assert kit.redis.dbsize() == 0, "a refused call has written something"


@pytest.mark.usefixtures("nothing_written")
class TestAdd:
    @pytest.mark.requirement("Q-7", "Q-40", "Q-42", "Q-43", "Q-44", "Q-45", "Q-46", "Q-49", "X-101")
    @pytest.mark.parametrize(("options", "named", "expected"), WRONG_OPTIONS, ids=lambda part: str(part)[:40])
    async def test_a_wrong_value_is_named(self, kit: Kit, options: dict[str, Any], named: str, expected: str) -> None:
        """Node stores many of these and runs into them later; here the line that is wrong gets the error."""
        queue = kit.queue()

        with pytest.raises(InvalidOption) as refused:
            await queue.add("job", {}, **options)

        assert refused.value.option.startswith(named)
        assert expected in str(refused.value)
        assert "got " in str(refused.value)

    @pytest.mark.parametrize(
        ("wrong", "right"),
        [
            *(("dealy", "delay"), ("retries", "attempts"), ("jobId", "job_id")),
            *(("removeOnComplete", "remove_on_complete"), ("dedupe", "deduplication"), ("debounce", "deduplication")),
        ],
    )
    async def test_a_misspelt_option_names_the_right_one(self, kit: Kit, wrong: str, right: str) -> None:
        """An option that does nothing is found in production; one that is refused, at once."""
        queue = kit.queue()

        given: dict[str, Any] = {wrong: 5}
        with pytest.raises(InvalidOption, match=f"{wrong}: expected the name of a job option.*did you mean '{right}'"):
            await queue.add("job", {}, **given)

    @pytest.mark.parametrize(
        ("wrong", "right"),
        [("pattern", "cron"), ("immediatly", "immediately"), ("evry", "every"), ("atempts", "attempts")],
    )
    async def test_a_misspelt_option_of_a_scheduler_names_the_right_one(self, kit: Kit, wrong: str, right: str) -> None:
        given: dict[str, Any] = {wrong: "1"}
        with pytest.raises(InvalidOption, match=f"{wrong}: expected the name of an option of a scheduler.*'{right}'"):
            await kit.queue().upsert_scheduler("s", **given)

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ("conection", "the name of an argument of Queue or a job option.*did you mean 'connection'"),
            ("max_bufered", "did you mean 'max_buffered'"),
            ("concurrency", "set concurrency on Worker"),
        ],
    )
    def test_a_misspelt_argument_of_a_queue_names_the_right_one(self, wrong: str, said: str) -> None:
        given: dict[str, Any] = {wrong: 4}
        with pytest.raises(InvalidOption, match=f"{wrong}: .*{said}"):
            Queue("q", **given)

    @pytest.mark.parametrize(
        ("made", "wrong", "said"),
        [
            (Worker, "lockDuration", "an argument of Worker.*did you mean 'lock'"),
            (Worker, "conection", "did you mean 'connection'"),
            (Worker, "limiter", "did you mean 'limit'"),
            (Taker, "ahed", "an argument of Taker.*did you mean 'ahead'"),
        ],
    )
    def test_a_misspelt_argument_of_a_worker_names_the_right_one(self, made: Any, wrong: str, said: str) -> None:
        given: dict[str, Any] = {wrong: 4}
        with pytest.raises(InvalidOption, match=f"{wrong}: expected {said}" if "arg" in said else f"{wrong}: .*{said}"):
            made("q", *([nothing] if made is Worker else []), **given)

    async def test_options_are_given_by_name(self, kit: Kit) -> None:
        with pytest.raises(InvalidOption, match="opts: expected options by name"):
            await kit.queue().add_flow(Flow("a", opts={"attempts": 3}))  # type: ignore[call-arg]  # the mistake

    @pytest.mark.parametrize(
        ("backoff", "said"),
        [
            ({"type": "exponental", "delay": 4}, "backoff.type: expected 'fixed' or 'exponential', or Backoff.custom"),
            ({"type": "linear", "delay": 4}, "backoff.type: expected 'fixed' or 'exponential', or Backoff.custom"),
            ({"type": "by-error"}, "backoff.type: expected 'fixed' or 'exponential', or Backoff.custom"),
            ({"type": "fixed"}, "backoff: expected both type and delay"),
        ],
    )
    async def test_a_backoff_says_what_may_stand_there(self, kit: Kit, backoff: Any, said: str) -> None:
        with pytest.raises(InvalidOption, match=said):
            await kit.queue().add("a", attempts=2, backoff=backoff)

    @pytest.mark.requirement("X-117")
    @pytest.mark.parametrize("option", ["lock", "lock_duration", "lock_ms", "lockDuration"])
    async def test_the_lock_belongs_to_the_worker(self, kit: Kit, option: str) -> None:
        """A lock duration among queue or job options would have no effect, so it is refused and the place is named."""
        given: dict[str, Any] = {option: 1000}
        with pytest.raises(InvalidOption, match="not a job option: set lock on Worker"):
            Queue(kit.name, connection=kit.url, **given)

        with pytest.raises(InvalidOption, match="not a job option"):
            await kit.queue().add("job", **given)

    @pytest.mark.requirement("X-45", "Q-2")
    @pytest.mark.parametrize("job_id", WRONG_IDS, ids=lambda job_id: repr(job_id)[:20])
    async def test_an_id_that_would_harm_the_queue_is_refused(self, kit: Kit, job_id: Any) -> None:
        """`meta` would lose the job in silence, `stalled` would break every later check."""
        queue = kit.queue()

        with pytest.raises(InvalidOption, match="job_id: expected"):
            await queue.add("job", job_id=job_id)

    @pytest.mark.requirement("Q-3", "X-33")
    @pytest.mark.parametrize("name", ["", None, 5, b"bytes", "\ud800"], ids=repr)
    async def test_a_name_is_non_empty_text(self, kit: Kit, name: Any) -> None:
        """A nameless job looks like a ghost to every worker."""
        with pytest.raises(InvalidOption, match="name: expected non-empty text"):
            await kit.queue().add(name, {})

    @pytest.mark.requirement("Q-4")
    @pytest.mark.parametrize(
        ("data", "path"),
        [
            ({"price": math.nan}, "data.price"),
            ([1, math.inf], r"data\[1\]"),
            ({"raw": b"bytes"}, "data.raw"),
            ({"set": {1}}, "data.set"),
            ({"price": Decimal("1.5")}, "data.price"),
            ({"id": 2**53}, "data.id"),
            ({1: "key"}, "data"),
            ({"text": "\ud800"}, "data.text"),
            (object, "data"),
        ],
        ids=str,
    )
    async def test_what_json_cannot_carry_is_named_by_its_path(self, kit: Kit, data: Any, path: str) -> None:
        """A value that changes on the way is worse than an error; in a large payload the path is what one needs."""
        with pytest.raises(NotJson, match=f"^{path}: expected"):
            await kit.queue().add("job", data)

    @pytest.mark.requirement("Q-17", "Q-18", "Q-19", "X-100")
    async def test_eleven_megabytes_are_too_much(self, kit: Kit) -> None:
        """Refused before the first byte is sent, with the sizes in the text."""
        queue = kit.queue()

        with pytest.raises(PayloadTooLarge) as refused:
            await queue.add("job", "x" * (11 * 1024 * 1024))
        with pytest.raises(PayloadTooLarge):
            await queue.add_many([("small", 1), ("large", "x" * (11 * 1024 * 1024))])

        assert str(refused.value) == "Job payload size 11.0 MB exceeds limit of 10.0 MB"
        assert refused.value.limit_bytes == 10 * 1024 * 1024

    @pytest.mark.requirement("Q-19", "X-100")
    async def test_one_byte_over_the_limit_is_told_with_more_digits(self, kit: Kit) -> None:
        """Data and options count together, in UTF-8 bytes; "10.0 MB exceeds 10.0 MB" would help nobody."""
        queue = kit.queue()
        opts_bytes = len(queue._defaults.wire_json)
        room = 10 * 1024 * 1024 - opts_bytes - 2  # two quotes around the text

        with pytest.raises(PayloadTooLarge, match=r"size 10\.0000\d+ MB exceeds limit of 10\.0 MB"):
            await queue.add("job", "é" * (room // 2) + "xx")

    async def test_a_mistake_harms_no_other_add_of_the_same_tick(self, kit: Kit) -> None:
        """Checks happen before the buffer: one wrong caller never costs its neighbours their jobs."""
        queue = kit.queue()

        results = await asyncio.gather(
            queue.add("good", 1), queue.add("bad", math.nan), queue.add("good", 2), return_exceptions=True
        )

        assert [type(result).__name__ for result in results] == ["Job", "NotJson", "Job"]
        assert len(kit.ids("wait")) == 2
        kit.redis.flushdb()


@pytest.mark.requirement("Q-17")
async def test_exactly_ten_mebibytes_pass(kit: Kit) -> None:
    """The limit itself is allowed."""
    queue = kit.queue(remove_on_complete=True)
    room = 10 * 1024 * 1024 - len(queue._defaults.wire_json) - 2

    job = await queue.add("job", "x" * room)

    assert kit.redis.hstrlen(kit.base + job.id, "data") == room + 2


@pytest.mark.requirement("Q-49")
async def test_keeping_very_many_jobs_is_warned_of_at_the_callers_line(kit: Kit) -> None:
    """The default policy for a retention above 10000; the warning must point at user code to be of use."""
    with pytest.warns(UserWarning, match="keeping 20000 finished jobs can fill the server's memory") as caught:
        await kit.queue().add("job", remove_on_complete=20_000)

    assert caught[0].filename == __file__


class TestNames:
    @pytest.mark.parametrize("name", WRONG_NAMES, ids=repr)
    def test_a_queue_name_without_colon(self, name: Any) -> None:
        """A colon separates the parts of Redis keys; with one in a name two queues could share a key."""
        makers: list[Callable[..., Any]] = [Queue, QueueEvents, lambda name, **given: Worker(name, nothing, **given)]
        for make in makers:
            with pytest.raises(InvalidOption, match="queue: expected"):
                make(name, connection="redis://localhost")

    def test_a_colon_gets_a_suggestion(self) -> None:
        """`outbox:email` is what people write; the nearest legal name is one character away."""
        with pytest.raises(InvalidOption, match="did you mean 'outbox-email'"):
            Queue("outbox:email", connection="redis://localhost")

    @pytest.mark.parametrize("prefix", ["", "bull:", "line\nbreak", 5])
    def test_a_prefix_is_checked(self, prefix: Any) -> None:
        """A trailing colon would double it and put all keys out of Node's reach."""
        with pytest.raises(InvalidOption, match="prefix: expected"):
            Queue("q", connection="redis://localhost", prefix=prefix)

    @pytest.mark.parametrize("options", [{"max_buffered": 0}, {"events_max_len": 0}])
    def test_bounds_of_a_queue_are_positive(self, options: dict[str, Any]) -> None:
        """Zero would refuse every add, or keep no event."""
        with pytest.raises(InvalidOption, match=f"{next(iter(options))}: expected a whole number, at least 1, got 0"):
            Queue("q", connection="redis://localhost", **options)

    def test_a_deadline_is_a_time(self) -> None:
        """Zero would refuse every add."""
        with pytest.raises(InvalidOption, match=r"add_deadline: expected whole milliseconds .* more than 0, got 0"):
            Queue("q", connection="redis://localhost", add_deadline=0)

    def test_a_connection_is_a_url_or_a_connection(self) -> None:
        """A client object of another library cannot work, and should not fail three layers down."""
        with pytest.raises(InvalidOption, match="connection: expected a Connection or a URL"):
            Queue("q", connection=object())  # type: ignore[arg-type]  # the mistake under test


class TestWorker:
    @pytest.mark.requirement("X-48")
    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"concurrency": 0}, "concurrency"),
            ({"concurrency": 1.5}, "concurrency"),
            ({"lock": 0}, "lock"),
            ({"lock": 50}, "lock"),
            ({"timeout": 0}, "timeout"),
            ({"close_timeout": -1}, "close_timeout"),
            ({"stalled_interval": 0}, "stalled_interval"),
            ({"max_block": 0}, "max_block"),
            ({"drain_delay": 1}, "drain_delay"),
            ({"events_max_len": 0}, "events_max_len"),
            ({"limit": 5}, "limit"),
            ({"dead_letters": "yes"}, "dead_letters"),
            ({"permanent_errors": (5,)}, "permanent_errors"),
            ({"remove_on_complete": -1}, "remove_on_complete"),
            ({"remove_on_fail": "all"}, "remove_on_fail"),
            ({"count_stalls_as_attempts": 1}, "count_stalls_as_attempts"),
            ({"max_lonely_deaths": 0}, "max_lonely_deaths"),
            ({"max_lonely_deaths": "off"}, "max_lonely_deaths"),
            ({"clock_offset_ms": 0.5}, "clock_offset_ms"),
        ],
        ids=str,
    )
    def test_a_wrong_value_is_named(self, options: dict[str, Any], named: str) -> None:
        """Worker options are checked once, when the worker is made, not when the first job meets them."""
        with pytest.raises(InvalidOption, match=f"^{named}: expected .*got "):
            Worker("q", nothing, connection="redis://localhost", **options)

    def test_a_handler_can_be_called(self) -> None:
        """Calling the handler instead of passing it is a common slip."""
        with pytest.raises(InvalidOption, match="handler: expected a function that takes a Job"):
            Worker("q", None, connection="redis://localhost")  # type: ignore[arg-type]  # the mistake under test

    @pytest.mark.parametrize("handler", [takes_a_token, takes_nothing, lambda job, token: None])
    def test_a_handler_takes_the_job_and_nothing_else(self, handler: Any) -> None:
        """Each job would burn all of its attempts with a TypeError, and fail for good."""
        with pytest.raises(InvalidOption, match=r"handler: expected a function of \(job\), not of \(.*got <function"):
            Worker("q", handler, connection="redis://localhost")
        with pytest.raises(InvalidOption, match=r"handler: expected a function of \(job\)"):
            Bullpen("redis://localhost").handler("q")(handler)

    @pytest.mark.parametrize("handler", [takes_more, lambda *_: None, print, takes_a_session, Callable_()])
    def test_a_handler_may_have_more_parameters_with_values(self, handler: Any) -> None:
        Worker("q", handler, connection="redis://localhost")

    def test_a_time_to_wait_needs_something_to_wait_for(self) -> None:
        with pytest.raises(InvalidOption, match=r"batch.wait_at_most: expected with a minimum above 1"):
            BatchOptions(size=5, wait_at_most=9)

    @pytest.mark.parametrize("strategy", [lambda n: 5, lambda: 5, lambda a, b, c, d: 5])
    def test_a_strategy_takes_what_it_is_given(self, strategy: Any) -> None:
        with pytest.raises(InvalidOption, match=r"backoff.c: expected a function of \(failures, error, job\), not of"):
            Worker("q", nothing, connection="redis://localhost", backoff={"c": strategy})

    @pytest.mark.requirement("X-48")
    def test_job_options_are_no_worker_options(self) -> None:
        """Node breaks when they are spread into each other; here the types differ."""
        with pytest.raises(InvalidOption, match="attempts"):
            Worker("q", nothing, connection="redis://localhost", attempts=3)  # type: ignore[call-arg]  # as above

    @pytest.mark.parametrize("limit", [(0, 1000), (1, 0), (1.5, 1000)])
    def test_a_rate_limit_is_positive(self, limit: tuple[Any, Any]) -> None:
        """A limit of nothing would be a pause without end."""
        with pytest.raises(InvalidOption, match="limit"):
            RateLimit(*limit)

    def test_an_unknown_event_lists_the_known_ones(self) -> None:
        """A listener for an event that never comes is a silent mistake."""
        worker = Worker("q", nothing, connection="redis://localhost")

        with pytest.raises(InvalidOption, match="event: expected one of active, closed, closing, completed"):
            worker.on("done", nothing)  # type: ignore[arg-type]  # the mistake under test

    @pytest.mark.parametrize("given", [{"suffix": ""}, {"suffix": ":dlq"}, {"store": "somewhere"}])
    def test_dead_letter_settings_are_checked(self, given: dict[str, Any]) -> None:
        """A suffix with a colon would name a key inside another queue."""
        with pytest.raises(InvalidOption, match="dead_letters"):
            DeadLetterPolicy(**given)


class TestHelpers:
    def test_retention_bounds_are_checked(self) -> None:
        """A negative bound means "all" to Node and "none" to a reader; nobody should have to know."""
        for wrong in ({"count": -1}, {"age_s": -1}, {"limit": 0}, {"count": 1.5}):
            with pytest.raises(InvalidOption, match="KeepJobs"):
                KeepJobs(**wrong)

    def test_timeouts_of_a_connection_are_positive(self) -> None:
        """Zero would mean "never connect"."""
        wrongs: list[dict[str, Any]] = [{"connect_timeout_ms": 0}, {"command_timeout_ms": 0}]
        for wrong in wrongs:
            with pytest.raises(InvalidOption, match="timeout_ms: expected at least 1"):
                Connection("redis://localhost", **wrong)

    def test_new_job_holds_no_surprises(self) -> None:
        """The record for `add_many` has the same three parts as `add`."""
        assert NewJob("a") == NewJob("a", None, {})


@pytest.mark.parametrize("job_id", ["repeat:s", "dn:once", "meta", "metrics:completed"])
async def test_a_record_of_the_queue_is_no_job(kit: Kit, job_id: str) -> None:
    """Who asks for a job by an id that a stranger gave must not read or delete a schedule."""
    queue = kit.queue()
    await queue.upsert_scheduler("s", every=600_000, data={"secret": 1})
    kit.redis.hset(kit.base + "dn:once", mapping={"name": "n", "data": "{}", "opts": "{}"})
    kit.redis.hset(kit.base + "metrics:completed", mapping={"name": "n", "count": 1})
    before = kit.fields(job_id)

    assert await queue.get_job(job_id) is None
    assert await queue.state_of(job_id) is JobState.UNKNOWN
    assert not await queue.remove(job_id)
    for change in (queue.change_priority(job_id, priority=3), queue.promote(job_id), queue.cancel(job_id)):
        with pytest.raises((JobNotFound, JobStateConflict)):
            await change

    assert kit.fields(job_id) == before
    (iteration,) = kit.zset("delayed") or kit.ids("wait")
    assert await queue.get_job(iteration) is not None


LONE = "\ud800"


@pytest.mark.parametrize(
    "call",
    [
        lambda queue: queue.get_job(LONE),
        lambda queue: queue.get_job(None),
        lambda queue: queue.get_job(5),
        lambda queue: queue.state_of(LONE),
        lambda queue: queue.state_of(None),
        lambda queue: queue.get_scheduler(LONE),
        lambda queue: queue.remove_scheduler(LONE),
        lambda queue: queue.run_scheduler(LONE),
        lambda queue: queue.run_scheduler(LONE, early=True),
        lambda queue: queue.pause_scheduler(LONE),
        lambda queue: queue.resume_scheduler(LONE),
        lambda queue: queue.upsert_scheduler("s", cron=LONE),
    ],
)
async def test_an_id_that_nothing_can_have_is_refused(kit: Kit, call: Callable[[Any], Any]) -> None:
    with pytest.raises(
        InvalidOption, match=r"^(job_id: expected an id|scheduler_id: expected an id|cron: expected) .*"
    ):
        await call(kit.queue())


def test_a_pattern_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(InvalidOption, match="cron: expected text without lone surrogates"):
        next_runs(cron=LONE)


async def test_an_id_that_is_no_utf8_can_still_be_asked_for(kit: Kit) -> None:
    """Other clients may have made it; lists show its bytes as surrogates."""
    assert await kit.queue().get_job("\udcff") is None


@pytest.mark.parametrize("line", [None, 5, b"x"])
async def test_a_log_line_that_is_no_text_is_refused(kit: Kit, line: Any) -> None:
    queue = kit.queue()
    job = await queue.add("a")

    for call in (job.log(line), queue.add_log(job, line)):
        with pytest.raises(InvalidOption, match="line: expected text"):
            await call
    assert await job.logs() == []


async def test_progress_and_log_lines_have_the_limit_of_data(kit: Kit) -> None:
    queue = kit.queue()
    job = await queue.add("a")
    large = "x" * (json.MAX_PAYLOAD_BYTES + 1)

    for call in (job.log(large), queue.add_log(job, large), job.progress(large), queue.update_progress(job, large)):
        with pytest.raises(
            PayloadTooLarge, match=r"^Job (log line|progress) size 10\.\d+ MB exceeds limit of 10\.0 MB$"
        ):
            await call
    assert await job.logs() == [] and "progress" not in kit.fields(job.id)
