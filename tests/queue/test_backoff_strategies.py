"""Pauses that a worker computes itself, by the type that a job's backoff names."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from bullpen import Backoff, RetryPolicy
from bullpen.errors import InvalidOption
from bullpen.queue import Job
from tests.queue import _process_handlers as handlers
from tests.queue._kit import Failing, Kit, load, nothing


async def test_a_strategy_of_the_worker_decides_the_pause(kit: Kit) -> None:
    """It is called with the failures so far, the error and the job, as Node's `backoffStrategy` is."""
    told: list[Any] = []

    def strategy(failures: int, error: BaseException, job: Job) -> int:
        told.append((failures, str(error), job.id, job.data))
        return failures

    job = await kit.queue().add("a", {"n": 1}, attempts=3, backoff=Backoff.custom("own", delay=7))
    work = await kit.drain(Failing(OSError("one"), OSError("two"), value=5), 1, backoff={"own": strategy})

    assert load(kit.fields(job.id)["opts"])["backoff"] == {"type": "own", "delay": 7}
    assert told == [(1, "one", job.id, {"n": 1}), (2, "two", job.id, {"n": 1})]
    assert [delay for _, _, delay in work.of("retrying")] == [1, 2]
    assert work.ids("completed") == [job.id]


async def test_a_strategy_may_end_it(kit: Kit) -> None:
    """-1 as in Node, or None: the failure is final although attempts are left."""
    job = await kit.queue().add("a", attempts=9, backoff=Backoff.custom("own"))

    await kit.drain(Failing(OSError("enough")), 1, backoff={"own": lambda failures, error, job: None})

    stored = kit.fields(job.id)
    assert (stored["failedReason"], stored["atm"]) == ("enough", "1")


@pytest.mark.parametrize(
    ("options", "delay_ms"),
    [({}, 1_000), ({"policy": RetryPolicy(backoff=Backoff.fixed(timedelta(seconds=77)))}, 77_000)],
)
async def test_a_foreign_job_of_a_type_that_nobody_knows_here_is_tried_again(
    kit: Kit, options: dict[str, Any], delay_ms: int
) -> None:
    """Node takes any type when a job is added. Failing it for good at its first error helped nobody."""
    kit.seed("7", opts='{"attempts":3,"backoff":{"type":"fibonacci"}}')

    told = await kit.work(Failing(OSError("away")), **options)

    _, reason, delay = await told.wait("retrying")
    assert (reason, delay) == ("away", delay_ms)
    assert list(kit.zset("delayed")) == ["7"]


async def test_the_policy_may_name_strategies_too(kit: Kit) -> None:
    """Workers of many queues share one policy."""
    policy = RetryPolicy(strategies={"own": Backoff.fixed(timedelta(seconds=55))})
    await kit.queue().add("a", attempts=2, backoff=Backoff.custom("own"))

    told = await kit.work(Failing(OSError("away")), policy=policy)

    assert (await told.wait("retrying"))[2] == 55_000


@pytest.mark.measures_children
async def test_a_handler_in_a_child_process_is_retried_by_the_strategy_of_its_worker(kit: Kit) -> None:
    """The strategy is called where the job is judged, with what came out of the child."""
    told: list[str] = []

    def strategy(failures: int, error: BaseException, job: Job) -> int:
        told.append(f"{failures}: {error}")
        return -1

    await kit.queue().add("a", {"how": "plain"}, attempts=3, backoff=Backoff.custom("own"))
    await kit.drain(handlers.failing, 1, processes=True, backoff={"own": strategy})

    assert len(told) == 1 and told[0].startswith("1: ")


@pytest.mark.parametrize(
    "backoff", [{"fixed": Backoff.fixed(5)}, {"own": 5}, {"own": nothing}, "own", Backoff.fixed(5)]
)
def test_a_wrong_argument_is_refused(kit: Kit, backoff: Any) -> None:
    """An async function would be a coroutine that nobody awaits."""
    with pytest.raises(InvalidOption, match="backoff"):
        kit.worker(nothing, backoff=backoff)
