"""This file is changes of topics' settings after the topics were made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, bindparam, delete, select
from sqlalchemy.dialects.postgresql import insert as upsert

from txnstore.config import TOPIC_SETTINGS, check_setting_name, check_topic_config, setting_text
from txnstore.db.cluster.membership import lock_catalogue, read_databases
from txnstore.db.schema import topic_configs, topics
from txnstore.log.placement import PLACEMENT, check_placement
from txnstore.log.topics import Topic, get_topic

# Two that change the settings of a topic one after the other see each other's changes.
_LOCK: Final = select(topics.c.topic_id).where(topics.c.topic_id == bindparam("of_topic_id")).with_for_update()
_INSERT: Final = upsert(topic_configs)
_SET: Final = _INSERT.on_conflict_do_update(
    index_elements=[topic_configs.c.topic_id, topic_configs.c.name], set_={"value": _INSERT.excluded.value}
)
_RESET: Final = delete(topic_configs).where(
    topic_configs.c.topic_id == bindparam("of_topic_id"), topic_configs.c.name == bindparam("of_name")
)


def lock_topic_configs(connection: Connection, name: str) -> Topic:
    """Return the topic; nobody else changes its settings until the database transaction ends.

    Raises:
        UnknownTopicOrPartition: there is no topic of this name.
    """
    lock_catalogue(connection)
    topic = get_topic(connection, name)
    connection.execute(_LOCK, {"of_topic_id": topic.topic_id})
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
            connection.execute(_RESET, {"of_topic_id": topic.topic_id, "of_name": name})
        else:
            connection.execute(_SET, {"topic_id": topic.topic_id, "name": name, "value": text})
