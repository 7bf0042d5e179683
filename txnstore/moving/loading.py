"""The load: the records of an archive are produced to a topic, each once, however often the load is broken off.

A row group is a transaction.  How many are done is committed with it, as the offset of a group that has the archive's
name: the next one goes on after them.  The records get new offsets; partition, timestamp, key, value and headers
are those of the archive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import pyarrow.parquet as pq
from sqlalchemy import select

from txnstore.clients.consumer.consumer import Consumer
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.clients.producer.producer import Producer
from txnstore.config import TOPIC_SETTINGS, Settings, settings_in_force
from txnstore.db.cluster.catalogue import read_store_settings
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.store import server_now_ms
from txnstore.errors import InvalidRequest, TopicAlreadyExists, UnsupportedCompression
from txnstore.log.cluster_topics import create_topic
from txnstore.log.columns import Codec, require_codec
from txnstore.log.topics import Topic, find_topics
from txnstore.model import INTERNAL_GROUP_PREFIX
from txnstore.moving.archive_files import Contents, reading, row_group_rows

#: How many records are objects at once, besides those in the producer's queue.
_ROWS_AT_ONCE: Final = 1_000
#: Settings of a topic that speak of the databases that it was in.
_OF_THE_CLUSTER: Final = frozenset({"txnstore.placement"})
#: What the records are to a limit that would delete some.
_WHY: Final = {"retention.ms": "are older than", "retention.bytes": "may take more than"}
#: By the clock that retention goes by.
_NOW: Final = select(server_now_ms())
#: How long a call outside a transaction may take.
_CALL_SECONDS: Final = 60.0
#: How long a row group may take, if the store allows as much: one that takes longer is never loaded.
_ROW_GROUP_MS_MAX: Final = 300_000
#: How long a full queue is waited for before it is looked at again.
_QUEUE_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load has done."""

    contents: Contents
    topic: str
    record_count: int
    """How many records this call has written."""

    record_count_before: int
    """How many earlier calls had written."""


def load(
    cluster: Cluster,
    path: Path,
    settings: Mapping[str, Any],
    topic_name: str | None = None,
    *,
    told: Callable[[int, int], None] | None = None,
    told_of_limit: Callable[[str, int], None] | None = None,
) -> Loaded:
    """Produce what is in an archive to a topic; by default to that of its name.

    A topic that is not there is made, with the archive's partitions and settings, but for limits that would delete some
    of the records: `told_of_limit` hears of each by its name and its value in the archive, before anything is loaded.
    `settings` are those of a client: where the database is.  `told` hears how many records are done, and of how many.

    Raises:
        OSError: the file cannot be read.
        InvalidRequest: it is not an archive, or is damaged; or the topic has fewer partitions, or would delete records.
        KafkaException: the records were refused, or the database cannot be reached; the next call goes on.
        TxnStoreError: a database refuses or cannot be reached.
    """
    with reading(path) as file:
        contents = Contents.of(file, str(path))
        name = topic_name or contents.topic
        now_ms: int = cluster.controller.read(lambda connection: connection.execute(_NOW).scalar_one())
        topic, lifted = _topic(cluster, name, contents, file, now_ms)
        if told_of_limit is not None:
            for limit, value in lifted.items():
                told_of_limit(limit, value)
        needed = max((number for number, (start, end) in contents.ranges.items() if start < end), default=-1) + 1
        if len(topic.partition_ids) < needed:
            raise InvalidRequest(
                f"the archive has records of {needed} partitions, and the topic {name} has"
                f" {len(topic.partition_ids)}: add some with `txnstore topics alter`"
            )
        count = file.metadata.num_row_groups
        rows = [file.metadata.row_group(number).num_rows for number in range(count)]
        longest_ms: int = cluster.controller.read(read_store_settings)["transaction.max.timeout.ms"]
        with _Loading(settings, name, contents, min(_ROW_GROUP_MS_MAX, longest_ms)) as loading:
            done = loading.row_groups_done()
            for limit, value in _limits(topic.settings, file, now_ms, done).items():
                # Retention would take some of them, and readers would get an archive without its beginning.
                raise InvalidRequest(
                    f"records of the archive {_WHY[limit]} the {limit} of {name}, {value}, and would be deleted: keep"
                    f" them with `txnstore topics alter {name} --config {limit}=-1`, or load them into another topic"
                )
            for number in range(done, count):
                loading.load(file, number)
                if told is not None:
                    told(sum(rows[: number + 1]), sum(rows))
    return Loaded(contents, name, sum(rows[done:]), sum(rows[:done]))


def topic_in(path: Path) -> str:
    """Return the name of the topic that an archive is of.

    Raises:
        OSError: the file cannot be read.
        InvalidRequest: it is not an archive.
    """
    with reading(path) as file:
        return Contents.of(file, str(path)).topic


