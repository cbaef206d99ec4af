"""The OpenAPI description of the endpoints API, made from the types that travel. No I/O."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from bullpen import _version
from bullpen.http import _endpoint_types as types
from bullpen.http._api import Problem
from bullpen.http._openapi import UUID_PATTERN, content, operation, query_parameter
from bullpen.outbox import EndpointState

_WHY: Final = {
    404: "No such endpoint of this tenant.",
    409: "Somebody else has changed it at the same time.",
    413: "Larger than 1 MiB.",
    429: "Too many tests and replays of this tenant are under way.",
}
_TYPES: Final = (
    *(types.NewEndpoint, types.EndpointChange, types.Rotation, types.StateChange, types.TestMessage, types.ReplayOrder),
    *(types.EndpointView, types.SecretView, types.EndpointPage, types.EndpointAttemptPage, types.TestAnswer),
    *(types.Replayed, Problem),
)


def describe(root_path: str = "") -> bytes:
    """The whole description as JSON."""
    _, components = msgspec.json.schema_components(_TYPES, ref_template="#/components/schemas/{name}")
    one = [
        {"name": "endpoint_id", "in": "path", "required": True, "schema": {"type": "string", "pattern": UUID_PATTERN}}
    ]
    key = {
        "name": "Idempotency-Key",
        "in": "header",
        "description": "The same key is the same endpoint, however often it is sent.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]([ -~]*[!-~])?$"},
    }
    state = query_parameter("state", {"type": "string", "enum": [each.value for each in EndpointState]})
    limit = query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": 200, "default": 50})
    cursor = query_parameter("cursor", {"type": "string"})
    reads, writes = (401, 404, 422, 503), (401, 403, 404, 409, 413, 422, 503)

    def deed(name: str, summary: str, body: str, answer: str, *, busy: bool = False, needed: bool = False) -> Any:
        return {
            "post": operation(
                name,
                summary,
                {200: ("Done.", answer)},
                (*writes, 429) if busy else writes,
                _WHY,
                parameters=one,
                requestBody={"required": needed, "content": content(body)},
            )
        }

    at = "/endpoints/{endpoint_id}"
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "bullpen endpoints",
            "version": _version.__version__,
            "description": "Where the events of one tenant are sent: the one that the token names.",
        },
        "servers": [{"url": root_path or "/"}],
        "security": [{"bearer": []}],
        "paths": {
            "/endpoints": {
                "post": operation(
                    "create",
                    "Make an endpoint",
                    {
                        201: ("It is made; its secret is never shown again.", "SecretView"),
                        200: ("It was.", "SecretView"),
                    },
                    (401, 403, 413, 422, 503),
                    _WHY,
                    parameters=[key],
                    requestBody={"required": True, "content": content("NewEndpoint")},
                ),
                "get": operation(
                    "list",
                    "List endpoints, the oldest first",
                    {200: ("A page.", "EndpointPage")},
                    (401, 422, 503),
                    _WHY,
                    parameters=[state, limit, cursor],
                ),
            },
            at: {
                "get": operation(
                    "inspect", "One endpoint", {200: ("It.", "EndpointView")}, reads, _WHY, parameters=one
                ),
                "patch": operation(
                    "change",
                    "Change an endpoint",
                    {200: ("As it is now.", "EndpointView")},
                    writes,
                    _WHY,
                    parameters=one,
                    requestBody={"required": True, "content": content("EndpointChange")},
                ),
                "delete": {
                    **operation("remove", "Remove an endpoint", {}, writes, _WHY, parameters=one),
                    "responses": {
                        "204": {"description": "It is gone."},
                        **operation("remove", "", {}, writes, _WHY)["responses"],
                    },
                },
            },
            f"{at}/secret": deed("rotate", "Make a new secret", "Rotation", "SecretView"),
            f"{at}/enable": deed("enable", "Send to it (again)", "StateChange", "EndpointView"),
            f"{at}/pause": deed("pause", "Store messages for it and let them wait", "StateChange", "EndpointView"),
            f"{at}/disable": deed("disable", "Store no more messages for it", "StateChange", "EndpointView"),
            f"{at}/test": deed("test", "Send one test message now", "TestMessage", "TestAnswer", busy=True),
            f"{at}/replay": deed("replay", "Send again", "ReplayOrder", "Replayed", busy=True, needed=True),
            f"{at}/attempts": {
                "get": operation(
                    "attempts",
                    "What was tried, the last first",
                    {200: ("A page.", "EndpointAttemptPage")},
                    reads,
                    _WHY,
                    parameters=[*one, limit, cursor],
                )
            },
        },
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }
    return msgspec.json.encode(document)
