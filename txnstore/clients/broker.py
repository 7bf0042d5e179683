"""This file is the one broker that clients are told of: the database plays it, and it leads every partition."""

from __future__ import annotations

from typing import Final

from txnstore.clients.cluster_metadata import BrokerMetadata, Node
from txnstore.db.url import DatabaseUrl

BROKER_ID: Final = 0

_LOCAL: Final = "localhost"
_PORT_POSTGRESQL: Final = 5432


def broker_metadata(url: DatabaseUrl) -> BrokerMetadata:
    """Return the broker as `list_topics()` shows it."""
    broker = BrokerMetadata()
    broker.id = BROKER_ID
    broker.host, broker.port = broker_address(url)
    return broker


def broker_node(url: DatabaseUrl) -> Node:
    """Return the broker as the admin client shows it."""
    host, port = broker_address(url)
    return Node(BROKER_ID, host, port)


def broker_address(url: DatabaseUrl) -> tuple[str, int]:
    """Return host and port of the database, and nothing else of its URL; a file's are `localhost` and 0.

    Of several hosts, one is named: the first.
    """
    if url.kind == "sqlite":
        return _LOCAL, 0
    host = url.url.host or _first(url.url.query.get("host"))
    port = url.url.port or _first(url.url.query.get("port"))
    if host.count(":") == 1:
        # SQLAlchemy's form of several servers: ?host=one:5432&host=two:5432; an IPv6 address has more colons.
        name, _, behind = host.rpartition(":")
        if behind.isdecimal():
            host, port = name, behind
    # A folder is where the socket of a server on this machine is.
    host = _LOCAL if not host or host.startswith(("/", "@")) else host.partition(",")[0]
    number = str(port).partition(",")[0]
    return host, int(number) if number.isdecimal() else _PORT_POSTGRESQL


def _first(value: str | tuple[str, ...] | None) -> str:
    return (value if isinstance(value, str) else value[0]) if value else ""
