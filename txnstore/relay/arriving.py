"""This file is records of a Kafka cluster on their way into the store: batches, and one database transaction.

The records and the positions behind them are one database transaction, so the store has both or neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from txnstore.db.store import Store
from txnstore.log.append import Append, append
from txnstore.log.codec import EncodedBatch, RecordColumns, encode_columns
from txnstore.log.topics import Topic
from txnstore.model import TopicPartition
from txnstore.relay.positions import move_relay_positions

#: A record of Kafka's oldest formats has no timestamp.
_NO_TIMESTAMP: Final = 0


@dataclass(frozen=True, slots=True)
class Arrived:
    """What was read of one partition: from the relay's position up to where it goes on."""

    messages: Sequence[Any]
    from_offset: int
    next_offset: int


def copy_into_store(
    store: Store, relay_id: str, topics: Mapping[str, Topic], arrived: Mapping[TopicPartition, Arrived]
) -> None:
    """Append what has arrived, in at least one partition, and move the positions behind it.

    Raises:
        PositionMoved: somebody else has copied some of it; nothing was copied.
        RecordTooLarge, InvalidTimestamp: the topic in the store will not have a record; nothing was copied.
        TxnStoreError: the database refuses; after `OutcomeUnknown` the positions tell.
    """
    appends: list[Append] = []
    for partition, item in arrived.items():
        topic = topics[partition.topic]
        partition_id = topic.partition_id(partition.partition)
        appends += [
            Append(partition_id, batch, topic.settings)
            for batch in batches_of(item.messages, topic.settings["max.message.bytes"])
        ]
    moves = {partition: (item.from_offset, item.next_offset) for partition, item in arrived.items()}

    def copy(connection: Any) -> None:
        # The positions' rows before the heads': of two relays the second waits here, and appends nothing.
        move_relay_positions(connection, relay_id, moves)
        if appends:
            append(connection, appends)

    store.write(copy, wakes_readers=bool(appends))


def batches_of(messages: Sequence[Any], size_bytes_max: int) -> list[EncodedBatch]:
    """Return messages as batches that the topic takes; a single one that is too large stays so."""
    if not messages:
        return []
    batch = encode_columns(
        RecordColumns(
            [message.key() for message in messages],
            [message.value() for message in messages],
            [_timestamp_ms(message) for message in messages],
            [message.headers() or () for message in messages],
        )
    )
    if batch.size_bytes <= size_bytes_max or len(messages) == 1:
        return [batch]
    middle = len(messages) // 2
    return batches_of(messages[:middle], size_bytes_max) + batches_of(messages[middle:], size_bytes_max)


def _timestamp_ms(message: Any) -> int:
    _, timestamp_ms = message.timestamp()
    return timestamp_ms if timestamp_ms >= 0 else _NO_TIMESTAMP
