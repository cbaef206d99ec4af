"""JSON that no reader misunderstands."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import enum
import json as standard
import math
import uuid
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bullpen._kernel import json
from bullpen.errors import NotJson, PayloadTooLarge

MB = 1024 * 1024
SAFE = 2**53 - 1

texts = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.integers(-SAFE, SAFE) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner) | st.lists(inner).map(tuple), max_leaves=20
)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.decimals()
    | st.datetimes()
    | st.uuids()
    | st.frozensets(st.integers()),
    lambda inner: st.lists(inner) | st.dictionaries(st.integers() | st.text() | st.none(), inner) | st.tuples(inner),
    max_leaves=20,
)


def lists_for_tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [lists_for_tuples(item) for item in value]
    return {key: lists_for_tuples(item) for key, item in value.items()} if isinstance(value, dict) else value


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Plain(enum.Enum):
    A = "a"


class Text(str):
    __slots__ = ()


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Order:
    number: int = 1


class Nameless:
    def __repr__(self) -> str:
        raise RuntimeError("no name for you")


@pytest.mark.requirement("Q-4")
@given(values)
@example(2**53 - 1)
@example([-(2**53 - 1), 12345678901234567.0, "9" * 30, {",": "[1234567890123456789]"}])
def test_what_is_written_reads_back_equal_here_and_in_the_standard_library(value: Any) -> None:
    """Data is the caller's; we may not change it on the way."""
    raw = json.encode(value)

    assert json.decode(raw) == lists_for_tuples(value)
    assert standard.loads(raw) == lists_for_tuples(value)


@given(anything)
def test_encoding_either_keeps_the_value_or_raises_not_json(value: Any) -> None:
    """No other exception escapes, and nothing is changed in silence."""
    try:
        raw = json.encode(value)
    except NotJson:
        return

    assert standard.loads(raw) == lists_for_tuples(value)


@pytest.mark.parametrize(
    ("value", "path", "expected"),
    [
        (math.nan, "data", "a finite number"),
        ({"items": [0, 1, 2, {"price": math.inf}]}, "data.items[3].price", "a finite number"),
        ([b"x"], "data[0]", "not bytes"),
        ({"tags": {1}}, "data.tags", "not set"),
        ({"price": decimal.Decimal("1.5")}, "data.price", "not Decimal"),
        ({"at": datetime(2026, 1, 1, tzinfo=UTC)}, "data.at", "not datetime"),
        ({"id": uuid.UUID(int=1)}, "data.id", "not UUID"),
        (Order(), "data", "not Order"),
        (Plain.A, "data", "not Plain"),
        ({1: "one"}, "data", "only text as keys, not int"),
        ({"a b": {None: 1}}, "data['a b']", "only text as keys, not NoneType"),
        ({"n": 2**53}, "data.n", "or the number as text"),
        ({"n": -(2**53)}, "data.n", "or the number as text"),
        ([10**5000], "data[0]", "or the number as text"),
        ("\ud800", "data", "without lone surrogates"),
        ({"\udfff": 1}, "data", "without lone surrogates"),
        (((1, (2, math.nan)),), "data[0][1][1]", "a finite number"),
        ([Nameless()], "data[0]", "not Nameless"),
        ({"k" * 500: math.nan}, "data['" + "k" * 59 + "]", "a finite number"),
    ],
)
def test_what_cannot_travel_is_named_by_its_path(value: Any, path: str, expected: str) -> None:
    """msgspec writes most of these as something else; a reader in another language would never know."""
    with pytest.raises(NotJson) as caught:
        json.encode(value)

    assert caught.value.option == path
    assert expected in caught.value.expected


@pytest.mark.parametrize(
    ("value", "raw"),
    [
        (Colour.RED, b'"red"'),
        ({Colour.RED: Level.HIGH}, b'{"red":3}'),
        ((Colour.RED, Level.HIGH), b'["red",3]'),
        (({Colour.RED: True},), b'[{"red":true}]'),
        ((Text("x"), 1.5), b'["x",1.5]'),
        (Point(1, 2), b"[1,2]"),
        (collections.OrderedDict(a=1), b'{"a":1}'),
        ((1, (2, ())), b"[1,[2,[]]]"),
        ("é", '"é"'.encode()),
    ],
)
def test_tuples_enums_and_subclasses_travel_as_what_they_are(value: Any, raw: bytes) -> None:
    """They carry nothing that JSON would lose."""
    assert json.encode(value) == raw


def test_a_value_that_contains_itself_is_refused_with_the_place() -> None:
    """A circle is found, not followed."""
    node: dict[str, Any] = {"name": "root"}
    node["children"] = [node]

    with pytest.raises(NotJson, match=r"data\.children\[0\]: expected a value that does not contain itself"):
        json.encode(node)


