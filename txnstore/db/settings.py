"""The settings of a store as they stand in its table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, bindparam, delete, select
from sqlalchemy.dialects.postgresql import insert as upsert

from txnstore.config import STORE_SETTINGS, Settings, check_setting_name, parse_setting
from txnstore.db.cluster.membership import lock_catalogue
from txnstore.db.schema import store_configs

_ALL: Final = select(store_configs.c.name, store_configs.c.value)
_INSERT: Final = upsert(store_configs)
_SET: Final = _INSERT.on_conflict_do_update(
    index_elements=[store_configs.c.name], set_={"value": _INSERT.excluded.value}
)
_RESET: Final = delete(store_configs).where(store_configs.c.name == bindparam("of_name"))


def read_store_settings(connection: Connection) -> Settings:
    """Return the store's settings in force.

    Raises:
        InvalidConfiguration: somebody has written a value into the table that the setting does not take.
    """
    return Settings(STORE_SETTINGS, read_store_config(connection))


def read_store_config(connection: Connection) -> dict[str, str]:
    """Return the settings that were set, as text."""
    return {row.name: row.value for row in connection.execute(_ALL)}


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
            connection.execute(_RESET, {"of_name": name})
        else:
            connection.execute(_SET, {"name": name, "value": text})
