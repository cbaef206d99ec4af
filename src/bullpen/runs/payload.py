"""The inputs of a run: the payload, as stored in the job and in the row.

In: a mapping with the wire's names. Out: a checked `RunPayload`, or InvalidOption that names the field. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from bullpen.errors import InvalidOption
from bullpen.ledger import check_run_id, check_tenant

__all__ = ["LEDGER_HEADER", "RunPayload", "read_payload"]

LEDGER_HEADER: Final = "ledger"
"""Which ledger has the run: a header of its job (`job.meta`). Two applications may share a Redis without knowing."""


class RunPayload(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True, frozen=True):
    """Names are camelCase on the wire: `runId`, `tenantId`, `versionId`, `contextInputs`."""

    run_id: str
    tenant_id: str
    version_id: str
    definition: Any
    """What is to be done; the handler knows its form."""
    context_inputs: dict[str, Any] = msgspec.field(default_factory=dict)
    subject_file: Any = None
    subject_files: list[Any] | None = None
    knowledge_context: str | None = None

    def to_data(self) -> dict[str, Any]:
        """As it is stored: wire names, absent fields left out, `contextInputs` always there."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return {**data, "contextInputs": self.context_inputs}


def read_payload(data: object) -> RunPayload:
    """The payload of a job or a request. Unknown fields are kept: a newer producer may send them."""
    if not isinstance(data, Mapping):
        raise InvalidOption("payload", "an object with runId, tenantId, versionId, definition", data)
    try:
        payload = msgspec.convert(dict(data), RunPayload)
    except msgspec.ValidationError as error:
        raise InvalidOption("payload", f"a run payload ({error})", sorted(map(str, data))) from None
    if not 0 < len(payload.version_id) <= 120:
        raise InvalidOption("payload.versionId", "1 to 120 characters", payload.version_id)
    return msgspec.structs.replace(
        payload, run_id=check_run_id(payload.run_id), tenant_id=check_tenant(payload.tenant_id)
    )