def _limits(topic_settings: Settings, file: pq.ParquetFile, now_ms: int, first_row_group: int = 0) -> Mapping[str, int]:
    """Return by name which limits of a topic would delete, or may delete, records in these row groups."""
    groups = [file.metadata.row_group(number) for number in range(first_row_group, file.metadata.num_row_groups)]
    groups = [group for group in groups if group.num_rows]
    if not groups or "delete" not in topic_settings["cleanup.policy"]:
        return {}
    limits = {}
    if _has_older(topic_settings, file, groups, now_ms):
        limits["retention.ms"] = topic_settings["retention.ms"]
    # How much they take there depends on their batches and on a codec.
    if topic_settings["retention.bytes"] >= 0:
        limits["retention.bytes"] = topic_settings["retention.bytes"]
    return limits


def _has_older(topic_settings: Settings, file: pq.ParquetFile, groups: list[Any], now_ms: int) -> bool:
    """Return whether some records are too old for the topic."""
    kept_ms: int = topic_settings["retention.ms"]
    if kept_ms < 0 or topic_settings["message.timestamp.type"] == "LogAppendTime":
        return False
    column = file.schema_arrow.get_field_index("timestamp")
    for statistics in (group.column(column).statistics for group in groups):
        if statistics is None or not statistics.has_min_max:
            raise InvalidRequest("the archive lacks the age of its records, so it was changed after the export")
        # As it is stored: no calendar has all of them.
        if statistics.min_raw < now_ms - kept_ms:
            return True
    return False


def _topic(
    cluster: Cluster, name: str, contents: Contents, file: pq.ParquetFile, now_ms: int
) -> tuple[Topic, Mapping[str, int]]:
    """Return the topic, and by name the archive's limits if it was made without them."""
    found = cluster.controller.read(lambda connection: find_topics(connection, [name]))
    if found:
        return found[0], {}
    config = {key: value for key, value in contents.config.items() if key not in _OF_THE_CLUSTER}
    lifted = _limits(settings_in_force(TOPIC_SETTINGS, config), file, now_ms)
    config |= dict.fromkeys(lifted, "-1")
    try:
        topic = create_topic(cluster, name, partition_count=contents.partition_count, config=config)
    except TopicAlreadyExists:
        # Another client was faster.
        (topic,) = cluster.controller.read(lambda connection: find_topics(connection, [name]))
        return topic, {}
    return topic, lifted


def _usable(codec: str) -> str:
    """Return the codec, or where its package is missing, one that comes with Python.

    A batch may become larger by that one, and too large for its topic; without any it would be larger still.
    """
    try:
        require_codec(Codec.named(codec))
    except UnsupportedCompression:
        return Codec.GZIP.label
    return codec


class _Loading:
    """The producer of one load, and the group by which it remembers how far it is."""

    def __init__(self, settings: Mapping[str, Any], topic: str, contents: Contents, row_group_ms: int) -> None:
        name = f"{INTERNAL_GROUP_PREFIX}load_{contents.archive_id}_{topic}"
        self._topic = topic
        # Of the group's offsets, the one of partition 0 counts row groups.
        self._place = TopicPartition(topic, 0)
        self._consumer = Consumer({**settings, "group.id": name, "enable.auto.commit": False})
        own = {
            "transactional.id": name,
            "transaction.timeout.ms": row_group_ms,
            # The topic says what is too large.
            "message.max.bytes": 1_000_000_000,
            "compression.type": _usable(contents.codec),
        }
        self._producer = Producer({**settings, **own})

    def __enter__(self) -> Self:
        """Take over from the call that has loaded it before."""
        self._producer.init_transactions(_CALL_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        """Give up what is not committed."""
        self._producer.close()
        self._consumer.close()

    def row_groups_done(self) -> int:
        """Return how many row groups are in the topic."""
        (place,) = self._consumer.committed([self._place], _CALL_SECONDS)
        return max(0, place.offset)

    def load(self, file: pq.ParquetFile, number: int) -> None:
        """Write one row group, or nothing of it."""
        producer = self._producer
        producer.begin_transaction()
        for row in row_group_rows(file, number, _ROWS_AT_ONCE):
            self._produce(row)
        position = TopicPartition(self._topic, self._place.partition, number + 1)
        producer.send_offsets_to_transaction([position], self._consumer.consumer_group_metadata())
        producer.commit_transaction()

    def _produce(self, row: Mapping[str, Any]) -> None:
        headers = [(pair["key"], pair["value"]) for pair in row["headers"]]
        while True:
            try:
                self._producer.produce(
                    self._topic,
                    row["value"],
                    row["key"],
                    partition=row["partition"],
                    # A producer takes 0 as the present time.
                    timestamp=row["timestamp"] or 1,
                    headers=headers or None,
                )
            except BufferError:
                self._producer.poll(_QUEUE_SECONDS)
            else:
                return
