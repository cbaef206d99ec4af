"""A Kafka cluster inside the test process: librdkafka's mock brokers, which speak the real protocol on loopback.

In: how many brokers. Out: an address for any client, in this process or another; brokers that can be taken down, and
errors that the next requests get. What it does not play: restarts with data, retention, compaction, access rights, the
isolation of transactions.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from bullpen.testing.servers import ComponentMissing

__all__ = ["MockKafka", "need_kafka"]

_PRODUCER: Final = 0
PRODUCE, FETCH, OFFSET_COMMIT, JOIN_GROUP = 0, 1, 8, 11
"""Numbers of requests, for `fail_next`."""
_PATTERNS: Final = ("confluent_kafka.libs/librdkafka-*.so*", "confluent_kafka/.dylibs/librdkafka*.dylib")


def _find_library() -> Path:
    # Found by its spec and not by importing it: the import would load the client as well.
    spec = importlib.util.find_spec("confluent_kafka")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        for pattern in _PATTERNS:
            for found in Path(location).parent.glob(pattern):
                return found
    raise ComponentMissing("librdkafka's mock cluster", "pip package confluent-kafka")


def need_kafka() -> Path:
    """The library, for a test that cannot do without: skips at home, fails when `CI=true`."""
    import pytest

    try:
        return _find_library()
    except ComponentMissing as missing:
        if os.environ.get("CI", "").lower() in {"1", "true"}:
            pytest.fail(str(missing), pytrace=False)
        pytest.skip(str(missing))


class MockKafka:
    """Brokers in threads of this process. Topics are made on first use with four partitions, or by `create_topic`."""

    def __init__(self, library: Path, brokers: int) -> None:
        self._library = c.CDLL(str(library))
        self._brokers = brokers
        error = c.create_string_buffer(512)
        conf = self._call("rd_kafka_conf_new", c.c_void_p)
        self._call("rd_kafka_conf_set", c.c_int, conf, b"log_level", b"0", error, c.c_size_t(512))
        self._client = self._call("rd_kafka_new", c.c_void_p, c.c_int(_PRODUCER), conf, error, c.c_size_t(512))
        if not self._client:
            raise RuntimeError(f"librdkafka did not start: {error.value.decode()}")
        self._cluster = self._call("rd_kafka_mock_cluster_new", c.c_void_p, self._client, c.c_int(brokers))
        told: bytes = self._call("rd_kafka_mock_cluster_bootstraps", c.c_char_p, self._cluster)
        self.address = told.decode()
        """Comma-separated `host:port` of all brokers."""
        self._call("rd_kafka_mock_group_initial_rebalance_delay_ms", None, self._cluster, c.c_int32(0))

    @classmethod
    def start(cls, brokers: int = 3) -> Self:
        """Takes a few milliseconds."""
        return cls(_find_library(), brokers)

    def create_topic(self, name: str, *, partitions: int = 4) -> None:
        code = self._call(
            "rd_kafka_mock_topic_create", c.c_int, self._cluster, name.encode(), c.c_int(partitions), c.c_int(1)
        )
        if code:
            raise RuntimeError(f"topic {name!r} was not created: error {code}")

    def take_down(self) -> None:
        """Let every broker close its connections and accept no new ones. Nothing that was stored is lost."""
        for broker in range(1, self._brokers + 1):
            self._call("rd_kafka_mock_broker_set_down", c.c_int, self._cluster, c.c_int32(broker))

    def bring_up(self) -> None:
        for broker in range(1, self._brokers + 1):
            self._call("rd_kafka_mock_broker_set_up", c.c_int, self._cluster, c.c_int32(broker))

    @contextmanager
    def down(self) -> Iterator[None]:
        """All brokers are away for the length of a block."""
        self.take_down()
        try:
            yield
        finally:
            self.bring_up()

    def slow_down(self, milliseconds: int) -> None:
        """Let every answer take so long from now on."""
        for broker in range(1, self._brokers + 1):
            self._call("rd_kafka_mock_broker_set_rtt", c.c_int, self._cluster, c.c_int32(broker), c.c_int(milliseconds))

    def fail_next(self, request: int, *errors: int) -> None:
        """Answer the next requests of a kind with these error codes, one each."""
        codes = (c.c_int * len(errors))(*errors)
        self._call(
            "rd_kafka_mock_push_request_errors_array",
            None,
            self._cluster,
            c.c_int16(request),
            c.c_size_t(len(errors)),
            codes,
        )

    def forgive(self, request: int) -> None:
        """Forget the errors that requests of a kind would still have got."""
        self._call("rd_kafka_mock_clear_request_errors", None, self._cluster, c.c_int16(request))

    def close(self) -> None:
        """End all brokers. May be called twice."""
        if self._cluster:
            self._call("rd_kafka_mock_cluster_destroy", None, self._cluster)
            self._call("rd_kafka_destroy", None, self._client)
            self._cluster = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(self._library, name)
        function.restype = result
        # Pointers come back as plain numbers and would be passed on as 32-bit ones.
        return function(*(c.c_void_p(one) if isinstance(one, int) else one for one in arguments))
