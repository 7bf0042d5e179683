"""The catalogue, of which every database of a cluster has a copy: databases, topics, partitions and settings.

The controller's rows are the truth.  Each of its changes has a number; a copy is brought to the state of a whole
snapshot, and back to an older one only where the controller itself has gone back.  So a copy may be made by anybody, at
any time, and by several at once.

A controller may have lost its last changes: restored from an older backup, or by a failover.  So no partition is
deleted in a member because the controller lacks it, but only because it tells that it has deleted it
(`deleted_numbers`).  What it has made since has other numbers than all that it has lost, which can stay as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, bindparam, delete, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from txnstore.config import STORE_SETTINGS, Settings, check_setting_name, parse_setting, settings_in_force
from txnstore.db.cluster.membership import (
    CONTROLLER_ID,
    PRODUCER_ID_BITS,
    Database,
    claim,
    lock_catalogue,
    read_databases,
)
from txnstore.db.postgresql.segments import TURNING_SEGMENTS
from txnstore.db.schema import (
    databases,
    deleted_numbers,
    deleted_partitions,
    partition_heads,
    partition_storage,
    partitions,
    pending_group_offsets,
    pending_markers,
    producer_states,
    store_configs,
    stores,
    topic_configs,
    topics,
    transaction_partitions,
    transaction_writer_partitions,
)
from txnstore.db.statements import HotStatement
from txnstore.db.store import Store, chunks, must_hit_each
from txnstore.errors import StoreUnavailable, WrongCluster

_log = logging.getLogger(__name__)

#: What is copied, each with the columns that name a row; in the order in which rows come to be.
COPIED: Final[tuple[tuple[Table, tuple[str, ...]], ...]] = (
    (databases, ("database_id",)),
    (store_configs, ("name",)),
    (topics, ("topic_id",)),
    (topic_configs, ("topic_id", "name")),
    (partitions, ("partition_id",)),
)
#: What never changes in a row that is copied.
_FIXED: Final = {topics: "topic_uuid", partitions: "topic_id"}
#: How many deletions a controller remembers: of more than these a member that was away keeps the first.
DELETIONS_KEPT: Final = 1_000_000
#: How many topics one message names.
_NAMED_MAX: Final = 10
_LOST: Final = "the controller was restored from an older backup, or a failover has lost its last changes"
#: What is deleted together with a partition, heads last, so that a waiter for one finds nothing after it.  Its log and
#: committed offsets can no longer be found: `log.deleting` deletes them in portions.
OF_PARTITIONS: Final = (
    pending_group_offsets,
    transaction_partitions,
    transaction_writer_partitions,
    pending_markers,
    partition_storage,
    partition_heads,
    partitions,
)

_GONE: Final = select(deleted_partitions.c.partition_id)
_STILL_DELETED: Final = _GONE.where(deleted_partitions.c.partition_id.not_in(select(partitions.c.partition_id)))
# Another copy at the same time waits here.
_LOCK_COPY: Final = (
    select(databases.c.catalogue_version).where(databases.c.database_id == CONTROLLER_ID).with_for_update()
)
_OWN_UUID: Final = select(stores.c.store_uuid)
_VERSION: Final = select(databases.c.catalogue_version).where(databases.c.database_id == CONTROLLER_ID)
_TOPICS_BY_PARTITION: Final = select(partitions.c.partition_id, topics.c.topic_uuid).join(
    topics, topics.c.topic_id == partitions.c.topic_id
)
_DELETED: Final = select(deleted_numbers.c.partition_id).where(
    deleted_numbers.c.partition_id.in_(bindparam("partition_ids", expanding=True))
)
_NOTE_DELETION: Final = upsert(deleted_numbers).on_conflict_do_nothing(index_elements=[deleted_numbers.c.partition_id])
_FORGET_DELETIONS: Final = delete(deleted_numbers).where(
    deleted_numbers.c.deletion_number
    <= select(func.max(deleted_numbers.c.deletion_number) - bindparam("kept")).scalar_subquery()
)
_RENAME: Final = update(topics).where(topics.c.topic_id == bindparam("of_topic_id")).values(name=bindparam("new_name"))
_EMPTY: Final = select(topics.c.topic_id).where(topics.c.topic_id.not_in(select(partitions.c.topic_id)))
_HEADS: Final = select(partition_heads.c.partition_id)
# Otherwise they would be taken for transactions that hang.
_DELETE_OPEN: Final = delete(producer_states).where(
    producer_states.c.partition_id.in_(_GONE), producer_states.c.transaction_first_offset >= 0
)
_INSERT_HEADS: Final = upsert(partition_heads).on_conflict_do_nothing(index_elements=[partition_heads.c.partition_id])

_Key = tuple[Any, ...]
_Rows = Mapping[_Key, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """One snapshot of what the controller has, by table and key."""

    version: int
    rows: Mapping[str, _Rows]
    asked: frozenset[int] = frozenset()
    """Partitions that it lacks, and of which it was asked whether it has deleted them."""

    deleted: frozenset[int] = frozenset()
    """Those that it has."""

    replaces: int | None = None
    """Of which version copies are newer, and the controller has gone back."""

    def is_older_than(self, version: int) -> bool:
        """Return whether copies of a version stay as they are."""
        return version > self.version and version != self.replaces


class UnaskedError(Exception):
    """A member has partitions that the controller lacks, and nobody has asked whether it has deleted them."""

    def __init__(self, partition_ids: Collection[int]) -> None:
        """Name the partitions."""
        super().__init__(partition_ids)
        self.partition_ids = partition_ids


def read_version(connection: Connection) -> int:
    """Return the number of the last change, or up to where a copy is."""
    return int(connection.execute(_VERSION).scalar_one())


def read_catalogue(connection: Connection, asked: Collection[int] = ()) -> Catalogue:
    """Return what members copy, as it is in this database; and which of some partitions it has deleted."""
    rows = {str(table.name): _read(connection, table, key) for table, key in COPIED}
    version = int(rows["databases"][CONTROLLER_ID,]["catalogue_version"])
    return Catalogue(version, rows, frozenset(asked), frozenset(read_deleted(connection, asked)))


def read_deleted(connection: Connection, partition_ids: Collection[int]) -> set[int]:
    """Return which of the partitions the controller, whose database this is, has deleted."""
    return {
        number
        for some in chunks(list(partition_ids))
        for number in connection.execute(_DELETED, {"partition_ids": some}).scalars()
    }


def look(controller: Store, version: int | None = None, asked: Collection[int] = ()) -> Catalogue:
    """Return the controller's state; copies had the version, if one is given, before it is asked.

    It replaces them if its own version is an older one: that grows with each change, so the controller has gone back.
    A standby, which is behind, replaces nothing.
    """

    def read(connection: Connection) -> Catalogue:
        # First: one that is promoted meanwhile may have shown less than it has by then.
        is_behind = version is not None and controller.backend.is_standby(connection)
        found = read_catalogue(connection, asked)
        if version is None or version <= found.version or is_behind:
            return found
        return replace(found, replaces=version)

    return controller.read(read)


def is_current(connection: Connection, catalogue: Catalogue, database_id: int) -> bool:
    """Return whether `apply_catalogue` would change nothing here; a role that may only read can ask."""
    if not _is_member(connection, database_id):
        return False
    copies = read_catalogue(connection)
    if copies.version != catalogue.version:
        return catalogue.is_older_than(copies.version)
    if _missing_heads(connection, catalogue, database_id):
        return False
    return all(copies.rows[name].get(key) == row for name, rows in catalogue.rows.items() for key, row in rows.items())


def copy_catalogue(controller: Store, catalogue: Catalogue, database_id: int, write: Callable[..., bool]) -> bool:
    """Bring a member's copies to the controller's state, by what writes there; False if nothing was to be changed."""
    apply = partial(apply_catalogue, catalogue=catalogue, database_id=database_id)
    try:
        return write(apply, wakes_readers=True)
    except UnaskedError as error:
        # Now nobody in the member waits for the controller.
        catalogue = look(controller, catalogue.replaces, error.partition_ids)
    return write(partial(apply, catalogue=catalogue), wakes_readers=True)


def apply_catalogue(connection: Connection, catalogue: Catalogue, database_id: int) -> bool:
    """Bring a member's copies to the controller's state; False if nothing was to be changed.

    Partitions that live here get their heads; those that the controller has deleted go, with all that is in them.  What
    it lacks otherwise stays.  What is older than the copies changes nothing.  A partition with a number by which this
    database still deletes comes once that is over: its records would be deleted as well.

    Raises:
        WrongCluster: the database belongs to another cluster, or is used by itself; or the controller does not know it
            under this number, or has something else than it under a number of partitions or topics.
        UnaskedError: the controller lacks partitions, and was asked for none.
    """
    controller = Database(**catalogue.rows["databases"][CONTROLLER_ID,])
    is_new = not _is_member(connection, database_id)
    if is_new:
        claim(connection, controller)
    present_version = int(connection.execute(_LOCK_COPY).scalar_one())
    if catalogue.is_older_than(present_version):
        return False
    own = catalogue.rows["databases"].get((database_id,))
    if own is None or own["store_uuid"] != connection.execute(_OWN_UUID).scalar_one():
        raise WrongCluster(
            f"this database is no longer number {database_id} of the cluster: {_LOST}, or only some databases of"
            " a copy have been adopted so far"
        )
    # A stale snapshot may lack rows that are there: only another one says that something is gone.
    removes = present_version != catalogue.version
    changed, is_complete = is_new, True
    if removes:
        wanted = catalogue.rows["partitions"]
        lacking = {key: row for key, row in _read(connection, *COPIED[-1]).items() if key not in wanted}
        numbers = {number for (number,) in lacking}
        is_complete = numbers <= catalogue.asked
        if not is_complete and not catalogue.asked:
            raise UnaskedError(numbers)
        changed |= _forget_deleted(connection, numbers & catalogue.deleted, catalogue)
        lost = [row for (number,), row in lacking.items() if number not in catalogue.deleted]
        names = _let_give_way(connection, lost, catalogue, own["label"])
        if is_complete and (names or present_version == catalogue.replaces):
            _tell_of_loss(names, own["label"])
    ready = _without_still_deleted(connection, catalogue)
    if ready is not catalogue or not is_complete:
        # The copies stay behind until the rest has come, or the rest has been asked for.
        ready = _at_version(ready, present_version)
    for table, key in COPIED:
        changed |= _bring(connection, table, key, ready, removes=removes or table is databases)
    changed |= _make_heads(connection, ready, database_id)
    if is_new:
        first = (database_id - 1) << PRODUCER_ID_BITS
        connection.execute(update(stores).where(stores.c.next_producer_id < first).values(next_producer_id=first))
    return changed


def _forget_deleted(connection: Connection, partition_ids: Collection[int], catalogue: Catalogue) -> bool:
    """Delete partitions, and the topics that have none left and that the controller has no more."""
    for some in chunks(sorted(partition_ids)):
        forget_partitions(connection, partitions.c.partition_id.in_(some))
    gone = [number for number in connection.execute(_EMPTY).scalars() if (number,) not in catalogue.rows["topics"]]
    for some in chunks(gone):
        for table in (topic_configs, topics):
            connection.execute(delete(table).where(table.c.topic_id.in_(some)))
    return bool(partition_ids or gone)


def _let_give_way(
    connection: Connection, lost: Sequence[Mapping[str, Any]], catalogue: Catalogue, label: str
) -> list[str]:
    """Free the names that topics have now of those the controller has lost; return the topics of lost partitions."""
    if not lost:
        return []
    present, wanted = _read(connection, topics, ("topic_id",)), catalogue.rows["topics"]
    places = {(row["topic_id"], row["partition_number"]) for row in catalogue.rows["partitions"].values()}
    for row in lost:
        if (row["topic_id"], row["partition_number"]) in places:
            name = wanted[row["topic_id"],]["name"]
            raise WrongCluster(
                f"the database {label!r} has the partition {row['partition_number']} of the topic {name!r}, but its"
                f" controller has made another one in its place: {_LOST}. Nothing was changed: restore the"
                " controller's last state, or delete the topic; what the database has of the lost partition is kept"
            )
    names = {row["name"] for row in wanted.values()}
    for key, row in present.items():
        if key not in wanted and row["name"] in names:
            connection.execute(_RENAME, {"of_topic_id": row["topic_id"], "new_name": row["topic_uuid"]})
    of = {row["topic_id"] for row in lost}
    return sorted(row["name"] for (topic_id,), row in present.items() if topic_id in of)


def _tell_of_loss(names: Sequence[str], label: str) -> None:
    """Log what the controller has lost, as far as it shows; again with each change that comes."""
    _log.warning(
        "%s: the database %r has topics or settings that its controller does not know; it keeps its partitions of the"
        " topics [%s], and has the controller's settings now: look at them",
        _LOST,
        label,
        ", ".join(names[:_NAMED_MAX]),
        extra={"event": "changes_lost", "database": label},
    )


def _without_still_deleted(connection: Connection, catalogue: Catalogue) -> Catalogue:
    """Return the catalogue without new partitions whose numbers were given out before, and are still deleted by here.

    By a controller that has lost that it deleted them; or here, before this database joined.
    """
    wanted = catalogue.rows["partitions"]
    left_out = wanted.keys() & {tuple(row) for row in connection.execute(_STILL_DELETED)}
    if not left_out:
        return catalogue
    ready = {key: row for key, row in wanted.items() if key not in left_out}
    return replace(catalogue, rows={**catalogue.rows, "partitions": ready})


def _at_version(catalogue: Catalogue, version: int) -> Catalogue:
    members = dict(catalogue.rows["databases"])
    members[CONTROLLER_ID,] = {**members[CONTROLLER_ID,], "catalogue_version": version}
    return replace(catalogue, rows={**catalogue.rows, "databases": members})


def check_history(member: Store, controller: Store, *, retry_timeout_ms: int) -> None:
    """Refuse a member that has other topics than its controller under the same numbers.

    Numbers are not given out twice in a cluster, but by a database that was restored to when it was alone: what is
    written to a new topic would go to the log of another one, and groups would begin where they had come to in that.
    While the controller is away nobody can tell, and nobody waits for longer than `retry_timeout_ms`.

    Raises:
        WrongCluster: see above.
        TxnStoreError: one of them refuses, or the member cannot be reached.
    """

    def read(connection: Connection) -> dict[int, str]:
        return {row.partition_id: row.topic_uuid for row in connection.execute(_TOPICS_BY_PARTITION)}

    held = member.read(read)
    try:
        given = controller.read(read, retry_timeout_ms=retry_timeout_ms)
    except StoreUnavailable:
        return
    if any(given.get(number, uuid) != uuid for number, uuid in held.items()):
        raise WrongCluster(
            f"the database {member.label!r} has copies of topics whose numbers its controller {controller.label!r} has"
            f" given to others: {_LOST}. Nothing was changed; restore all databases of a cluster from backups of which"
            " the controller's is the last"
        )


def note_deletions(connection: Connection, partition_ids: Sequence[int]) -> None:
    """Let the other databases of the cluster delete partitions; what was deleted longest ago is forgotten."""
    connection.execute(_NOTE_DELETION, [{"partition_id": partition_id} for partition_id in partition_ids])
    connection.execute(_FORGET_DELETIONS, {"kept": DELETIONS_KEPT})


def forget_partitions(connection: Connection, which: ColumnElement[bool]) -> None:
    """Delete the partitions that a condition on their table selects; what they held is deleted later, in portions."""
    # Heads first, as everybody does: appends that are under way finish, later ones find no partition.
    lock_heads_of(connection, which)
    connection.execute(insert(deleted_partitions).from_select(["partition_id"], _ids(which)))
    connection.execute(_DELETE_OPEN)
    for table in OF_PARTITIONS:
        connection.execute(delete(table).where(table.c.partition_id.in_(_GONE)))


def lock_heads_of(connection: Connection, which: ColumnElement[bool]) -> None:
    """Lock those heads of such partitions that are here."""
    connection.execute(
        select(partition_heads.c.partition_id)
        .where(partition_heads.c.partition_id.in_(_ids(which)))
        .order_by(partition_heads.c.partition_id)
        .with_for_update()
    )


def _is_member(connection: Connection, database_id: int) -> bool:
    return any(member.is_own and member.database_id == database_id for member in read_databases(connection))


def _ids(which: ColumnElement[bool]) -> Select[int]:
    return select(partitions.c.partition_id).where(which)


def _read(connection: Connection, table: Table, key: Sequence[str]) -> dict[_Key, dict[str, Any]]:
    rows = (dict(row) for row in connection.execute(select(table)).mappings())
    return {tuple(row[name] for name in key): row for row in rows}


def _goes(table: Table, found: _Key, catalogue: Catalogue) -> bool:
    """Return whether a copy goes that the controller has no row for; what belongs to a topic that it has lost stays."""
    if table is topic_configs:
        return found[:1] in catalogue.rows["topics"]
    return table is not topics and table is not partitions


def _bring(connection: Connection, table: Table, key: Sequence[str], catalogue: Catalogue, *, removes: bool) -> bool:
    present, wanted = _read(connection, table, key), catalogue.rows[str(table.name)]
    fixed = _FIXED.get(table)
    if fixed is not None and any(present[found][fixed] != wanted[found][fixed] for found in present.keys() & wanted):
        raise WrongCluster(
            "the copies of topics in this database do not come from the cluster's controller, which has reused their"
            f" numbers: {_LOST}"
        )
    gone = [found for found in present if found not in wanted and _goes(table, found, catalogue)] if removes else []
    if gone:
        must_hit_each(
            connection,
            delete(table).where(_this(table, key)),
            [{f"of_{name}": value for name, value in zip(key, found, strict=True)} for found in gone],
        )
    new = [dict(row) for found, row in wanted.items() if found not in present]
    for rows in chunks(new):
        connection.execute(insert(table), rows)
    changed = [row for found, row in wanted.items() if found in present and present[found] != row]
    if changed:
        values: dict[str, Any] = {
            column.name: bindparam(f"new_{column.name}") for column in table.c if column.name not in key
        }
        must_hit_each(
            connection,
            update(table).where(_this(table, key)).values(values),
            [
                {
                    **{f"of_{name}": row[name] for name in key},
                    **{f"new_{name}": row[name] for name in values},
                }
                for row in changed
            ],
        )
    return bool(gone or new or changed)


def _this(table: Table, key: Sequence[str]) -> ColumnElement[bool]:
    return and_(*(table.c[name] == bindparam(f"of_{name}") for name in key))


def _missing_heads(connection: Connection, catalogue: Catalogue, database_id: int) -> list[int]:
    own = {
        row["partition_id"] for row in catalogue.rows["partitions"].values() if row["leader_database_id"] == database_id
    }
    return sorted(own - set(connection.execute(_HEADS).scalars())) if own else []


def _make_heads(connection: Connection, catalogue: Catalogue, database_id: int) -> bool:
    missing = _missing_heads(connection, catalogue, database_id)
    for ids in chunks(missing):
        connection.execute(_INSERT_HEADS, [new_head(partition_id) for partition_id in ids])
    return bool(missing)


def new_head(partition_id: int) -> dict[str, int]:
    """Return the row of a partition that nothing was written to."""
    return {
        "partition_id": partition_id,
        "log_start_offset": 0,
        "next_offset": 0,
        "running_max_timestamp_ms": -1,
        "segment": TURNING_SEGMENTS[0],
    }


# --- the store's settings --------------------------------------------------------------------------------------------

_SETTINGS: Final = HotStatement(select(store_configs.c.name, store_configs.c.value))
_INSERT_SETTING: Final = upsert(store_configs)
_CHANGE_SETTING: Final = _INSERT_SETTING.on_conflict_do_update(
    index_elements=[store_configs.c.name], set_={"value": _INSERT_SETTING.excluded.value}
)
_RESET_SETTING: Final = delete(store_configs).where(store_configs.c.name == bindparam("of_name"))


def read_store_settings(connection: Connection) -> Settings:
    """Return the store's settings in force.

    Raises:
        InvalidConfiguration: somebody has written a value into the table that the setting does not take.
    """
    return settings_in_force(STORE_SETTINGS, read_store_config(connection))


def read_store_config(connection: Connection) -> dict[str, str]:
    """Return the settings that were set, as text."""
    return {row.name: row.value for row in _SETTINGS.rows(connection)}


def change_store_settings(connection: Connection, changes: Mapping[str, str | None]) -> None:
    """Set each setting to its text; None gives it its default back.

    Raises:
        InvalidConfiguration: a name is unknown or a value out of range; nothing was changed.
        WrongCluster: this is a member of a cluster, and not its controller.
    """
    for name, text in changes.items():
        if text is None:
            check_setting_name(STORE_SETTINGS, name)
        else:
            parse_setting(STORE_SETTINGS, name, text)
    lock_catalogue(connection)
    for name, text in changes.items():
        if text is None:
            connection.execute(_RESET_SETTING, {"of_name": name})
        else:
            connection.execute(_CHANGE_SETTING, {"name": name, "value": text})
