"""Topics and their partitions: made, placed in a database, found, grown, configured and deleted."""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import Connection, Select, bindparam, delete, func, insert, select, union_all
from sqlalchemy.dialects.sqlite import insert as upsert

from txnstore.config import (
    TOPIC_SETTINGS,
    Settings,
    check_setting_name,
    check_topic_config,
    setting_text,
    settings_in_force,
)
from txnstore.db.cluster.catalogue import (
    forget_partitions,
    lock_heads_of,
    new_head,
    note_deletions,
    read_store_settings,
)
from txnstore.db.cluster.membership import (
    CONTROLLER_ID,
    Database,
    draw_numbers,
    hash_of_name,
    lock_catalogue,
    read_databases,
)
from txnstore.db.schema import (
    partition_heads,
    partitions,
    stores,
    topic_configs,
    topics,
    transaction_partitions,
    transaction_writer_partitions,
)
from txnstore.db.statements import HotStatement
from txnstore.db.store import chunks, must_hit, server_now_ms
from txnstore.errors import (
    InvalidConfiguration,
    InvalidPartitions,
    InvalidTopic,
    InvalidTransactionState,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
)
from txnstore.model import PartitionName

#: The setting of a store, and of a topic.
PLACEMENT: Final = "txnstore.placement"
BY_HASH: Final = "hash"
ROUND_ROBIN: Final = "roundrobin"
_COUNTS: Final = select(partitions.c.leader_database_id, func.count()).group_by(partitions.c.leader_database_id)
#: Kafka's limit: a folder name plus "-" and the partition must fit a file system (Topic.java).
NAME_LENGTH_MAX: Final = 249
_NAME: Final = re.compile(r"[a-zA-Z0-9._-]+")
PARTITIONS_MAX: Final = 100_000
DEFAULT_TOPIC_SETTINGS: Final = settings_in_force(TOPIC_SETTINGS, {})
_BY_NAME: Final = HotStatement(
    select(topics.c.topic_id, topics.c.name, topics.c.topic_uuid).where(
        topics.c.name.in_(bindparam("names", expanding=True))
    )
)
# With the row of the store, which is there whether or not there are topics: whose topics these are.
_BY_NAME_AND_STORE: Final = HotStatement(
    select(
        stores.c.store_uuid,
        stores.c.next_producer_id,
        stores.c.oldest_writer_version,
        topics.c.topic_id,
        topics.c.name,
        topics.c.topic_uuid,
    ).select_from(stores.outerjoin(topics, topics.c.name.in_(bindparam("names", expanding=True))))
)
_ALL_NAMES: Final = select(topics.c.name).order_by(topics.c.name)
# A topic whose name differs only in dots and underscores: Kafka's metrics cannot tell them apart.
_COLLIDING: Final = HotStatement(
    select(topics.c.name).where(
        func.replace(topics.c.name, ".", "_") == bindparam("folded"), topics.c.name != bindparam("own_name")
    )
)
_PARTITIONS: Final = HotStatement(
    select(partitions.c.topic_id, partitions.c.partition_id, partitions.c.leader_database_id)
    .where(partitions.c.topic_id.in_(bindparam("topic_ids", expanding=True)))
    .order_by(partitions.c.topic_id, partitions.c.partition_number)
)
_CONFIGS: Final = HotStatement(
    select(topic_configs).where(topic_configs.c.topic_id.in_(bindparam("topic_ids", expanding=True)))
)
# DO NOTHING: of two that create a topic at once, the second waits for the first and then finds its row.
_INSERT: Final = (
    upsert(topics)
    .values(created_ms=server_now_ms())
    .on_conflict_do_nothing(index_elements=[topics.c.name])
    .returning(topics.c.topic_id)
)
# Creators and deleters of a topic's partitions wait for each other here.
_LOCK: Final = select(topics.c.topic_id).where(topics.c.name == bindparam("of_name")).with_for_update()
_DELETE: Final = delete(topics).where(topics.c.topic_id == bindparam("of_topic_id"))
# Two that change the settings of a topic one after the other see each other's changes.
_LOCK_BY_ID: Final = select(topics.c.topic_id).where(topics.c.topic_id == bindparam("of_topic_id")).with_for_update()
_INSERT_CONFIG: Final = upsert(topic_configs)
_SET_CONFIG: Final = _INSERT_CONFIG.on_conflict_do_update(
    index_elements=[topic_configs.c.topic_id, topic_configs.c.name], set_={"value": _INSERT_CONFIG.excluded.value}
)
_RESET_CONFIG: Final = delete(topic_configs).where(
    topic_configs.c.topic_id == bindparam("of_topic_id"), topic_configs.c.name == bindparam("of_name")
)
#: How many ids one statement asks for: SQLite takes 32,766 parameters, PostgreSQL 65,535.
_IDS_MAX: Final = 10_000
_NAMES: Final = (
    select(partitions.c.partition_id, topics.c.name, partitions.c.partition_number)
    .join(topics, topics.c.topic_id == partitions.c.topic_id)
    .where(partitions.c.partition_id.in_(bindparam("partition_ids", expanding=True)))
)


