"""This file is in which database of a cluster a new partition lives: chosen once, when it is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, func, select

from txnstore.config import Settings
from txnstore.db.cluster.membership import Database, hash_of_name
from txnstore.db.schema import partitions
from txnstore.db.settings import read_store_settings
from txnstore.errors import InvalidConfiguration

#: The setting of a store, and of a topic.
PLACEMENT: Final = "txnstore.placement"
BY_HASH: Final = "hash"
ROUND_ROBIN: Final = "roundrobin"

_COUNTS: Final = select(partitions.c.leader_database_id, func.count()).group_by(partitions.c.leader_database_id)


def place_partitions(
    connection: Connection, members: Sequence[Database], name: str, settings: Settings, numbers: range
) -> list[int]:
    """Return the home of each new partition of the topic, on these members.

    Raises:
        InvalidConfiguration: the topic's setting names no database of the cluster.
    """
    how: str = settings[PLACEMENT]
    check_placement(members, how)
    if len(members) == 1:
        return [members[0].database_id] * len(numbers)
    how = how or read_store_settings(connection)[PLACEMENT]
    if how == BY_HASH:
        return leaders_by_hash(members, name, numbers)
    if how == ROUND_ROBIN:
        counts = {row[0]: row[1] for row in connection.execute(_COUNTS)}
        return leaders_in_turn(members, counts, len(numbers))
    return [next(member.database_id for member in members if member.label == how)] * len(numbers)


def check_placement(members: Sequence[Database], how: str) -> None:
    """Refuse the name of a database that the cluster does not have.

    Raises:
        InvalidConfiguration: it is neither a label, nor one of the two words, nor empty.
    """
    labels = [member.label for member in members]
    if how and how not in (BY_HASH, ROUND_ROBIN, *labels):
        raise InvalidConfiguration(
            f"{PLACEMENT} is {BY_HASH}, {ROUND_ROBIN} or one of the databases {', '.join(labels)}; not {how[:80]!r}"
        )


def leaders_by_hash(members: Sequence[Database], name: str, numbers: range) -> list[int]:
    """Return for each partition the database that the hash of its name selects."""
    ids = sorted(member.database_id for member in members)
    return [ids[hash_of_name(f"{name}-{number}") % len(ids)] for number in numbers]


def leaders_in_turn(members: Sequence[Database], counts: dict[int, int], count: int) -> list[int]:
    """Return for each new partition the database that has the fewest by then, the first of them."""
    held = Counter({member.database_id: counts.get(member.database_id, 0) for member in members})
    leaders: list[int] = []
    for _ in range(count):
        home = min(held, key=lambda database_id: (held[database_id], database_id))
        held[home] += 1
        leaders.append(home)
    return leaders
