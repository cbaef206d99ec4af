"""Who looks at the dashboard, and what he may do.

In: a request. Out: a principal with a role, or None for somebody unknown. Four modes: `none` for the own machine,
`token`, `passwords` (a file), `proxy` (headers of a proxy that is trusted); or a function of the host application.
Sessions are signed cookies: nothing is stored, so several processes with the same key share them.
Elsewhere: whether a request may change something at all (`guard`).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import os
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import msgspec

from bullpen._kernel.duration import check_texts
from bullpen._kernel.logs import get_logger
from bullpen._kernel.ownership import Distrusted, read_trusted
from bullpen._kernel.reminder import Reminder
from bullpen.dashboard._web import PageProblem, PageRequest
from bullpen.errors import InvalidOption

__all__ = [
    "Access",
    "HostAccess",
    "LocalAccess",
    "PasswordAccess",
    "Permission",
    "ProxyAccess",
    "Role",
    "SessionAccess",
    "TokenAccess",
    "Visitor",
    "cookie_name",
    "hash_password",
    "local_visitor",
    "session_cookie",
]

logger = get_logger("bullpen.dashboard")

_IDLE_S: Final = 12 * 3600
_LONGEST_S: Final = 7 * 24 * 3600
_FAILURES: Final = 5
_FAILURES_WITHIN_S: Final = 60.0
_MOST_REMEMBERED: Final = 10_000
_SCRYPT: Final = {"n": 2**14, "r": 8, "p": 1}
_LEAST_TOKEN: Final = 22
"""Characters: 128 bits in base64."""


class Role(StrEnum):
    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"


class Permission(StrEnum):
    """What a route asks for."""

    SEE = "see"
    PAYLOADS = "payloads"
    ACT = "act"
    ADMIN = "admin"


_GRANTS: Final = {
    Role.VIEWER: {Permission.SEE},
    Role.OPERATOR: {Permission.SEE, Permission.PAYLOADS, Permission.ACT},
    Role.ADMIN: set(Permission),
}


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who asks."""

    name: str
    role: Role = Role.VIEWER
    tenants: tuple[str, ...] = ()
    """Sees objects of these tenants only; empty: of all."""
    payloads: bool = False
    """Lets a viewer see payloads too."""
    queues: tuple[str, ...] = ()
    """The role holds for these queues only, by patterns such as `mail-*`; elsewhere he is a viewer. Empty: for all."""

    def __post_init__(self) -> None:
        check_texts("tenants", self.tenants)
        check_texts("queues", self.queues)

    def on(self, queue: str) -> Visitor:
        """Who this is for one queue, or with an empty name for what belongs to none."""
        if not self.queues or (queue and any(fnmatchcase(queue, pattern) for pattern in self.queues)):
            return self
        return replace(self, role=Role.VIEWER)

    def may(self, permission: Permission) -> bool:
        return permission in _GRANTS[self.role] or (permission is Permission.PAYLOADS and self.payloads)


def local_visitor() -> Visitor:
    """Whoever sits at this machine."""
    from bullpen.queue.actor import who

    return Visitor(who(), Role.ADMIN)


Decide = Callable[[Mapping[str, Any]], "Visitor | Awaitable[Visitor | None] | None"]
"""The host application's own login: takes the ASGI scope."""


class Access:
    """Decides who a request is from."""

    has_login = False
    """Whether there is a login page."""
    uses_cookies = False

    async def principal(self, request: PageRequest, scope: Mapping[str, Any]) -> Visitor | None:
        """None: somebody unknown."""
        raise NotImplementedError

    def login(self, request: PageRequest, fields: Mapping[str, str]) -> tuple[Visitor, str]:
        """The principal and the cookie of a new session. Raises PageProblem."""
        raise PageProblem(404, "This dashboard has no login.")

    def csrf(self, request: PageRequest) -> str:
        """What a form has to carry; empty where no cookie lets anybody in."""
        return ""


class LocalAccess(Access):
    """No login: for addresses of the own machine."""

    async def principal(self, request: PageRequest, scope: Mapping[str, Any]) -> Visitor | None:
        return local_visitor()


class HostAccess(Access):
    """The application that mounts the dashboard decides."""

    def __init__(self, decide: Decide) -> None:
        self._decide = decide

    async def principal(self, request: PageRequest, scope: Mapping[str, Any]) -> Visitor | None:
        found = self._decide(scope)
        return await found if isinstance(found, Awaitable) else found


