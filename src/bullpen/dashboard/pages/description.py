"""`/api/v1/openapi.json`: the API as OpenAPI 3.1, made from the routes and the types of their views."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import msgspec

from bullpen import _version
from bullpen.dashboard._web import JSON, PageAnswer, join
from bullpen.dashboard.access import Permission
from bullpen.dashboard.fields import body_schema
from bullpen.dashboard.routes import Context, PageRoute

_NOT_DESCRIBED: Final = ("/stream", "/pulse", "/login", "/logout", "/settings")
"""For browsers, not for programs."""
_PROBLEMS: Final = {
    "401": "Nobody is logged in.",
    "403": "The role, the tenant or the origin may not do this.",
    "404": "There is no such object.",
    "429": "Too many requests.",
    "503": "A store does not answer.",
}
_PROBLEM: Final = {"$ref": "#/components/schemas/Problem"}


async def description(context: Context) -> PageAnswer:
    """The same for everybody who may look: it names no object."""
    found = dict(_described(tuple(context.dashboard.routes)))
    found["servers"] = [{"url": join(context.request.base, "api", "v1")}]
    return PageAnswer(200, msgspec.json.encode(found), JSON)


@cache
def _described(routes: tuple[PageRoute, ...]) -> dict[str, Any]:
    described = [route for route in routes if not route.pattern.startswith(_NOT_DESCRIBED)]
    types = list(dict.fromkeys(route.view for route in described if route.view is not None))
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in described:
        paths.setdefault(route.pattern, {})[route.method.lower()] = _operation(route, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "bullpen dashboard", "version": _version.__version__},
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": {**components, "Problem": _problem()},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: PageRoute, by_type: dict[Any, Any]) -> dict[str, Any]:
    is_change = route.method == "POST"
    schema: dict[str, Any] = {} if is_change or route.view is None else by_type[route.view]
    content: dict[str, Any] = {kind: {"schema": {}} for kind in route.produces} or {JSON: {"schema": schema}}
    good = {"description": "Done." if is_change else "The view.", "content": content}
    answers: dict[str, Any] = {"200": good, "304": {"description": "Not changed."}}
    if is_change:
        answers = dict.fromkeys(("200", "201", "202", "303"), good) | _problems(("409",))
    found: dict[str, Any] = {
        "operationId": _name(route),
        "summary": (inspect.getdoc(route.handler) or route.pattern).partition("\n")[0],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"\{(\w+)\}", route.pattern)
        ],
        "responses": {**answers, **_problems(("400", "405", "413", "422", *_PROBLEMS))},
        "x-permission": route.permission.value,
    }
    if is_change:
        found["parameters"].append(
            {"name": "Idempotency-Key", "in": "header", "required": False, "schema": {"type": "string"}}
        )
        schema = body_schema(route.fields or ())
        found["requestBody"] = {"required": "required" in schema, "content": {JSON: {"schema": schema}}}
    return found


def _problems(codes: Sequence[str]) -> dict[str, Any]:
    content = {"application/problem+json": {"schema": _PROBLEM}}
    return {
        code: {"description": _PROBLEMS.get(code, "The request cannot be done."), "content": content} for code in codes
    }


def _problem() -> dict[str, Any]:
    text = {"type": "string"}
    return {
        "type": "object",
        "required": ["type", "title", "status", "requestId"],
        "properties": {
            "type": text,
            "title": text,
            "status": {"type": "integer"},
            "requestId": text,
            "detail": text,
        },
    }


def _name(route: PageRoute) -> str:
    words = re.sub(r"[^a-z]+", "_", route.pattern.lower()).strip("_") or "overview"
    return f"{'post' if route.method == 'POST' else 'get'}_{words}"


ROUTES = (PageRoute("/openapi.json", description, Permission.SEE, for_tenants=True),)
