"""The tables of consumer groups: members and offsets."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Index, PrimaryKeyConstraint

from txnstore.db.ddl import Int32, Int64, String
from txnstore.db.names import StoreName
from txnstore.db.tables.building import MINUTE_MS, TEN_SECONDS_MS, check, coarse_time, column, table

groups: Final = table(
    "groups",
    column("group_id", String, "The group's name."),
    column("generation", Int32, "How many times the group has been rebalanced; 0 if never."),
    column("assignor", String, "The assignor that its members agreed on.", null=True),
    column("commit_number", Int64, "How often offsets were committed; numbers the commits in order."),
    column("last_update_ms", Int64, "When the row last changed."),
    PrimaryKeyConstraint("group_id", name="groups_pk"),
    comment="Consumer groups. The lock of a row stands in for the group's coordinator.",
    sqlite_with_rowid=False,
    is_hot=True,
)

group_members: Final = table(
    "group_members",
    column("group_id", String, "The group."),
    column("member_id", String, "The member."),
    column("group_instance_id", String, "The lasting name of a static member (KIP-345).", null=True),
    column("client_id", String, "The member's client.id."),
    column("generation", Int32, "The newest generation that the member knows of."),
    column("session_timeout_ms", Int32, "How long the member may be silent, in milliseconds."),
    column("deadline_ms", Int64, "When the member is considered dead if it stays silent."),
    column("subscription", String, "JSON: what the member subscribes to and owns."),
    column("assignment", String, "JSON: the partitions assigned to the member."),
    coarse_time("deadline_ten_seconds", "deadline_ms", TEN_SECONDS_MS),
    PrimaryKeyConstraint("group_id", "member_id", name="group_members_pk"),
    Index(StoreName("group_members_deadline"), "deadline_ten_seconds"),
    comment="The members of consumer groups.",
    sqlite_with_rowid=False,
    is_hot=True,
)

group_offsets: Final = table(
    "group_offsets",
    column("group_id", String, "The group."),
    column("partition_id", Int64, "The partition."),
    column("producer_id", Int64, "The producer of the transaction that committed it; -1 without a transaction."),
    column("leader_epoch", Int32, "The leader epoch that the client sent; -1 if it sent no epoch."),
    column("producer_epoch", Int32, "That producer's epoch; -1 without a transaction."),
    column("committed_offset", Int64, "The offset of the next record to read; in commit order the place."),
    column(
        "offset_in_transaction",
        Int64,
        "In commit order, the next record of the transaction at that place, or 0; in offset order NULL.",
        null=True,
    ),
    column("commit_ms", Int64, "When it was committed."),
    column("commit_number", Int64, "This commit's place in the order of the group's commits."),
    column("offset_metadata", String, "Text that the client keeps beside the offset; NULL if not given.", null=True),
    PrimaryKeyConstraint("group_id", "partition_id", name="group_offsets_pk"),
    check("group_offsets_offset", "committed_offset >= 0 AND coalesce(offset_in_transaction, 0) >= 0"),
    comment="The offsets that each group has committed.",
    sqlite_with_rowid=False,
    is_hot=True,
)

pending_group_offsets: Final = table(
    "pending_group_offsets",
    column("group_id", String, "The group."),
    column("partition_id", Int64, "The partition."),
    column("producer_id", Int64, "The producer of the open transaction."),
    column("producer_epoch", Int32, "The producer's epoch."),
    column("pending_offset", Int64, "The group's committed offset if the transaction commits."),
    column("offset_in_transaction", Int64, "The same column of group_offsets then.", null=True),
    column("leader_epoch", Int32, "The leader epoch that the client sent; -1 if it sent no epoch."),
    column("offset_metadata", String, "Text that the client keeps beside the offset; NULL if not given.", null=True),
    column("commit_ms", Int64, "When the client sent it."),
    column("commit_number", Int64, "Its place in the order of the group's commits: a later plain commit wins."),
    PrimaryKeyConstraint("group_id", "partition_id", "producer_id", name="pending_group_offsets_pk"),
    Index(StoreName("pending_group_offsets_producer"), "producer_id"),
    check("pending_group_offsets_offset", "pending_offset >= 0 AND coalesce(offset_in_transaction, 0) >= 0"),
    comment="Offsets that an open transaction will commit.",
    sqlite_with_rowid=False,
)

offset_producers: Final = table(
    "offset_producers",
    column("producer_id", Int64, "A producer whose transactions are coordinated in another database."),
    column("producer_epoch", Int32, "Its epoch after its offsets were last finished here; older epochs are refused."),
    column("last_update_ms", Int64, "When that was."),
    coarse_time("last_update_minute", "last_update_ms", MINUTE_MS),
    PrimaryKeyConstraint("producer_id", name="offset_producers_pk"),
    Index(StoreName("offset_producers_age"), "last_update_minute"),
    comment="Producers of other databases that committed offsets of groups here; tells requests that come late.",
    sqlite_with_rowid=False,
)
