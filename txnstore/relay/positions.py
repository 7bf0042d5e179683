"""The positions of relays in the store: read, begun, and moved together with what was copied."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, bindparam, delete, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from txnstore.db import schema
from txnstore.db.schema import relay_positions
from txnstore.db.store import chunks
from txnstore.model import PartitionName
from txnstore.relay.errors import RelayFailed
from txnstore.relay.options import opposite_relay, relay_of, start_id_of

_IS_NAMED: Final = relay_positions.c.topic.in_(bindparam("topics", expanding=True))
_ALL: Final = select(relay_positions).where(relay_positions.c.relay_id == bindparam("of_relay_id"))
_TOPICS: Final = select(relay_positions.c.relay_id, relay_positions.c.topic).distinct()
_LOCK_TOPICS: Final = (
    select(schema.topics.c.topic_id)
    .where(schema.topics.c.name.in_(bindparam("names", expanding=True)))
    .order_by(schema.topics.c.name)
    .with_for_update(key_share=True)
)
# Two relays of one name copy one after the other: the second one finds that the position has moved on.
_LOCK: Final = (
    _ALL.where(_IS_NAMED).order_by(relay_positions.c.topic, relay_positions.c.partition_number).with_for_update()
)
# DO NOTHING: of two relays that begin at once, both go on from where the first one began.
_BEGIN: Final = upsert(relay_positions).on_conflict_do_nothing(
    index_elements=[relay_positions.c.relay_id, relay_positions.c.topic, relay_positions.c.partition_number]
)
_THIS: Final = (
    relay_positions.c.relay_id == bindparam("of_relay_id"),
    relay_positions.c.topic == bindparam("of_topic"),
    relay_positions.c.partition_number == bindparam("of_partition_number"),
)
_MOVE: Final = update(relay_positions).where(*_THIS).values(next_offset=bindparam("to_offset"))
_FORGET_FORMER: Final = delete(relay_positions).where(
    *_THIS, relay_positions.c.topic_uuid != bindparam("present_topic_uuid")
)
_OF_RELAY: Final = relay_positions.c.relay_id.in_(bindparam("relay_ids", expanding=True))
# In one order: whoever forgets the same waits, and nobody in a circle.
_LOCK_TO_FORGET: Final = (
    select(relay_positions).where(_OF_RELAY).order_by(*relay_positions.primary_key).with_for_update()
)
_FORGET: Final = delete(relay_positions).where(_OF_RELAY)
_FORGET_GONE: Final = _FORGET.where(_IS_NAMED, relay_positions.c.topic.not_in(select(schema.topics.c.name)))


@dataclass(frozen=True, slots=True)
class RelayPosition:
    """Where a relay stands in one partition of a topic with this identity."""

    topic_uuid: str
    next_offset: int


class PositionMoved(Exception):
    """The records from there on were copied already: by another relay of this name, or by this one, unheard."""


def read_relay_positions(connection: Connection, relay_id: str) -> dict[PartitionName, RelayPosition]:
    """Return the positions of a relay."""
    rows = connection.execute(_ALL, {"of_relay_id": relay_id})
    return {
        PartitionName(row.topic, row.partition_number): RelayPosition(row.topic_uuid, row.next_offset) for row in rows
    }


def check_one_way(connection: Connection, relay_id: str, topics: Collection[str]) -> None:
    """Refuse topics that another relay copies in the other direction: their records would go round and round.

    For the database transaction that writes where this one begins: it locks the topics, so that of two relays that
    begin in one at the same time the second one finds the first.

    Raises:
        RelayFailed: there is one; it may have been given up, but nobody has forgotten its positions.
    """
    for names in chunks(sorted(topics)):
        connection.execute(_LOCK_TOPICS, {"names": names})
    opposite = opposite_relay(relay_id)
    # A relay to Kafka has begun as soon as it is written where it is to begin: nothing is in Kafka before.
    rows = [(relay_of(row.relay_id), row.topic) for row in connection.execute(_TOPICS) if row.topic in topics]
    found = sorted({(other, topic) for other, topic in rows if other.startswith(opposite)})
    if found:
        other, _ = found[0]
        of_other = " ".join(f"--topic {topic}" for relay, topic in found if relay == other)
        raise RelayFailed(
            f"topic {', '.join(sorted({topic for _, topic in found}))}: another relay copies it in the other direction,"
            " between this store and the same Kafka cluster, and its records would circulate for ever; choose others"
            " with --topic, or, if that relay is given up for good, have it forgotten: txnstore relay --forget"
            f" {other} {of_other}"
        )


def begin_relay_positions(
    connection: Connection, relay_id: str, positions: Mapping[PartitionName, RelayPosition]
) -> None:
    """Write where a relay begins in partitions, at least one, in which it has no position yet."""
    connection.execute(
        _BEGIN,
        [
            {
                "relay_id": relay_id,
                "topic": partition.topic,
                "partition_number": partition.partition,
                "topic_uuid": position.topic_uuid,
                "next_offset": position.next_offset,
            }
            for partition, position in positions.items()
        ],
    )


def move_relay_positions(connection: Connection, relay_id: str, moves: Mapping[PartitionName, tuple[int, int]]) -> None:
    """Lock positions and move each, at least one, from the first offset to the second.

    Raises:
        PositionMoved: one of them is not where it was read; nothing may be copied.
    """
    topics: Sequence[str] = list(dict.fromkeys(partition.topic for partition in moves))
    rows = connection.execute(_LOCK, {"of_relay_id": relay_id, "topics": topics})
    there = {PartitionName(row.topic, row.partition_number): row.next_offset for row in rows}
    for partition, (from_offset, _) in moves.items():
        if there.get(partition) != from_offset:
            raise PositionMoved(f"{partition}: the relay's position is {there.get(partition)}, not {from_offset}")
    connection.execute(
        _MOVE,
        [
            {
                "of_relay_id": relay_id,
                "of_topic": partition.topic,
                "of_partition_number": partition.partition,
                "to_offset": to_offset,
            }
            for partition, (_, to_offset) in moves.items()
        ],
    )


def forget_former_position(connection: Connection, relay_id: str, partition: PartitionName, topic_uuid: str) -> None:
    """Delete where a relay stands in a topic of another identity than this, which the topic had before."""
    connection.execute(
        _FORGET_FORMER,
        {
            "of_relay_id": relay_id,
            "of_topic": partition.topic,
            "of_partition_number": partition.partition,
            "present_topic_uuid": topic_uuid,
        },
    )


def forget_gone_topics(connection: Connection, relay_id: str, topics: Collection[str]) -> None:
    """Delete where a relay stands in those of these topics, at least one, that the store has not got."""
    connection.execute(_FORGET_GONE, {"relay_ids": [relay_id], "topics": list(topics)})


def forget_relay(connection: Connection, relay: str, topics: Collection[str] = ()) -> int:
    """Delete where the one relay with this id or name stands, in these topics or in all; return in how many partitions.

    Raises:
        RelayFailed: there is no such relay, there are several, or it stands in none of the topics.
    """
    relay_ids = sorted({relay_of(row.relay_id) for row in connection.execute(_TOPICS)})
    found = [relay_id for relay_id in relay_ids if relay in (relay_id, relay_id.rpartition("/")[2])]
    if len(found) != 1:
        why = "is the name of several relays; say which" if found else "is no relay with a position in this store"
        raise RelayFailed(f"{relay} {why}: {', '.join(found or relay_ids) or 'there is none'}")
    (relay_id,) = found
    # Where it is to begin goes as well: before a relay to Kafka has a position there, nothing else stands here.
    of = {"relay_ids": [start_id_of(relay_id), relay_id]} | ({"topics": list(topics)} if topics else {})
    only = [_IS_NAMED] if topics else []
    rows = connection.execute(_LOCK_TO_FORGET.where(*only), of)
    partitions = {PartitionName(row.topic, row.partition_number) for row in rows}
    if topics and not partitions:
        raise RelayFailed(f"{relay_id} has a position in none of these topics: {', '.join(topics)}")
    connection.execute(_FORGET.where(*only), of)
    return len(partitions)
