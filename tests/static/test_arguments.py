"""What editors read of keyword arguments and what checks them are compared: names and types.

A new option is written where it is checked, and in the `TypedDict` beside it; then these tests hold.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import pytest

from bullpen._kernel.backoff import Backoff, BackoffMapping, CustomBackoff
from bullpen.errors import InvalidOption
from bullpen.ledger import OutboxFields, OutboxItem
from bullpen.messages.imports import ImportArguments, import_csv
from bullpen.outbox.enqueue import make_job_item
from bullpen.outbox.replay import ReplayArguments, replay
from bullpen.outbox.routing import Route, RouteArguments
from bullpen.plugins._kafka import BrokerArguments, Brokers
from bullpen.plugins.channels.email import Email, EmailArguments
from bullpen.plugins.channels.kafka import KafkaChannel, KafkaChannelArguments
from bullpen.plugins.channels.slack import Slack, SlackArguments
from bullpen.plugins.channels.sms import Sms, SmsArguments
from bullpen.plugins.channels.webhook import Webhook, WebhookArguments
from bullpen.plugins.messaging import ClientArguments, MessagingClient
from bullpen.plugins.transports.bullmq import BullMQTransport
from bullpen.plugins.transports.kafka.client import KafkaClient, KafkaClientArguments
from bullpen.plugins.transports.rabbitmq.client import RabbitMQClient, RabbitMQClientArguments
from bullpen.ports.messaging import ProduceArguments, ProduceManyArguments
from bullpen.queue import Queue
from bullpen.queue.arguments import (
    AddArguments,
    JobArguments,
    JobDefaults,
    NewJobArguments,
    QueueArguments,
    RowArguments,
    ScheduleArguments,
    SchedulerArguments,
    TaskArguments,
)
from bullpen.queue.tasks import _check_options
from bullpen.runs.handlers import RunArguments, RunOptions
from bullpen.runs.service import RunService, SubmitArguments
from bullpen.wire.deduplication import Deduplication
from bullpen.wire.links import HasKey, JobKey
from bullpen.wire.options import DEFAULT_OPTIONS, JobOptions, make_options
from bullpen.wiring.workflows import RegisterOptions, WorkflowOptions, Workflows
from bullpen.worker import Worker
from bullpen.worker.options import WorkerArguments, WorkerOptions
from tests.static.public import public_modules, public_names


class Pair(NamedTuple):
    """What editors read, and what takes the values."""

    arguments: Any
    reader: Any
    """A dataclass, or a function."""
    apart: frozenset[str] = frozenset()
    """What the reader takes that is given in another way."""
    wider: Mapping[str, Any] = {}
    """What callers may write instead of the reader's type."""


def pair(arguments: Any, reader: Any, *apart: str, **wider: Any) -> Any:
    return pytest.param(Pair(arguments, reader, frozenset(apart), wider), id=arguments.__name__)


WORKERS_OWN = ("name", "policy", "codec", "permanent_errors", "dead_letters", "backoff")
CONFIGURED = dict.fromkeys(("url", "account", "token", "sender"), str | None)

PAIRS = [
    pair(
        *(JobArguments, JobOptions),
        backoff=Backoff | CustomBackoff | int | timedelta | BackoffMapping | None,
        timestamp=int | datetime | None,
        delay=int | timedelta | None,
        deduplication=Deduplication | str | None,
        parent=JobKey | HasKey | None,
    ),
    pair(WorkerArguments, WorkerOptions),
    pair(OutboxFields, OutboxItem, "integration_type", "event_type", "payload"),
    pair(RowArguments, make_job_item, "queue", "name", "data", "options"),
    pair(RouteArguments, Route, "channel"),
    pair(ReplayArguments, replay, "store", "by", "label", "integration_type"),
    pair(ImportArguments, import_csv, "recipients", "lines", "occasions"),
    pair(RunArguments, RunOptions),
    pair(SubmitArguments, RunService.submit, "payload"),
    pair(WebhookArguments, Webhook, "url"),
    pair(SlackArguments, Slack, "url"),
    pair(EmailArguments, Email, "host", sender=CONFIGURED["sender"]),
    pair(SmsArguments, Sms, **CONFIGURED),
    pair(KafkaChannelArguments, KafkaChannel, "brokers"),
    pair(BrokerArguments, Brokers, "addresses"),
    pair(ClientArguments, MessagingClient, "transport", "policy"),
    pair(KafkaClientArguments, KafkaClient, "brokers", "workflow"),
    pair(RabbitMQClientArguments, RabbitMQClient, "urls", "policy"),
    pair(ProduceManyArguments, MessagingClient.event, "queue", "name", "data"),
    pair(WorkflowOptions, Workflows.add, "definition", "with_client", "container"),
    pair(
        *(RegisterOptions, Workflows.add, "definition", "with_client", "container"),
        *("name", "bullmq", "kafka"),
    ),
]


