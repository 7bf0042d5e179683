"""The catalogue, of which every database of a cluster has a copy: databases, topics, partitions and settings.

The controller's rows are the truth.  Each of its changes has a number; a copy is brought to the state of a whole
snapshot, and never back to an older one.  So a copy may be made by anybody, at any time, and by several at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, bindparam, delete, insert, select, update
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
#: What is deleted together with a partition: its own rows, and what open transactions still wanted of it.  Heads come
#: last, so that a waiter for one finds nothing after it.  Its log, and what groups have committed of it, can no
#: longer be found: `log.deleting` deletes that in portions.
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
_VERSION: Final = select(databases.c.catalogue_version).where(databases.c.database_id == CONTROLLER_ID)
_TOPICS_BY_PARTITION: Final = select(partitions.c.partition_id, topics.c.topic_uuid).join(
    topics, topics.c.topic_id == partitions.c.topic_id
)
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


def read_catalogue(connection: Connection) -> Catalogue:
    """Return what members copy, as it is in this database."""
    rows = {str(table.name): _read(connection, table, key) for table, key in COPIED}
    return Catalogue(int(rows["databases"][CONTROLLER_ID,]["catalogue_version"]), rows)


def is_current(connection: Connection, catalogue: Catalogue, database_id: int) -> bool:
    """Return whether `apply_catalogue` would change nothing here; a role that may only read can ask."""
    if not _is_member(connection, database_id):
        return False
    present = read_catalogue(connection)
    is_newer = present.version > catalogue.version
    return is_newer or (present.rows == catalogue.rows and not _missing_heads(connection, catalogue, database_id))


def apply_catalogue(connection: Connection, catalogue: Catalogue, database_id: int) -> bool:
    """Bring a member's copies to the controller's state; False if nothing was to be changed.

    Partitions that live here get their heads; those that the controller has deleted go, with all that is in them.
    What is older than the copies changes nothing.  A partition with a number by which this database still deletes
    comes once that is over: its records would be deleted as well.

    Raises:
        WrongCluster: the database belongs to another cluster, or is used by itself.
    """
    controller = Database(**catalogue.rows["databases"][CONTROLLER_ID,])
    is_new = not _is_member(connection, database_id)
    if is_new:
        claim(connection, controller)
    present_version = int(connection.execute(_LOCK_COPY).scalar_one())
    if present_version > catalogue.version:
        return False
    catalogue = _without_still_deleted(connection, catalogue, present_version)
    changed = is_new
    for table, key in COPIED:
        # A stale snapshot may lack rows that are there: only a newer one says that something is gone.
        changed |= _bring(
            connection,
            table,
            key,
            catalogue.rows[str(table.name)],
            removes=present_version < catalogue.version or table is databases,
        )
    changed |= _make_heads(connection, catalogue, database_id)
    if is_new:
        first = (database_id - 1) << PRODUCER_ID_BITS
        connection.execute(update(stores).where(stores.c.next_producer_id < first).values(next_producer_id=first))
    return changed


def _without_still_deleted(connection: Connection, catalogue: Catalogue, present_version: int) -> Catalogue:
    """Return the catalogue without new partitions whose numbers were given out before, and are still deleted by here.

    By a controller that was restored to an older state; or here, before this database joined.  The copies stay behind
    until the rest has come.
    """
    wanted = catalogue.rows["partitions"]
    left_out = wanted.keys() & {tuple(row) for row in connection.execute(_STILL_DELETED)}
    if not left_out:
        return catalogue
    ready = {key: row for key, row in wanted.items() if key not in left_out}
    members = dict(catalogue.rows["databases"])
    members[CONTROLLER_ID,] = {**members[CONTROLLER_ID,], "catalogue_version": present_version}
    return replace(catalogue, rows={**catalogue.rows, "partitions": ready, "databases": members})


def check_history(member: Store, controller: Store, *, retry_timeout_ms: int) -> None:
    """Refuse a member whose copies the controller cannot have given to it: one of the two was restored alone.

    A controller that has gone back gives the numbers of partitions out again: what is written to a new topic would go
    to the log of another one, and groups would begin where they had come to in that.  While the controller is away, or
    a standby that follows, nobody can tell, and nobody waits for longer than `retry_timeout_ms`.

    Raises:
        WrongCluster: see above.
        TxnStoreError: one of them refuses, or the member cannot be reached.
    """

    def read(connection: Connection) -> tuple[int, dict[int, str]]:
        version = int(connection.execute(_VERSION).scalar_one())
        return version, {row.partition_id: row.topic_uuid for row in connection.execute(_TOPICS_BY_PARTITION)}

    held_version, held = member.read(read)
    try:
        # After the member: what that has, the controller had before.
        version, given = controller.read(read, retry_timeout_ms=retry_timeout_ms)
        is_known = held_version <= version and all(given.get(number, uuid) == uuid for number, uuid in held.items())
        if is_known or controller.read(controller.backend.is_standby):
            return
    except StoreUnavailable:
        return
    raise WrongCluster(
        f"the database {member.label!r} has copies of topics that its controller {controller.label!r} has not made: the"
        " controller was restored from an older backup, or a failover has lost its last changes. Nothing was changed;"
        " restore all databases of a cluster from backups of which the controller's is the last"
    )


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


def _bring(connection: Connection, table: Table, key: Sequence[str], wanted: _Rows, *, removes: bool) -> bool:
    present = _read(connection, table, key)
    fixed = _FIXED.get(table)
    if fixed is not None and any(present[found][fixed] != wanted[found][fixed] for found in present.keys() & wanted):
        raise WrongCluster(
            "the copies of topics in this database are not of the cluster's controller, which has given their numbers"
            " out again: it was restored from an older backup, or a failover has lost its last changes"
        )
    gone = [found for found in present if found not in wanted] if removes else []
    if gone and table is partitions:
        for numbers in chunks([number for (number,) in gone]):
            forget_partitions(connection, partitions.c.partition_id.in_(numbers))
    elif gone:
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
