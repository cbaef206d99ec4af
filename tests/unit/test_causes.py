"""What makes two failures one cause."""

from __future__ import annotations

import pytest

from bullpen._kernel.causes import cause_of, fingerprint_of

PYTHON = """\
Traceback (most recent call last):
  File "/srv/shop/app/orders.py", line {line}, in charge
    pay(order)
  File "/usr/lib/python3.12/site-packages/httpx/_api.py", line 7, in post
    raise error
{error}: {message}"""


@pytest.mark.requirement("X-5")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("order 1234 not found", "order 99 not found"),
        ("order ord8f3a92b1 not found", "order ord17cc03d9 not found"),
        ("no user 'alice'", 'no user "bob"'),
        ("late since 2030-01-01T10:00:00Z", "late since 2031-12-31T11:30:00Z"),
        ("no answer from 10.0.0.1:443 within 30s", "no answer from 10.0.0.27:8443 within 60s"),
        ("refused ada@shop.example", "refused grace.h@mail.shop.example"),
        ("job 6f8a1c6e-1b1c-4a71-93a5-8f3a92b10c6e is gone", "job 00000000-1b1c-4a71-93a5-8f3a92b10c6e is gone"),
        ("first line\nsecond of one", "first line\nsecond of another"),
        ("HTTP 503 for order 1", "HTTP 503 for order 2"),
    ],
)
def test_what_varies_makes_no_other_cause(one: str, other: str) -> None:
    assert cause_of(one) == cause_of(other)


@pytest.mark.requirement("X-5")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("HTTP 503", "HTTP 401"),
        ("status code 429 for order 1", "status code 500 for order 1"),
        ("[Errno 111] Connect call failed", "[Errno 113] Connect call failed"),
        ("'vat'", "'email'"),
        ("KeyError: 'vat'", "KeyError: 'email'"),
        ('column "vat" does not exist', 'column "email" does not exist'),
        ("missing field 'vat'", "missing field 'street'"),
        ("user 17 not found", "user 17 is blocked"),
        ("sha256 differs", "sha512 differs"),
    ],
)
def test_what_tells_causes_apart_is_kept(one: str, other: str) -> None:
    assert cause_of(one) != cause_of(other)


def test_class_place_code_source_and_name_tell_causes_apart() -> None:
    def mark(error: str = "KeyError", place: str = "charge", line: int = 7, code: str = "", name: str = "send") -> str:
        stack = PYTHON.format(line=line, error=error, message="'vat'").replace("charge", place)
        return fingerprint_of("mails", name, "'vat'", code=code, stack=stack)

    assert mark() == mark(line=99), "a release moves lines"
    assert len({mark(), mark(error="LookupError"), mark(place="refund"), mark(code="HTTP_503"), mark(name="x")}) == 5
    node = "Error: away\n    at fetchUser (/app/src/user.js:{}:11)\n    at async run (/app/src/main.js:3:1)"
    assert fingerprint_of("q", "n", "away", stack=node.format(7)) == fingerprint_of(
        "q", "n", "away", stack=node.format(8)
    )
    assert fingerprint_of("q", "n", "away", stack=node.format(7)) != fingerprint_of("q", "n", "away")


@pytest.mark.parametrize("text", ["", "\n\n", "'" * 50_000, "a1b" * 20_000, "x@" * 20_000, "\ud800", "1" * 50_000])
def test_hostile_texts_cost_no_time_and_have_a_fingerprint(text: str) -> None:
    assert len(cause_of(text)) <= 600
    assert len(fingerprint_of(text, text, text, stack=text, code=text)) == 12
