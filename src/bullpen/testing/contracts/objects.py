"""What every object store promises. Subclass it and give it a `store` fixture that is empty.

In: any implementation of `bullpen.ports.objects.ObjectStore`. Out: tests of pytest.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from bullpen.errors import InvalidOption, PayloadTooLarge
from bullpen.ports.objects import ObjectStore, StoredObject

__all__ = ["ObjectStoreContract"]

_HOSTILE = (
    "../x",
    "/x",
    "a/../x",
    "a/./x",
    "a//x",
    "",
    "a/",
    "a?b",
    "a#b",
    "a b",
    "a%2Fb",
    "a\\b",
    "a\0b",
    "ä",
    "x" * 201,
)


class ObjectStoreContract:
    """The promises of the port."""

    async def test_what_was_put_is_got(self, store: ObjectStore) -> None:
        await store.put("bull=3Aemails/owner/one", b"\x00\xff bytes")

        assert await store.get("bull=3Aemails/owner/one", max_bytes=100) == b"\x00\xff bytes"

    async def test_an_empty_object_is_an_object(self, store: ObjectStore) -> None:
        await store.put("bull=3Aemails/owner/one", b"")

        assert await store.get("bull=3Aemails/owner/one", max_bytes=100) == b""

    async def test_a_large_object_comes_back_whole(self, store: ObjectStore) -> None:
        content = bytes(range(256)) * 20_000
        await store.put("bull=3Aemails/owner/large", content)

        assert await store.get("bull=3Aemails/owner/large", max_bytes=len(content)) == content

    async def test_what_is_not_there_is_none(self, store: ObjectStore) -> None:
        await store.put("bull=3Aemails/owner/one", b"x")

        assert await store.get("bull=3Aemails/owner/two", max_bytes=100) is None

    async def test_a_put_replaces(self, store: ObjectStore) -> None:
        """A repeated put after a lost answer must end with the same object."""
        await store.put("bull=3Aemails/owner/one", b"first")
        await store.put("bull=3Aemails/owner/one", b"second")

        assert await store.get("bull=3Aemails/owner/one", max_bytes=100) == b"second"
        assert len(await _listed(store, "bull=3Aemails")) == 1

    async def test_an_object_above_the_limit_is_refused(self, store: ObjectStore) -> None:
        """What somebody else put there must not fill the memory of a reader."""
        await store.put("bull=3Aemails/owner/one", b"x" * 5_000)

        with pytest.raises(PayloadTooLarge):
            await store.get("bull=3Aemails/owner/one", max_bytes=4_999)
        with pytest.raises(PayloadTooLarge):
            await store.get("bull=3Aemails/owner/one", max_bytes=10)

    async def test_deleting_twice_is_no_error(self, store: ObjectStore) -> None:
        await store.put("bull=3Aemails/owner/one", b"x")

        await store.delete("bull=3Aemails/owner/one")
        await store.delete("bull=3Aemails/owner/one")

        assert await store.get("bull=3Aemails/owner/one", max_bytes=100) is None

    async def test_a_listing_has_one_directory_and_nothing_beside_it(self, store: ObjectStore) -> None:
        """The neighbour whose name begins alike is another queue."""
        for key in ("bull=3Aemails/owner/one", "bull=3Aemails/other/two", "bull=3Aemails-dlq/owner/three"):
            await store.put(key, b"xyz")

        found = await _listed(store, "bull=3Aemails")

        assert {one.key for one in found} == {"bull=3Aemails/owner/one", "bull=3Aemails/other/two"}
        assert {one.size for one in found} == {3}
        assert all(abs(one.stored_ms - time.time() * 1000) < 600_000 for one in found)
        assert await _listed(store, "bull=3Anothing") == []

    async def test_a_listing_has_all_however_many(self, store: ObjectStore) -> None:
        keys = {f"bull=3Aemails/owner/{number}" for number in range(1_050)}
        room = asyncio.Semaphore(10)

        async def put(key: str) -> None:
            async with room:
                await store.put(key, b"x")

        await asyncio.gather(*map(put, keys))

        assert {one.key for one in await _listed(store, "bull=3Aemails")} == keys

    @pytest.mark.parametrize("key", _HOSTILE)
    async def test_a_key_of_another_form_is_refused(self, store: ObjectStore, key: str) -> None:
        """Whoever forges an envelope must not reach anything beside the objects."""
        with pytest.raises(InvalidOption):
            await store.put(key, b"x")
        with pytest.raises(InvalidOption):
            await store.get(key, max_bytes=100)
        with pytest.raises(InvalidOption):
            await store.delete(key)

    async def test_it_may_be_used_after_it_was_closed(self, store: ObjectStore) -> None:
        """Another event loop, another day."""
        await store.put("bull=3Aemails/owner/one", b"x")
        await store.aclose()

        assert await store.get("bull=3Aemails/owner/one", max_bytes=100) == b"x"


async def _listed(store: ObjectStore, directory: str) -> list[StoredObject]:
    return [found async for found in store.list(directory)]
