"""Changing the payload of a dead letter: what may change, what is kept of it, and what never is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen.errors import InvalidOption, NotJson
from bullpen.ports.edits import make_edit, merged, payload_fingerprint

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [  # the examples of RFC 7396, appendix A
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "foo"}, None, None),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_a_merge_patch_does_what_its_standard_says(target: Any, patch: Any, result: Any) -> None:
    assert merged(target, patch) == result


@given(_json, _json)
def test_fingerprints_are_equal_for_equal_values_only(one: Any, other: Any) -> None:
    same = repr(_ordered(one)) == repr(_ordered(other))  # not `==`: True is 1 in Python and not in JSON
    assert (payload_fingerprint(one) == payload_fingerprint(other)) == same


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _ordered(value[name]) for name in sorted(value)}
    return [_ordered(item) for item in value] if isinstance(value, list) else value


def test_an_edit_keeps_paths_and_fingerprints_and_no_value() -> None:
    before = {"to": "Ada", "card": "4111111111111111", "items": [{"sku": 1}, {"sku": 2}], "old": True}

    edit = make_edit(
        before,
        merge={"card": "5500000000000004", "items": [{"sku": 1}, {"sku": 3}], "old": None, "password=hunter2": 1},
        why="card of ada@example.com expired",
    )

    assert edit.data["card"] == "5500000000000004" and "old" not in edit.data
    assert edit.note() == {
        "before": payload_fingerprint(before),
        "after": payload_fingerprint(edit.data),
        "changed": ["card", "items[1].sku", "old", "password=***"],
        "why": "card of ***@*** expired",
    }
    assert "4111" not in repr(edit.note()) and "5500" not in repr(edit.note())


@pytest.mark.requirement("X-41")
@pytest.mark.parametrize(
    ("before", "after", "tenant", "named"),
    [
        ({"tenantId": "acme"}, {"tenantId": "zeta"}, None, "tenantId"),
        ({"tenantId": "acme", "n": 1}, {"n": 1}, None, "tenantId"),
        ({"runId": "r1"}, {"runId": "r2"}, None, "runId"),
        ({"urn": "u", "payload": {"tenantId": "acme"}}, {"urn": "u", "payload": {}}, None, "tenantId"),
        ({"n": 1}, {"n": 1, "tenantId": "zeta"}, "acme", "tenantId"),
    ],
)
def test_whose_work_it_is_cannot_be_edited(before: Any, after: Any, tenant: str | None, named: str) -> None:
    with pytest.raises(InvalidOption, match=named):
        make_edit(before, data=after, tenant_id=tenant)


def test_a_tenant_that_was_missing_may_be_given() -> None:
    assert make_edit({"n": 1}, data={"n": 1, "tenantId": "acme"}).changed == ("tenantId",)
    assert make_edit({"n": 1}, data={"n": 1, "tenantId": "acme"}, tenant_id="acme").changed == ("tenantId",)


def test_what_is_no_edit_is_refused() -> None:
    with pytest.raises(InvalidOption, match="a payload that differs from the stored one"):
        make_edit({"a": 1, "b": 2}, data={"b": 2, "a": 1})
    with pytest.raises(InvalidOption, match="either data"):
        make_edit({"a": 1}, data={}, merge={})
    with pytest.raises(InvalidOption, match="either data"):
        make_edit({"a": 1})
    with pytest.raises(InvalidOption, match="an object"):
        make_edit([1], merge={"a": 1})
    with pytest.raises(NotJson):
        make_edit({"a": 1}, data={"a": float("nan")})
    with pytest.raises(InvalidOption, match="why"):
        make_edit({"a": 1}, data={}, why="x" * 501)
    assert make_edit({"a": 1}, data=None).data is None
