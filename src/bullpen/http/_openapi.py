"""The OpenAPI description of the runs API, made from the types that travel. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from bullpen import _version
from bullpen.http._api import Problem
from bullpen.http._run_types import DeadLetterPage, RunPage, RunView, StartRun
from bullpen.ledger import RunStatus

UUID_PATTERN: Final = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"
_WHY: Final = {
    401: "No valid token.",
    402: "The tenant has fewer credits than the run costs; nothing was stored.",
    403: "The token may not do that.",
    404: "No such run of this tenant.",
    409: "The state of the run does not allow it, or the key was used for another request.",
    413: "Larger than 10 MiB.",
    422: "A value in the request is invalid.",
    429: "Too many runs are being followed.",
    503: "The database or the queue does not answer; try again.",
}


def describe(root_path: str = "") -> bytes:
    """The whole description as JSON."""
    types = (StartRun, RunView, RunPage, DeadLetterPage, Problem)
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    run_id = {"name": "run_id", "in": "path", "required": True, "schema": {"type": "string", "pattern": UUID_PATTERN}}
    key = {
        "name": "Idempotency-Key",
        "in": "header",
        "required": True,
        "description": "Repeated requests with the same key start one run.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]([ -~]*[!-~])?$"},
    }
    query = [
        query_parameter("status", {"type": "string", "enum": [status.value for status in RunStatus]}),
        query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": 200, "default": 50}),
        query_parameter("handler", {"type": "string"}),
        query_parameter("cursor", {"type": "string"}),
    ]
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "bullpen runs",
            "version": _version.__version__,
            "description": "Charged, long operations of one tenant: the one that the token names.",
        },
        "servers": [{"url": root_path or "/"}],
        "security": [{"bearer": []}],
        "paths": {
            "/runs": {
                "post": operation(
                    "start",
                    "Start a run",
                    {201: ("The run is stored.", "RunView"), 200: ("The run was stored before.", "RunView")},
                    (401, 402, 403, 409, 413, 422, 503),
                    parameters=[key],
                    requestBody={"required": True, "content": content("StartRun")},
                ),
                "get": operation(
                    "list", "List runs, newest first", {200: ("A page.", "RunPage")}, (401, 422, 503), parameters=query
                ),
            },
            "/runs/{run_id}": {
                "get": operation(
                    "inspect", "One run", {200: ("The run.", "RunView")}, (401, 404, 422, 503), parameters=[run_id]
                )
            },
            "/runs/{run_id}/cancel": {
                "post": operation(
                    "cancel",
                    "End a run that has not ended",
                    {200: ("The run.", "RunView")},
                    (401, 403, 404, 409, 422, 503),
                    parameters=[run_id],
                )
            },
            "/runs/{run_id}/retry": {
                "post": operation(
                    "retry",
                    "Send a failed run back",
                    {200: ("The run.", "RunView")},
                    (401, 402, 403, 404, 409, 422, 503),
                    parameters=[run_id],
                )
            },
            "/runs/{run_id}/events": {
                "get": operation(
                    "follow",
                    "Follow a run until it has ended (server-sent events)",
                    {200: ("Events `run`, each with the run as it is then.", None)},
                    (401, 404, 422, 429, 503),
                    parameters=[run_id],
                )
            },
            "/dead-letters": {
                "get": operation(
                    "deadLetters",
                    "Runs that failed finally, with their inputs",
                    {200: ("A page, newest first.", "DeadLetterPage")},
                    (401, 403, 422, 503),
                    parameters=[each for each in query if each["name"] != "status"],
                )
            },
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(document)


def query_parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter of the query."""
    return {"name": name, "in": "query", "schema": schema}


def content(schema: str) -> dict[str, Any]:
    """A body of one of the types."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def operation(
    name: str,
    summary: str,
    good: Mapping[int, tuple[str, str | None]],
    bad: tuple[int, ...],
    why: Mapping[int, str] | None = None,
    **further: Any,
) -> dict[str, Any]:
    """One operation: answers that are good with their types, and those that are not, with what they mean here."""
    meaning = {**_WHY, **(why or {})}
    responses: dict[str, Any] = {}
    for status, (text, schema) in good.items():
        body: dict[str, Any] = {"text/event-stream": {}} if schema is None else content(schema)
        responses[str(status)] = {"description": text, "content": body}
    for status in bad:
        responses[str(status)] = {"description": meaning[status], "content": content("Problem")}
    return {"operationId": name, "summary": summary, "responses": responses, **further}
