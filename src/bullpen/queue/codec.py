"""Seal payloads before they are stored, and open them where they are used.

Sealing encrypts (`keys`), or moves what is large to an object store (`store`), or both; a job then holds an envelope
(`bullpen.wire.envelope`). In: bytes of JSON and the queue they belong to. Out: the same bytes, sealed or opened, or
an error that says whether waiting helps (PayloadUnavailable) or not (PayloadTampered, PayloadMissing).
Elsewhere: the cipher (`encryption`), where adds pass through (`sealed_add`), where workers do
(`bullpen.worker.sealed`), objects that no job needs any more (`payloads`).
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from bullpen._kernel import json
from bullpen._kernel.duration import check_int, check_texts
from bullpen._kernel.ids import new_token
from bullpen.errors import (
    InvalidOption,
    ObjectStoreFailed,
    PayloadMissing,
    PayloadTampered,
    PayloadTooLarge,
    PayloadUnavailable,
    require,
)
from bullpen.ports.objects import ObjectStore
from bullpen.wire.envelope import (
    SEALED,
    Envelope,
    Kind,
    NoEnvelope,
    associated_data,
    directory_of,
    is_envelope,
)
from bullpen.wire.keys import QueueKeys
from bullpen.wire.records import JobRecord

if TYPE_CHECKING:
    from bullpen.queue.encryption import KeyRing

__all__ = ["Codec", "Sealer", "check_codec", "no_codec", "owner_commands", "run_blocking"]

T = TypeVar("T")

_IN_THREAD_FROM: Final = 256 * 1024
"""From this size on encrypting takes longer than handing it to a thread."""
DEFAULT_ABOVE: Final = 256 * 1024
DEFAULT_MAX_BYTES: Final = 100 * json.MEGABYTE
OWNER_FIELD: Final = "bpstore"
"""Field of `meta` that names whose objects are this queue's: one that was deleted and made anew, or that has the same
name on another server, has another."""


class Codec:
    """How job data and return values are stored: encrypted, in an object store, or both.

        codec = Codec(keys={"k2": new, "k1": old}, store=FileStore("/srv/payloads"))
        queue = Queue("emails", codec=codec)
        worker = Worker("emails", handle, codec=codec)

    Queues and workers open what any of `keys` sealed and seal with `current` (the first unless given). May be shared
    by all queues and workers of a process. Close its store yourself (`await codec.aclose()`), after them.
    """

    def __init__(
        self,
        keys: Mapping[str, bytes | str] | None = None,
        *,
        current: str | None = None,
        store: ObjectStore | None = None,
        above: int = DEFAULT_ABOVE,
        max_bytes: int = DEFAULT_MAX_BYTES,
        also_from: Iterable[str] = (),
        refuse_plain: bool = False,
    ) -> None:
        """`keys`: key id to 32 bytes, or the same as base64; nothing is encrypted without. `above`: data of more bytes
        goes to `store`. `max_bytes`: longer data is neither stored there nor read from there. `also_from`: further
        queues, as `<prefix>:<queue>`, whose sealed payloads are opened here after they were moved.
        `refuse_plain`: jobs whose data is not encrypted fail without being run."""
        self.also_from = frozenset(check_texts("also_from", also_from))
        if keys is None and store is None:
            raise InvalidOption("codec", "keys, a store, or both", None)
        if current is not None and keys is None:
            raise InvalidOption("current", "keys to choose from", current)
        self._keys = None if keys is None else _key_ring(keys, current)
        if store is not None and not isinstance(store, ObjectStore):
            raise InvalidOption("store", "an object store, such as FileStore or S3Store", store)
        self.store = store
        self.above = check_int("above", above, minimum=0)
        self.max_bytes = check_int("max_bytes", max_bytes, minimum=1)
        require("refuse_plain", isinstance(refuse_plain, bool), "True or False", refuse_plain)
        require("refuse_plain", not refuse_plain or keys is not None, "keys to open the others with", refuse_plain)
        self.refuse_plain = refuse_plain

    def __repr__(self) -> str:
        return f"Codec(keys={self.key_ids}, store={self.store!r})"

    @property
    def key_ids(self) -> tuple[str, ...]:
        """The keys that it knows; the one that seals is `current_key`."""
        return () if self._keys is None else self._keys.ids

    @property
    def current_key(self) -> str | None:
        return None if self._keys is None else self._keys.current

    @property
    def limit_bytes(self) -> int:
        """How long data may be before it is sealed."""
        return json.MAX_PAYLOAD_BYTES if self.store is None else max(self.max_bytes, json.MAX_PAYLOAD_BYTES)

    async def aclose(self) -> None:
        if self.store is not None:
            await self.store.aclose()

    def encrypt(self, plain: bytes, kind: Kind, queue: str) -> tuple[str | None, bytes]:
        """The id of the key, and what it made; None and the plain bytes without keys."""
        if self._keys is None:
            return None, plain
        key_id = self._keys.current
        return key_id, self._keys.encrypt(plain, associated_data(kind, key_id, queue))

    def decrypt(self, envelope: Envelope, box: bytes, kind: Kind, what: str) -> bytes:
        key_id = envelope.key_id
        if key_id is None:
            return box
        if self._keys is None or key_id not in self._keys:
            raise _unknown_key(what, envelope, self.key_ids)
        # Only here, behind the optional dependency.
        from bullpen.queue.encryption import WrongTag

        try:
            return self._keys.decrypt(key_id, box, associated_data(kind, key_id, envelope.queue))
        except WrongTag:
            raise PayloadTampered(
                what, f"it was not sealed with key {key_id!r} for {envelope.queue!r}, or it was changed later"
            ) from None


def _key_ring(keys: Mapping[str, bytes | str], current: str | None) -> KeyRing:
    from bullpen.queue.encryption import KeyRing

    return KeyRing(keys, current)


def check_codec(given: Any) -> Codec | None:
    """The option `codec` of queues and workers."""
    require("codec", given is None or isinstance(given, Codec), "a Codec", given)
    return given  # type: ignore[no-any-return]  # looked at just now


def _unknown_key(what: str, envelope: Envelope, known: tuple[str, ...]) -> PayloadUnavailable:
    has = f"this codec has {', '.join(known)}" if known else "no codec with keys is configured here"
    return PayloadUnavailable(
        what, f"{envelope}; {has}. Give queues and workers a codec with that key", key_id=envelope.key_id
    )


def no_codec(record: JobRecord, queue: str) -> PayloadUnavailable:
    """Why a worker without a codec gives a job back."""
    what = f"job {record.id!r} of queue {queue!r}"
    try:
        envelope = Envelope.parse(record.raw_data)
    except NoEnvelope as error:
        return PayloadUnavailable(what, f"it is sealed, no codec is configured here, and {error}")
    return PayloadUnavailable(what, f"{envelope}; no codec is configured here: pass codec=", key_id=envelope.key_id)


def owner_commands(keys: QueueKeys) -> list[tuple[str | bytes | int, ...]]:
    """The commands whose second reply names whose objects are this queue's."""
    return [("HSETNX", keys.meta, OWNER_FIELD, new_token()), ("HGET", keys.meta, OWNER_FIELD)]


