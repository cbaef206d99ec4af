"""Error texts lose secrets and personal data, and nothing else."""

from __future__ import annotations

import re
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel import scrub
from bullpen._kernel.addresses import hide_path, show_address
from bullpen._kernel.outcome import MAX_TEXT, describe
from bullpen._kernel.scrub import hide_secrets, is_clean, scrub_lines
from tests.unit._kernel._secrets import HARMLESS, SHAPES

SECRETS = [(f"{kind}{number}", *shape) for kind, shapes in SHAPES.items() for number, shape in enumerate(shapes)]


@pytest.mark.requirement("W-74")
def test_the_corpus_is_a_corpus() -> None:
    assert len({text for _, text, _ in SECRETS}) >= 150


@pytest.mark.requirement("W-74")
@pytest.mark.parametrize(("text", "secret"), [shape[1:] for shape in SECRETS], ids=[name for name, *_ in SECRETS])
def test_a_secret_is_hidden_and_the_rest_stays(text: str, secret: str) -> None:
    scrubbed = scrub_lines(text)

    assert secret not in scrubbed
    assert "***" in scrubbed
    assert scrubbed[:2] == text[:2]
    assert scrub_lines(scrubbed) == scrubbed
    assert not is_clean(text)


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays_as_it_is(text: str) -> None:
    """Ids above all: without them nobody finds the job that a line speaks of."""
    assert scrub_lines(text) == text


@pytest.mark.requirement("W-74")
@pytest.mark.parametrize(("text", "secret"), [shape[1:] for shape in SECRETS if not shape[0].startswith("people")])
def test_a_secret_in_a_field_is_hidden(text: str, secret: str) -> None:
    shown = hide_secrets({"note": text, "list": [text], "deep": {"er": [{"note": text}]}})

    assert secret not in repr(shown)


@pytest.mark.requirement("W-74")
@pytest.mark.parametrize(
    "field",
    [
        *("password", "passphrase", "dbPassword", "secret_key", "clientSecret", "apiKey", "x-api-key", "Authorization"),
        *("cookie", "Set-Cookie", "privateKey", "accessKeyId", "sig", "X-Amz-Signature", "pin", "otp", "iban", "jwt"),
        *("credentials", "session_id", "refreshToken", "tokens", "signing_key"),
    ],
)
def test_a_field_with_the_name_of_a_secret_is_hidden_and_so_is_it_in_a_text(field: str) -> None:
    """There is one list of names for both."""
    assert hide_secrets({field: "hunter2"}) == {field: "***"}
    if field not in ("tokens", "accessKeyId"):
        assert "hunter2" not in scrub_lines(f"{field}=hunter2")
        assert "hunter2" not in scrub_lines(f'{{"{field}": "hunter2"}}')


def test_fields_that_only_speak_of_secrets_stay() -> None:
    value = {
        "maxTokens": 512,
        "total_tokens": 7,
        "token_type": "bearer",
        "hasPassword": True,
        "password": None,
        "jobId": "9f8e7d6c5b4a39281706f5e4d3c2b1a0",
        "pinned": "yes",
        "passenger": "Ada",
        "to": "ada@example.com",
        "pairs": [["city", "Vienna"]],
    }

    assert hide_secrets(value) == value


def test_pairs_of_names_and_values_are_fields_too() -> None:
    assert hide_secrets([["Authorization", "abc"], ["accept", "*/*"]]) == [["Authorization", "***"], ["accept", "*/*"]]
    assert hide_secrets({"name": "DB_PASSWORD", "value": "x"}) == {"name": "DB_PASSWORD", "value": "***"}
    assert hide_secrets({"name": "CITY", "value": "x"}) == {"name": "CITY", "value": "x"}


@pytest.mark.requirement("W-74")
@given(
    before=st.text(max_size=200),
    after=st.text(max_size=200),
    secret=st.text(alphabet="abcdefghjkmnpqrstuvwxyz23456789", min_size=12, max_size=40),
    form=st.sampled_from(["password={}", "token: {}", "redis://user:{}@host/0", "Bearer {}", "{}@example.com"]),
)
def test_no_surroundings_bring_a_secret_through(before: str, after: str, secret: str, form: str) -> None:
    text = f"{before} {form.format(secret)} {after}"

    assert secret not in scrub_lines(text).replace(before, "").replace(after, "") or secret in before + after


PIECES = [
    *("password", "PassWd", "pwd", "SECRET", "ſecret", "to\u212aen", "signature", "ſIGNATURE", "api key", "API_KEY"),
    *(
        "ap\u0130-key",
        "apıkey",
        "accessKey",
        "access-key",
        "Bearer ",
        "Basic\n",
        "baſic ",
        "eyJ",
        "EYJ",
        "whsec_",
        "AKIA",
    ),
    *("akia", "sk-", "task_", "pk_", "rk-", "ghp_", "xoxb-", "+", "+49", "@", "://", "redis://u:p@h/", "a@b.c"),
    *("4111 1111 1111 1111", "4111-1111-1111-1111", "5555555555554444", "1717171717171", "٤١١١١١١١١١١١١١١١", "1", "٣"),
    *(
        "=",
        ":",
        "'",
        '"',
        "&",
        ";",
        "/",
        "-",
        ".",
        "*",
        " ",
        "\t",
        "\n",
        "é",
        "日本",
        "\ud800",
        "\u0307",
        "abcdefghi",
        "aB3_",
    ),
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join))
def test_a_form_that_is_not_looked_for_would_not_have_been_found(text: str) -> None:
    """Patterns are slow, so one is tried only where a hint of its form stands; all of them together say the same."""
    expected = text
    for form in scrub._SECRETS:
        expected = re.sub(form.pattern, form.instead, expected)
    expected = scrub._CARD.sub(scrub._hide_card, expected)

    assert scrub_lines(text) == expected
    if all(map(is_clean, text.split("\n"))):
        assert expected == text