def place_partitions(
    connection: Connection, members: Sequence[Database], name: str, settings: Settings, numbers: range
) -> list[int]:
    """Return the leader of each new partition of the topic, on these members.

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
        leader = min(held, key=lambda database_id: (held[database_id], database_id))
        held[leader] += 1
        leaders.append(leader)
    return leaders


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it stands: its partitions' ids in the order of their numbers, and its settings."""

    topic_id: int
    name: str
    topic_uuid: str
    partition_ids: tuple[int, ...]
    settings: Settings = field(compare=False, repr=False)
    config: Mapping[str, str]
    """The settings that were set, as text."""

    leaders: tuple[int, ...] = ()
    """The numbers of the databases that hold the partitions, in the same order."""

    def partition_id(self, number: int) -> int:
        """Return the id of the partition with this number.

        Raises:
            UnknownTopicOrPartition: the topic has no such partition.
        """
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self.partition_ids):
            raise UnknownTopicOrPartition(
                f"topic {self.name} has partitions 0 to {len(self.partition_ids) - 1}, not {number!r}"
            )
        return self.partition_ids[number]


def _in_use(partition_ids: Any) -> Select[str]:
    """Return the question for a transactional id that has an open transaction in one of the partitions."""
    tables = (transaction_partitions, transaction_writer_partitions)
    found = (select(table.c.transactional_id).where(table.c.partition_id.in_(partition_ids)) for table in tables)
    return select(union_all(*found).subquery().c.transactional_id).limit(1)


_IN_USE: Final = _in_use(bindparam("partition_ids", expanding=True))


def check_topic_name(name: object) -> None:
    """Refuse a name that Kafka does not allow.

    Raises:
        InvalidTopic: it is not text, empty, too long, `.` or `..`, or has other characters than a-z A-Z 0-9 . _ -
    """
    if not isinstance(name, str):
        raise InvalidTopic(f"a topic's name is text, not {type(name).__name__}")
    if not name:
        raise InvalidTopic("a topic's name is not empty")
    if name in (".", ".."):
        raise InvalidTopic('a topic\'s name is not "." or ".."')
    if len(name) > NAME_LENGTH_MAX:
        raise InvalidTopic(f"a topic's name has at most {NAME_LENGTH_MAX} characters, not {len(name)}")
    if not _NAME.fullmatch(name):
        raise InvalidTopic(f"a topic's name has only the characters a-z A-Z 0-9 . _ -; not {name[:80]!r}")


def create_topic(
    connection: Connection, name: str, *, partition_count: int = 1, config: Mapping[str, str] = MappingProxyType({})
) -> Topic:
    """Create a topic with empty partitions; it is there once the database transaction commits.

    Raises:
        InvalidTopic: Kafka does not allow the name, or it differs from another topic's only in dots and underscores.
        InvalidPartitions: the number of partitions is not from 1 to 100,000.
        InvalidConfiguration: a setting is unknown or its value is out of range.
        TopicAlreadyExists: there is one of this name.
    """
    check_topic_name(name)
    _check_partition_count(partition_count)
    config = {key: setting_text(TOPIC_SETTINGS, key, text) for key, text in config.items()}
    check_topic_config(config)
    settings = settings_in_force(TOPIC_SETTINGS, config)
    members = lock_catalogue(connection)
    _check_collision(connection, name)
    topic_uuid = str(uuid.uuid4())
    numbers = draw_numbers(members, 1 + partition_count)
    own_number = {} if numbers is None else {"topic_id": numbers.pop()}
    topic_id = connection.execute(_INSERT, {"name": name, "topic_uuid": topic_uuid, **own_number}).scalar_one_or_none()
    if topic_id is None:
        raise TopicAlreadyExists(f"there is a topic {name} already")
    if config:
        connection.execute(
            insert(topic_configs), [{"topic_id": topic_id, "name": key, "value": text} for key, text in config.items()]
        )
    leaders = place_partitions(connection, members, name, settings, range(partition_count))
    partition_ids = _add_partitions(connection, topic_id, 0, leaders, numbers)
    return Topic(topic_id, name, topic_uuid, partition_ids, settings, config, tuple(leaders))


