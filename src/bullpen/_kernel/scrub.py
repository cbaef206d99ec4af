"""Take secrets and personal data out of error texts before they are stored, logged or shown.

In: the text of an error, whoever wrote it. Out: the same text with stars in their place, for jobs and dead letters;
or a line of it that may stand in a row, an API's answer or a page, without the stack. It knows forms, not meanings:
credentials in addresses and headers, `password=…` and its relatives, tokens of well-known shapes, private keys, rows
that a database shows, mail addresses, numbers of telephones, cards and bank accounts. Ids are not secrets: a long
number, a UUID or a hexadecimal text stays unless a name before it says that it is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final, NamedTuple

# Names ------------------------------------------------------------------------------------------------------------
# One list for texts and for fields. A blank in a name stands for any of `-`, `_`, a blank, or nothing.

_NAMES: Final = (
    *("password", "passwd", "passphrase", "passcode", "pwd", "secret", "token", "signature", "credential", "jwt"),
    *("api key", "access key", "private key", "signing key", "encryption key", "account key", "auth key"),
    *("shared key", "master key", "license key", "session key", "code verifier", "session id", "phpsessid"),
    *("requirepass", "masterauth", "passwort", "kennwort"),
)
"""A name that holds one of these is the name of a secret."""
_HEADERS: Final = ("authorization", "cookie")
"""The same; but what follows in a text is the rest of a header line."""
_WHOLE_NAMES: Final = ("sig", "pass", "pw", "pin", "otp", "cvv", "cvc", "iban", "auth", "sid", "ssn", "pat")
"""Too short to be looked for inside of others."""
# `max_tokens: 512` counts.
_SUFFIX: Final = r"(?:(?<!token)s)?(?:[-_ ]?(?:access[-_ ]?key|key|value|hash|base|string|json|[0-9]{1,2})){0,2}"


def _any(names: tuple[str, ...]) -> str:
    return "(?:" + "|".join(name.replace(" ", "[-_ ]?") for name in names) + ")"


_WHOLE: Final = rf"(?<![A-Za-z0-9]){_any(_WHOLE_NAMES)}(?![A-Za-z0-9])"
# `token_type` describes one.
_SECRET_NAME: Final = rf"(?i){_any((*_NAMES, *_HEADERS))}(?![-_]?(?:type|count|limit|length|policy|expires))|{_WHOLE}"
_HEADER: Final = rf"(?i){_any((*_NAMES, *_HEADERS))}$"

# Forms ------------------------------------------------------------------------------------------------------------


# Compiled when a text first needs it: most programs never do, and all of them together are a third of the time that the
# import of a queue would take.
_compiled: Final = cache(re.compile)


class _Form(NamedTuple):
    """How one kind of secret looks."""

    hints: tuple[str, ...]
    """A text without any of these, in small letters, holds no such secret. Nearly no text has one, and to look for
    them all takes a small part of the time of the patterns. None reaches over the end of a line: see `is_clean`."""
    pattern: str
    instead: str | Callable[[re.Match[str]], str]


# Every repetition is bounded, or keeps what it took, and what it takes is not looked at again: the text may come from
# somebody hostile, and twice the text may take twice the time only. A group is never followed by `++` or `*+`: Python
# before 3.11.5 takes too little then.
_QUOTED: Final = r"(?P<quote>\\{0,7}[\"'`])(?:(?!(?<!\\)(?P=quote))[^\n])+"  # to the end of the line if none closes it
_LIST: Final = r"(?P<open>[\[{(])[^\]})\n]++"
_NOTHING: Final = r"(?!(?:none|null|nil|undefined|true|false)\b)"
# A comma ends a value when another name or a blank comes after it.
_BARE: Final = _NOTHING + r"(?:[^\s&,;\"'<\[{(]|,(?!\s|[\w.-]{1,40}[=:]))(?:[^\s&,;\"'<]|,(?!\s|[\w.-]{1,40}[=:]))*"
# In YAML the value may stand on a line of its own, behind a mark of a block, or as the first of a list.
_GAP: Final = r"\s{0,40}(?:[|>][-+1-9]{0,2}\s{1,40}|- {1,5})?"
_IS: Final = rf"\s{{0,5}}(?:=>|:=|[=:]|%3[ad]){_GAP}(?:[bru]{{1,2}}(?=[\"']))?"
_CLOSED: Final = r"\\{0,7}[\"'`]?[\])]{0,2}"
_VALUE_FIELD: Final = r"\\{0,7}[\"'],\s{0,5}\\{0,7}[\"']value\\{0,7}[\"']" + _IS
_NAMED: Final = rf"{_any(_NAMES)}{_SUFFIX}"
_NAME_HINTS: Final = tuple(
    dict.fromkeys(
        name.replace(" ", blank) for name in _NAMES for blank in ("", "-", "_", " ") if " " in name or not blank
    )
)
_WHOLE_IS: Final = rf"\\{{0,7}}[\"']? ?(?:=>|:=|[=:]|%3[ad]){_GAP}(?:[bru]{{1,2}}(?=[\"']))?"
_WHOLE_HINTS: Final = tuple(
    f"{name}{mark}" for name in _WHOLE_NAMES for mark in ("=", ":", '"', "'", "\\", "%3", " =", " :", " %")
)


_AUTHORIZATION: Final = r"authorization(?:\\{0,7}[\"'])?" + _IS + r"(?P<quote>\\{0,7}[\"'])?"
_SCHEME: Final = r"(?:bearer|basic|token|negotiate|ntlm|apikey|key|jwt)"


# A queue may be called `token`. What our own texts quote behind such a word is a name, and what follows it is no value.
_OUR_NAME: Final = (
    r"(?P<ours>\b(?:queue|job|task|handler|worker|scheduler|workflow) (?P<mark>[\"'])[^\s\"'=:]{1,200}+(?P=mark))"
)


def _hide_value(found: re.Match[str]) -> str:
    groups = found.groupdict("")
    if groups.get("ours"):
        return found[0]
    return f"{groups['keep']}{groups['quote']}{groups.get('open', '')}***"


def _hide_user(found: re.Match[str]) -> str:
    """An address: what stands before the host. A slash in a password is an error, but people make it."""
    scheme, rest = found["scheme"], found["rest"]
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    is_web = scheme.lower() in ("http", "https", "ws", "wss")
    path = rest.partition("?")[0]
    if "@" in authority and (is_web or "@" not in path[len(authority) :]):
        return f"{scheme}://***@{rest[authority.rindex('@') + 1 :]}"
    port = authority.rpartition(":")[2] if ":" in authority else ""
    is_host = not port or (port.isdigit() and len(port) <= 5)
    if "@" in path and not (is_web and is_host) and ":" in authority:
        return f"{scheme}://***@{path[path.rindex('@') + 1 :]}{rest[len(path) :]}"
    if "@" in rest and ":" in authority and not is_host and not authority.startswith("["):
        return f"{scheme}://***@{rest[rest.rindex('@') + 1 :]}"
    return found[0]


def _hide_literals(found: re.Match[str]) -> str:
    """Of a statement what stands in quotes: a program should bind its values, and not all do."""
    return re.sub(r"'[^']*+'?+", "'***'", found[0])


_PREFIXES: Final = (
    # Stripe, Svix, OpenAI and Anthropic; GitHub, GitLab, Bitbucket, Atlassian
    *("whsec_", "sk-", "sk_live_", "sk_test_", "rk_live_", "rk_test_", "pk_live_", "pk_test_"),
    *(
        "ghp_",
        "gho_",
        "ghu_",
        "ghs_",
        "ghr_",
        "ghp-",
        "github_pat_",
        "glpat-",
        "gldt-",
        "glrt-",
        "glptt-",
        "ATBB",
        "ATATT",
    ),
    # Slack, Amazon, Google, Microsoft, DigitalOcean, Heroku
    *("xoxa-", "xoxb-", "xoxe-", "xoxo-", "xoxp-", "xoxr-", "xoxs-", "xoxb_", "xoxp_", "xapp-", "AKIA", "ASIA"),
    *("AIza", "ya29.", "GOCSPX-", "dop_v1_", "doo_v1_", "dor_v1_", "HRKU-"),
    # package registries, providers of mail and messages, shops
    *("npm_", "pypi-AgE", "rubygems_", "dckr_pat_", "SG.", "xkeysib-", "key-", "shpat_", "shpss_", "shpca_", "sq0atp-"),
    *("sq0csp-", "EZAK"),
    # what runs programs and watches them
    *("hvs.", "hvb.", "hf_", "NRAK-", "PMAK-", "figd_", "sbp_", "glc_", "glsa_", "lin_api_", "sntrys_", "tskey-"),
    *("pscale_tkn_", "pscale_pw_", "CFPAT-", "nfp_", "dapi", "pul-", "AGE-SECRET-KEY-", "dp.pt.", "ops_ey", "r8_"),
    # what lasts when an access token has ended; tokens of Facebook, Clojars and PASETO
    *("1//0", "EAA", "CLOJARS_", "v2.local.", "v3.local.", "v4.local."),
)
# These begin words of people, too: only with a digit and some length are they tokens.
_NEEDS_DIGIT: Final = (
    "key-",
    "hf_",
    "npm_",
    "pul-",
    "dapi",
    "SG.",
    "glc_",
    "nfp_",
    "EZAK",
    "ATBB",
    "figd_",
    "r8_",
    "1//0",
    "EAA",
)
_SURE: Final = tuple(prefix for prefix in _PREFIXES if prefix not in _NEEDS_DIGIT)

_SECRETS: Final = (
    # The whole block, and to the end of the text if it was cut off.
    _Form(
        ("private key",),
        (r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)[\s\S]*?(-----END [A-Z0-9 ]{1,60}-----|\Z)"),
        r"\1***\2",
    ),
    # What PostgreSQL and SQLAlchemy show of a statement that failed.
    _Form(("failing row contains",), r"(?i)(failing row contains \()[^\n]++", r"\1***)."),
    _Form(("[parameters:",), r"(\[parameters: )[^\n]++", r"\1***]"),
    _Form(("[sql:",), r"\[SQL: [^\]]++", _hide_literals),
    _Form(
        ("@",),
        # One match for all that hangs together, or every `://` of it would look for the same @ again.
        (r"(?P<scheme>(?<![a-zA-Z0-9+.])[a-zA-Z0-9+.]*+)://(?P<rest>(?:(?!,\s?[a-z+]{1,20}://)[^\s\"'<>`])+)"),
        _hide_user,
    ),
    # user:password@host:port, and @tcp(host:port) of Go
    _Form(
        ("@",),
        (r"(?<![\w.+/-])([\w.+-]{1,64}+:)[^\s@:/\"']{1,200}+@(?=(?:tcp|unix)\(|[\w.-]{1,253}+:[0-9]{2,5}(?![0-9]))"),
        r"\1***@",
    ),
    # The addresses of webhooks are secrets in their path.
    _Form(
        ("hook", "/bot", "ifttt"),
        (
            r"(?i)(hooks\.slack\.com/(?:services|workflows|triggers)/|discord(?:app)?\.com/api/(?:v[0-9]{1,2}/)?webhooks/"
            r"|outlook\.office(?:365)?\.com/webhook/|webhook\.office\.com/webhookb2/|hooks\.zapier\.com/hooks/catch/"
            r"|maker\.ifttt\.com/trigger/[\w-]{1,100}+/(?:json/)?with/key/|api\.telegram\.org/(?:file/)?bot"
            r"|hook\.[a-z0-9]{2,5}\.make\.com/|hooks\.[a-z0-9.-]{1,60}/)[^\s\"'<>?]++"
        ),
        r"\1***",
    ),
    # Headers, also in lists of pairs. Of known schemes one word is the secret, of others the line.
    _Form(
        ("authorization", "cookie", "x-"),
        (
            r"(?i)(?P<keep>[(\[]\s{0,5}b?[\"'](?:(?:proxy-)?authorization|(?:set-)?cookie|x-[a-z-]{0,30}(?:key|token))[\"']"
            r"\s{0,5},\s{0,5}b?)" + _QUOTED
        ),
        _hide_value,
    ),
    _Form(
        ("authorization",),
        rf"(?i)(?P<keep>{_AUTHORIZATION}{_SCHEME}\s{{1,5}})[^\s\"',;\\]++",
        r"\g<keep>***",
    ),
    _Form(
        ("authorization",),
        rf"(?i)(?P<keep>{_AUTHORIZATION})(?!{_SCHEME}\s)(?=\S)(?(quote)[^\n\"'\\]++|[^\n]++)",
        r"\g<keep>***",
    ),
    _Form(
        ("cookie",),
        (
            r"(?i)(?P<keep>\bcookies?2?(?:\\{0,7}[\"'])?" + _IS + r"(?P<quote>\\{0,7}[\"'])?)"
            r"(?=[^\s\"'\\])[^\n\"'\\]*+(?:(?<==)[\"'][^\n\"']*+[\"']?[^\n\"'\\]*+)*"
        ),
        r"\g<keep>***",
    ),
    _Form(
        _NAME_HINTS,
        (rf"(?i){_OUR_NAME}|(?P<keep>{_NAMED}(?:{_VALUE_FIELD}|{_CLOSED}{_IS}))(?:{_QUOTED}|{_LIST}|{_BARE})"),
        _hide_value,
    ),
    _Form(
        _WHOLE_HINTS,
        rf"(?i){_OUR_NAME}|(?P<keep>{_WHOLE}{_WHOLE_IS})(?:{_QUOTED}|{_LIST}|{_BARE})",
        _hide_value,
    ),
    # "password":"…" as it stands in an address
    _Form(
        ("%22",),
        rf"(?i)(?P<keep>{_NAMED}%22(?:%20)?%3a(?:%20)?%22)[^\s%&]++(?:%(?!22)[^\s%&]++)*",
        r"\g<keep>***",
    ),
    # what Redis and servers of mail are told; `mysql -p…`
    _Form(
        ("auth default", "auth plain", "auth login", "auth xoauth2"),
        (r"(?P<keep>\b(?i:auth (?:default|plain|login|xoauth2)) )(?=[a-z]{0,60}[A-Z0-9@$%^&*+=!#_/])[^\s\"'<>]++"),
        r"\g<keep>***",
    ),
    _Form(
        ("mysql", "mariadb"),
        r"(?P<keep>\b(?:mysql|mariadb)[a-z-]{0,20}(?: [^\s]{1,60}){0,10}? -p)(?=\S)[^\s]++",
        r"\g<keep>***",
    ),
    # <password>…</password>, but not what servers say of `AUTH <password>`; name="password" and an empty line before
    # the value; PASSWORD '…' and IDENTIFIED BY '…'
    _Form(
        _NAME_HINTS,
        (
            rf"(?i)(?P<keep><(?:\w{{1,30}}:)?[\w-]{{0,30}}{_NAMED}(?:\s[^<>\n]{{0,200}})?>)"
            r"(?! called without any password configured)[^<\n]++"
        ),
        r"\g<keep>***",
    ),
    _Form(
        _NAME_HINTS,
        rf"(?i)(?P<keep>name=[\"']?[\w-]{{0,30}}{_NAMED}[\"']?[^\n]{{0,200}}\n\r?\n)[^\n]++",
        r"\g<keep>***",
    ),
    _Form(
        ("passw", "passp", "identified by", "pwd"),
        (rf"(?i)(?P<keep>(?:password|passwd|passphrase|pwd|identified by)\s{{1,5}}(?:(?:is|was)\s{{1,5}})?){_QUOTED}"),
        _hide_value,
    ),
    # `passwd hunter2`, `--password hunter2`: a word that is none of these, with a digit or sign in it or after a dash.
    # What a server says of a wrong one stays.
    _Form(
        ("passw", "passp", "requirepass", "sshpass"),
        (
            r"(?i)(?P<keep>(?:password|passphrase|passwd|requirepass|sshpass\s{1,5}-p)\s{1,5}(?:(?:is|was)\s{1,5})?)"
            r"(?:(?=[a-z]{0,60}[0-9@$%^&*+=!#_])|(?<=-password )(?!pair or user is disabled)"
            r"|(?<=-passphrase )|(?<=passwd )|(?<=requirepass )|(?<=sshpass -p ))"
            r"(?!(?:is|was|has|had|for|of|from|must|may|not|file|entry|and|or|in|to|with|the|a|an|are|cannot|can|does|hash"
            r"|authentication|required|missing|expired|changed|failed|command|database|backend|-)\b|-|%[sr]|\*)[^\s\"',;]++"
        ),
        r"\g<keep>***",
    ),
    _Form(
        ("token", "secret", "credential", "apikey", "api-key", "api_key", "api key"),
        (
            r"(?i)(?P<keep>\b(?:token|secret|api[-_ ]?key|credential)s?\s{1,5}[\"']?)"
            r"(?=[a-z0-9_-]{8})(?=[a-z_-]{0,60}[0-9])(?=[0-9_-]{0,60}[a-z])[a-z0-9._~+/=-]++"
        ),
        r"\g<keep>***",
    ),
    _Form(
        (" -u", "--user", "--proxy-user"),
        r"(?P<keep>(?<=\s)(?:-u|--user|--proxy-user)[ =][\"']?[^\s:\"']{1,64}+:)[^\s\"']++",
        r"\g<keep>***",
    ),
    _Form(
        ("bearer",),
        (
            r"(?i)\b(bearer)\s{1,5}(?!(?:token|auth|authentication|authorization|realm|scheme|is|of|was|and|or|for|error"
            r"|in|with|not|required|header|credentials?|scope)\b)[a-z0-9._~+/=-]{3,}"
        ),
        r"\1 ***",
    ),
    _Form(
        ("basic",),
        r"\b((?i:basic))\s{1,5}(?=[A-Za-z0-9+/_-][a-z]{0,60}[A-Z0-9+/=])[A-Za-z0-9._~+/=-]{6,}",
        r"\1 ***",
    ),
    _Form(
        ("eyj",),
        r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}+(?:\.[A-Za-z0-9_-]*+){1,4}",
        "***",
    ),
    _Form(
        tuple(prefix.lower() for prefix in _SURE),
        rf"(?<![A-Za-z0-9])({'|'.join(map(re.escape, _SURE))})[A-Za-z0-9_.~+/=-]{{8,}}+",
        r"\1***",
    ),
    _Form(
        tuple(prefix.lower() for prefix in _NEEDS_DIGIT),
        (
            rf"(?<![\w.-])({'|'.join(map(re.escape, _NEEDS_DIGIT))})"
            r"(?=[A-Za-z_-]{0,60}[0-9])(?=[A-Za-z0-9_.-]{20})[A-Za-z0-9_.-]++"
        ),
        r"\1***",
    ),
    _Form(
        ("sk_", "pk_", "rk_", "pk-", "rk-"),
        r"(?<![\w-])([spr]k[-_])(?=[A-Za-z_-]{0,60}[0-9])[A-Za-z0-9_-]{8,}+",
        r"\1***",
    ),
    # A bot of Telegram
    _Form((":aa",), r"(?<![0-9A-Za-z])([0-9]{8,10}:)AA[A-Za-z0-9_-]{33}(?![A-Za-z0-9_-])", r"\1***"),
    # What must not stand before the plus is looked at after it: to search for one character is quick.
    _Form(("+",), r"\+(?<![\w+]\+)[1-9](?:[ ()./-]{0,2}[0-9]){7,14}(?![0-9])", "+***"),
    _Form(
        ("@",),
        r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]++@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){1,8}",
        "***@***",
    ),
)


def _one_of(words: set[str]) -> str:
    """A pattern for any of these, by their first letters: ten times as quick as one after the other."""
    rests: dict[str, set[str]] = {}
    for word in words:
        rests.setdefault(word[0], set()).add(word[1:])
    ways = [re.escape(first) + ("" if "" in rest else _one_of(rest)) for first, rest in sorted(rests.items())]
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


@cache
def _hints() -> re.Pattern[str]:
    return re.compile(_one_of({hint for form in _SECRETS for hint in form.hints}))


_CARD: Final = re.compile(r"\d(?<![\d.-]\d)(?:[ -]?\d){12,18}(?![\d.-])")
# Without its spaces and dashes, a card's number is at least so many digits in a row.
_DIGITS: Final = bytes(ord("0") if c in b"0123456789" else ord(".") for c in range(256))
_CARD_DIGITS: Final = b"0" * 13
_IBAN: Final = re.compile(
    r"(?<![A-Za-z0-9])[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}+(?: ?[A-Z0-9]{1,3})?+(?![A-Za-z0-9])"
)
_may_hold_iban: Final = re.compile(r"[A-Z]{2}[0-9]{2} ?[A-Z0-9]{4} ?[A-Z0-9]{4}").search
_ENDS: Final = 50
"""Lines of the end of a stack that may be notes and further lines of a text."""
_STACK: Final = "Traceback (most recent call last)"
_HIDDEN: Final = "***"


def scrub(text: str) -> str:
    """A reason as a row may keep it: one line, without credentials and mail addresses."""
    return " ".join(scrub_lines(text).split())


def scrub_lines(text: str) -> str:
    """The same text, line breaks and all, without credentials, tokens, mail addresses, telephone, card and account
    numbers.

    Scrubbing it again changes nothing.
    """
    return _scrub_forms(text, _SECRETS)


def _scrub_forms(text: str, forms: tuple[_Form, ...]) -> str:
    folded = _fold(text)
    if _hints().search(folded) is not None:
        for form in forms:
            text = _apply(form, text, folded)
    if _may_hold_iban(text) is not None:
        text = _IBAN.sub(_hide_iban, text)
    return _CARD.sub(_hide_card, text) if _may_hold_card(text) else text


def scrub_around(text: str, ids: Iterable[str]) -> str:
    """As `scrub_lines`, but these values stay: ids are no secrets, however much one looks like a card's number."""
    scrubbed = scrub_lines(text)
    if scrubbed == text:
        return text
    # Only those that would be hidden themselves: around any other, such as "1", a secret could be cut in two.
    kept = [value for value in dict.fromkeys(ids) if value in text and scrub_lines(value) != value]
    if not kept:
        return scrubbed
    anyone = "|".join(re.escape(value) for value in sorted(kept, key=len, reverse=True))
    pieces = re.split(rf"((?<!\w)(?:{anyone})(?!\w))", text)
    return "".join(piece if place % 2 else scrub_lines(piece) for place, piece in enumerate(pieces))


