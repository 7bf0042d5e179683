"""Protection on the way to a server: whether the server has to prove who it is, and a warning where it has not."""

from __future__ import annotations

import ipaddress
import logging
import math
import os
from typing import Final

from txnstore.db.url import DatabaseUrl
from txnstore.trouble import RepeatedTrouble

_log = logging.getLogger(__name__)

#: Values of sslmode with which the server shows a certificate that is checked.
VERIFIED: Final = ("verify-ca", "verify-full")
#: What libpq does if nothing is said: TLS if the server has it, whoever that is.
_DEFAULT: Final = "prefer"
#: This process warns once of each host.
_unverified: Final = RepeatedTrouble(math.inf)


def warn_of_unverified(url: DatabaseUrl) -> None:
    """Warn, once for each host, if a server on another machine is taken for the right one without a proof.

    Anybody on the way could read and change what is sent, and the password with some ways of authentication.
    """
    mode = _setting(url, "sslmode", "PGSSLMODE")
    if mode is None:
        # With the certificates of the system, verify-full is libpq's default.
        mode = "verify-full" if _setting(url, "sslrootcert", "PGSSLROOTCERT") == "system" else _DEFAULT
    if mode in VERIFIED or _setting(url, "gssencmode", "PGGSSENCMODE") == "require" or "service" in url.url.query:
        return
    for host in _hosts(url):
        if not is_local(host) and _unverified.may_be_told(host):
            _log.warning(
                "nothing proves that the server at %.255r is the right one, because sslmode is %.20r: anybody on"
                " the way can read and change everything. Put sslmode=verify-full into the URL, and sslrootcert where"
                " its certificate is not signed by a known authority",
                host,
                mode,
                extra={"event": "server_not_verified", "host": host},
            )


def is_local(host: str) -> bool:
    """Return whether a host is this machine: a folder of Unix sockets, or the loopback interface by name or number."""
    if not host or host.startswith(("/", "@")) or host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _hosts(url: DatabaseUrl) -> list[str]:
    # An address is what is connected to; the name beside it is only compared with the certificate's.
    for name, variable in (("hostaddr", "PGHOSTADDR"), ("host", "PGHOST")):
        told = url.url.query.get(name)
        if told is None and name == "host":
            told = url.url.host
        found = (told,) if isinstance(told, str) else told
        if found is None and variable in os.environ:
            found = (os.environ[variable],)
        if found:
            # SQLAlchemy takes host:port as well.
            return [_without_port(part) for text in found for part in text.split(",")]
    return []


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() and (":" not in name or name.endswith("]")) else host


def _setting(url: DatabaseUrl, option: str, variable: str) -> str | None:
    value = url.url.query.get(option)
    return value if isinstance(value, str) else os.environ.get(variable)
