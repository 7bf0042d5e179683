"""The rights: what a role of each kind may do with each table, and by what a row belongs to somebody.

Every client holds the code of log and coordinator, so a producer writes to heads and states, and a member of a group to
the rows of groups.  What the rights of tables leave open, row-level security closes by topic, group and transactional
id: this folder's README says which attacks each of them refuses, and which remain.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final

from txnstore.db.names import OPEN_TRANSACTIONS_VIEW, PENDING_OFFSETS_VIEW, RECORDS_VIEW, VERSION_TABLE, VIEWS
from txnstore.db.schema import metadata, outbox, record_batches


class Kind(enum.StrEnum):
    """What a role is for; one role may be of several kinds."""

    OWNER = "owner"
    """Makes the tables and migrates them."""

    PRODUCER = "producer"
    """Writes records, with transactions or without, and rows of the outbox; reads no payload."""

    CONSUMER = "consumer"
    """Reads records and takes part in groups. With a producer's rights, offsets can be a part of transactions."""

    COORDINATOR = "coordinator"
    """Does all that clients do: `txnstore maintain`, the admin client, the sequencer of the outbox."""

    MONITOR = "monitor"
    """Sees everything but what records hold."""


class Per(enum.Enum):
    """What says to whom a row belongs."""

    TOPIC = "the topic's name, in the row"
    TOPIC_ID = "the topic, by its id"
    PARTITION = "the topic, by the id of a partition"
    GROUP = "the group"
    TRANSACTIONAL_ID = "the transactional id"
    ELSEWHERE = "another database of a cluster, where no role has limits"
    SEEN_GROUP = "the group, by which of them the role sees"
    DRAW = "whoever has just drawn the number"


#: The column by which a table's rows belong to somebody; tables that are not named have no such rows.
BELONGING: Final[Mapping[str, tuple[Per, str]]] = {
    "topics": (Per.TOPIC, "name"),
    "topic_configs": (Per.TOPIC_ID, "topic_id"),
    "partitions": (Per.TOPIC_ID, "topic_id"),
    "partition_heads": (Per.PARTITION, "partition_id"),
    "record_batches": (Per.PARTITION, "partition_id"),
    "producer_states": (Per.PARTITION, "partition_id"),
    "finished_transactions": (Per.PARTITION, "partition_id"),
    "partition_storage": (Per.PARTITION, "partition_id"),
    "outbox": (Per.TOPIC, "topic"),
    "transactions": (Per.TRANSACTIONAL_ID, "transactional_id"),
    "transaction_partitions": (Per.TRANSACTIONAL_ID, "transactional_id"),
    "transaction_writers": (Per.TRANSACTIONAL_ID, "transactional_id"),
    "transaction_writer_partitions": (Per.TRANSACTIONAL_ID, "transactional_id"),
    "transaction_groups": (Per.TRANSACTIONAL_ID, "transactional_id"),
    "transaction_branches": (Per.TRANSACTIONAL_ID, "transactional_id"),
    "transaction_log": (Per.TRANSACTIONAL_ID, "transactional_id"),
    "pending_markers": (Per.TRANSACTIONAL_ID, "transactional_id"),
    "sink_batches": (Per.TRANSACTIONAL_ID, "transactional_id"),
    "sink_runs": (Per.TRANSACTIONAL_ID, "transactional_id"),
    "groups": (Per.GROUP, "group_id"),
    "group_members": (Per.GROUP, "group_id"),
    "group_offsets": (Per.GROUP, "group_id"),
    "pending_group_offsets": (Per.GROUP, "group_id"),
    "sink_inputs": (Per.GROUP, "group_id"),
    "sink_positions": (Per.GROUP, "group_id"),
    "offset_producers": (Per.ELSEWHERE, "producer_id"),
}
#: By what a row, besides, has to belong to a role with limits that writes it. A transaction is ended by anybody, with
#: rights of his own: in what it names. And a number that nobody has drawn would be in the way of who draws it.
WRITTEN: Final[Mapping[str, tuple[Per, str]]] = {
    "transaction_partitions": (Per.PARTITION, "partition_id"),
    "transaction_writer_partitions": (Per.PARTITION, "partition_id"),
    "pending_markers": (Per.PARTITION, "partition_id"),
    "transaction_groups": (Per.SEEN_GROUP, "group_id"),
    "transaction_log": (Per.DRAW, "entry_id"),
    "record_batches": (Per.DRAW, "commit_number"),
    "finished_transactions": (Per.DRAW, "commit_number"),
}