def test_the_letters_that_patterns_take_for_others_are_known() -> None:
    """A pattern that knows no capitals also takes these for letters; a new version of Unicode might bring more."""
    beyond_ascii = "".join(map(chr, range(128, sys.maxunicode + 1)))

    assert re.findall("(?i)[a-z]", beyond_ascii) == ["\u0130", "ı", "ſ", "\u212a"]
    assert scrub._fold("\u0130ıſ\u212a") == "iisk"


def test_frames_of_programs_are_clean() -> None:
    """Else all the looking for hints were in vain."""
    assert is_clean(
        '  File "/app/src/orders/handlers.py", line 217, in charge\n    await bank.charge(order, key=ref)\n'
    )
    assert is_clean("TimeoutError: order 4711 of customer 1234567: no answer from bank-2 within 30.0 s\n")


HOSTILE = [
    *("a", "1 ", "a@", "://", "password=", "eyJ", "eyJ-", "a.", "-1", 'password="', "authorization: ", 'cookie: "'),
    *('cookie:a="', "[", "-----BEGIN " + "PRIVATE KEY-----", "DE89 3704 ", "+1 ", "pk_", "sk_a", "key-a", "a:b@", "a:"),
    *(
        "name=password\n",
        "<password ",
        "token ",
        "passwd ",
        "basic ",
        "hooks.slack.com/services/",
        "http://a:b,",
        "-u a",
    ),
    *('\\"password\\": \\"', "Failing row contains (", "AB12", "http:// ", "maker.ifttt.com/trigger/a", "a,", "-u a"),
]


@pytest.mark.many
@pytest.mark.parametrize("form", [*SHAPES, "hostile"])
def test_four_times_the_text_takes_four_times_the_time(form: str) -> None:
    """The text may come from somebody hostile. A pattern that goes back and forth takes sixteen times as long."""
    whole = HOSTILE if form == "hostile" else [text for text, _ in SHAPES[form]]
    pieces = [*whole, *(text[: len(text) // 2] for text in whole if len(text) > 3)]

    def seconds(text: str) -> float:
        began = time.process_time()
        scrub_lines(text)
        return time.process_time() - began

    for piece in pieces:
        short, long = ((piece * (size // len(piece) + 1))[:size] for size in (5_000, 20_000))
        if seconds(long) > 0.05:  # too short to be compared, and nothing that grows with the square is
            ratio = min(seconds(long) for _ in range(3)) / min(seconds(short) for _ in range(3))
            assert ratio < 9, piece


@pytest.mark.requirement("W-74")
def test_reason_and_stack_of_an_error_are_scrubbed() -> None:
    try:
        try:
            raise ConnectionError("redis://worker:hunter2@cache:6379 refused")
        except ConnectionError as cause:
            raise RuntimeError("ada@example.com could not be told, password=hunter3") from cause
    except RuntimeError as error:
        reason, stack = describe(error)

    assert reason == "***@*** could not be told, password=***"
    for secret in ("hunter2", "hunter3", "ada@example"):
        assert secret not in stack


@pytest.mark.requirement("W-74")
def test_a_secret_at_the_end_of_what_is_kept_is_not_cut_into_view() -> None:
    for shift in range(30):
        text = "x" * (MAX_TEXT - 20 - shift) + " password=hunter2hunter2"

        reason, stack = describe(RuntimeError(text))

        assert "hunter" not in reason
        assert "hunter" not in stack


@pytest.mark.requirement("O-64")
@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("redis://ada:pa:ss@word@cache:6379/1", "redis://ada:***@cache:6379/1"),
        ("redis://:hunter2@cache", "redis://:***@cache"),
        ("redis://cache:6379/0?password=hunter2&db=1", "redis://cache:6379/0?password=***&db=1"),
        ("redis://cache?key=hunter2&sentinel_password=x", "redis://cache?key=***&sentinel_password=***"),
        ("amqp://guest:hun/ter2@broker/vhost", "amqp://guest:***@broker/vhost"),
        ("amqp://a:hunter2@h1,amqp://b:hunter2@h2", "amqp://a:***@h1,amqp://b:***@h2"),
        ("redis://ada:hun?ter2@cache", "redis://ada:***@cache"),
        (
            "postgresql://db/app?sslmode=require&sslpassword=hunter2",
            "postgresql://db/app?sslmode=require&sslpassword=***",
        ),
        ("postgresql://db/app?hunter2", "postgresql://db/app?hunter2=***"),
        ("ada:hunter2@host:6379", "***"),
        ("localhost:6379", "localhost:6379"),
        ("sqlite:////srv/ledger.db", "sqlite:////srv/ledger.db"),
        ("esdb+discover://admin:hunter2@events:2113?tls=true#x", "esdb+discover://admin:***@events:2113?tls=true"),
        ("https://hun!ter2@host/", "https://***@host/"),
    ],
)
def test_of_an_address_only_what_is_known_to_be_harmless_is_shown(address: str, shown: str) -> None:
    assert show_address(address) == shown


def test_of_an_address_that_is_a_secret_only_the_host_is_shown() -> None:
    assert hide_path("https://ada:pw@hooks.example.com/services/T/B/x?y=1") == "https://hooks.example.com/…"
