"""The values that pass between the layers: frozen, without behaviour that needs a database."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

#: What stands in the columns of a batch that no idempotent producer wrote.
NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
NO_SEQUENCE: Final = -1
#: Kafka's answer where there is no timestamp.
NO_TIMESTAMP_MS: Final = -1

#: Sequence numbers run from 0 to this one and wrap to 0 (KIP-98).
SEQUENCE_MAX: Final = 2**31 - 1
OFFSET_MAX: Final = 2**63 - 1

#: One header: its name, and its value or None. Order and duplicates are kept.
Header = tuple[str, bytes | None]
#: Asks whether both databases store a text unchanged: one without NUL and without halves of surrogate pairs.
is_storable_text: Final = re.compile("[^\0\ud800-\udfff]*").fullmatch
_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")
#: How many bytes of UTF-8 a name has at most: PostgreSQL takes 2,704 for an entry of an index, which may hold two.
NAME_BYTES_MAX: Final = 1_200


class TimestampType(enum.IntEnum):
    """Where a record's timestamp comes from; Kafka's numbers."""

    CREATE_TIME = 0
    """The producer's clock."""

    LOG_APPEND_TIME = 1
    """The store's clock at the append."""


class OrderedEnum(enum.Enum):
    """An enumeration whose members are ordered by their numbers, which are Kafka's."""

    def __lt__(self, other: object) -> bool:
        return bool(self.value < other.value) if isinstance(other, type(self)) else NotImplemented


class IsolationLevel(OrderedEnum):
    """What a reader may see; Kafka's numbers."""

    READ_UNCOMMITTED = 0
    """Everything up to the high watermark, open and aborted transactions included."""

    READ_COMMITTED = 1
    """Only what was committed, up to the last stable offset."""


class ControlType(enum.IntEnum):
    """The kind of a control record; Kafka's numbers (ControlRecordType)."""

    ABORT = 0
    COMMIT = 1


@dataclass(frozen=True, slots=True)
class ProducerIdentity:
    """A producer id and its epoch: who writes, and which incarnation."""

    producer_id: int
    epoch: int

    def __str__(self) -> str:
        """Return the form of KIP-939: "pid:epoch"."""
        return f"{self.producer_id}:{self.epoch}"


#: A batch without an idempotent producer.
NO_PRODUCER: Final = ProducerIdentity(NO_PRODUCER_ID, NO_PRODUCER_EPOCH)


@dataclass(frozen=True, slots=True, order=True)
class PartitionName:
    """One partition of a topic, by the topic's name."""

    topic: str
    partition: int

    def __str__(self) -> str:
        """Return Kafka's usual spelling, "topic-0"."""
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True)
class Record:
    """A record on its way into the log.

    `timestamp_ms` is milliseconds since 1970 by the producer's clock.  A key or value of None is not the same as an
    empty one.
    """

    value: bytes | None
    key: bytes | None = None
    timestamp_ms: int = 0
    headers: Sequence[Header] = ()


class StoredRecord(NamedTuple):
    """A record as it stands in the log; a tuple, because readers make very many of them."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header] = ()


@dataclass(frozen=True, slots=True)
class OffsetAndMetadata:
    """A consumed position of a group in one partition: the offset of the *next* record to read."""

    offset: int
    leader_epoch: int = -1
    metadata: str | None = None
    """Text that the client keeps beside it; None and "" are not the same."""

    offset_in_transaction: int | None = None
    """None: in offset order.  In commit order `offset` is a place, and this the offset of the next record of the
    transaction at that place; 0: at its beginning, or outside transactions."""


#: Of an offset that is committed by nobody in particular: no group membership is checked.
NO_GENERATION: Final = -1


#: What the ids of groups begin with that are no consumers: txnstore keeps a place of its own in their offsets.
INTERNAL_GROUP_PREFIX: Final = "__txnstore_"


@dataclass(frozen=True, slots=True)
class GroupMembership:
    """Who commits offsets: Kafka's consumer group metadata (KIP-447)."""

    group_id: str
    generation: int = NO_GENERATION
    member_id: str = ""
    group_instance_id: str | None = None
    commits_unowned: bool = False
    """Whether the member wants to commit partitions that it does not own, too, as Kafka lets it."""


@dataclass(frozen=True, slots=True)
class ClientProcess:
    """A process that uses a store, as it says of itself: for people who look for it."""

    client_id: str
    """Its `client.id`."""

    host: str
    process_id: int

    @classmethod
    def here(cls, client_id: str) -> Self:
        """Return this very process."""
        import socket  # for few programs anything else imports it

        return cls(client_id, storable_text(socket.gethostname()), os.getpid())


def storable_text(text: str) -> str:
    """Return the text without what no database stores."""
    return _UNSTORABLE.sub("?", text)