#: A right, and the columns that it is limited to.
Right = str | tuple[str, Sequence[str]]
_READ: Final[Sequence[Right]] = ("SELECT",)
_ADD: Final[Sequence[Right]] = ("SELECT", "INSERT")
_WORK: Final[Sequence[Right]] = ("SELECT", "INSERT", "UPDATE")
_LISTED: Final[Sequence[Right]] = ("SELECT", "INSERT", "DELETE")
_ALL: Final[Sequence[Right]] = ("SELECT", "INSERT", "UPDATE", "DELETE")
#: What every client reads when it opens a store and looks for topics.
_OPENING: Final[Mapping[str, Sequence[Right]]] = dict.fromkeys(
    ("stores", "store_configs", "databases", "topics", "topic_configs", "partitions", VERSION_TABLE), _READ
)
_PRODUCER: Final[Mapping[str, Sequence[Right]]] = {
    **_OPENING,
    "stores": ("SELECT", ("UPDATE", ("next_producer_id",))),
    "deleted_numbers": _READ,
    "partition_heads": ("SELECT", ("UPDATE", ("next_offset", "running_max_timestamp_ms"))),
    # What is in the log is neither changed nor read by those who write, but of which epoch it is: see `write_markers`.
    "record_batches": ("INSERT", ("SELECT", ("partition_id", "last_offset", "producer_id", "producer_epoch"))),
    "producer_states": _WORK,
    "finished_transactions": _ADD,
    "transactions": _WORK,
    "transaction_partitions": _LISTED,
    "transaction_writers": _ALL,
    "transaction_writer_partitions": _LISTED,
    "transaction_groups": _LISTED,
    "transaction_branches": _ALL,
    "transaction_log": _ADD,
    "pending_markers": _LISTED,
    # A batch of an older checkpoint takes the place of one with its number.
    "sink_batches": _ALL,
    "sink_runs": _ALL,
    # A task that is tried again notes the same once more.
    "sink_inputs": _ALL,
    "sink_positions": _WORK,
    "outbox": (("INSERT", ("topic", "partition_number", "key", "value", "headers", "timestamp_ms")),),
}
_CONSUMER: Final[Mapping[str, Sequence[Right]]] = {
    **_OPENING,
    # The maker of a group keeps databases from joining meanwhile: a lock, which takes the right to change a column.
    # This one is always 1.
    "stores": ("SELECT", ("UPDATE", ("singleton",))),
    "partition_heads": _READ,
    "record_batches": _READ,
    "producer_states": _READ,
    "finished_transactions": _READ,
    "groups": _WORK,
    "group_members": _ALL,
    "group_offsets": _ALL,
    "pending_group_offsets": _ALL,
    "offset_producers": _WORK,
    # Whether rows wait there, which somebody else has to move.
    "outbox": (("SELECT", ("outbox_id", "refusal")),),
}
_PAYLOAD: Final = frozenset({"key", "value", "headers", "key_data", "value_data"})


def rights_of(kind: Kind) -> Mapping[str, Sequence[Right]]:
    """Return what a role of this kind may do, by table; everything of the tables is the owner's."""
    everywhere = {str(table.name): _ALL for table in metadata.tables.values()}
    match kind:
        case Kind.PRODUCER:
            return _PRODUCER
        case Kind.CONSUMER:
            return _CONSUMER
        case Kind.COORDINATOR:
            return {**everywhere, VERSION_TABLE: _READ}
        case Kind.MONITOR:
            rights: dict[str, Sequence[Right]] = {**dict.fromkeys(everywhere, _READ), VERSION_TABLE: _READ}
            for table in (record_batches, outbox):
                shown = [column.name for column in table.columns if column.name not in _PAYLOAD]
                rights[str(table.name)] = (("SELECT", shown),)
            return rights
        case Kind.OWNER:
            raise AssertionError("an owner owns")


#: Kinds that may be limited to some topics.
BOUNDED: Final = (Kind.PRODUCER, Kind.CONSUMER)
CALLS_FUNCTIONS: Final = (Kind.PRODUCER, Kind.CONSUMER, Kind.COORDINATOR)
#: The views that a kind reads. A role with limits may be given that of records alone, which asks with its own rights.
VIEWS_OF: Final[Mapping[Kind, Sequence[str]]] = {
    Kind.CONSUMER: (RECORDS_VIEW,),
    Kind.COORDINATOR: VIEWS,
    Kind.MONITOR: (OPEN_TRANSACTIONS_VIEW, PENDING_OFFSETS_VIEW),
}
