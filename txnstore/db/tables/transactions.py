"""The tables of the transaction coordinator."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Index, PrimaryKeyConstraint

from txnstore.db.ddl import Flag, Int16, Int32, Int64, String
from txnstore.db.names import StoreName
from txnstore.db.tables.building import MINUTE_MS, check, coarse_time, column, identity, partial_index, table

transactions: Final = table(
    "transactions",
    column("transactional_id", String, "The producer's transactional.id."),
    column("producer_id", Int64, "The producer id that it writes with."),
    column("previous_producer_id", Int64, "The producer id before its last change; -1 if there was no other."),
    column("next_producer_id", Int64, "The producer id to use once this transaction is complete; -1: the same."),
    column("timeout_ms", Int32, "How long a transaction may stay open; 2147483647 means without a limit (KIP-939)."),
    column("begin_epoch", Int32, "The epoch of the open or decided transaction's records; -1 without one."),
    column(
        "producer_epoch",
        Int32,
        "The newest epoch; an older one is refused. Above 32767: of who took over a prepared transaction.",
    ),
    column("last_producer_epoch", Int32, "The epoch before its last change; -1 if repetitions are not answered."),
    column("start_ms", Int64, "When the transaction became Ongoing; -1 if the state is Empty."),
    column("last_update_ms", Int64, "When the row last changed."),
    column("transaction_number", Int64, "How many transactions this id has begun."),
    column("deadline_ms", Int64, "When the transaction will be aborted for its age; NULL: never.", null=True),
    column("state", Int16, "0 Empty, 1 Ongoing, 2 PrepareCommit, 3 PrepareAbort, 4 CompleteCommit, 5 CompleteAbort."),
    column("fence_reason", String, "Why the epoch was raised from outside: timeout, init or admin.", null=True),
    column("fence_detail", String, "What happened then, in words.", null=True),
    column("client_id", String, "The client.id of the producer that started last; NULL: not told.", null=True),
    column("client_host", String, "The host on which it runs, as it says itself; NULL: not told.", null=True),
    column("client_process_id", Int64, "Its process there, as it says itself; NULL: not told.", null=True),
    coarse_time("last_update_minute", "last_update_ms", MINUTE_MS),
    PrimaryKeyConstraint("transactional_id", name="transactions_pk"),
    Index(StoreName("transactions_age"), "last_update_minute"),
    check("transactions_state", "state BETWEEN 0 AND 5"),
    check("transactions_epoch", "producer_epoch >= -1 AND (producer_epoch <= 32767 OR state BETWEEN 1 AND 3)"),
    check("transactions_start", "(state = 0) = (start_ms = -1)"),
    check("transactions_deadline", "deadline_ms IS NULL OR state = 1"),
    comment="The coordinator's row for each transactional id; every request locks it first.",
    sqlite_with_rowid=False,
    is_hot=True,
)
partial_index(
    "transactions_deadline",
    transactions.c.deadline_ms,
    where=transactions.c.deadline_ms.is_not(None),
)
# Producer ids hardly ever change: these cost next to nothing, and updates stay on their page.
Index(StoreName("transactions_producer"), transactions.c.producer_id)
partial_index(
    "transactions_previous_producer",
    transactions.c.previous_producer_id,
    where=transactions.c.previous_producer_id >= 0,
)
partial_index(
    "transactions_decided",
    transactions.c.state,
    where=transactions.c.state.in_((2, 3)),
)

transaction_partitions: Final = table(
    "transaction_partitions",
    column("transactional_id", String, "The transaction's transactional id."),
    column("partition_id", Int64, "A partition that it wrote to."),
    PrimaryKeyConstraint("transactional_id", "partition_id", name="transaction_partitions_pk"),
    comment="The partitions in the open or decided transaction of each transactional id.",
    sqlite_with_rowid=False,
)

transaction_writers: Final = table(
    "transaction_writers",
    column("transactional_id", String, "The transaction's transactional id."),
    column("writer_producer_id", Int64, "The producer id of an additional writer in it."),
    column("producer_epoch", Int32, "The epoch of the transaction that the writer joined."),
    column("reported", Flag, "Whether the writer has reported that it has written everything."),
    column("client_id", String, "The client.id of the writer; NULL: not told.", null=True),
    column("client_host", String, "The host on which it runs, as it says itself; NULL: not told.", null=True),
    column("client_process_id", Int64, "Its process there, as it says itself; NULL: not told.", null=True),
    PrimaryKeyConstraint("transactional_id", "writer_producer_id", name="transaction_writers_pk"),
    Index(StoreName("transaction_writers_producer"), "writer_producer_id"),
    comment="Additional writers of transactions, in other processes.",
    sqlite_with_rowid=False,
)

transaction_writer_partitions: Final = table(
    "transaction_writer_partitions",
    column("transactional_id", String, "The transaction's transactional id."),
    column("writer_producer_id", Int64, "The producer id of an additional writer in it."),
    column("partition_id", Int64, "A partition that the writer wrote to."),
    PrimaryKeyConstraint(
        "transactional_id", "writer_producer_id", "partition_id", name="transaction_writer_partitions_pk"
    ),
    comment="The partitions that additional writers of open or decided transactions wrote to.",
    sqlite_with_rowid=False,
)

transaction_groups: Final = table(
    "transaction_groups",
    column("transactional_id", String, "The transaction's transactional id."),
    column("group_id", String, "A consumer group whose offsets it commits."),
    PrimaryKeyConstraint("transactional_id", "group_id", name="transaction_groups_pk"),
    comment="The groups whose offsets the open or decided transaction of each transactional id commits.",
    sqlite_with_rowid=False,
)

transaction_branches: Final = table(
    "transaction_branches",
    column("gid", String, "The name under which the other database keeps the prepared branch."),
    column("transactional_id", String, "The transactional id of the transaction that the branch belongs to."),
    column("producer_id", Int64, "The producer id of that transaction."),
    column("producer_epoch", Int32, "That transaction's epoch, which tells the producer's transactions apart."),
    column("database_label", String, "The database that votes, for people: host:port/name, without credentials."),
    column("database_identity", String, "The same database, as its server identifies it: system identifier:oid."),
    column("transaction_xid8", String, "The number of its transaction there; by it the server tells how that ended."),
    column(
        "outcome",
        Int16,
        "What was decided: 0 abort, 1 commit, 2 commit, and its database did not know of one, which was told; NULL if"
        " nothing has been decided.",
        null=True,
    ),
    column("registered_ms", Int64, "When the branch was registered, which is before it could vote."),
    PrimaryKeyConstraint("gid", name="transaction_branches_pk"),
    Index(StoreName("transaction_branches_transaction"), "transactional_id"),
    Index(StoreName("transaction_branches_database"), "database_identity"),
    check("transaction_branches_outcome", "outcome BETWEEN 0 AND 2"),
    comment="Branches of transactions in other databases, which vote; a row is deleted once its branch has ended.",
)

transaction_log: Final = table(
    "transaction_log",
    identity("entry_id", "The order of the entries."),
    column("transaction_number", Int64, "Which of the id's transactions it is."),
    column("producer_id", Int64, "The producer id after the change."),
    column("start_ms", Int64, "When the transaction became Ongoing; -1 if it has not."),
    column("update_ms", Int64, "When the change was made."),
    column("producer_epoch", Int32, "The epoch after the change."),
    column("timeout_ms", Int32, "The transaction's timeout."),
    column("state", Int16, "The state after the change, numbered as in transactions; 6 is Dead: the id has expired."),
    column("first_state", Int16, "The state after the first of the changes that the entry stands for; one: state."),
    column("transactional_id", String, "The transactional id."),
    column("reason", String, "What made the change: a request, or a task such as recovery or expiry."),
    column(
        "sent_offsets",
        String,
        "The consumed offsets that took effect with it, in JSON by group; NULL: none.",
        null=True,
    ),
    Index(StoreName("transaction_log_producer"), "producer_id", "producer_epoch"),
    comment="The journal: every change of every transaction's state, in order; those made at once are one entry.",
    sqlite_autoincrement=True,
    is_passed_through=True,
)

pending_markers: Final = table(
    "pending_markers",
    column("transactional_id", String, "The decided transaction."),
    column("partition_id", Int64, "A partition that still lacks the transaction's marker."),
    column("producer_id", Int64, "The producer whose transaction the marker ends."),
    column("producer_epoch", Int32, "The marker's epoch, which is above that of the records (KIP-890, KIP-1228)."),
    column("outcome", Int16, "0: abort; 1: commit."),
    PrimaryKeyConstraint("transactional_id", "partition_id", "producer_id", name="pending_markers_pk"),
    check("pending_markers_outcome", "outcome BETWEEN 0 AND 1"),
    comment="Markers that have been decided on but not yet written; inserted together with the decision.",
    sqlite_with_rowid=False,
)
