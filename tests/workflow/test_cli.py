"""`bullpen workflows`, as somebody types it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import forks
from tests.flows._cli import Answer, cli, environment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

Type = Callable[..., Answer]

DOUBTFUL = """
from bullpen import Bullpen
from bullpen.workflow import *
app = Bullpen("redis://localhost:1")
empty = Bullpen("redis://localhost:1")
shelf = {"urn:1": "new"}
app.workflow(Definition(
    name="[parcel]",
    states=States(idles=["new"], failed="lost"),
    transitions=[
        Transition(event="send", from_="new", to="sent", conditions=[lambda entity, payload: payload == "now"]),
    ],
    entity=InlineEntities(new=lambda: "new", load=shelf.get, update=lambda e, s: s, status=str, urn=str),
))
"""


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "doubtful.py").write_text(DOUBTFUL)
    (tmp_path / "order_workflow.py").write_text((EXAMPLES / "order_workflow.py").read_text())
    return tmp_path


@pytest.fixture
def type_(there: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Type]:
    # Modules of the test's directory are imported by the command; the next test has another directory.
    monkeypatch.syspath_prepend(str(there))
    known = {*sys.modules}

    def typed(*words: str, stdin: str = "") -> Answer:
        env = {"BULLPEN_DATA_DIR": str(there / "data"), "BULLPEN_TRANSPORT": "memory", "NO_COLOR": "1"}
        return cli("workflows", *words, cwd=there, env=env, stdin=stdin)

    yield typed
    for name in {"doubtful", "order_workflow"} - known:
        sys.modules.pop(name, None)


def test_workflows_are_listed_and_shown(type_: Type) -> None:
    listed = type_("list", "order_workflow")
    assert (listed.code, listed.out.splitlines()[1].split()) == (
        0,
        ["order", "Memory", "order-events", "5", "3", "0"],
    )
    assert json.loads(type_("list", "order_workflow:app", "--json").out)[0]["sources"] == ["order-events"]
    shown = type_("show", "order_workflow", "order")
    assert shown.out.splitlines()[1].split() == ["new", "pay", "paid", "charge"]
    told = json.loads(type_("show", "order_workflow", "order", "--json").out)
    assert (told["idles"], told["finals"], told["failed"]) == (["new", "packed"], ["shipped"], "failed")
    assert told["moves"][0] == {
        "from": ["new"],
        "event": ["pay"],
        "to": "paid",
        "conditions": [],
        "actions": ["charge"],
    }
    missing = type_("show", "order_workflow", "parcel")
    assert (missing.code, missing.err) == (2, "bullpen: the app has no workflow 'parcel'; there is order\n")
    assert "has no workflows" in type_("list", "doubtful:empty").err


def test_lint_tells_and_ends_with_one(type_: Type) -> None:
    found = type_("lint", "doubtful")
    assert found.code == 1
    assert found.out.splitlines() == [
        "[parcel]: warning: no state is final, so no entity is ever done; name finals=[…] [no-final-state]",
        "[parcel]: warning: no event leads out of state sent, which is not final [dead-end]",
    ]
    as_json = type_("lint", "doubtful", "--json")
    assert (as_json.code, [each["code"] for each in json.loads(as_json.out)]) == (1, ["no-final-state", "dead-end"])
    fine = type_("lint", "order_workflow")
    assert (fine.code, fine.out) == (0, "nothing is doubtful\n")


def test_diagrams_go_to_stdout_or_to_a_file(type_: Type, there: Path) -> None:
    assert type_("diagram", "order_workflow", "order").out.startswith("stateDiagram-v2\n    [*] --> new\n")
    written = type_("diagram", "order_workflow", "order", "--format", "svg", "-o", "order.svg")
    assert (written.code, written.out) == (0, "")
    assert (there / "order.svg").read_text().startswith("<svg")
    wrong = type_("diagram", "order_workflow", "order", "--format", "png")
    assert (wrong.code, wrong.err) == (
        2,
        (
            "bullpen: invalid value for '--format': 'png' is not one of 'mermaid', 'svg'; "
            "see 'bullpen workflows diagram --help'\n"
        ),
    )


def test_events_are_simulated(type_: Type) -> None:
    told = type_("simulate", "order_workflow", "order", "pay", "ship")
    assert told.out.splitlines() == [
        "begins at new",
        "new --pay--> paid (event)",
        "paid --pack--> packed (automatic)",
        "packed --ship--> shipped (event)",
        "ends at shipped",
    ]
    as_json = json.loads(type_("simulate", "order_workflow", "order", "ship", "--from", "new", "--json").out)
    assert (as_json["end"], as_json["moves"], len(as_json["refused"])) == ("new", [], 1)
    assert "no event 'pya'" in type_("simulate", "order_workflow", "order", "pya", "--from", "new").err
    assert "no state 'old'" in type_("simulate", "order_workflow", "order", "pay", "--from", "old").err


def test_an_entity_is_explained(type_: Type, there: Path) -> None:
    # The example has run before, and left two orders in its ledger.
    env = environment({"BULLPEN_DATA_DIR": str(there / "data"), "BULLPEN_TRANSPORT": "memory"})
    forks.run(["order_workflow.py"], cwd=there, env=env).check_returncode()

    past = json.loads(type_("history", "order_workflow", "order", "urn:order:1", "--json").out)
    assert [(each["from"], each["to"]) for each in past] == [("new", "paid"), ("paid", "packed"), ("packed", "shipped")]
    assert past[-1]["correlationId"] == "truck-7"
    table = type_("history", "order_workflow", "order", "urn:order:2").out
    assert "card is stolen" in table
    told = type_("explain", "order_workflow", "order", "urn:order:2")
    assert told.out.startswith("urn:order:2 is failed (failed)\n")
    assert json.loads(type_("explain", "order_workflow", "order", "urn:order:1", "--json").out)["kind"] == "final"
    nobody = type_("explain", "order_workflow", "order", "urn:order:9")
    assert nobody.code == 1 and "no entity 'urn:order:9'" in nobody.err

    shipped = type_("follow", "order_workflow", "order", "urn:order:1")
    assert (shipped.code, len(shipped.out.splitlines())) == (0, 4)
    assert "packed --ship--> shipped (event)" in shipped.out
    failed = type_("follow", "order_workflow", "order", "urn:order:2", "--json")
    assert (failed.code, json.loads(failed.out.splitlines()[-1])["to"]) == (1, "failed")
    assert type_("follow", "order_workflow", "order", "urn:order:2", "--until", "failed").code == 0
    soon = ("--interval", "50", "--timeout", "99")
    late = type_("follow", "order_workflow", "order", "urn:order:1", "--until", "new", *soon)
    assert (late.code, late.err) == (4, "bullpen: urn:order:1 is still shipped after 0.099 s\n")
    assert type_("follow", "order_workflow", "order", "urn:order:1", "--until", "old").code == 2
    assert type_("follow", "order_workflow", "order", "urn:order:9").code == 1


def test_a_payload_is_shown_to_conditions(type_: Type) -> None:
    waits = type_("explain", "doubtful", "[parcel]", "urn:1")
    goes = type_("explain", "doubtful", "[parcel]", "urn:1", "--payload", "-", stdin='"now"')

    assert "send leads to sent, but not now" in waits.out
    assert "send leads to sent\n" in goes.out
    assert "keep none" in type_("history", "doubtful", "[parcel]", "urn:1").err


def test_an_event_is_sent_through_the_transport(there: Path, redis_url: str, type_: Type) -> None:
    env = {"BULLPEN_DATA_DIR": str(there / "data"), "BULLPEN_TRANSPORT": "bullmq", "BULLPEN_REDIS_URL": redis_url}

    def send(*options: str) -> Answer:
        words = ("workflows", "send", "order_workflow", "order", "pay", "urn:order:1", *options)
        sys.modules.pop("order_workflow", None)  # a process of its own would import it anew
        return cli(*words, cwd=there, env=env)

    payload = ("--payload", '{"amount": 3, "card": "good"}')
    first = send(*payload, "--key", "payment-1", "--tenant", "acme", "--delay", "1h", "--json")
    again = send(*payload, "--key", "payment-1")
    (job,) = json.loads(cli("jobs", "list", "order-events", "--json", cwd=there, env=env).out)

    assert (first.code, again.code) == (0, 0)
    assert job["state"] == "delayed"
    assert job["data"]["payload"] == {"amount": 3, "card": "good"}
    assert "acme" in json.dumps(job)
    assert json.loads(first.out)["id"] == job["id"]
    assert again.out == f"sent: {job['id']}\n", "the same key is the same event"
    assert type_("send", "order_workflow", "order", "pya", "urn:order:1").code == 2


def test_transports_are_asked_whether_they_answer(there: Path, redis_url: str, type_: Type) -> None:
    env = {"BULLPEN_DATA_DIR": str(there / "data"), "BULLPEN_TRANSPORT": "bullmq", "BULLPEN_REDIS_URL": redis_url}
    away = {**env, "BULLPEN_REDIS_URL": "redis://127.0.0.1:1"}

    fine = cli("workflows", "check", "order_workflow", cwd=there, env=env)
    sys.modules.pop("order_workflow", None)  # or the app of the first address would answer
    ill = cli("workflows", "check", "order_workflow", "--json", cwd=there, env=away)

    assert (fine.code, fine.out.split()[-1]) == (0, "ok")
    assert (ill.code, json.loads(ill.out)[0]["healthy"]) == (1, False)
