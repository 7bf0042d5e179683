"""The rules of topics and their partitions: what they are called, and that a cluster's copies are current."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Final

from sqlalchemy import Connection, bindparam, func, select, union

from txnstore.config import STORE_SETTINGS, TOPIC_SETTINGS, parse_setting
from txnstore.db.cluster.catalogue import read_catalogue
from txnstore.db.cluster.membership import coordinator_of_name, read_databases
from txnstore.db.schema import (
    deleted_partitions,
    groups,
    partition_heads,
    partitions,
    store_configs,
    topic_configs,
    topics,
    transactions,
)
from txnstore.db.statements import HotStatement
from txnstore.db.store import ROWS_AT_ONCE, chunks
from txnstore.errors import InvalidConfiguration
from txnstore.verification.invariants import Invariant, Place, Violation
from txnstore.verification.reading import Pages

#: Of a store alone: a partition without a head is found missing.
PARTITION_IDS: Final = HotStatement(union(select(partitions.c.partition_id), select(partition_heads.c.partition_id)))
_OF_PARTITION: Final = union(
    select(partitions.c.partition_id).where(partitions.c.partition_id == bindparam("of_partition_id")),
    select(partition_heads.c.partition_id).where(partition_heads.c.partition_id == bindparam("of_partition_id")),
)
HEAD_IDS: Final = HotStatement(select(partition_heads.c.partition_id))
_LEADERS: Final = select(partitions.c.partition_id, partitions.c.leader_database_id)
_IDS: Final = Pages(select(transactions.c.transactional_id), transactions.c.transactional_id)
_GROUPS: Final = Pages(select(groups.c.group_id), groups.c.group_id)
_NAMES: Final = (
    select(partitions.c.partition_id, topics.c.name, partitions.c.partition_number)
    .join(topics, topics.c.topic_id == partitions.c.topic_id)
    .where(partitions.c.partition_id.in_(bindparam("partition_ids", expanding=True)))
)

_NUMBERS: Final = HotStatement(
    select(
        topics.c.topic_id,
        topics.c.name,
        func.count(partitions.c.partition_id).label("partition_count"),
        func.max(partitions.c.partition_number).label("last_number"),
    )
    .outerjoin(partitions, partitions.c.topic_id == topics.c.topic_id)
    .group_by(topics.c.topic_id, topics.c.name)
    .having(func.coalesce(func.max(partitions.c.partition_number), 0) != func.count(partitions.c.partition_id) - 1)
    .order_by(topics.c.topic_id)
)
#: Logs that are not found by the name of a topic.
_OF_NO_TOPIC: Final = HotStatement(
    select(partition_heads.c.partition_id)
    .outerjoin(partitions, partitions.c.partition_id == partition_heads.c.partition_id)
    .outerjoin(topics, topics.c.topic_id == partitions.c.topic_id)
    .where(topics.c.topic_id.is_(None))
    .order_by(partition_heads.c.partition_id)
)
#: What the maintenance would delete, and a topic has still.
_TO_BE_DELETED: Final = HotStatement(
    select(partitions.c.partition_id)
    .join(deleted_partitions, deleted_partitions.c.partition_id == partitions.c.partition_id)
    .order_by(partitions.c.partition_id)
)
_TOPIC_SETTINGS: Final = HotStatement(
    select(topic_configs.c.topic_id, topics.c.name.label("topic"), topic_configs.c.name, topic_configs.c.value)
    .outerjoin(topics, topics.c.topic_id == topic_configs.c.topic_id)
    .order_by(topic_configs.c.topic_id, topic_configs.c.name)
)
_STORE_SETTINGS: Final = HotStatement(
    select(store_configs.c.name, store_configs.c.value).order_by(store_configs.c.name)
)


def exists(connection: Connection, partition_id: int) -> bool:
    """Return whether the partition is one of PARTITION_IDS."""
    return connection.execute(_OF_PARTITION, {"of_partition_id": partition_id}).first() is not None


def topic_violations(connection: Connection) -> Iterator[Violation]:
    """Return what topics and partitions lack, in a store alone or the controller of a cluster."""
    for row in _NUMBERS.rows(connection):
        seen = f"its last partition has the number {row.last_number}, but there are {row.partition_count} of them"
        if row.partition_count == 0:
            seen = "it has no partition"
        yield Violation(Invariant.TOPICS_COMPLETE, Place(topic=row.name), seen)
    for (partition_id,) in _OF_NO_TOPIC.rows(connection):
        seen = "the partition has a log, but belongs to no topic"
        yield Violation(Invariant.TOPICS_COMPLETE, Place(partition_id), seen)


def deletion_violations(connection: Connection) -> Iterator[Violation]:
    """Return which partitions of topics would be deleted, in a store alone or any database of a cluster."""
    for (partition_id,) in _TO_BE_DELETED.rows(connection):
        seen = "deleted_partitions has the partition, so all that it holds is deleted, but it belongs to a topic"
        yield Violation(Invariant.TOPICS_COMPLETE, Place(partition_id), seen)


def setting_violations(connection: Connection) -> Iterator[Violation]:
    """Return which settings nobody understands, or has, of a store alone or in the controller of a cluster."""
    rows = _TOPIC_SETTINGS.rows(connection)
    for row in rows:
        if row.topic is None:
            seen = f"{row.name} is set for the topic with the id {row.topic_id}, which is not there"
            yield Violation(Invariant.SETTINGS_UNDERSTOOD, Place(), seen)
    of_topics = ((TOPIC_SETTINGS, Place(topic=row.topic), row) for row in rows)
    of_store = ((STORE_SETTINGS, Place(), row) for row in _STORE_SETTINGS.rows(connection))
    for table, place, row in chain(of_topics, of_store):
        try:
            parse_setting(table, row.name, row.value)
        except InvalidConfiguration as error:
            yield Violation(Invariant.SETTINGS_UNDERSTOOD, place, str(error))


def copy_violations(controller: Connection, member: Connection, database_id: int) -> Iterator[Violation]:
    """Return how the copies of a member differ from the controller's tables, and what logs it lacks."""
    present = read_catalogue(member)
    for name, rows in read_catalogue(controller).rows.items():
        if present.rows[name] != rows:
            yield Violation(Invariant.COPIES_CURRENT, Place(), f"it has other {name} than the controller")
    own = {row.partition_id for row in member.execute(_LEADERS) if row.leader_database_id == database_id}
    heads = set(HEAD_IDS.values(member))
    if own != heads:
        seen = f"it lacks the heads {sorted(own - heads)}, and has {sorted(heads - own)}, which live elsewhere"
        yield Violation(Invariant.COPIES_CURRENT, Place(), seen)


def placement_violations(member: Connection) -> Iterator[Violation]:
    """Return which transactional ids and groups are in this database and belong in another: none is in two, then."""
    databases = read_databases(member)
    own_id = next(database.database_id for database in databases if database.is_own)
    labels = {database.database_id: database.label for database in databases}
    ids = (Place(transactional_id=row[0]) for row in _IDS.rows(member))
    of_groups = (Place(group_id=row[0]) for row in _GROUPS.rows(member))
    for place in chain(ids, of_groups):
        coordinator_id = coordinator_of_name(place.transactional_id or place.group_id or "", databases)
        if coordinator_id != own_id:
            yield Violation(Invariant.AT_COORDINATOR, place, f"its name selects {labels[coordinator_id]!r}")


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