def is_clean(text: str) -> bool:
    """True when scrubbing would find nothing: neither here nor in a text that is made of such lines, so that nobody
    need ask again for a line that he knows. False: `scrub_lines` has to look."""
    if not text.isascii():
        return False  # what is stored of it may differ, and letters and digits of other scripts need the patterns
    return _hints().search(text.lower()) is None and _may_hold_iban(text) is None and not _may_hold_card(text)


def summary(text: str, limit: int = 500) -> str:
    """What a person needs of an error: its first line, scrubbed; of a stack the line that says what it was."""
    lines = [line.strip() for line in text.replace("\0", " ").splitlines() if line.strip()]
    if not lines:
        return "unknown error"
    line = scrub(lines[-1] if _STACK in text else lines[0])
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def with_type(text: str, stack: str | None) -> str:
    """The text of an error with its type in front, where the stack tells it: `KeyError: 'email'`. Python ends a stack
    with that line, JavaScript begins it so."""
    first = text.partition("\n")[0].strip()
    lines = [line.strip() for line in (stack or "").splitlines()]
    for line in (*reversed(lines[-_ENDS:]), *lines[:1]):
        name, colon, said = line.partition(": ")
        kind = name.rpartition(".")[2]
        if colon and said == first and kind.isidentifier() and kind != "Error":
            return text if first.startswith(f"{kind}: ") else f"{kind}: {text}"
    return text


