"""The envelope of a sealed payload: what stands in a job instead of its data or its return value.

    {"bpcodec":{"v":1,"q":"bull:emails","kid":"k1","box":"<base64>"}}                     encrypted
    {"bpcodec":{"v":1,"q":"bull:emails","ref":"<key>","size":N,"sha256":"<hex>"}}         in the object store
    {"bpcodec":{"v":1,"q":"bull:emails","kid":"k1","ref":…,"size":N,"sha256":…}}          both

In: bytes of a job, which anybody may have written. Out: an `Envelope` whose parts have the right form, or an error that
says what is wrong with it; and back, the exact bytes. No I/O, no keys. Elsewhere: encrypting and storing
(`bullpen.queue.codec`), the page that describes it for other clients (`docs/reference/envelope.md`).
"""

from __future__ import annotations

import binascii
import hashlib
import re
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any, Final, Literal

from bullpen._kernel import json

__all__ = [
    "MEMBER",
    "SEALED",
    "Envelope",
    "Kind",
    "NoEnvelope",
    "associated_data",
    "directory_of",
    "is_envelope",
    "is_key_id",
    "is_object_key",
    "seal_words",
]

MEMBER: Final = "bpcodec"
SEALED: Final = b'{"bpcodec":{'
"""How sealed bytes begin. Part of the format: data that says the same with a space in it is plain data."""
VERSION: Final = 1

Kind = Literal["data", "result", "endpoint"]
"""What is sealed: data of a job, a return value, what an endpoint keeps secret. None opens as another."""

_is_key_id = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}").fullmatch
_SEGMENT: Final = r"[A-Za-z0-9=_-][A-Za-z0-9=._-]{0,199}"
_is_object_key = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT}){{0,5}}").fullmatch
_is_digest = re.compile(r"[0-9a-f]{64}").fullmatch
_LONGEST_NAME: Final = 150


class NoEnvelope(Exception):
    """It begins like an envelope and is none. The text says what is wrong, and shows nothing of the content."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A sealed payload. `box` or `ref` is set, never both."""

    queue: str
    """`<prefix>:<queue>` that it was sealed for."""
    key_id: str | None = None
    """The key that it is encrypted with; None: it is not encrypted."""
    box: bytes | None = None
    """Nonce, ciphertext and tag."""
    ref: str | None = None
    """Key of the object that holds the payload, or nonce, ciphertext and tag of it."""
    size: int = 0
    """Bytes of that object."""
    sha256: str = ""
    """Of that object."""

    def to_value(self) -> dict[str, Any]:
        """What is stored, as a value; its members are in the order of the format."""
        inside: dict[str, Any] = {"v": VERSION, "q": self.queue}
        if self.key_id is not None:
            inside["kid"] = self.key_id
        if self.ref is not None:
            inside.update(ref=self.ref, size=self.size, sha256=self.sha256)
        else:
            inside["box"] = b64encode(self.box or b"").decode()
        return {MEMBER: inside}

    def to_bytes(self) -> bytes:
        return json.encode_checked(self.to_value())

    def __str__(self) -> str:
        """For people: never the content."""
        where = [] if self.key_id is None else [f"encrypted with key {self.key_id}"]
        if self.ref is not None:
            where.append(f"in the object store ({_size_words(self.size)})")
        return ", ".join(where)

    @classmethod
    def parse(cls, raw: bytes) -> Envelope:
        """From the bytes of a job. Raises NoEnvelope."""
        try:
            value = json.decode(raw)
        except ValueError:
            raise NoEnvelope("it is not JSON") from None
        return cls.read(value)

    @classmethod
    def read(cls, value: Any) -> Envelope:
        """From a decoded value. Raises NoEnvelope."""
        inside = value.get(MEMBER) if isinstance(value, dict) else None
        if not isinstance(inside, dict) or len(value) != 1:
            raise NoEnvelope(f"its only member is not {MEMBER!r} with an object")
        if inside.get("v") != VERSION:
            raise NoEnvelope(f"its version is not {VERSION}")
        queue, key_id, ref, box = (inside.get(name) for name in ("q", "kid", "ref", "box"))
        if not isinstance(queue, str) or not queue:
            raise NoEnvelope("it names no queue")
        if key_id is not None and not is_key_id(key_id):
            raise NoEnvelope("its key id is malformed")
        if (ref is None) == (box is None):
            raise NoEnvelope("it must have either a box or a reference")
        if box is not None:
            if key_id is None:
                raise NoEnvelope("it has a box but names no key")
            return cls(queue, key_id, _unpack(box))
        size, sha256 = inside.get("size"), inside.get("sha256")
        if not is_object_key(ref) or not str(ref).startswith(f"{directory_of(queue)}/"):
            # Whoever may write a job can write anything here: other directories, other hosts, other queues' objects.
            raise NoEnvelope("its reference is not one of an object of that queue")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise NoEnvelope("its size is not a whole number")
        if not isinstance(sha256, str) or not _is_digest(sha256):
            raise NoEnvelope("its sha256 is not a digest")
        return cls(queue, key_id, None, ref, size, sha256)


def is_key_id(value: Any) -> bool:
    """Letters, digits, `.`, `_` and `-`, at most 64."""
    return isinstance(value, str) and _is_key_id(value) is not None


def is_object_key(value: Any) -> bool:
    """Segments of harmless characters with `/` between them: no `..`, no host, no query, nothing to be decoded."""
    return isinstance(value, str) and _is_object_key(value) is not None


def is_envelope(value: Any) -> bool:
    """Whether a decoded value is sealed; `Envelope.read` tells whether rightly."""
    return isinstance(value, dict) and len(value) == 1 and isinstance(value.get(MEMBER), dict)


def directory_of(queue: str) -> str:
    """Where the objects of a queue are: its name with everything but letters, digits, `_` and `-` as `=XX`."""
    name = "".join(
        chr(byte) if (chr(byte).isalnum() and byte < 128) or chr(byte) in "_-" else f"={byte:02X}"
        for byte in queue.encode("utf-8", "surrogateescape")
    )
    if len(name) <= _LONGEST_NAME:
        return name
    return f"=h{hashlib.sha256(queue.encode('utf-8', 'surrogateescape')).hexdigest()}"


def associated_data(kind: Kind, key_id: str, queue: str) -> bytes:
    """What the tag also covers. The queue is last, so no two combinations give the same text."""
    return f"bullpen:{VERSION}:{kind}:{key_id}:{queue}".encode("utf-8", "surrogateescape")


def seal_words(value: Any) -> str | None:
    """What to show instead of a sealed value, such as `encrypted with key k1`; None: it is not sealed."""
    if not is_envelope(value):
        return None
    try:
        return str(Envelope.read(value))
    except NoEnvelope as error:
        return f"a sealed payload that cannot be read: {error}"


def _unpack(box: Any) -> bytes:
    try:
        return b64decode(box if isinstance(box, str) else b"?", validate=True)
    except (binascii.Error, ValueError):
        raise NoEnvelope("its box is not base64") from None


def _size_words(size: int) -> str:
    for unit, above in (("MB", 1024 * 1024), ("kB", 1024)):
        if size >= above:
            return f"{size / above:.1f} {unit}"
    return f"{size} bytes"
