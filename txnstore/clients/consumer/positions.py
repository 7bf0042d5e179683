"""The positions of a consumer: one number each, which grows as it reads, in either order of delivery; where it starts.

In offset order it is the offset of the next record.  In commit order a position is a pair: the place where something
is delivered, and the offset of the next record within the transaction at that place.  Outside this module nobody takes
the number apart; a partition that is handed over has the place as its `offset`, and the other one beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.message import NO_MARKER, Message
from txnstore.clients.model.topic_partition import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    OFFSET_STORED,
    TopicPartition,
)
from txnstore.log.bounds import Bounds
from txnstore.log.commit_order import CommitPosition
from txnstore.model import OffsetAndMetadata

#: An offset within a transaction takes so many bits of the number.
_BITS: Final = 64
_MASK: Final = (1 << _BITS) - 1

#: Offsets from here on downwards count from the end: OFFSET_TAIL_BASE - n is n records before it.
OFFSET_TAIL_BASE: Final = -2000
NOTHING_COMMITTED: Final = "no previously committed offset available: Local: No offset stored"
_LOGICAL_OFFSETS: Final = frozenset({OFFSET_BEGINNING, OFFSET_END, OFFSET_STORED, OFFSET_INVALID})


@dataclass(frozen=True, slots=True)
class Positions:
    """How the positions of one consumer are numbered; a number below zero is one of the logical offsets."""

    in_commit_order: bool = False

    @property
    def unit(self) -> int:
        """By how much the position grows from one record outside transactions to the next."""
        return 1 << _BITS if self.in_commit_order else 1

    def at(self, place: int, offset_in_transaction: int = 0) -> int:
        """Return the position."""
        if place < 0 or not self.in_commit_order:
            return place
        return (place << _BITS) + offset_in_transaction

    def place(self, position: int) -> int:
        """Return the offset or the place."""
        return position >> _BITS if self.in_commit_order and position >= 0 else position

    def offset_in_transaction(self, position: int) -> int | None:
        """Return the offset within the transaction at the place; None in offset order, and of a logical offset."""
        return position & _MASK if self.in_commit_order and position >= 0 else None

    def pair(self, position: int) -> CommitPosition:
        """Return the pair."""
        return CommitPosition(position >> _BITS, position & _MASK)

    def of(self, partition: TopicPartition) -> int:
        """Return the position that the partition carries; without an offset beside it, the beginning of a place."""
        return self.at(partition.offset, partition.offset_in_transaction or 0)

    def partition(
        self,
        topic: str,
        number: int,
        position: int,
        *,
        metadata: str | None = None,
        leader_epoch: int | None = None,
    ) -> TopicPartition:
        """Return the partition that carries the position."""
        within = self.offset_in_transaction(position)
        place = self.place(position)
        return TopicPartition(topic, number, place, metadata, leader_epoch, offset_in_transaction=within)

    def of_message(self, message: Message) -> int:
        """Return the position at which the record comes next."""
        offset = message.offset() or 0
        marker_offset = message.marker_offset
        if marker_offset is None or marker_offset == NO_MARKER:
            return self.at(offset)
        return self.at(marker_offset, offset)

    def is_own(self, committed: OffsetAndMetadata) -> bool:
        """Return whether an offset is of this order."""
        return self.in_commit_order == (committed.offset_in_transaction is not None)

    def check(self, partitions: Iterable[TopicPartition], prefix: str, *, to_store: bool = False) -> None:
        """Refuse offsets of the other order; with `to_store` also such as do not say of which they are.

        To begin at, also what is below zero and stands for nothing: where a program has counted too far back.

        Raises:
            KafkaException: `_INVALID_ARG`: one is not what this consumer may take.
        """
        for partition in partitions:
            has_own = partition.offset_in_transaction is not None
            if partition.offset < 0:
                if to_store or partition.offset in _LOGICAL_OFFSETS or partition.offset <= OFFSET_TAIL_BASE:
                    continue
                text = "is below zero, and not one of the constants"
            elif has_own and not self.in_commit_order:
                text = "is in commit order, and this consumer reads in offset order (txnstore.delivery.order=offset)"
            elif to_store and self.in_commit_order and not has_own:
                text = "has no offset_in_transaction: in commit order take what position() returns, or give the message"
            else:
                continue
            where = f"{partition.topic} [{partition.partition}]: offset {partition.offset}"
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, f"{prefix}: {where} {text}"))


OFFSET_ORDER: Final = Positions()


def position_behind(message: Message, topic: str, number: int, offset: int) -> TopicPartition:
    """Return the partition with the position after a record, in the order in which it was delivered."""
    marker_offset = message.marker_offset
    leader_epoch = message.leader_epoch()
    if marker_offset is None:
        return TopicPartition(topic, number, offset + 1, None, leader_epoch)
    if marker_offset == NO_MARKER:
        return TopicPartition(topic, number, offset + 1, None, leader_epoch, offset_in_transaction=0)
    return TopicPartition(topic, number, marker_offset, None, leader_epoch, offset_in_transaction=offset + 1)


@dataclass(frozen=True, slots=True)
class StartPosition:
    """Where to begin."""

    position: int | None
    """None: there is no such offset, because auto.offset.reset is "error"."""

    why: str = ""
    """Why auto.offset.reset had to decide."""

    reset_from: int | None = None
    """The offset that was given or committed, if auto.offset.reset has decided otherwise."""


def start_position(
    wanted: int,
    bounds: Bounds,
    end_offset: int,
    committed: int | None,
    reset: str,
    *,
    positions: Positions = OFFSET_ORDER,
) -> StartPosition:
    """Return where to begin if `wanted` is a position or one of the constants; `reset` is earliest, latest or error."""
    said, given = "offset", wanted
    if wanted == OFFSET_STORED:
        if committed is None:
            return _reset(bounds.log_start_offset, end_offset, reset, NOTHING_COMMITTED, positions)
        said, given = "the committed offset", committed
    why = f"{said} {positions.place(given)} is not in the log: Broker: Offset out of range"
    place, within = positions.place(given), positions.offset_in_transaction(given) or 0
    place = {OFFSET_BEGINNING: bounds.log_start_offset, OFFSET_END: end_offset}.get(place, place)
    if given <= OFFSET_TAIL_BASE:
        place = max(bounds.log_start_offset, end_offset - (OFFSET_TAIL_BASE - given))
    given_place = positions.place(given) if given >= 0 else None
    if not bounds.log_start_offset <= place <= bounds.high_watermark:
        return _reset(bounds.log_start_offset, end_offset, reset, why, positions, reset_from=given_place)
    if 0 < within < bounds.log_start_offset:
        # It stands in a transaction of which the next records are deleted: the earliest ones are those that are left.
        if reset == "earliest":
            return StartPosition(positions.at(place, bounds.log_start_offset), why, given_place)
        return _reset(bounds.log_start_offset, end_offset, reset, why, positions, reset_from=given_place)
    return StartPosition(positions.at(place, within))


def _reset(
    earliest: int, latest: int, reset: str, why: str, positions: Positions, *, reset_from: int | None = None
) -> StartPosition:
    place = {"earliest": earliest, "latest": latest}.get(reset)
    return StartPosition(None if place is None else positions.at(place), why, reset_from)