def members(kind: Any) -> frozenset[Any]:
    """The alternatives of a type, without None: whether "not given" has a word of its own is the reader's affair."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return frozenset(parts) - {NoneType}


def taken_by(reader: Any) -> dict[str, Any]:
    """Names and types of what a dataclass or a function takes, durations as callers write them."""
    if dataclasses.is_dataclass(reader):
        hints = get_type_hints(reader)
        names = [field.name for field in dataclasses.fields(reader) if field.init]
        if reader not in (JobOptions, WorkerOptions):
            return {name: hints[name] for name in names}
        return dict(_as_written(name, hints[name]) for name in names)
    function = reader.__init__ if inspect.isclass(reader) else reader
    hints = get_type_hints(function)
    taken: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            (further,) = get_args(hints[name])
            taken |= get_type_hints(further)
        elif name != "self":
            taken[name] = hints[name]
    return taken


def _as_written(name: str, kind: Any) -> tuple[str, Any]:
    """Inside the name says the unit; callers give milliseconds or a timedelta."""
    is_duration = name.endswith("_ms") and name != "clock_offset_ms"
    return (name.removesuffix("_ms"), kind | timedelta) if is_duration else (name, kind)


@pytest.mark.parametrize("pair", PAIRS)
def test_arguments_are_those_that_are_read(pair: Pair) -> None:
    written = get_type_hints(pair.arguments)
    taken = {name: kind for name, kind in taken_by(pair.reader).items() if name not in pair.apart}
    if pair.reader is WorkerOptions:
        written = {name: kind for name, kind in written.items() if name not in WORKERS_OWN}

    assert sorted(written) == sorted(taken)
    expected = {name: members(pair.wider.get(name, kind)) for name, kind in taken.items()}
    assert {name: members(kind) for name, kind in written.items()} == expected


def test_every_option_of_messages_on_a_transport_is_an_argument() -> None:
    options = set(ProduceArguments.__annotations__) - {"attempts", "backoff"}

    assert options == set(BullMQTransport.features.options)


def test_what_holds_for_many_jobs_is_what_holds_for_one() -> None:
    """The classes for one job, for a task and for a queue differ only in what cannot be said there."""
    one = get_type_hints(AddArguments)
    taken_by_queue, taken_by_add = taken_by(Queue), taken_by(Queue.add)

    rule, of_one = get_type_hints(ScheduleArguments), ("job_id", "parent", "on_failure")
    by_task = {name: kind for name, kind in one.items() if name not in of_one} | rule
    by_task["lane"] = str | Callable[..., str | None] | None  # or a function of the arguments
    assert get_type_hints(TaskArguments) == by_task
    per_job = ("delay", "at", "timestamp", "deduplication")
    assert (
        get_type_hints(SchedulerArguments)
        == {name: kind for name, kind in get_type_hints(JobDefaults).items() if name not in per_job}
        | rule
        | {"on_failure": one["on_failure"]}  # stored for others; there is no parent
    )
    assert get_type_hints(QueueArguments) == {
        name: kind for name, kind in taken_by_queue.items() if name not in ("name", "connection", "prefix")
    }
    assert {name: kind for name, kind in taken_by_add.items() if name not in ("name", "data")} == one


@pytest.mark.parametrize("name", JobArguments.__annotations__)
def test_a_job_option_refuses_what_is_nothing_of_it(name: str) -> None:
    with pytest.raises(InvalidOption, match=name):
        make_options(DEFAULT_OPTIONS, **{name: object()})


@pytest.mark.parametrize("name", TaskArguments.__annotations__)
def test_a_task_refuses_what_is_nothing_of_it(name: str) -> None:
    if name != "add_deadline":
        with pytest.raises(InvalidOption, match=name):
            _check_options({name: object()})


@pytest.mark.parametrize("name", WorkerArguments.__annotations__)
def test_a_worker_refuses_what_is_nothing_of_it(name: str) -> None:
    given: Any = {name: object()}

    with pytest.raises(InvalidOption, match=name):
        Worker("q", print, connection="redis://localhost:1", **given)


def test_a_wrong_argument_of_a_worker_names_the_nearest() -> None:
    with pytest.raises(InvalidOption, match="did you mean 'concurrency'"):
        Worker("q", print, connection="redis://localhost:1", concurency=5)  # type: ignore[call-arg]  # the point


def test_new_jobs_have_the_options_of_add() -> None:
    assert set(AddArguments.__annotations__) - set(NewJobArguments.__annotations__) == {"durability", "add_deadline"}


# ---- nothing is taken without a name -------------------------------------------------------------------------------

OPEN = {
    "join": "any name of a query of an address",
    "EventEmitter.emit": "arguments of whichever event it is",
    "Settings.load": "any setting by its name, of which there are more than sixty",
    **dict.fromkeys(
        (
            *("AppTester.enqueued", "AppTester.assert_enqueued", "AppTester.assert_not_enqueued"),
            *("AppTester.assert_idempotent", "AppTester.assert_idempotent_sync"),
        ),
        "arguments of whichever task it is",
    ),
    "BatchTask.call_with": "what the worker found for whichever parameters there are",
    "AnyTransport.on": "fields of whichever binding the name stands for",
    "TenantRuns.audit": "what a line of the audit shall show",
    "log": "what a line of the log shall show",
}


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for module in public_modules():
        if module.startswith(("bullpen.cli", "bullpen.testing.contracts", "bullpen.wire")):
            continue
        for _, value in public_names(module):
            if not str(getattr(value, "__module__", "")).startswith("bullpen"):
                continue
            if inspect.isfunction(value):
                yield value.__qualname__, value
            elif inspect.isclass(value):
                for name, member in vars(value).items():
                    function = getattr(member, "__func__", member)
                    if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
                        yield function.__qualname__, function


def test_no_public_function_takes_just_anything() -> None:
    """`**options: Any` lets a misspelt name pass every checker."""
    found = {
        name
        for name, function in functions()
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and parameter.annotation in ("Any", "object", Any, object)
    }

    assert found == set(OPEN)
