"""What every API of ours over HTTP does alike: who asks, reading a request, and what becomes of an error.

In: a request. Out: whose it is, its body if that is small and flat enough, and answers in JSON. The tenant comes from
the token and from nowhere else. Answers hold summaries of errors, never stacks or secrets. Elsewhere: the operations
(`runs`, `endpoints`), limits of connections (`_protocol`).
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from bullpen._kernel.logs import get_logger
from bullpen.errors import (
    BullpenError,
    ConnectionLost,
    DatabaseUnavailable,
    InsufficientCredits,
    InvalidOption,
    MissingExtra,
    PayloadTooLarge,
    RowNotFound,
    RowStateConflict,
)
from bullpen.ledger import check_tenant

try:
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
except ModuleNotFoundError as error:
    raise MissingExtra("http", "the HTTP interfaces") from error

__all__ = [
    "ON_ERRORS",
    "PAYLOAD_LIMIT",
    "ApiRecord",
    "Authenticate",
    "Principal",
    "Problem",
    "Tokens",
    "answer_json",
    "decode",
    "identify",
    "read_body",
    "read_limit",
]

_log = get_logger("bullpen.http")

AnyBody = TypeVar("AnyBody", bound=msgspec.Struct)
PAYLOAD_LIMIT: Final = 10 * 1024 * 1024


class ApiRecord(msgspec.Struct, rename="camel", kw_only=True):
    """What travels. Names are camelCase there."""


class Problem(ApiRecord):
    """Why not."""

    error: str
    message: str


_STATUS_OF: Final[tuple[tuple[type[Exception], int, str], ...]] = (
    (RowNotFound, 404, "not_found"),
    (RowStateConflict, 409, "conflict"),
    (InsufficientCredits, 402, "insufficient_credits"),
    (PayloadTooLarge, 413, "too_large"),
    (InvalidOption, 422, "invalid"),
    (DatabaseUnavailable, 503, "unavailable"),
    (ConnectionLost, 503, "unavailable"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who asks, and for which tenant."""

    tenant_id: str
    actor: str
    """Written into the audit of every change."""
    may_write: bool = True
    """False: may look, and nothing else."""
    may_test: bool = False
    """May start test runs, which cost nothing."""

    def __post_init__(self) -> None:
        check_tenant(self.tenant_id)


Authenticate = Callable[[str], Awaitable[Principal | None]]
"""Finds out whose token it is; None: nobody's."""


class Tokens:
    """A fixed set of tokens. Only their digests are kept, and comparing takes the same time for all."""

    def __init__(self, principals: Mapping[str, Principal]) -> None:
        for token in principals:
            if len(token) < 16:
                raise InvalidOption("token", "at least 16 characters", f"{token[:2]}…")
        self._principals = {_digest(token): principal for token, principal in principals.items()}

    async def __call__(self, token: str) -> Principal | None:
        return self._principals.get(_digest(token))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


async def identify(request: Request, authenticate: Authenticate, *, writes: bool = False) -> Principal:
    """Who asks. Answers 401 without a good token, and 403 where `writes` is more than it may."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    who = await authenticate(token.strip()) if scheme.lower() == "bearer" and token.strip() else None
    if who is None:
        raise HTTPException(401, "a valid bearer token is needed", {"www-authenticate": "Bearer"})
    if writes and not who.may_write:
        raise HTTPException(403, "this token may only read")
    return who


# Reading ------------------------------------------------------------------------------------------------------------


async def read_body(request: Request, most: int = PAYLOAD_LIMIT) -> bytes:
    """The whole body, unless it is larger than it may be."""
    found = bytearray()
    async for chunk in request.stream():
        found += chunk
        if len(found) > most:
            text = f"the request is larger than {most // 1024 // 1024} MiB"
            raise PayloadTooLarge(text, size_bytes=len(found), limit_bytes=most)
    return bytes(found)


def decode(body: bytes, kind: type[AnyBody]) -> AnyBody:
    """What a body says. Raises InvalidOption for one that is no such thing, too deep, or of too many values."""
    if _holds_more_values(body, _MOST_VALUES):
        raise InvalidOption("body", f"JSON with at most {_MOST_VALUES:,} values", f"{len(body)} bytes")
    try:
        decoded = msgspec.json.decode(body, type=kind)
        if _is_deeper(decoded, _MOST_DEPTH):
            raise InvalidOption("body", f"JSON that is nested at most {_MOST_DEPTH} deep", f"{len(body)} bytes")
        return decoded
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidOption("body", f"JSON as described ({error})", f"{len(body)} bytes") from None


_MOST_DEPTH: Final = 100
"""Of a body. What reads the value later does so by recursion, and would end in an error of ours."""


_MOST_VALUES: Final = 100_000
"""In a body. Each costs time on the loop that all clients share, however small it is: 10 MiB of `[],` are 3,300,000,
and took six seconds, for a token without credits too."""


def _holds_more_values(body: bytes, most: int) -> bool:
    """Whether more values stand in it, before any of them is made. Each follows a comma or the beginning of a list or
    table; those inside of texts do not count."""
    if _count(body, b",[{") <= most:
        return False
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 4 * most + 100:  # a name and a text for each
        return True
    return _count(b"".join(bare.split(b'"')[::2]), b",[{") > most


def _count(text: bytes, characters: bytes) -> int:
    return sum(text.count(character) for character in characters)


def _is_deeper(value: object, most: int) -> bool:
    """Whether lists and tables stand in each other more often. Level by level: nothing here is limited itself."""
    level: list[Any] = [msgspec.structs.asdict(value)] if isinstance(value, msgspec.Struct) else [value]
    for _ in range(most + 1):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def read_limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= 200):
        raise InvalidOption("limit", "a number from 1 to 200", text)
    return int(text)


# Answering ----------------------------------------------------------------------------------------------------------


def answer_json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _words_of(error: Exception) -> str:
    """What is wrong, without the value: a payload may hold what neither answers nor logs of others should."""
    return f"{error.option}: expected {error.expected}" if isinstance(error, InvalidOption) else str(error)


async def _on_error(request: Request, error: Exception) -> Response:
    for kind, status, code in _STATUS_OF:
        if isinstance(error, kind):
            message = "the database or the queue does not answer; try again" if status == 503 else _words_of(error)
            return answer_json(Problem(error=code, message=message), status)
    # A mistake of ours, or a ledger that is not ready. The client learns a number to ask for, and nothing else.
    number = uuid.uuid4().hex[:12]
    _log.error("request %s %s failed (%s)", request.method, request.url.path, number, exc_info=error)
    return answer_json(Problem(error="internal", message=f"internal error; quote {number}"), 500)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed", 429: "too_many"}
    answer = answer_json(
        Problem(error=codes.get(error.status_code, "invalid"), message=str(error.detail)), error.status_code
    )
    answer.headers.update(error.headers or {})
    return answer


ON_ERRORS: Final[Mapping[Any, Any]] = {
    **{kind: _on_error for kind, _, _ in _STATUS_OF},
    HTTPException: _on_http,
    BullpenError: _on_error,
}
"""For an application: which error becomes which answer."""