def ensure_topic(connection: Connection, name: str, *, partition_count: int = 1) -> Topic:
    """Return the topic, created with default settings if it is not there: Kafka's auto-creation.

    Raises:
        InvalidTopic, InvalidPartitions: as `create_topic`.
    """
    check_topic_name(name)
    found = find_topics(connection, [name])
    if found:
        return found[0]
    try:
        return create_topic(connection, name, partition_count=partition_count)
    except TopicAlreadyExists:
        # Somebody else created it while we waited for that row.
        return get_topic(connection, name)


def get_topic(connection: Connection, name: str) -> Topic:
    """Return the topic.

    Raises:
        UnknownTopicOrPartition: there is no topic of this name.
    """
    found = find_topics(connection, [name])
    if not found:
        raise UnknownTopicOrPartition(f"there is no topic {str(name)[:NAME_LENGTH_MAX]!r}")
    return found[0]


def find_topics(
    connection: Connection, names: Sequence[str], *, check: Callable[[str | None, int, int], None] | None = None
) -> list[Topic]:
    """Return those of the topics that there are, by name.

    With `check` it is told, before anything else is read, of which store they are, its next producer id and the oldest
    version that may write.
    """
    # No database is asked for what is not a name: some refuse the very characters.
    wanted = [name for name in names if _is_name(name)]
    by_name = _BY_NAME if check is None else _BY_NAME_AND_STORE
    rows = [row for some in chunks(wanted) for row in by_name.rows(connection, {"names": some})]
    if check is not None and wanted:
        check(*(rows[0][:3] if rows else (None, 0, 0)))
        rows = [row for row in rows if row.topic_id is not None]
    if not rows:
        return []
    topic_ids = [row.topic_id for row in rows]
    places_of: dict[int, list[tuple[int, int]]] = {topic_id: [] for topic_id in topic_ids}
    config_of: dict[int, dict[str, str]] = {topic_id: {} for topic_id in topic_ids}
    for some in chunks(topic_ids):
        for topic_id, partition_id, leader in _PARTITIONS.rows(connection, {"topic_ids": some}):
            places_of[topic_id].append((partition_id, leader))
        for row in _CONFIGS.rows(connection, {"topic_ids": some}):
            config_of[row.topic_id][row.name] = row.value
    return sorted(
        (
            Topic(
                row.topic_id,
                row.name,
                row.topic_uuid,
                tuple(partition_id for partition_id, _ in places_of[row.topic_id]),
                settings_in_force(TOPIC_SETTINGS, config_of[row.topic_id]),
                config_of[row.topic_id],
                tuple(leader for _, leader in places_of[row.topic_id]),
            )
            for row in rows
            # A topic without partitions was deleted between the first statement and the second.
            if places_of[row.topic_id]
        ),
        key=lambda topic: topic.name,
    )


def list_topics(connection: Connection) -> list[str]:
    """Return the names of all topics, sorted."""
    return list(connection.execute(_ALL_NAMES).scalars())


def grow_topic(connection: Connection, name: str, *, partition_count: int) -> Topic:
    """Give the topic more partitions, `partition_count` in all.

    Raises:
        UnknownTopicOrPartition: there is no such topic.
        InvalidPartitions: that is not more than it has.
        InvalidConfiguration: its setting txnstore.placement names no database of the cluster.
    """
    _check_partition_count(partition_count)
    members = lock_catalogue(connection)
    topic = _locked_topic(connection, name)
    present = len(topic.partition_ids)
    if partition_count <= present:
        raise InvalidPartitions(
            f"topic {name} has {present} partitions already; it can only get more, not {partition_count}"
        )
    leaders = place_partitions(connection, members, name, topic.settings, range(present, partition_count))
    _add_partitions(connection, topic.topic_id, present, leaders, draw_numbers(members, partition_count - present))
    return get_topic(connection, name)


def delete_topic(connection: Connection, name: str) -> None:
    """Delete the topic: from the commit on nobody finds it, its records, or what was remembered of its partitions.

    What its partitions held is deleted in portions: `deleting.purge_deleted_partitions`, by the caller or maintenance.

    Raises:
        UnknownTopicOrPartition: there is no such topic.
        InvalidTransactionState: an open transaction has written to it.
    """
    members = lock_catalogue(connection)
    topic = _locked_topic(connection, name)
    # Heads first, as everybody does: appends that are under way finish, later ones find no partition.
    which = partitions.c.topic_id == topic.topic_id
    lock_heads_of(connection, which)
    holder = connection.execute(_in_use(select(partitions.c.partition_id).where(which))).scalars().first()
    if holder is not None:
        raise InvalidTransactionState(
            f"an open transaction of {holder[:80]!r} has written to topic {name}; end it first, then delete the topic"
        )
    forget_partitions(connection, which)
    connection.execute(delete(topic_configs).where(topic_configs.c.topic_id == topic.topic_id))
    must_hit(connection, _DELETE, {"of_topic_id": topic.topic_id})
    if len(members) > 1:
        note_deletions(connection, topic.partition_ids)