def hide_secrets(value: Any, *, most_depth: int = 100) -> Any:
    """The same JSON value with what looks like a secret replaced: by the name of its field, or by its form. What is
    nested deeper is hidden, too: nobody reads it, and it would end in an error of ours."""
    deeper = most_depth - 1
    match value:
        case dict() | list() | tuple() if deeper < 0:
            return _HIDDEN
        case dict():
            named = next((str(value[key]) for key in ("name", "key", "Name", "Key") if key in value), "")
            return {
                hide_secrets(name): _HIDDEN
                if _is_secret(str(name), item) or (str(name).lower() == "value" and _is_secret(named, item))
                else hide_secrets(item, most_depth=deeper)
                for name, item in value.items()
            }
        case [str(name), str()] if _compiled(_HEADER).search(name):
            return [name, _HIDDEN]
        case list() | tuple():
            return [hide_secrets(item, most_depth=deeper) for item in value]
        case str():
            return _scrub_forms(value, _SECRETS[:-1])  # mail addresses are data here
        case int() if _is_card_number(value):
            return _HIDDEN
    return value


def _is_card_number(value: int) -> bool:
    return 10**12 <= value < 10**19 and _CARD.sub(_hide_card, str(value)) == _HIDDEN


def _is_secret(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool) or _compiled(_SECRET_NAME).search(name) is None:
        return False
    return not (isinstance(value, int | float) and name.lower().endswith("tokens"))  # so many of them