class Sealer:
    """A codec for one queue."""

    def __init__(self, codec: Codec, keys: QueueKeys, read_owner: Callable[[], Awaitable[str]]) -> None:
        self.codec = codec
        self.queue = keys.base.removesuffix(":")
        self._name = keys.name
        self._read_owner = read_owner

    # ---- data -------------------------------------------------------------------------------------------------

    async def seal(self, plain: bytes) -> bytes:
        """The bytes to store in a job. When this returns, an object that they name is stored."""
        codec = self.codec
        if plain.startswith(SEALED):
            raise InvalidOption("data", "data that is not sealed already", "{'bpcodec': …}")
        is_large = codec.store is not None and len(plain) > codec.above
        if is_large and len(plain) > codec.max_bytes:
            raise PayloadTooLarge(
                f"job data of {len(plain)} bytes exceeds max_bytes of the codec ({codec.max_bytes})",
                size_bytes=len(plain),
                limit_bytes=codec.max_bytes,
            )
        if codec.current_key is None and not is_large:
            return plain
        key_id, box = await _apart(len(plain), codec.encrypt, plain, "data", self.queue)
        if codec.store is None or not is_large:
            return Envelope(self.queue, key_id, box).to_bytes()
        ref = f"{directory_of(self.queue)}/{await self._read_owner()}/{secrets.token_hex(16)}"
        digest = await _apart(len(box), _sha256, box)
        await codec.store.put(ref, box)
        return Envelope(self.queue, key_id, None, ref, len(box), digest).to_bytes()

    async def open(self, stored: bytes, job_id: str) -> bytes:
        """The bytes that were sealed. Raises PayloadUnavailable, PayloadMissing or PayloadTampered."""
        what = f"job {job_id!r} of queue {self._name!r}"
        if not stored.startswith(SEALED):
            self._accept_plain(what)
            return stored
        envelope = self._check(stored, what)
        box = await self._fetch(envelope, what) if envelope.box is None else envelope.box
        plain: bytes = await _apart(len(box), self.codec.decrypt, envelope, box, "data", what)
        return plain

    async def open_record(self, record: JobRecord) -> JobRecord:
        """The job with its payload, and its return value if it has one, opened. Raises as `open`."""
        stored, value = record.raw_data, record.field(b"returnvalue")
        data = await self.open(stored, record.id)
        if data is stored and not (value or b"").startswith(SEALED):
            return record
        return record.opened(data, None if value is None else self.open_result_bytes(value))

    async def forget(self, stored: bytes) -> None:
        """Remove the object of a payload that no job got. What cannot be removed now is left to a sweep."""
        if self.codec.store is None or not stored.startswith(SEALED):
            return
        ref = Envelope.parse(stored).ref
        if ref is not None:
            try:
                await self.codec.store.delete(ref)
            except ObjectStoreFailed:
                pass

    def _accept_plain(self, what: str) -> None:
        if self.codec.refuse_plain:
            raise PayloadTampered(what, "its data is not encrypted, and this codec refuses that")

    def _check(self, stored: bytes, what: str, child_key: str | None = None) -> Envelope:
        try:
            envelope = Envelope.parse(stored)
        except NoEnvelope as error:
            raise PayloadTampered(what, f"its sealed payload cannot be read: {error}") from None
        is_own = envelope.queue == self.queue if child_key is None else child_key.startswith(f"{envelope.queue}:")
        if not is_own and envelope.queue not in self.codec.also_from:
            raise PayloadTampered(
                what, f"its payload was sealed for {envelope.queue!r}; name that in also_from of the codec to accept it"
            )
        if envelope.key_id is None:
            self._accept_plain(what)
        return envelope

    async def _fetch(self, envelope: Envelope, what: str) -> bytes:
        codec, ref = self.codec, envelope.ref or ""
        if codec.store is None:
            raise PayloadUnavailable(what, f"{envelope}; this codec has no store", key_id=envelope.key_id)
        if envelope.key_id is not None and envelope.key_id not in codec.key_ids:
            raise _unknown_key(what, envelope, codec.key_ids)  # before the store is asked for something useless
        # A nonce and a tag come on top.
        if envelope.size > codec.max_bytes + 28:
            raise PayloadTampered(what, f"{envelope}; max_bytes of this codec is {codec.max_bytes}")
        try:
            box = await codec.store.get(ref, max_bytes=envelope.size)
        except PayloadTooLarge:
            box = b""
        except ObjectStoreFailed as error:
            raise PayloadUnavailable(what, f"{envelope}; {error}", key_id=envelope.key_id) from error
        if box is None:
            raise PayloadMissing(what, ref)
        if len(box) != envelope.size or await _apart(len(box), _sha256, box) != envelope.sha256:
            raise PayloadTampered(what, f"the object {ref!r} is not the object that was stored")
        return box

    # ---- return values: encrypted, never moved away; their copies in events and parents outlive the job ----------

    def seal_result(self, value: Any) -> Any:
        """What a handler returned, as it is stored. Raises NotJson or PayloadTooLarge for what cannot be."""
        if self.codec.current_key is None:
            return value
        plain = json.encode(value, what="return value")
        json.check_result_size(len(plain))
        key_id, box = self.codec.encrypt(plain, "result", self.queue)
        return Envelope(self.queue, key_id, box).to_value()

    def open_result(self, value: Any) -> Any:
        """A decoded return value of a job of this queue, opened if it is sealed."""
        if not is_envelope(value):
            return value
        return json.decode(self._open_result(json.encode_checked(value), None), what="return value")

    def open_result_bytes(self, stored: bytes, child_key: str | None = None) -> bytes:
        return self._open_result(stored, child_key) if stored.startswith(SEALED) else stored

    def _open_result(self, stored: bytes, child_key: str | None) -> bytes:
        what = f"return value of {child_key or f'a job of queue {self._name!r}'}"
        envelope = self._check(stored, what, child_key)
        if envelope.box is None:
            raise PayloadTampered(what, "return values are never kept in an object store")
        return self.codec.decrypt(envelope, envelope.box, "result", what)


def run_blocking(codec: Codec, work: Coroutine[Any, Any, T]) -> T:
    """For callers without an event loop, and for those in a thread that has one: a loop in a thread of its own."""

    async def run() -> T:
        try:
            return await work
        finally:
            await codec.aclose()  # connections belong to that loop

    with ThreadPoolExecutor(1, thread_name_prefix="bullpen-codec") as thread:
        return thread.submit(asyncio.run, run()).result()


async def _apart(size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run it, in a thread when it takes long."""
    return await asyncio.to_thread(function, *args) if size >= _IN_THREAD_FROM else function(*args)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