def holder_of(connection: Connection, partition_ids: Sequence[int]) -> str | None:
    """Return a transactional id that is coordinated here and has an open transaction in one of the partitions."""
    for some in chunks(partition_ids):
        holder: str | None = connection.execute(_IN_USE, {"partition_ids": some}).scalars().first()
        if holder is not None:
            return holder
    return None


def _locked_topic(connection: Connection, name: str) -> Topic:
    if _is_name(name):
        connection.execute(_LOCK, {"of_name": name})
    return get_topic(connection, name)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _add_partitions(
    connection: Connection, topic_id: int, first: int, leaders: Sequence[int], numbers: Sequence[int] | None
) -> tuple[int, ...]:
    new: list[dict[str, int]] = [
        {"topic_id": topic_id, "partition_number": number, "leader_database_id": leader}
        for number, leader in enumerate(leaders, first)
    ]
    if numbers is not None:
        new = [{"partition_id": own, **row} for own, row in zip(numbers, new, strict=True)]
    connection.execute(insert(partitions), new)
    rows = _PARTITIONS.rows(connection, {"topic_ids": [topic_id]})
    own = [row.partition_id for row in rows[first:] if row.leader_database_id == CONTROLLER_ID]
    if own:
        connection.execute(insert(partition_heads), [new_head(partition_id) for partition_id in own])
    return tuple(row.partition_id for row in rows)


def _check_partition_count(count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= PARTITIONS_MAX:
        raise InvalidPartitions(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {count!r}")


def _check_collision(connection: Connection, name: str) -> None:
    others = _COLLIDING.values(connection, {"folded": name.replace(".", "_"), "own_name": name})
    if others:
        raise InvalidTopic(f"topic {name} differs from the topic {others[0]} only in dots and underscores")


def lock_topic_configs(connection: Connection, name: str) -> Topic:
    """Return the topic; nobody else changes its settings until the database transaction ends.

    Raises:
        UnknownTopicOrPartition: there is no topic of this name.
    """
    lock_catalogue(connection)
    topic = get_topic(connection, name)
    connection.execute(_LOCK_BY_ID, {"of_topic_id": topic.topic_id})
    # What stood there before the lock may have changed, or be gone.
    return get_topic(connection, name)


def change_topic_configs(connection: Connection, topic: Topic, changes: Mapping[str, str | None]) -> None:
    """Set each setting of a locked topic to its text; None gives it its default back.

    Raises:
        InvalidConfiguration: a name is unknown or a value out of range; nothing was changed.
    """
    texts: dict[str, str | None] = {}
    for name, text in changes.items():
        if text is None:
            check_setting_name(TOPIC_SETTINGS, name)
        texts[name] = None if text is None else setting_text(TOPIC_SETTINGS, name, text)
    check_topic_config({name: text for name, text in {**topic.config, **texts}.items() if text is not None})
    if changes.get(PLACEMENT):
        check_placement(read_databases(connection), changes[PLACEMENT] or "")
    for name, text in texts.items():
        if text is None:
            connection.execute(_RESET_CONFIG, {"of_topic_id": topic.topic_id, "of_name": name})
        else:
            connection.execute(_SET_CONFIG, {"topic_id": topic.topic_id, "name": name, "value": text})


def names_of_partitions(connection: Connection, partition_ids: Iterable[int]) -> dict[int, PartitionName]:
    """Return topic and number of these partitions by id; one that is not there any more is left out."""
    wanted = sorted(set(partition_ids))
    found: dict[int, PartitionName] = {}
    for start in range(0, len(wanted), _IDS_MAX):
        rows = connection.execute(_NAMES, {"partition_ids": wanted[start : start + _IDS_MAX]})
        found.update({row.partition_id: PartitionName(row.name, row.partition_number) for row in rows})
    return found


def settings_error(connection: Connection, topic_id: int, error: InvalidConfiguration) -> InvalidConfiguration:
    """Return the error with the name of the topic whose settings somebody has made unreadable."""
    name = connection.execute(select(topics.c.name).where(topics.c.topic_id == topic_id)).scalar()
    return InvalidConfiguration(f"the settings of topic {name or topic_id!r} cannot be read: {error}")
