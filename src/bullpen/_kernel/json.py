"""JSON as it travels: made once, exact, and never changed in silence.

In: a value of a caller, or bytes from Redis. Out: UTF-8 bytes that every reader understands alike, or the value; else
NotJson, which names the path of what cannot travel.

msgspec is fast because it is generous: it writes NaN as null, bytes as base64, sets as lists and integer keys as text.
A reader would get something else than was sent, so what was written is read back and compared; only when that fails
does a slow walk look for the culprit. Elsewhere: what job data means to a handler (`bullpen.queue.tasks`).
"""

from __future__ import annotations

import json as _standard
import math
from enum import Enum
from typing import Any, NoReturn

import msgspec

from bullpen.errors import NotJson, PayloadTooLarge

MEGABYTE = 1024 * 1024
MAX_PAYLOAD_BYTES = 10 * MEGABYTE
MAX_SAFE_INTEGER = 2**53 - 1
"""Above this a JavaScript reader silently gets a neighbouring number."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
decode_strict = _decode
"""For the hot path alone, which asks `decode` about what this one refuses: a call less per job."""

# A whole number of 16 digits or more can exceed 2^53 - 1. Every digit becomes 0 and everything that can stand before a
# number becomes d, so one search finds them: four times as fast as a regular expression on large payloads.
_SHAPES = bytes(ord("0") if c in b"0123456789" else ord("d") if c in b"[:,-" else ord(" ") for c in range(256))
_MAX_KEY_SHOWN = 60
_LONG_NUMBER = b"0" * 16
_LONG_NUMBER_INSIDE = b"d" + _LONG_NUMBER


class _Null:
    """See NULL."""


NULL = _Null()
"""JSON's null as the whole payload, where None means that nothing was given."""


def encode(value: Any, *, what: str = "data") -> bytes:
    """Write `value` as JSON bytes; `what` is the name that an error uses for the whole value.

    Raises NotJson, and nothing else, when some part cannot be read back as it was.
    """
    try:
        raw = _encode(value)
        if _decode(raw) == value and not _may_hold_unsafe_integer(raw):
            return raw
    except Exception:  # noqa: BLE001, S110 - whatever stopped it (a type, a surrogate, a circle), the walk names it
        pass
    try:
        # Encoding the plain copy, not the value: tuples, enums and subclasses of text and numbers come out the same.
        return _encode(_plain(value, what, set()))
    except NotJson:
        raise
    except RecursionError:
        _refuse(what, "a value that is nested less deeply", type(value).__name__)
    except Exception as exc:
        raise NotJson(what, "a value that JSON can carry", type(value).__name__) from exc


def encode_checked(value: Any) -> bytes:
    """Write a value that we built ourselves from checked parts: no second look."""
    return _encode(value)


def holds_nul(encoded: bytes) -> bool:
    """Whether JSON of ours has the character U+0000 in it, which jsonb of PostgreSQL cannot hold. The text of such an
    escape, with a backslash of its own, is harmless."""
    return b"\\u0000" in encoded and b"\\u0000" in encoded.replace(b"\\\\", b"")


def decode(raw: bytes | str, *, what: str = "data") -> Any:
    """Read JSON, also what only lenient writers produce (NaN, Infinity, lone surrogates). Raises NotJson."""
    try:
        return _decode(raw)
    except Exception:  # noqa: BLE001, S110 - strict reader refused; the lenient one below has the last word
        pass
    try:
        return _standard.loads(raw)
    except RecursionError:
        _refuse(what, "JSON that is nested less deeply", raw[:100])
    except (ValueError, TypeError) as exc:
        raise NotJson(what, "JSON", raw[:100]) from exc


def lenient_text(value: Any) -> str:
    """A decoded value as ASCII text, in the JSON of lenient writers. Never raises."""
    try:
        return _standard.dumps(value)
    except (ValueError, TypeError, RecursionError) as error:
        return f"({type(value).__name__} that cannot be written: {type(error).__name__})"


def check_payload_size(data_bytes: int, opts_bytes: int = 0, *, limit_bytes: int = MAX_PAYLOAD_BYTES) -> None:
    """Refuse a job whose data and options, as bytes of JSON, exceed the limit together."""
    if data_bytes + opts_bytes > limit_bytes:
        raise _too_large("Job payload size", data_bytes + opts_bytes, limit_bytes)


