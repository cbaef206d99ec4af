"""Payloads as objects of a bucket, in Amazon S3 or anything that speaks its protocol.

In: keys and bytes. Out: signed requests (Signature Version 4) to the one endpoint that is configured; a key is only
ever a part of the path. Plain HTTP, because five requests do not need a client library of forty megabytes. No retry:
who asked knows whether to ask again. Elsewhere: the port (`bullpen.ports.objects`), HTTP (`bullpen.plugins._http`).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import weakref
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree as ET

from bullpen._kernel.duration import to_ms
from bullpen.errors import InvalidOption, ObjectStoreFailed, PayloadTooLarge, require
from bullpen.plugins._http import AddressGuard, HttpAnswer, HttpClient, HttpFailed, check_url
from bullpen.ports.objects import StoredObject
from bullpen.wire.envelope import is_object_key

__all__ = ["Credentials", "S3Store", "sign"]

_MOST_XML_BYTES: Final = 4 * 1024 * 1024
_EVERYWHERE: Final = AddressGuard.allowing(("0.0.0.0/0", "::/0"))
"""The endpoint is the operator's own, often inside the network; nothing in a job can change it."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Whom requests are signed for."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


class S3Store:
    """Keeps payloads in a bucket.

        S3Store("payloads", endpoint="https://minio.internal:9000", access_key="…", secret_key="…")

    Keys and region that are not given are read from `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`
    and `AWS_REGION`; without `endpoint` it is Amazon's. `prefix` is put before every key.
    """

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str = "",
        endpoint: str | None = None,
        region: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        session_token: str | None = None,
        timeout: int | timedelta = 30_000,
    ) -> None:
        require("bucket", is_object_key(bucket) and "/" not in bucket, "the name of a bucket", bucket)
        prefix = prefix.strip("/") if isinstance(prefix, str) else prefix
        require("prefix", prefix == "" or is_object_key(prefix), "segments with '/' between them", prefix)
        self._region = region or os.environ.get("AWS_REGION") or "us-east-1"
        given = endpoint or f"https://s3.{self._region}.amazonaws.com"
        self._endpoint = check_url(given, allow_http=True).rstrip("/")
        if urlsplit(self._endpoint).path or urlsplit(self._endpoint).query:
            raise InvalidOption("endpoint", "an address without a path", endpoint)
        self._credentials = _credentials(access_key, secret_key, session_token)
        self._bucket, self._prefix = bucket, f"{prefix}/" if prefix else ""
        self._timeout_ms = to_ms("timeout", timeout, minimum=1)
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, HttpClient] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"S3Store({self._bucket!r}, endpoint={self._endpoint!r})"

    async def put(self, key: str, content: bytes) -> None:
        await self._request("PUT", self._path(key), content=content, expected=(200, 201, 204))

    async def get(self, key: str, *, max_bytes: int) -> bytes | None:
        answer = await self._request("GET", self._path(key), expected=(200, 404), most_bytes=max_bytes + 1)
        if answer.status == 404:
            if _code_of(answer) == "NoSuchBucket":  # a setting that is wrong, not an object that is gone
                raise ObjectStoreFailed(f"{self!r}: there is no such bucket")
            return None
        if len(answer.body) > max_bytes:
            raise PayloadTooLarge(
                f"the object has more than {max_bytes} bytes", size_bytes=len(answer.body), limit_bytes=max_bytes
            )
        return answer.body

    async def delete(self, key: str) -> None:
        await self._request("DELETE", self._path(key), expected=(200, 204, 404))

    async def list(self, directory: str) -> AsyncIterator[StoredObject]:
        token: str | None = None
        while True:
            query = {"list-type": "2", "prefix": f"{self._prefix}{_checked(directory)}/"}
            if token is not None:
                query["continuation-token"] = token
            answer = await self._request("GET", f"/{self._bucket}", query, expected=(200,), most_bytes=_MOST_XML_BYTES)
            found, token = _read_listing(answer.body)
            for key, size, stored_ms in found:
                yield StoredObject(key.removeprefix(self._prefix), size, stored_ms)
            if token is None:
                return

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def _path(self, key: str) -> str:
        return f"/{self._bucket}/{self._prefix}{_checked(key)}"

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        expected: tuple[int, ...],
        content: bytes = b"",
        most_bytes: int = 64 * 1024,
    ) -> HttpAnswer:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = HttpClient(_EVERYWHERE)
        url = f"{self._endpoint}{quote(path)}{f'?{_query(query)}' if query else ''}"
        headers = sign(
            method,
            urlsplit(self._endpoint).netloc,
            path,
            query or {},
            content,
            self._credentials,
            region=self._region,
            now=datetime.now(UTC),
        )
        try:
            answer = await client.request(
                method,
                url,
                headers=headers,
                content=content,
                timeout_ms=self._timeout_ms,
                # An error is read whatever the limit of the object is.
                most_bytes=max(most_bytes, 4096),
            )
        except HttpFailed as error:
            raise ObjectStoreFailed(f"{self!r} did not answer: {error}") from error
        if answer.status not in expected:
            raise ObjectStoreFailed(f"{self!r} answered {method} with {answer.status} {_code_of(answer)}".rstrip())
        return answer


