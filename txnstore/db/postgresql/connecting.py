"""The reasons why there is no connection to PostgreSQL: libpq's text of one is read, and told in words of ours."""

from __future__ import annotations

import re
from typing import Final

from txnstore.errors import InvalidUrl, PermissionDenied, StoreUnavailable, TxnStoreError

# What stands before libpq's reason: whom it has asked.
_ASKED: Final = re.compile(
    r'.*?connection to server (at|on socket) "(?P<host>[^"]*)"( \([^)]*\))?(, port (?P<port>\w+))? failed: '
    r"|connection (failed|is bad): "
)
_SEVERITY: Final = re.compile(r"(FATAL|PANIC|ERROR):\s+")
# Names of a user, a database, a host or a file, which may read like a reason.
_NAMES: Final = re.compile(r"\".*\"|(?<=host )'[^']*'")
_NOT_FOUND: Final = re.compile(r".*?failed to resolve host '(?P<host>[^']*)'")
_NO_DATABASE: Final = re.compile(r'.*?FATAL:\s+(database (?=")|no such database: )(?P<name>"?[^"]+"?)')
#: Why no connection came about: libpq has no SQLSTATE then, only text, which may repeat the URL and is not repeated.
#: Of what the server says, each is the beginning; names are left out.
CONNECTION_ERRORS: Final[tuple[tuple[str, type[TxnStoreError], str], ...]] = (
    (
        r"(sorry, )?too many (clients|connections)|(remaining )?connection slots are reserved",
        StoreUnavailable,
        "the server has no connection left for this user",
    ),
    (
        (
            r"(server login failed: (FATAL:?\s+)?)?[\w-]+ authentication failed|no password supplied"
            r"|role \"\" (does not exist|is not permitted)|no such user"
            r"|no pg_hba\.conf entry|pg_hba\.conf rejects|permission denied for database"
            r"|connection requires a valid client certificate"
        ),
        PermissionDenied,
        "the server refused the user or the password, or does not let this user in",
    ),
    (
        r"database \"\" does not exist|no such database",
        InvalidUrl,
        "the server has no database{name}; create it first",
    ),
    (
        r"server does not support SSL",
        InvalidUrl,
        "the server offers no TLS, which the URL's sslmode asks for",
    ),
    (
        r"root certificate file \"\" does not exist|weak sslmode",
        InvalidUrl,
        "there is no root certificate, by which the URL's sslmode has the server's TLS verified (sslrootcert)",
    ),
    (
        r"SSL error: certificate verify failed|server certificate for \"\"",
        InvalidUrl,
        "the server's TLS is not what the URL's sslmode asks for",
    ),
    (
        r"session is (not )?read-only|server is (not )?in hot standby mode",
        StoreUnavailable,
        "at the moment no server of the URL is what its target_session_attrs asks for",
    ),
    (
        r"the database system is (starting up|shutting down|in recovery|not (yet )?accepting connections)",
        StoreUnavailable,
        "the server is starting, stopping or recovering",
    ),
    (
        (
            r"unrecognized configuration parameter|invalid (value for parameter|command-line argument)"
            r"|parameter \"\" cannot be|permission denied to set parameter"
        ),
        InvalidUrl,
        "the server does not take a setting among the URL's options, or a value of it",
    ),
    (
        (
            r"(bad|invalid) (\w+ )*(value|number|integer)|could not match|unsupported"
            r"|definition of service|certificate file|private key file"
        ),
        InvalidUrl,
        "an option of the PostgreSQL URL has a value that PostgreSQL's client library does not accept",
    ),
)
_UNREACHABLE: Final = "no connection to PostgreSQL could be made: is the server there and the address right?"
#: Why there is not even an answer, as the operating system says it in English.
_NO_ANSWER: Final = (
    (r"failed to resolve host|could not translate host name", "there is no host of this name"),
    (r"Connection refused", "refused"),
    (r"timeout expired|timed out", "no answer in time"),
    (r"No such file or directory", "there is no such socket"),
    (r"No route to host|Network is unreachable", "no way there"),
)


def connecting_error(told: str) -> TxnStoreError:
    """Return our error for a connection that never came about, for the reason that libpq told.

    It names hosts with their ports, and the database that is not there, as the URL's own text does; nothing else.
    """
    lines = told.splitlines()
    reasons = [_reason(line) for number, line in enumerate(lines) if not number or _ASKED.match(line)]
    asked = _asked(lines)
    for pattern, kind, message in CONNECTION_ERRORS:
        if any((re.match if is_servers else re.search)(pattern, reason) for reason, is_servers in reasons):
            name = next((f" {found['name']}" for line in lines if (found := _NO_DATABASE.match(line))), " of this name")
            return kind(message.format(name=name) + (f" ({', '.join(asked)})" if asked else ""))
    told_why = [f"{place}: {why}" if why else place for place, why in asked.items()]
    where = ", ".join(told_why) or next((why for reason in reasons if (why := _no_answer(*reason))), "")
    return StoreUnavailable(_UNREACHABLE + (f" ({where})" if where else ""))


def _asked(lines: list[str]) -> dict[str, str]:
    """Return who was asked, host and port or the path of a socket, each once, and why there was no answer, if known."""
    asked: dict[str, str] = {}
    for line in lines:
        found = _ASKED.match(line) or _NOT_FOUND.match(line)
        place = {} if found is None else found.groupdict()
        host, port = place.get("host"), place.get("port")
        if host and port:
            host = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if host:
            asked.setdefault(host, _no_answer(*_reason(line)))
    return asked


def _no_answer(reason: str, is_servers: bool) -> str:
    """Return why there was no answer, or nothing if that is not known, or the server has said it."""
    return "" if is_servers else next((why for pattern, why in _NO_ANSWER if re.search(pattern, reason)), "")


def _reason(line: str) -> tuple[str, bool]:
    """Return a line without whom was asked, and without names, and whether it is the server's, in whose words it is."""
    line = _ASKED.sub("", line, count=1)
    severity = _SEVERITY.match(line)
    return _NAMES.sub('""', line if severity is None else line[severity.end() :]), severity is not None
