"""The rules of topics and their partitions: what they are called, and that a cluster's copies are current."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from sqlalchemy import Connection, bindparam, select, union

from txnstore.db.cluster.catalogue import read_catalogue
from txnstore.db.schema import partition_heads, partitions, topics
from txnstore.db.store import ROWS_AT_ONCE, chunks
from txnstore.verification.invariants import Invariant, Place, Violation

#: Of a store alone: a partition without a head is found missing.
PARTITION_IDS: Final = union(select(partitions.c.partition_id), select(partition_heads.c.partition_id))
_OF_PARTITION: Final = union(
    select(partitions.c.partition_id).where(partitions.c.partition_id == bindparam("of_partition_id")),
    select(partition_heads.c.partition_id).where(partition_heads.c.partition_id == bindparam("of_partition_id")),
)
HEAD_IDS: Final = select(partition_heads.c.partition_id)
_LEADERS: Final = select(partitions.c.partition_id, partitions.c.leader_database_id)
_NAMES: Final = (
    select(partitions.c.partition_id, topics.c.name, partitions.c.partition_number)
    .join(topics, topics.c.topic_id == partitions.c.topic_id)
    .where(partitions.c.partition_id.in_(bindparam("partition_ids", expanding=True)))
)


def exists(connection: Connection, partition_id: int) -> bool:
    """Return whether the partition is one of PARTITION_IDS."""
    return connection.execute(_OF_PARTITION, {"of_partition_id": partition_id}).first() is not None


def copy_violations(controller: Connection, member: Connection, database_id: int) -> Iterator[Violation]:
    """Return how the copies of a member differ from the controller's tables, and what logs it lacks."""
    present = read_catalogue(member)
    for name, rows in read_catalogue(controller).rows.items():
        if present.rows[name] != rows:
            yield Violation(Invariant.COPIES_CURRENT, Place(), f"it has other {name} than the controller")
    own = {row.partition_id for row in member.execute(_LEADERS) if row.leader_database_id == database_id}
    heads = set(member.execute(HEAD_IDS).scalars())
    if own != heads:
        seen = f"it lacks the heads {sorted(own - heads)}, and has {sorted(heads - own)}, which live elsewhere"
        yield Violation(Invariant.COPIES_CURRENT, Place(), seen)


def with_topics(connection: Connection, violations: Iterable[Violation]) -> list[Violation]:
    """Return the violations with the names of the topics that their partitions belong to, if they are known."""
    found = list(violations)
    ids = sorted({each.place.partition_id for each in found if each.place.partition_id is not None})
    names = {
        row.partition_id: {"topic": row.name, "partition": row.partition_number}
        for some in chunks(ids, ROWS_AT_ONCE)
        for row in connection.execute(_NAMES, {"partition_ids": some})
    }
    return [
        replace(each, place=replace(each.place, **names[each.place.partition_id]))
        if each.place.partition_id in names
        else each
        for each in found
    ]
