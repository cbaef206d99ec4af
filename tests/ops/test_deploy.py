"""The dashboard and the alarms speak of metrics that exist."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bullpen.app import ROLES
from bullpen.cli import commands
from bullpen.ops.symptoms import RULES
from bullpen.settings import Settings

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


def test_every_alarm_is_on_the_page() -> None:
    """Whoever is woken by one must find what it means."""
    page = (DEPLOY.parent / "docs" / "operate" / "monitoring.md").read_text().partition("\n## Alarms\n")[2]
    rows = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `Bullpen")]

    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]

    assert sorted(listed) == sorted(re.findall(r"- alert: (\w+)", (DEPLOY / "alerts.yml").read_text()))


@pytest.mark.requirement("W-76")
@pytest.mark.parametrize("file", ["kubernetes.yml", "bullpen-exporter.service"])
def test_the_exporter_is_started_with_options_that_it_has(file: str) -> None:
    text = (DEPLOY / file).read_text()
    group: Any = commands.tree()
    options = {name for option in group.commands["exporter"].params for name in option.opts}
    (line,) = [line for line in text.splitlines() if re.search(r"^\s*(command:|ExecStart=).*\bexporter\b", line)]
    words = re.findall(r'[^\s",\[\]]+', line.rpartition("bullpen")[2])

    assert words[0] == "exporter"
    assert {word for word in words if word.startswith("--")} <= options
    assert "0.0.0.0:9465" in words or "127.0.0.1:9465" in words
    assert set(re.findall(r"\bBULLPEN_[A-Z_]*[A-Z]\b", text)) <= {setting.variable for setting in Settings().describe()}


@pytest.mark.requirement("W-68")
def test_the_dashboard_shows_what_an_operator_asks_for() -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    shown = {name for panel in panels for target in panel["targets"] for name in NAME.findall(target["expr"])}

    assert shown >= {"bullpen_job_wait_seconds_bucket", "bullpen_queue_workers", "bullpen_late_wakeups_total"}
    assert shown >= {"bullpen_runs", "bullpen_workflow_moves_total", "bullpen_outbox_rows", "bullpen_named_jobs_total"}
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.requirement("W-76")
@pytest.mark.parametrize("file", ["kubernetes.yml", "bullpen.service"])
def test_commands_and_variables_of_the_examples_exist(file: str) -> None:
    text = (DEPLOY / file).read_text()
    group: Any = commands.tree()
    options = {name for option in group.commands["run"].params for name in option.opts}
    commands_run = [
        re.findall(r'[^\s",\[\]]+', line.partition("bullpen")[2])
        for line in text.splitlines()
        if re.search(r"^\s*(command:|ExecStart=).*\brun\b", line)
    ]
    variables = {setting.variable for setting in Settings().describe()}

    assert commands_run
    for words in commands_run:
        assert words[:2] == ["run", "shop:app"]
        assert {word for word in words if word.startswith("--")} <= options
        parts = {value for option, value in itertools.pairwise(words) if option == "--only"}
        assert parts <= set(ROLES)
    assert set(re.findall(r"\bBULLPEN_[A-Z_]*[A-Z]\b", text)) <= variables
    if file.endswith("yml"):
        assert set(re.findall(r"path: (/\w+)", text)) == {"/livez", "/readyz"}
        assert {name for name in NAME.findall(text) if name.startswith("bullpen_")} == {"bullpen_queue_jobs"}


@pytest.mark.requirement("W-76")
def test_the_guide_speaks_of_everything_that_a_deployment_needs() -> None:
    page = (DEPLOY.parent / "docs" / "operate" / "deployment.md").read_text()

    for word in ("appendonly", "noeviction", "maxmemory", "SIGTERM", "close_timeout", "terminationGracePeriodSeconds"):
        assert word in page
    for path in ("/livez", "/readyz", "/metrics", "bullpen_queue_oldest_waiting_seconds", "bullpen migrate"):
        assert path in page
    assert {role for role in ROLES if f"--only {role}" not in page} == set()
    for file in re.findall(r"`deploy/([\w.-]+)`", page):
        assert (DEPLOY / file).is_file()
    assert {path.name for path in DEPLOY.iterdir()} == set(re.findall(r"`deploy/([\w.-]+)`", page))


@pytest.mark.parametrize("file", ["bullpen.service", "bullpen-exporter.service", "bullpen-dashboard.service"])
def test_the_units_give_away_every_right_that_the_work_does_not_need(file: str) -> None:
    given = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / file).read_text(), re.MULTILINE))

    assert given["User"] not in ("", "root")
    assert (given["UMask"], given["ProtectSystem"], given["CapabilityBoundingSet"]) == ("0077", "strict", "")
    closed = (
        "NoNewPrivileges",
        "ProtectHome",
        "PrivateTmp",
        "PrivateDevices",
        "RestrictNamespaces",
        "RestrictSUIDSGID",
    )
    assert {name for name in closed if given.get(name) != "yes"} == set()
    assert set(given["RestrictAddressFamilies"].split()) == {"AF_UNIX", "AF_INET", "AF_INET6"}


def test_every_container_gives_away_every_right_that_the_work_does_not_need() -> None:
    text = (DEPLOY / "kubernetes.yml").read_text()
    deployments = [each for each in text.split("---") if "kind: Deployment" in each or "kind: Job" in each]

    assert len(deployments) == 8
    assert {role for role in ROLES if f'"--only", "{role}"' not in text} == set()
    for each in deployments:
        assert "automountServiceAccountToken: false" in each
        assert "securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}" in each
        assert '{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: ["ALL"]}}' in each
        assert re.search(r"limits: \{memory: \d+Mi\}", each)
        assert each.count("name: tmp") == 2  # what is written to at all, and where it is mounted


def test_a_drained_node_takes_one_process_of_a_kind_at_a_time() -> None:
    text = (DEPLOY / "kubernetes.yml").read_text()
    several = set(re.findall(r"kind: Deployment\nmetadata:\n  name: ([\w-]+)\nspec:\n(?:  #.*\n)*  replicas: 2", text))
    guarded = set(re.findall(r"kind: PodDisruptionBudget\nmetadata:\n  name: ([\w-]+)", text))

    assert several == guarded == {"shop-worker", "shop-outbox", "shop-messages", "shop-projector"}


@pytest.mark.parametrize("file", ["Dockerfile", "compose.yml", "kubernetes.yml", "bullpen-dashboard.service"])
def test_every_process_of_the_examples_is_a_command_with_options_that_it_has(file: str) -> None:
    text, group = (DEPLOY / file).read_text(), commands.tree()
    variables = {setting.variable for setting in Settings().describe()}
    found = re.findall(r"^\s*(?:command: |CMD |ExecStart=)(.*)$", text, re.MULTILINE)
    lines = [re.findall(r'[^\s",\[\]]+', line) for line in found if not re.search(r"valkey-server|CMD-SHELL", line)]

    assert lines
    for words in lines:
        name, *rest = words[1:] if words[0].endswith("bullpen") else words
        command: Any = group.commands[name]
        options = {name for option in command.params for name in option.opts}
        assert {word for word in rest if word.startswith("--")} <= options, name
    assert set(re.findall(r"\bBULLPEN_[A-Z_]*[A-Z]\b", text)) <= variables


def test_the_image_runs_without_root_and_gets_its_signals() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()

    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001"]
    assert 'ENTRYPOINT ["bullpen"]' in lines  # no shell in between, which would keep SIGTERM to itself
    assert sum(line.startswith("FROM ") for line in lines) == 2
