"""Why a server that never let us in does not: the usual mistakes with TLS, each in its own words.

In: where it is, and how the attempt failed. Out: ServerRefused with a sentence that says what to change, or None. Asks
the server once more, blocking, for a short time: what it says of a certificate is lost when we write first, and a
server that speaks another protocol says nothing at all. Elsewhere: connecting (`client`, `blocking`).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Final

from bullpen.errors import ServerRefused
from bullpen.redis.address import NodeAddress, NoPassword

HANDSHAKE_SHARE: Final = 0.5
"""Of the time for connecting; the rest is for finding out why there was no answer."""
_EXPIRED, _NOT_YET_VALID, _NAME, _ADDRESS = 10, 9, 62, 64  # what OpenSSL calls them


def untrusted(endpoint: NodeAddress, error: ssl.SSLCertVerificationError) -> ServerRefused:
    """The server's certificate does not pass."""
    text = f"the certificate of {endpoint} cannot be trusted: "
    match error.verify_code:
        case code if code in (_EXPIRED, _NOT_YET_VALID):
            when = "it has expired" if code == _EXPIRED else "it is not valid yet"
            text += f"{when}; renew it on the server, or correct the clock"
        case code if code in (_NAME, _ADDRESS):
            text += f"it is for another name ({error.verify_message}); connect with a name in it, or with ?verify=ca"
        case _:
            text += f"{error.verify_message}; name its certificate authority with ?ca=<file>"
    return ServerRefused(text)


def is_worth_asking(endpoint: NodeAddress, error: BaseException) -> bool:
    """Whether somebody was there: then it may be a matter of TLS."""
    cause = error.__cause__ or error
    is_away = isinstance(error, NoPassword) or isinstance(cause, (ConnectionRefusedError, socket.gaierror))
    return endpoint.path is None and not is_away


def diagnose(endpoint: NodeAddress, within_s: float) -> ServerRefused | None:
    """What is wrong with TLS, if that is it. Takes up to `within_s`."""
    patience_s = within_s / 3  # at most two conversations, of which the first may wait twice
    with contextlib.suppress(OSError):  # it is not there: no matter of TLS
        if endpoint.tls is None:
            return _speaks_tls(endpoint, patience_s)
        with socket.create_connection((endpoint.host, endpoint.port), patience_s) as plain:
            try:
                with endpoint.tls.wrap_socket(plain, server_hostname=endpoint.host) as secured:
                    secured.recv(1)  # nothing was asked: what comes is a complaint
            except ssl.SSLCertVerificationError as error:
                return untrusted(endpoint, error)
            except ssl.SSLError as error:
                if (complaint := _complaint(endpoint, error.reason or "")) is not None:
                    return complaint
            except OSError:
                pass  # it ended, or says nothing: perhaps it does not understand
        return _speaks_plainly(endpoint, patience_s)
    return None


def _complaint(endpoint: NodeAddress, reason: str) -> ServerRefused | None:
    if "ALERT" not in reason:
        return None
    said = reason.partition("ALERT_")[2].replace("_", " ").lower()
    if "required" in said or "handshake failure" in said:
        return ServerRefused(f"{endpoint} requires a client certificate: set ?cert=<file>&key=<file> ({said})")
    if "expired" in said:
        return ServerRefused(f"{endpoint} refused the client certificate because it has expired: renew ?cert=<file>")
    return ServerRefused(
        f"{endpoint} refused the client certificate ({said}): ?cert=<file> must be signed by an authority that the "
        "server trusts"
    )


def _speaks_tls(endpoint: NodeAddress, within_s: float) -> ServerRefused | None:
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE  # nothing is sent but the hello
    with socket.create_connection((endpoint.host, endpoint.port), within_s) as plain:
        try:
            anybody.wrap_socket(plain, server_hostname=endpoint.host).close()
        except ssl.SSLError as error:
            if "ALERT" not in (error.reason or ""):
                return None
    return ServerRefused(f"{endpoint} requires TLS: use rediss:// instead of redis://, or tls=True")


def _speaks_plainly(endpoint: NodeAddress, within_s: float) -> ServerRefused | None:
    with socket.create_connection((endpoint.host, endpoint.port), within_s) as plain:
        plain.sendall(b"PING\r\n")
        if plain.recv(1) not in (b"+", b"-"):
            return None
    return ServerRefused(f"{endpoint} does not use TLS: use redis:// instead of rediss://, without tls=")