class ProxyAccess(Access):
    """A proxy in front has checked who it is, and says so in headers."""

    def __init__(self, proxies: str, *, user_header: str, groups_header: str, admins: str, operators: str) -> None:
        try:
            self._proxies = [ipaddress.ip_network(each.strip(), strict=False) for each in proxies.split(",") if each]
        except ValueError as error:
            raise InvalidOption("dashboard.proxies", f"addresses or networks, with commas ({error})", proxies) from None
        if not self._proxies:
            raise InvalidOption("dashboard.proxies", "the addresses of the proxy, in mode proxy", proxies)
        self._user, self._groups = user_header.lower(), groups_header.lower()
        self._admins, self._operators = _words(admins), _words(operators)
        self._strangers = Reminder()

    async def principal(self, request: PageRequest, scope: Mapping[str, Any]) -> Visitor | None:
        user = request.headers.get(self._user, "")
        if not self._is_trusted(request.client):
            if user:
                if self._strangers.begins_or_lasts():  # whoever can connect may send as many as he likes
                    logger.warning("dashboard: %s sent %s and is not a configured proxy", request.client, self._user)
                raise PageProblem(403, "Only the configured proxy may send the user's name.")
            return None
        if not user:
            return None
        groups = _words(request.headers.get(self._groups, ""))
        role = Role.ADMIN if groups & self._admins else Role.OPERATOR if groups & self._operators else Role.VIEWER
        return Visitor(user[:200], role)

    def _is_trusted(self, client: str) -> bool:
        try:
            address = ipaddress.ip_address(client.partition("%")[0])
        except ValueError:
            return False
        return any(address in network for network in self._proxies)


class SessionAccess(Access):
    """Somebody logged in, and has a signed cookie since."""

    has_login = True
    uses_cookies = True

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._failures: dict[str, deque[float]] = {}

    async def principal(self, request: PageRequest, scope: Mapping[str, Any]) -> Visitor | None:
        session = self._session(request)
        return None if session is None else self.known(session["u"], session["v"])

    def known(self, user: str, version: str) -> Visitor | None:
        """The principal of a session, if he may still come in."""
        raise NotImplementedError

    def check(self, fields: Mapping[str, str]) -> tuple[Visitor, str]:
        """Visitor and version of what he proved; raises PageProblem."""
        raise NotImplementedError

    def login(self, request: PageRequest, fields: Mapping[str, str]) -> tuple[Visitor, str]:
        account = fields.get("user", "")[:200]
        who = [f"address {request.client}", f"account {account}"]
        self._slow_down(who)
        try:
            principal, version = self.check(fields)
        except PageProblem:
            for each in who:
                self._failures.setdefault(each, deque(maxlen=_FAILURES)).append(time.monotonic())
            while len(self._failures) > _MOST_REMEMBERED:
                self._failures.pop(next(iter(self._failures)))
            logger.warning("dashboard: login refused for %s", request.client)
            raise
        now = int(time.time())
        session = {"u": principal.name, "v": version, "b": now, "s": now, "n": secrets.token_urlsafe(12)}
        return principal, self._sign(session)

    def renewed(self, request: PageRequest) -> str | None:
        """A younger cookie for a session that is in use, now and then."""
        session = self._session(request)
        if session is None or time.time() - session["s"] < _IDLE_S / 24:
            return None
        return self._sign({**session, "s": int(time.time())})

    def csrf(self, request: PageRequest) -> str:
        session = self._session(request)
        return "" if session is None else self._mac(b"csrf", str(session["n"]).encode())

    def _slow_down(self, who: list[str]) -> None:
        now = time.monotonic()
        for each in who:
            recent = [at for at in self._failures.get(each, ()) if now - at < _FAILURES_WITHIN_S]
            if len(recent) >= _FAILURES:
                wait_s = max(1, int(_FAILURES_WITHIN_S - (now - recent[0])))
                raise PageProblem(429, "Too many failed logins. Wait a minute.", headers={"retry-after": str(wait_s)})

    def _session(self, request: PageRequest) -> dict[str, Any] | None:
        raw = request.cookies.get(cookie_name(request), "")
        body, _, mac = raw.partition(".")
        # As bytes: texts with characters beyond ASCII, which a cookie may hold, cannot be compared.
        if not mac or not hmac.compare_digest(self._mac(b"session", body.encode()).encode(), mac.encode()):
            return None
        try:
            session: dict[str, Any] = msgspec.json.decode(base64.urlsafe_b64decode(body))
        except (ValueError, msgspec.DecodeError):
            return None
        now = time.time()
        return session if now - session["s"] < _IDLE_S and now - session["b"] < _LONGEST_S else None

    def _sign(self, session: dict[str, Any]) -> str:
        body = base64.urlsafe_b64encode(msgspec.json.encode(session)).decode()
        return f"{body}.{self._mac(b'session', body.encode())}"

    def _mac(self, purpose: bytes, body: bytes) -> str:
        return hmac.new(self._key, purpose + b"\0" + body, hashlib.sha256).hexdigest()