def check_result_size(result_bytes: int, *, limit_bytes: int = MAX_PAYLOAD_BYTES) -> None:
    """Refuse a return value that exceeds the limit: it is stored twice, in the job and in its event."""
    if result_bytes > limit_bytes:
        raise _too_large("Job return value size", result_bytes, limit_bytes)


def check_size(subject: str, size_bytes: int, *, limit_bytes: int = MAX_PAYLOAD_BYTES) -> None:
    """Refuse something else that a job stores."""
    if size_bytes > limit_bytes:
        raise _too_large(subject, size_bytes, limit_bytes)


def _too_large(subject: str, size_bytes: int, limit_bytes: int) -> PayloadTooLarge:
    size, limit = size_bytes / MEGABYTE, limit_bytes / MEGABYTE
    # One digit, as people read it; more only while "10.0 MB exceeds limit of 10.0 MB" would be printed.
    digits = next((n for n in range(1, 9) if f"{size:.{n}f}" != f"{limit:.{n}f}"), 9)
    limit_digits = 1 if f"{limit:.1f}" == f"{limit:.9f}".rstrip("0").ljust(len(f"{limit:.1f}"), "0") else digits
    return PayloadTooLarge(
        f"{subject} {size:.{digits}f} MB exceeds limit of {limit:.{limit_digits}f} MB",
        size_bytes=size_bytes,
        limit_bytes=limit_bytes,
    )


def _may_hold_unsafe_integer(raw: bytes) -> bool:
    """False is certain; True also comes from text that looks like it, and then the walk finds nothing."""
    shapes = raw.translate(_SHAPES)
    return _LONG_NUMBER_INSIDE in shapes or shapes.startswith(_LONG_NUMBER)


def _plain(value: Any, path: str, parents: set[int]) -> Any:
    """Copy `value` into exact built-in types, or raise NotJson at the path of the first part that cannot travel."""
    if value is None or value is True or value is False:
        return value
    if value is NULL:
        return None
    if isinstance(value, Enum) and isinstance(value, str | int | float):
        value = value.value
    if isinstance(value, str):
        return _plain_text(value, path)
    if isinstance(value, int):
        if abs(value) > MAX_SAFE_INTEGER:
            _refuse(path, f"a whole number up to {MAX_SAFE_INTEGER} either way, or the number as text", value)
        return int.__index__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            _refuse(path, "a finite number", value)
        return float.__float__(value)
    if not isinstance(value, dict | list | tuple):
        _refuse(path, f"text, number, boolean, None, list or dict, not {type(value).__name__}", value)

    if id(value) in parents:
        _refuse(path, "a value that does not contain itself", type(value).__name__)
    parents.add(id(value))
    copy: Any
    if isinstance(value, dict):
        copy = {_plain_key(key, path): _plain(item, _member(path, key), parents) for key, item in value.items()}
    else:
        copy = [_plain(item, f"{path}[{index}]", parents) for index, item in enumerate(value)]
    parents.discard(id(value))
    return copy


def _plain_text(value: str, path: str) -> str:
    text = str.__str__(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        _refuse(path, "text without lone surrogates", value)
    return text


def _plain_key(key: Any, path: str) -> str:
    if isinstance(key, Enum) and isinstance(key, str):
        key = key.value
    if not isinstance(key, str):
        _refuse(path, f"only text as keys, not {type(key).__name__}", key)
    return _plain_text(key, path)


def _member(path: str, key: Any) -> str:
    if isinstance(key, str) and key.isidentifier() and len(key) <= _MAX_KEY_SHOWN:
        return f"{path}.{key}"
    return f"{path}[{(_safe_repr(key) or type(key).__name__)[:_MAX_KEY_SHOWN]}]"


def _refuse(path: str, expected: str, value: Any) -> NoReturn:
    # A value whose repr fails must not replace our error by its own.
    shown = value if _safe_repr(value) is not None else type(value).__name__
    raise NotJson(path, expected, shown) from None


def _safe_repr(value: Any) -> str | None:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - user code
        return None
