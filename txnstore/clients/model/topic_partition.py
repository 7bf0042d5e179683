"""The partition as users of the clients hand it over: with an offset, metadata and an error beside it."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

if TYPE_CHECKING:
    from txnstore.clients.model.errors import KafkaError
    from txnstore.model import OffsetAndMetadata


#: Logical offsets, in `TopicPartition.offset`: the end of the log, its beginning, the committed one, and no offset.
OFFSET_END: Final = -1
OFFSET_BEGINNING: Final = -2
OFFSET_STORED: Final = -1000
OFFSET_INVALID: Final = -1001

_PARTITION_BITS: Final = 32
_OFFSET_BITS: Final = 64


class TopicPartition:
    """A partition of a topic, and what is said about it; compared, ordered and hashed by topic and partition alone.

    `partition` and `offset` can be set; the rest cannot.  `error` is set by the call that returned the object.

    `offset_in_transaction` is there with `txnstore.delivery.order=commit` alone.  `offset` is then a place: of records
    outside transactions their own offset, of all records of a transaction the offset of its commit marker.

    Args:
        topic: the topic's name.
        partition: the partition's number; -1: no particular one.
        offset: an offset, or one of `OFFSET_BEGINNING`, `OFFSET_END`, `OFFSET_STORED` and `OFFSET_INVALID`.
        metadata: the text that is committed beside an offset.
        leader_epoch: the leader epoch of the offset; None or below zero: not known.
        offset_in_transaction: in commit order, the own offset of the next record of the transaction at that place, 0
            at its beginning and outside transactions; None in offset order.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the topic's name has a null character in it; UnicodeEncodeError: a text has half of a surrogate
            pair in it.
        OverflowError: the partition does not fit into 32 bits, or an offset not into 64.
    """

    __slots__ = ("_error", "_leader_epoch", "_metadata", "_offset", "_offset_in_transaction", "_partition", "_topic")

    def __init__(
        self,
        topic: str,
        partition: SupportsIndex = -1,
        offset: SupportsIndex = OFFSET_INVALID,
        metadata: str | None = None,
        leader_epoch: SupportsIndex | None = None,
        *,
        offset_in_transaction: SupportsIndex | None = None,
    ) -> None:
        if not isinstance(topic, str):
            raise TypeError(f"argument 1 must be str, not {_type_name(topic)}")
        if "\0" in topic:
            raise ValueError("embedded null character in a topic's name")
        if metadata is not None and not isinstance(metadata, str):
            raise TypeError(f"argument 4 must be str, not {_type_name(metadata)}")
        for text in (topic, metadata):
            if text is not None and not text.isascii():
                # No database takes half of a surrogate pair as text.
                text.encode()
        self._topic = topic
        self._partition = _checked(partition, _PARTITION_BITS)
        self._offset = _checked(offset, _OFFSET_BITS)
        self._metadata = metadata
        self._leader_epoch = -1 if leader_epoch is None else _checked(leader_epoch, _PARTITION_BITS)
        self._error: KafkaError | None = None
        within = None if offset_in_transaction is None else _checked(offset_in_transaction, _OFFSET_BITS)
        if within is not None and within < 0:
            raise ValueError(f"an offset within a transaction has to be 0 or above, not {within}")
        self._offset_in_transaction = within

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self._topic

    @property
    def partition(self) -> int:
        """The partition's number; -1: no particular one."""
        return self._partition

    @partition.setter
    def partition(self, partition: SupportsIndex) -> None:
        self._partition = _checked(partition, _PARTITION_BITS)

    @property
    def offset(self) -> int:
        """The offset; below zero: one of the constants."""
        return self._offset

    @offset.setter
    def offset(self, offset: SupportsIndex) -> None:
        self._offset = _checked(offset, _OFFSET_BITS)
        if self._offset_in_transaction is not None:
            # It was about the transaction at the former place.
            self._offset_in_transaction = 0

    @property
    def offset_in_transaction(self) -> int | None:
        """In commit order, the own offset of the next record of the transaction at the place; None in offset order.

        Setting `offset` sets it back to 0.
        """
        return self._offset_in_transaction

    @property
    def metadata(self) -> str | None:
        """The text beside a committed offset, or None."""
        return self._metadata

    @property
    def leader_epoch(self) -> int | None:
        """The leader epoch of the offset, or None."""
        return None if self._leader_epoch < 0 else self._leader_epoch

    @property
    def error(self) -> KafkaError | None:
        """What went wrong with this partition in the call that returned it, or None."""
        return self._error

    def with_error(self, error: KafkaError | None) -> TopicPartition:
        """Return a copy that carries this error."""
        copy = TopicPartition(self._topic, self._partition, self._offset, self._metadata, self._leader_epoch)
        copy._offset_in_transaction = self._offset_in_transaction
        copy._error = error
        return copy

    def __repr__(self) -> str:
        within = self._offset_in_transaction
        return (
            f"TopicPartition{{topic={self._topic},partition={self._partition},offset={self._offset},"
            f"{'' if within is None else f'offset_in_transaction={within},'}"
            f"leader_epoch={self.leader_epoch},error={self._error}}}"
        )

    def __hash__(self) -> int:
        return hash((self._topic, self._partition))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TopicPartition):
            return NotImplemented
        return self._partition == other._partition and self._topic == other._topic

    def __lt__(self, other: TopicPartition) -> bool:
        return self._key() < other._key() if isinstance(other, TopicPartition) else NotImplemented

    def __le__(self, other: TopicPartition) -> bool:
        return self._key() <= other._key() if isinstance(other, TopicPartition) else NotImplemented

    def __gt__(self, other: TopicPartition) -> bool:
        return self._key() > other._key() if isinstance(other, TopicPartition) else NotImplemented

    def __ge__(self, other: TopicPartition) -> bool:
        return self._key() >= other._key() if isinstance(other, TopicPartition) else NotImplemented

    def _key(self) -> tuple[str, int]:
        return self._topic, self._partition

    def __getstate__(self) -> tuple[Any, ...]:
        state = (self._topic, self._partition, self._offset, self._metadata, self._leader_epoch, self._error)
        return state if self._offset_in_transaction is None else (*state, self._offset_in_transaction)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._topic, self._partition, self._offset, self._metadata, self._leader_epoch, self._error, *within = state
        self._offset_in_transaction = within[0] if within else None


def with_committed(partition: TopicPartition, committed: OffsetAndMetadata | None) -> TopicPartition:
    """Return the partition with what is committed for it; None: nothing."""
    if committed is None:
        return TopicPartition(partition.topic, partition.partition, OFFSET_INVALID)
    return TopicPartition(
        partition.topic,
        partition.partition,
        committed.offset,
        committed.metadata,
        committed.leader_epoch,
        offset_in_transaction=committed.offset_in_transaction,
    )


def _checked(number: SupportsIndex, bits: int) -> int:
    """Return the integer; one that Kafka has no room for is refused here and not by the database."""
    checked = operator.index(number)
    if not -(1 << bits - 1) <= checked < 1 << bits - 1:
        raise OverflowError(f"{checked} does not fit into {bits} bits")
    return checked


def _type_name(value: object) -> str:
    return "None" if value is None else type(value).__name__
