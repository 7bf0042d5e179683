"""This file is the settings of the Kafka clients that a relay makes: the operator's, and those that are the relay's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from txnstore.relay.errors import RelayFailed

#: A Kafka transaction that its relay has left open is aborted by Kafka after this long.
TRANSACTION_TIMEOUT_MS: Final = 60_000

#: What exactly once depends on; it cannot be set.
_OWN: Final = frozenset(
    {
        "acks",
        "auto.offset.reset",
        "bootstrap.servers",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.idempotence",
        "enable.partition.eof",
        "group.id",
        "group.instance.id",
        "isolation.level",
        "metadata.broker.list",
        "transaction.timeout.ms",
        "transactional.id",
    }
)
#: librdkafka waits that long before it asks the coordinator again, which is busy after each transaction.
_RETRY_BACKOFF_MS: Final = 10
#: What goes wrong is said by the relay; librdkafka itself says only what is critical.
_LOG_LEVEL: Final = 2


def check_settings(settings: Mapping[str, str]) -> None:
    """Refuse settings that are not the operator's to make.

    Raises:
        RelayFailed: one of them is what exactly once depends on.
    """
    own = sorted(settings.keys() & _OWN)
    if own:
        raise RelayFailed(f"the relay sets {', '.join(own)} itself")


def client_settings(bootstrap: str, settings: Mapping[str, str]) -> dict[str, object]:
    """Return what all clients of one Kafka cluster have in common."""
    return {"log_level": _LOG_LEVEL, "retry.backoff.ms": _RETRY_BACKOFF_MS, **settings, "bootstrap.servers": bootstrap}


def producer_settings(bootstrap: str, settings: Mapping[str, str], transactional_id: str) -> dict[str, object]:
    """Return the settings of the producer of one partition."""
    return {
        # The broker and its topic say what is too large.
        "message.max.bytes": 1_000_000_000,
        **client_settings(bootstrap, settings),
        "transactional.id": transactional_id,
        "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
    }


def consumer_settings(bootstrap: str, settings: Mapping[str, str], group: str) -> dict[str, object]:
    """Return the settings of a consumer that belongs to no generation and commits nothing by itself."""
    return {
        # One turn's records at most lie in memory twice.
        "queued.max.messages.kbytes": 16_384,
        **client_settings(bootstrap, settings),
        "group.id": group,
        "auto.offset.reset": "error",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
    }
