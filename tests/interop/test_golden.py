"""What is in Redis after each step, compared with what Node left there."""

import json
from pathlib import Path

import pytest
import redis
from _pytest.mark.structures import ParameterSet

from ._dump import diff
from ._scenarios import SCENARIOS, Run, Scenario
from ._sides import OurSide, PeerSide
from .record_golden import GOLDEN_DIR


def cases(*, producer_is_ours: bool, worker_is_ours: bool) -> list[ParameterSet]:
    """The scenarios in which our sides have something to do."""
    return [
        pytest.param(one, id=one.name, marks=[pytest.mark.requirement(*one.requirements)] if one.requirements else [])
        for one in SCENARIOS.values()
        if not (producer_is_ours and one.produced_by_node)
        and not (worker_is_ours and (one.worked_by_node or not one.has_worker))
        and (producer_is_ours or one.has_worker)
    ]


def compare_with_golden(run: Run, scenario: Scenario) -> None:
    golden = json.loads(Path(GOLDEN_DIR / f"{scenario.name}.json").read_text())
    assert list(run.snapshots) == list(golden)
    found = [f"{name}: {line}" for name, snapshot in run.snapshots.items() for line in diff(golden[name], snapshot)]
    assert not found, "\n".join(["differs from Node:", *found])


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
async def test_the_stored_vectors_are_what_node_does(scenario: Scenario, node: PeerSide, client: redis.Redis) -> None:
    """The vectors prove nothing if Node itself would not pass."""
    run = Run(producer=node, worker=node, node=node, client=client)

    await scenario.steps(run)

    compare_with_golden(run, scenario)


@pytest.mark.parametrize("scenario", cases(producer_is_ours=False, worker_is_ours=True))
async def test_our_worker_leaves_what_node_would(
    scenario: Scenario, node: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """Node adds, we work: any difference would be met by the next Node worker, dashboard or flow."""
    run = Run(producer=node, worker=ours, node=node, client=client)

    await scenario.steps(run)

    compare_with_golden(run, scenario)


@pytest.mark.parametrize("scenario", cases(producer_is_ours=True, worker_is_ours=False))
async def test_our_jobs_are_node_jobs(scenario: Scenario, node: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    """We add, Node works."""
    run = Run(producer=ours, worker=node, node=node, client=client)

    await scenario.steps(run)

    compare_with_golden(run, scenario)


@pytest.mark.parametrize("scenario", cases(producer_is_ours=True, worker_is_ours=True))
async def test_our_queue_is_a_node_queue(
    scenario: Scenario, node: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """Both sides are ours, and Node could take over at any step."""
    run = Run(producer=ours, worker=ours, node=node, client=client)

    await scenario.steps(run)

    compare_with_golden(run, scenario)
