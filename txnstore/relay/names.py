"""This file is what a relay is called in the Kafka cluster and in the store."""

from __future__ import annotations

import re
from typing import Final

from txnstore.relay.errors import RelayFailed

_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,100}")
_PREFIX: Final = "txnstore-relay"


def check_relay_name(name: str) -> str:
    """Return the name.

    Raises:
        RelayFailed: it has other characters than a-z A-Z 0-9 . _ -, none, or more than 100.
    """
    if not _NAME.fullmatch(name):
        raise RelayFailed(f"a relay's name has 1 to 100 of the characters a-z A-Z 0-9 . _ -; not {name[:40]!r}")
    return name


def group_of(name: str) -> str:
    """Return the consumer group whose committed offsets in Kafka are the relay's positions in the store."""
    return f"{_PREFIX}-{name}"


def transactional_id_of(name: str, topic: str, partition: int) -> str:
    """Return the transactional id that writes the partition; "/" is in no name and in no topic."""
    return f"{_PREFIX}-{name}/{topic}-{partition}"


def relay_id_to(cluster_id: str, name: str) -> str:
    """Return what the relay to this Kafka cluster is called in `relay_positions`."""
    return f"to/{cluster_id}/{name}"


def relay_id_from(cluster_id: str, name: str) -> str:
    """Return what the relay from this Kafka cluster is called in `relay_positions`."""
    return f"from/{cluster_id}/{name}"
