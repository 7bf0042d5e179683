"""This file is the names of partitions: what people and other programs know the numbers of the tables by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sqlalchemy import Connection, bindparam, select

from txnstore.db.schema import partitions, topics
from txnstore.model import TopicPartition

#: How many ids one statement asks for: SQLite takes 32,766 parameters, PostgreSQL 65,535.
_IDS_MAX: Final = 10_000

_NAMES: Final = (
    select(partitions.c.partition_id, topics.c.name, partitions.c.partition_number)
    .join(topics, topics.c.topic_id == partitions.c.topic_id)
    .where(partitions.c.partition_id.in_(bindparam("partition_ids", expanding=True)))
)


def names_of_partitions(connection: Connection, partition_ids: Iterable[int]) -> dict[int, TopicPartition]:
    """Return topic and number of these partitions by id; one that is not there any more is left out."""
    wanted = sorted(set(partition_ids))
    found: dict[int, TopicPartition] = {}
    for start in range(0, len(wanted), _IDS_MAX):
        rows = connection.execute(_NAMES, {"partition_ids": wanted[start : start + _IDS_MAX]})
        found.update({row.partition_id: TopicPartition(row.name, row.partition_number) for row in rows})
    return found