def _apply(form: _Form, text: str, folded: str) -> str:
    for hint in form.hints:
        if hint in folded:
            return _compiled(form.pattern).sub(form.instead, text)
    return text


def _fold(text: str) -> str:
    """In small letters, and with the three that a pattern takes for `i` or `s` in spite of their look."""
    folded = text.lower()
    if text.isascii():
        return folded
    return folded.replace("i\N{COMBINING DOT ABOVE}", "i").replace("ı", "i").replace("ſ", "s")


def _may_hold_card(text: str) -> bool:
    # Patterns know the digits of all scripts.
    return not text.isascii() or _CARD_DIGITS in text.encode().translate(_DIGITS, b" -")


def _hide_card(found: re.Match[str]) -> str:
    """Long numbers are mostly ids and instants (which begin with 1): only those with the first digit and the check
    digit of a card are hidden."""
    digits = [int(character) for character in found[0] if character.isdecimal()]
    if not 2 <= digits[0] <= 6:
        return found[0]
    total = 0
    for place, digit in enumerate(reversed(digits)):
        doubled = digit * 2 if place % 2 else digit
        total += doubled - 9 if doubled > 9 else doubled
    return _HIDDEN if total % 10 == 0 else found[0]


def _hide_iban(found: re.Match[str]) -> str:
    """Only with the check digits of one: most such texts are references of something else."""
    text = found[0]
    while len(text) >= 15:
        packed = text.replace(" ", "")
        number = "".join(str(int(character, 36)) for character in packed[4:] + packed[:4])
        if 15 <= len(packed) <= 34 and int(number) % 97 == 1:
            return f"{text[:2]}***{found[0][len(text) :]}"
        text = text.rpartition(" ")[0]  # the next word, in capitals, was taken for its last part
    return found[0]