def sign(
    method: str,
    host: str,
    path: str,
    query: Mapping[str, str],
    content: bytes,
    credentials: Credentials,
    *,
    region: str,
    now: datetime,
) -> dict[str, str]:
    """The headers of a request, with its signature (AWS Signature Version 4, service `s3`)."""
    day, instant = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(content).hexdigest()
    headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": instant}
    if credentials.session_token is not None:
        headers["x-amz-security-token"] = credentials.session_token
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name].strip()}\n" for name in sorted(headers))
    request = "\n".join((method, quote(path), _query(query), lines, names, digest))
    scope = f"{day}/{region}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", instant, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{credentials.secret_key}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    return {
        **headers,
        "authorization": (
            f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, "
            f"SignedHeaders={names}, Signature={signature}"
        ),
    }


def _query(query: Mapping[str, str]) -> str:
    return "&".join(f"{quote(name, safe='')}={quote(query[name], safe='')}" for name in sorted(query))


def _checked(key: str) -> str:
    if not is_object_key(key):
        raise InvalidOption("key", "letters, digits, '=', '.', '_' and '-', with '/' between segments", key)
    return key


def _credentials(access_key: str | None, secret_key: str | None, session_token: str | None) -> Credentials:
    environ = os.environ
    if access_key is None and secret_key is None:
        access_key, secret_key = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
        session_token = session_token or environ.get("AWS_SESSION_TOKEN")
    if not access_key or not secret_key:
        raise InvalidOption(
            "access_key", "access_key and secret_key, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "nothing"
        )
    return Credentials(access_key, secret_key, session_token or None)


def _code_of(answer: HttpAnswer) -> str:
    """The server's own word for an error, such as `AccessDenied`."""
    try:
        return _text(ET.fromstring(answer.body), "Code")  # noqa: S314 - the operator's own server
    except ET.ParseError:
        return ""


def _read_listing(body: bytes) -> tuple[list[tuple[str, int, int]], str | None]:
    """Key, size and time of each object, and where the next page begins."""
    try:
        root = ET.fromstring(body)  # noqa: S314 - the operator's own server
        found = [
            (
                _text(one, "Key"),
                int(_text(one, "Size")),
                round(datetime.fromisoformat(_text(one, "LastModified")).timestamp() * 1000),
            )
            for one in root.findall("{*}Contents")
        ]
    except (ET.ParseError, ValueError) as error:
        raise ObjectStoreFailed(f"a listing of the object store cannot be read: {error}") from error
    is_cut = _text(root, "IsTruncated") == "true"
    return found, (_text(root, "NextContinuationToken") or None) if is_cut else None


def _text(element: ET.Element, name: str) -> str:
    return element.findtext(f"{{*}}{name}") or element.findtext(name) or ""
