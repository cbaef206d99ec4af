"""Where entities are kept: behind the user's own access, or as dictionaries in Redis. In SQL: `bullpen.ledger`."""

from bullpen.workflow.stores.direct import DirectStore
from bullpen.workflow.stores.redis import RedisEntities

__all__ = ["DirectStore", "RedisEntities"]
