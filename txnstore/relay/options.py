"""The options of a relay, and what it is called in the Kafka cluster and in the store."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from txnstore.log.topics import Topic
from txnstore.relay.errors import RelayFailed


class RelayStart(enum.Enum):
    """Where a relay begins in a topic in which it has no position yet; in what comes up later, at the first record."""

    EARLIEST = "earliest"
    LATEST = "latest"


class OnGap(enum.Enum):
    """What a relay does when records that it has not copied are gone: deleted, or the topic was recreated."""

    ERROR = "error"
    EARLIEST = "earliest"
    """Go on with the first record that is left."""


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """The operator's choices."""

    name: str | None = None
    """Relays of the same name share positions; by default the identity of the store or cluster that is read."""

    topics: Sequence[str] = ()
    """Which topics; by default all, including those created later."""

    start: RelayStart = RelayStart.EARLIEST
    on_gap: OnGap = OnGap.ERROR
    once: bool = False
    """Whether it ends where the partitions ended when it began."""

    patience_seconds: float = 60.0
    """How long a relay that ends by itself puts up with trouble; any other relay does so for ever."""


#: Whether somebody wants the relay to end.
IsStopped = Callable[[], bool]


_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,100}")
_PREFIX: Final = "txnstore-relay"
_START: Final = "start/"


def check_relay_name(name: str) -> str:
    """Return the name if a relay may have it."""
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


def start_id_of(relay_id: str) -> str:
    """Return under what `relay_positions` holds where a relay to Kafka is to begin, before Kafka holds its position."""
    return f"{_START}{relay_id}"


def relay_of(relay_id: str) -> str:
    """Return the relay that stands in `relay_positions` under this id, its own or `start_id_of` it."""
    return relay_id.removeprefix(_START)


def relay_id_from(cluster_id: str, name: str) -> str:
    """Return what the relay from this Kafka cluster is called in `relay_positions`."""
    return f"from/{cluster_id}/{name}"


def opposite_relay(relay_id: str) -> str:
    """Return what the relays in the other direction, between the same two, are called up to their names."""
    direction, cluster_id, _ = relay_id.split("/", 2)
    return f"{'from' if direction == 'to' else 'to'}/{cluster_id}/"


def check_leaders(topic: Topic, database_id: int) -> None:
    """Refuse a topic with a partition that another database leads: a relay cannot copy that yet."""
    elsewhere = [number for number, leader in enumerate(topic.leaders) if leader != database_id]
    if elsewhere:
        raise RelayFailed(
            f"{topic.name}-{elsewhere[0]} is in another database of the cluster; a relay copies only topics whose"
            " partitions are all in the database whose URL it is given"
        )
