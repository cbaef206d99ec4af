"""PyPI `bullmq` on one side, us on the other, compared with what Node would have left in Redis.

The same scenarios as for Node. Where PyPI bullmq itself writes something else than Node, the rule stands here with its
reason: those are differences that our side meets and must live with.
"""

import json
import re
from pathlib import Path

import pytest
import redis
from _pytest.mark.structures import ParameterSet

from ._dump import diff
from ._scenarios import SCENARIOS, Run, Scenario
from ._sides import OurSide, PeerSide
from .record_golden import GOLDEN_DIR

OF_ITS_PRODUCER = {
    r"/opts/delay: not expected, is 0$": "it writes a delay of 0 where Node writes none",
    r"meta/value/version: missing": "its Queue object does not introduce itself",
    r"/opts/prevMillis: not expected": "its scheduler keeps the time of the iteration in the options too",
    r"/value/data: expected \{\}, is null$": "a job of a flow without data has null",
    r"/value/pb: missing, expected \"dead\"$": "the worker that lost its job was PyPI bullmq's",
}
OF_ITS_WORKER = {
    r"/opts/prevMillis: not expected": "it keeps the time of a scheduler's job in the options too",
    r"/value/pb: (missing|expected)": "its worker's name reaches CLIENT LIST, but not the job",
    r"events: [+-] \{\"event\": \"drained\"\}": "it settles and takes in two calls, so it looks at other moments",
    r"returnvalue/ignored: missing": "a parent's handler cannot ask for ignored failures",
    r"events: [+-] \{\"event\": \"completed\", \"jobId\": \"P-1\"": "so its return value lacks them, in the event too",
}
CANNOT_WORK = {
    "returned_by_a_rate_limit": "no way for a handler to limit the queue",
    "returned_to_wait_by_the_handler": "no way for a handler to give a job back",
}
CANNOT_ADD = {"dedup_reschedule", "dedup_reschedule_and_extend", "flow_completed_job_becomes_a_child"}
"""Its scripts are older: that rule is unknown, and a parent is released before its last child was added."""
NEEDS_A_NODE_WORKER = {"stalled_beyond_the_limit"}
"""It needs a stalled check at once; that of PyPI bullmq comes for the first time after a whole `stalledInterval`."""


def cases(*, producer_is_ours: bool) -> list[ParameterSet]:
    return [
        pytest.param(one, id=one.name, marks=[pytest.mark.requirement(*one.requirements)] if one.requirements else [])
        for one in SCENARIOS.values()
        if one.has_worker
        and not (producer_is_ours and (one.produced_by_node or one.name in CANNOT_WORK))
        and (producer_is_ours or one.name not in CANNOT_ADD)
    ]


def differences(run: Run, scenario: Scenario, known: dict[str, str]) -> list[str]:
    golden = json.loads(Path(GOLDEN_DIR / f"{scenario.name}.json").read_text())
    assert list(run.snapshots) == list(golden)
    found = [f"{name}: {line}" for name, snapshot in run.snapshots.items() for line in diff(golden[name], snapshot)]
    return [line for line in found if not any(re.search(pattern, line) for pattern in known)]


@pytest.mark.parametrize("scenario", cases(producer_is_ours=False))
async def test_our_worker_leaves_what_node_would(
    scenario: Scenario, pypi: PeerSide, node: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """PyPI bullmq adds jobs, flows, schedulers and deduplicated jobs, we work."""
    run = Run(producer=pypi, worker=ours, node=node if scenario.name in NEEDS_A_NODE_WORKER else pypi, client=client)

    await scenario.steps(run)

    assert not differences(run, scenario, OF_ITS_PRODUCER)


@pytest.mark.parametrize("scenario", cases(producer_is_ours=True))
async def test_its_worker_does_with_our_jobs_what_node_would(
    scenario: Scenario, pypi: PeerSide, node: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    run = Run(producer=ours, worker=pypi, node=node, client=client)

    await scenario.steps(run)

    assert not differences(run, scenario, OF_ITS_WORKER)


@pytest.mark.parametrize(
    "scenario",
    [one for one in SCENARIOS.values() if not one.has_worker and one.name not in CANNOT_ADD],
    ids=lambda one: one.name,
)
async def test_its_jobs_are_node_jobs_but_for_what_we_know(
    scenario: Scenario, pypi: PeerSide, client: redis.Redis
) -> None:
    """If this changes with a new version, our knowledge of what its producers store is out of date."""
    run = Run(producer=pypi, worker=pypi, node=pypi, client=client)

    await scenario.steps(run)

    known = OF_ITS_PRODUCER | {r"/opts/(telemetry|tm): ": "it does not shorten the names of telemetry"}
    assert not differences(run, scenario, known)