def test_the_same_object_twice_is_no_circle() -> None:
    """Shared parts are common in Python data."""
    part = (1,)

    assert json.encode([part, part]) == b"[[1],[1]]"


def test_a_value_nested_too_deeply_is_refused_as_not_json() -> None:
    """Not as a RecursionError, which would end a worker's loop."""
    deep: Any = []
    for _ in range(100_000):  # Python 3.12 and newer let C code go deeper than `sys.getrecursionlimit` says
        deep = [deep]

    with pytest.raises(NotJson, match="nested less deeply"):
        json.encode(deep)


class Angry(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("do not look inside")


def test_a_container_that_fails_when_read_is_refused_as_not_json() -> None:
    """Its own exception would be the only one that a caller does not expect."""
    with pytest.raises(NotJson, match="data: expected a value that JSON can carry, got 'Angry'") as caught:
        json.encode(Angry(x=(1,)))

    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_error_uses_the_name_of_what_was_encoded() -> None:
    """A handler's return value is not "data"."""
    with pytest.raises(NotJson, match=r"return value\.x: expected a finite number, got nan"):
        json.encode({"x": math.nan}, what="return value")


def test_reading_accepts_what_only_lenient_writers_produce() -> None:
    """Data is already stored; refusing it helps nobody."""
    assert math.isnan(json.decode(b"NaN"))
    assert json.decode(b'{"a":-Infinity}') == {"a": -math.inf}
    assert json.decode(b'"\\ud800"') == "\ud800"
    assert json.decode("[1]") == [1]


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[1,]", b"1" * 5000, b"[" * 100_000, b"undefined", "'x'"])
def test_what_no_reader_takes_raises_not_json(raw: bytes | str) -> None:
    """One exception type, so that broken data is a failed job and not a dead worker."""
    with pytest.raises(NotJson, match="data: expected JSON"):
        json.decode(raw)


@given(st.binary())
def test_reading_any_bytes_gives_a_value_or_not_json(raw: bytes) -> None:
    """Nothing in a queue is trusted because it is there."""
    try:
        json.decode(raw)
    except NotJson:
        pass


@pytest.mark.requirement("Q-17", "Q-19")
def test_the_limit_counts_data_and_options_together() -> None:
    """Ten megabytes are allowed, one byte more is not."""
    json.check_payload_size(10 * MB - 100, 100)

    with pytest.raises(PayloadTooLarge) as caught:
        json.check_payload_size(10 * MB - 100, 101)

    assert (caught.value.size_bytes, caught.value.limit_bytes) == (10 * MB + 1, 10 * MB)


@pytest.mark.requirement("Q-18", "X-100")
@pytest.mark.parametrize(
    ("size", "printed"),
    [(int(12.3 * MB), "12.3"), (int(10.04 * MB), "10.04"), (10 * MB + 1, "10.000001"), (10 * MB + 1049, "10.001")],
)
def test_the_message_tells_the_size_with_as_many_digits_as_needed(size: int, printed: str) -> None:
    """ "10.0 MB exceeds limit of 10.0 MB" would be true and useless."""
    with pytest.raises(PayloadTooLarge) as caught:
        json.check_payload_size(size)

    assert str(caught.value) == f"Job payload size {printed} MB exceeds limit of 10.0 MB"


@pytest.mark.requirement("X-100")
@given(st.integers(10 * MB + 1, 10**12))
def test_the_printed_size_always_exceeds_the_printed_limit(size: int) -> None:
    """For every size, to the byte."""
    with pytest.raises(PayloadTooLarge) as caught:
        json.check_payload_size(size)

    words = str(caught.value).split()
    assert float(words[3]) > float(words[-2]) == 10.0


def test_a_smaller_limit_is_printed_so_that_it_can_be_told_from_the_size() -> None:
    """A limit below 0.05 MB must not read as 0.0 MB."""
    with pytest.raises(PayloadTooLarge, match=r"size 0\.002 MB exceeds limit of 0\.001 MB"):
        json.check_payload_size(2_000, limit_bytes=1_000)


@pytest.mark.requirement("X-127")
def test_return_values_have_the_same_limit_and_their_own_words() -> None:
    """They are stored twice, in the job and in its event."""
    json.check_result_size(10 * MB)

    with pytest.raises(PayloadTooLarge, match=r"Job return value size 10\.000001 MB exceeds limit of 10\.0 MB"):
        json.check_result_size(10 * MB + 1)


@pytest.mark.requirement("X-100")
@given(texts)
def test_sizes_are_the_bytes_that_are_written(text: str) -> None:
    """UTF-8, not escaped ASCII and not characters."""
    raw = json.encode(text)

    assert len(raw) == len(standard.dumps(text, ensure_ascii=False).encode()) or b"\\u" in raw


def test_null_as_the_whole_payload_is_written_as_such() -> None:
    """Where None means that nothing was given."""
    assert json.encode(json.NULL) == b"null"