class TokenAccess(SessionAccess):
    """One token lets in, as an administrator."""

    def __init__(self, token: str) -> None:
        if len(token) < _LEAST_TOKEN:
            raise InvalidOption("dashboard.token", f"at least {_LEAST_TOKEN} random characters", "a shorter one")
        self._token = token
        super().__init__(hashlib.sha256(b"bullpen dashboard\0" + token.encode()).digest())

    async def principal(self, request: PageRequest, scope: Mapping[str, Any]) -> Visitor | None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token.encode()):
            return Visitor("token", Role.ADMIN)
        return await super().principal(request, scope)

    def known(self, user: str, version: str) -> Visitor | None:
        return Visitor("token", Role.ADMIN)

    def check(self, fields: Mapping[str, str]) -> tuple[Visitor, str]:
        if not hmac.compare_digest(fields.get("token", "").encode(), self._token.encode()):
            raise PageProblem(403, "This token is wrong.")
        return Visitor("token", Role.ADMIN), ""


class PasswordAccess(SessionAccess):
    """A file of users, made by `bullpen dashboard --add-user`. It is read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_at = -1.0
        self._users: dict[str, dict[str, Any]] = {}
        self._read()
        super().__init__(hashlib.sha256(b"bullpen dashboard\0" + str(self._file_key).encode()).digest())

    def _read(self) -> None:
        try:
            found = self._path.stat()
        except OSError as error:
            raise InvalidOption(
                "dashboard.passwords", f"a file that can be read ({error.strerror})", str(self._path)
            ) from None
        if found.st_mtime == self._read_at:
            return
        if found.st_mode & 0o077:
            raise InvalidOption(
                "dashboard.passwords", "a file of mode 0600, which nobody else can read", str(self._path)
            )
        try:
            content = msgspec.json.decode(read_trusted(self._path) or b"")
            self._users, self._file_key = content["users"], content["key"]
        except Distrusted as reason:
            expected = f"a file that this user owns; this one {reason}"
            raise InvalidOption("dashboard.passwords", expected, str(self._path)) from None
        except (msgspec.DecodeError, KeyError, TypeError):
            raise InvalidOption(
                "dashboard.passwords", "a file made by bullpen dashboard --add-user", str(self._path)
            ) from None
        self._read_at = found.st_mtime

    def known(self, user: str, version: str) -> Visitor | None:
        self._read()
        entry = self._users.get(user)
        return _as_principal(user, entry) if entry is not None and _version(entry) == version else None

    def check(self, fields: Mapping[str, str]) -> tuple[Visitor, str]:
        self._read()
        user = fields.get("user", "")
        entry = self._users.get(user)
        stored = entry["password"] if entry is not None else _NOBODY  # the same work for accounts that do not exist
        is_right = _matches(fields.get("password", ""), stored)
        if entry is None or not is_right:
            raise PageProblem(403, "Name or password is wrong.")
        return _as_principal(user, entry), _version(entry)


def hash_password(password: str) -> str:
    """What the file keeps of a password."""
    salt = os.urandom(16)
    digest = hashlib.scrypt(password.encode(), salt=salt, **_SCRYPT)
    return f"scrypt${salt.hex()}${digest.hex()}"


def _matches(password: str, stored: str) -> bool:
    _, salt, digest = stored.split("$")
    found = hashlib.scrypt(password.encode(), salt=bytes.fromhex(salt), **_SCRYPT)
    return hmac.compare_digest(found, bytes.fromhex(digest))


_NOBODY: Final = f"scrypt${'00' * 16}${'00' * 64}"


def _version(entry: Mapping[str, Any]) -> str:
    """Changes with the password: a session of the earlier one ends."""
    return hashlib.sha256(str(entry["password"]).encode()).hexdigest()[:16]


def _as_principal(user: str, entry: Mapping[str, Any]) -> Visitor:
    tenants, queues = (tuple(str(each) for each in entry.get(name, ())) for name in ("tenants", "queues"))
    return Visitor(user, Role(entry.get("role", "viewer")), tenants, bool(entry.get("payloads")), queues)


def _words(text: str) -> set[str]:
    return {each.strip() for each in text.split(",") if each.strip()}


def cookie_name(request: PageRequest) -> str:
    """Over TLS a name that browsers tie to this host and to the root; there a mount cannot narrow it."""
    return "__Host-bullpen" if request.is_tls else "bullpen"


def session_cookie(request: PageRequest, value: str) -> str:
    """The header that stores a session, or with an empty value ends it."""
    ending = "; Max-Age=0" if not value else f"; Max-Age={_LONGEST_S}"
    secure = "; Secure" if request.is_tls else ""
    return f"{cookie_name(request)}={value}; Path=/; HttpOnly; SameSite=Lax{secure}{ending}"
