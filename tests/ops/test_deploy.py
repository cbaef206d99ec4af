"""The dashboard and the alarms speak of metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bullpen.ops.signs import RULES

DEPLOY = Path(__file__).parents[2] / "deploy"
SOURCES = Path(__file__).parents[2] / "src"
NAME = re.compile(r"\b(?:bullpen|outbox|queue)_[a-z_]+\b")


@pytest.mark.requirement("W-68", "W-76")
@pytest.mark.parametrize("file", ["grafana.json", "alerts.yml"])
def test_every_metric_that_is_shown_is_exported(file: str) -> None:
    text = (DEPLOY / file).read_text()
    exported = {name for path in SOURCES.rglob("*.py") for name in re.findall(r'"([a-z_]+)"', path.read_text())}
    expressions = (
        [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
        if file.endswith("json")
        else re.findall(r"expr: (.*(?:\n {12}.*|\n {10}.*)*)", text)
    )
    used = {name for expression in expressions for name in NAME.findall(expression)}

    assert len(used) >= 5
    assert {name for name in used if name not in exported and name.removesuffix("_bucket") not in exported} == set()


def test_alarms_of_prometheus_and_our_own_have_the_same_subjects() -> None:
    """What one of them tells of, the other one knows by a name that stands beside it."""
    named = set(re.findall(r"- alert: (\w+)", (DEPLOY / "alerts.yml").read_text()))

    assert {rule.prometheus for rule in RULES.values()} <= named
    filtered = set(re.findall(r'rule="(\w+)"', (DEPLOY / "alerts.yml").read_text()))
    assert filtered <= set(RULES)
