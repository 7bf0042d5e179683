"""The rule of the numbers that a database gives out: they are above all that it has given out.

Where rows were brought without what counts them, as by logical replication, it gives out again what is taken.  A key is
then refused; but commits are put in order by numbers of the same kind, and come before what they come after.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Column, Connection, Select, func, select, union_all

from txnstore.db.cluster.catalogue import read_version
from txnstore.db.cluster.membership import CONTROLLER_ID
from txnstore.db.schema import (
    finished_transactions,
    outbox,
    partition_heads,
    partitions,
    record_batches,
    topics,
    transaction_log,
)
from txnstore.db.statements import HotStatement
from txnstore.db.store import Store
from txnstore.verification.invariants import Invariant, Place, Violation


def _last_commits(offset: Column[Any]) -> Select[Any]:
    """Return what reads the commit number of what is last in each partition, by a look for each.

    For a join, PostgreSQL may read all batches.
    """
    columns = offset.table.c
    last = select(columns.commit_number).where(
        columns.partition_id == partition_heads.c.partition_id, offset == partition_heads.c.next_offset - 1
    )
    return select(last.limit(1).scalar_subquery().label("commit_number")).select_from(partition_heads)


# The last of each partition is its largest, and the others are not looked for: no index has them.
_COMMITS: Final = union_all(
    _last_commits(record_batches.c.last_offset), _last_commits(finished_transactions.c.marker_offset)
).subquery()
#: What gives out numbers, and the largest of those that it has given out.
_GIVEN: Final = tuple(
    (key, given.name, HotStatement(select(func.max(given))))
    for key, given in (
        (topics.c.topic_id, topics.c.topic_id),
        (partitions.c.partition_id, partitions.c.partition_id),
        (outbox.c.outbox_id, outbox.c.outbox_id),
        (transaction_log.c.entry_id, transaction_log.c.entry_id),
        (transaction_log.c.entry_id, _COMMITS.c.commit_number),
    )
)
#: Of a cluster, the controller gives these out with the numbers of its changes, and others have copies.
_OF_CATALOGUE: Final = {topics.name, partitions.name}


def number_violations(store: Store, connection: Connection, *, is_alone: bool = True) -> list[Violation]:
    """Return which numbers the database gives out that it has given out before, as far as this role may know."""
    found = []
    for key, name, largest_of in _GIVEN:
        table = str(key.table.name)
        is_drawn = table in _OF_CATALOGUE and not is_alone
        if is_drawn and store.database_id != CONTROLLER_ID:
            continue
        # First: what is given out meanwhile is not among the rows.
        largest = largest_of.value(connection)
        if largest is None:
            following = None
        elif is_drawn:
            # At the earliest: the next change has a larger number.
            following = read_version(connection) + 1
        else:
            following = store.backend.next_key(connection, store.schema, table, key.name)
        if following is not None and following <= largest:
            seen = f"{table} gives out {following} as the next {key.name}, but the {name} {largest} is there"
            found.append(Violation(Invariant.NUMBERS_AHEAD, Place(), seen))
    return found
