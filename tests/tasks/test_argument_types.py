"""Arguments and results that are records of other libraries: they travel as JSON, or are refused at the decorator."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any, NoReturn

import attrs
import msgspec
import pydantic
import pytest

from bullpen import Bullpen, InvalidOption, Job, JobFailed, Queue

PATIENCE = 60_000


@dataclass
class Plain:
    day: date
    size: int


class Struct(msgspec.Struct):
    day: date
    size: int


@attrs.define
class Attrs:
    day: date
    size: int = attrs.field(validator=attrs.validators.gt(0))


class Model(pydantic.BaseModel):
    day: date
    size: int = pydantic.Field(gt=0)


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    day: date
    size: int = pydantic.Field(alias="sizeInCm", gt=0)
    inner: Model | None = None


class Login(pydantic.BaseModel):
    password: pydantic.SecretStr | None
    next: Login | None = None


class Shown(pydantic.BaseModel):
    password: pydantic.SecretStr

    @pydantic.field_serializer("password", when_used="json")
    def show(self, value: pydantic.SecretStr) -> str:
        return value.get_secret_value()


class Unknown:
    pass


@pytest.fixture
async def app(redis_url: str) -> AsyncIterator[Bullpen]:
    async with Bullpen(redis_url) as made:
        yield made


DAY = date(2030, 1, 2)


@pytest.mark.parametrize("value", [Plain(DAY, 3), Struct(DAY, 3), Attrs(DAY, 3), Model(day=DAY, size=3)])
async def test_records_arrive_as_what_they_were_and_so_do_results(app: Bullpen, value: Any) -> None:
    seen: list[Any] = []

    async def ship(parcel: Any, others: Any) -> Any:
        seen.extend([parcel, *others])
        return parcel

    kind = type(value)
    ship.__annotations__ = {"parcel": kind, "others": list[kind], "return": kind}  # type: ignore[valid-type]  # by test
    task = app.task("shop")(ship)
    job = await task.add(value, others=[value])
    run = asyncio.create_task(app.run(signals=False))

    assert await job.result(timeout=PATIENCE) == value
    await app.stop()
    await run
    assert seen == [value, value]
    assert type(seen[0]) is kind
    assert job.data == {"parcel": {"day": "2030-01-02", "size": 3}, "others": [{"day": "2030-01-02", "size": 3}]}


async def test_strict_models_with_aliases_come_back(app: Bullpen) -> None:
    @app.task("shop")
    async def ship(parcel: Strict, link: pydantic.HttpUrl, parcels: dict[str, Strict | None]) -> Strict:
        return parcel

    parcel = Strict(day=DAY, sizeInCm=3, inner=Model(day=DAY, size=1))
    job = await ship.add(parcel, pydantic.HttpUrl("https://example.com/a"), {"one": parcel, "two": None})
    run = asyncio.create_task(app.run(signals=False))

    assert await job.result(timeout=PATIENCE) == parcel
    await app.stop()
    await run
    assert job.data["parcel"]["sizeInCm"] == 3
    assert job.data["link"] == "https://example.com/a"


@pytest.mark.parametrize("kind", [Plain, Struct, Attrs, Model])
async def test_wrong_data_fails_for_good_and_its_values_are_in_no_message(
    app: Bullpen, kind: type[Any], redis_url: str
) -> None:
    async def ship(parcel: Any) -> None: ...

    ship.__annotations__ = {"parcel": kind}
    task = app.task("shop")(ship)
    with pytest.raises(InvalidOption, match="size"):
        await task.add({"day": "2030-01-02", "size": "secret"})
    async with Queue("shop", connection=redis_url) as queue:
        job = await queue.add("ship", {"parcel": {"day": "2030-01-02", "size": "secret"}}, attempts=5)
        run = asyncio.create_task(app.run(signals=False))
        with pytest.raises(JobFailed, match="cannot be called with this job's data") as failed:
            await job.result(timeout=PATIENCE)
        await app.stop()
        await run

    assert "secret" not in str(failed.value)
    assert "size" in str(failed.value)


def takes_unknown(thing: Unknown) -> None: ...
def takes_list_of_unknown(thing: dict[str, list[Unknown]]) -> None: ...
def takes_iterator(thing: Iterator[int]) -> None: ...
def takes_function(thing: Callable[[], None]) -> None: ...
def takes_two_models(thing: Model | Strict) -> None: ...
def takes_model_or_number(thing: Model | int) -> None: ...
def takes_a_default(thing: Unknown = Unknown()) -> None: ...  # noqa: B008
async def returns_unknown() -> Unknown: ...  # type: ignore[empty-body]
async def returns_unknowns() -> list[Unknown]: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    "function",
    [
        takes_unknown,
        takes_list_of_unknown,
        takes_iterator,
        takes_function,
        takes_two_models,
        takes_model_or_number,
        takes_a_default,
    ],
)
def test_parameters_that_cannot_work_are_refused_where_the_task_stands(function: Callable[..., Any]) -> None:
    with pytest.raises(InvalidOption, match=rf"parameter 'thing' of task '{function.__name__}': .*Pydantic models"):
        Bullpen().task("shop")(function)


@pytest.mark.parametrize("function", [returns_unknown, returns_unknowns])
def test_results_that_cannot_work_are_refused_where_the_task_stands(function: Callable[..., Any]) -> None:
    with pytest.raises(InvalidOption, match=rf"result of task '{function.__name__}'"):
        Bullpen().task("shop")(function)


def test_what_takes_anything_or_never_returns_is_a_task() -> None:
    app = Bullpen()

    @app.task("shop")
    def takes_all(job: Job, anything: Any, thing: object, untyped=None) -> NoReturn:  # type: ignore[no-untyped-def]
        raise ValueError

    assert takes_all.call(1, {"a": [2]}).data == {"anything": 1, "thing": {"a": [2]}}


@pytest.mark.parametrize(
    "kind", [pydantic.SecretStr, pydantic.SecretBytes, pydantic.Secret[int], Login, list[Login], dict[str, Login]]
)
def test_secrets_that_would_arrive_as_asterisks_are_refused_where_the_task_stands(kind: Any) -> None:
    def takes(given: Any) -> None: ...

    def gives() -> Any: ...

    takes.__annotations__ = {"given": kind}
    gives.__annotations__ = {"return": kind}
    for function in (takes, gives):
        with pytest.raises(InvalidOption, match="asterisks"):
            Bullpen().task("shop")(function)


def test_a_secret_is_refused_in_what_anything_may_be_and_carried_where_a_serializer_writes_it() -> None:
    @Bullpen().task("shop")
    def ship(login: Shown, anything: Any) -> None: ...

    hidden, shown = Login(password=pydantic.SecretStr("hunter2")), Shown(password=pydantic.SecretStr("hunter2"))
    with pytest.raises((InvalidOption, TypeError), match="asterisks") as refused:
        ship.call(shown, [hidden])
    assert "hunter2" not in str(refused.value)
    assert ship.call(shown, 1).data["login"]["password"] == "hunter2"


def test_pydantic_and_attrs_are_not_imported_for_tasks_without_them() -> None:
    program = (
        "import sys; from bullpen import Bullpen\n"
        "def f(a: int) -> str: ...\n"
        "Bullpen().task('q')(f).call(1)\n"
        "print([name for name in ('pydantic', 'attrs') if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"
