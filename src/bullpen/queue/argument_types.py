"""Types of arguments and results of tasks: what JSON can carry, and how Pydantic's types join in.

In: annotations, and values of them. Out: JSON and back. msgspec does all that is its own: dates, decimals, enums,
dataclasses, TypedDicts, attrs classes, structs. Pydantic is never imported here: whoever annotates with its types has
it. An annotation that cannot work is refused where the task stands. Elsewhere: tasks (`tasks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import inspect as types

from bullpen.errors import InvalidOption

__all__ = ["check_argument", "check_result", "from_builtins", "to_builtins"]

_EXPECTED: Final = (
    "a type that JSON can carry (numbers, text, bytes, dates, enums, lists, dictionaries, dataclasses, TypedDict, "
    "msgspec Structs, attrs classes, Pydantic models)"
)

_HIDDEN: Final = (
    "Pydantic writes a secret as asterisks: send a reference to it, or give its field a serializer that writes it"
)


def to_builtins(value: Any) -> Any:
    """As JSON. Raises TypeError for what has no form in it."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_encode)


def from_builtins(value: Any, kind: Any) -> Any:
    """What JSON says, as this type. Raises msgspec.ValidationError."""
    return msgspec.convert(value, kind, str_keys=True, dec_hook=_decode)


def check_argument(where: str, annotation: Any) -> None:
    """Refuse an annotation whose values could not be read from a job."""
    try:
        msgspec.json.Decoder(msgspec.defstruct("Argument", [("value", annotation)]))
        _check(where, annotation)
    except TypeError as error:
        raise InvalidOption(where, f"{_EXPECTED}; {error}", annotation) from None


def check_result(where: str, annotation: Any) -> None:
    """The same for what a task returns. What never returns, or cannot be told, is none of our business."""
    try:
        types.type_info(annotation)
    except TypeError:
        return
    _check(where, annotation)


def _check(where: str, annotation: Any) -> None:
    for one in _custom_types(types.type_info(annotation), set()):
        if one is object:
            continue
        if not _is_pydantic(one):
            raise InvalidOption(where, _EXPECTED, annotation)
        try:
            _adapter(one)
        except Exception as error:
            raise InvalidOption(where, f"a type that Pydantic can read ({error})", annotation) from error
        if _hides_secrets(one):
            raise InvalidOption(where, f"a type whose values come back as what they were; {_HIDDEN}", annotation)


def _custom_types(info: Any, seen: set[int]) -> Iterator[Any]:
    """Those that msgspec leaves to others, at any depth."""
    if isinstance(info, types.CustomType):
        yield info.cls
    if not isinstance(info, types.Type | types.Field) or id(info) in seen:
        return
    seen.add(id(info))
    for name in info.__struct_fields__:
        value = getattr(info, name)
        for part in value if isinstance(value, tuple) else (value,):
            yield from _custom_types(part, seen)


def _is_pydantic(kind: Any) -> bool:
    return hasattr(kind, "__get_pydantic_core_schema__")


def _make_adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


_adapter: Final[Callable[[Any], Any]] = cache(_make_adapter)


def _judge_secrets(kind: Any) -> bool:
    return _has_asterisks(_adapter(kind).core_schema)


_hides_secrets: Final[Callable[[Any], bool]] = cache(_judge_secrets)
"""Whether Pydantic writes asterisks for some part of a type: SecretStr and its like, without a serializer."""


def _has_asterisks(part: Any) -> bool:
    if isinstance(part, list | tuple):
        return any(map(_has_asterisks, part))
    if not isinstance(part, dict):
        return False
    writes = part.get("serialization")
    if isinstance(writes, dict) and writes.get("type") == "function-plain":  # it alone decides, whatever is inside
        function = writes["function"]
        made_by = getattr(function, "__module__", ""), getattr(function, "__name__", "")
        return made_by[0] == "pydantic.types" and made_by[1].startswith("_serialize_secret")
    return any(map(_has_asterisks, part.values()))


def _encode(value: Any) -> Any:
    if _is_pydantic(type(value)):
        if _hides_secrets(type(value)):
            raise TypeError(f"objects of type {type(value).__name__} would not come back as what they were; {_HIDDEN}")
        return _adapter(type(value)).dump_python(value, mode="json", by_alias=True)
    raise TypeError(f"objects of type {type(value).__name__} have no form in JSON")


def _decode(kind: Any, value: Any) -> Any:
    if kind is object:
        return value
    try:
        # As JSON: in Pydantic's strict mode, text is a date there and nowhere else.
        return _adapter(kind).validate_json(msgspec.json.encode(value))
    except ValueError as error:
        raise ValueError(_describe(error)) from None


def _describe(error: ValueError) -> str:
    """Without the values, which may be anybody's and are stored with the failure."""
    listed = getattr(error, "errors", None)
    if listed is None:
        return str(error)
    found = listed(include_input=False, include_url=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'it'}: {one['msg']}" for one in found[:5])
