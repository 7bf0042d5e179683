"""The load: the records of an archive are produced to a topic, each once, however often the load is broken off.

A row group is a transaction.  How many are done is committed with it, as the offset of a group that has the archive's
name: the next one goes on after them.  The records get new offsets; partition, timestamp, key, value and headers
are those of the archive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import pyarrow.parquet as pq

from txnstore.clients.consumer.consumer import Consumer
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.clients.producer.producer import Producer
from txnstore.config import TOPIC_SETTINGS, Settings, settings_in_force
from txnstore.db.cluster.catalogue import read_store_settings
from txnstore.db.cluster.cluster import Cluster
from txnstore.errors import InvalidRequest, TopicAlreadyExists
from txnstore.log.cluster_topics import create_topic
from txnstore.log.topics import Topic, find_topics
from txnstore.model import INTERNAL_GROUP_PREFIX
from txnstore.moving.archive_files import Contents, reading, row_group_rows

#: How many records are objects at once, besides those in the producer's queue.
_ROWS_AT_ONCE: Final = 1_000
#: Settings of a topic that speak of the databases that it was in.
_OF_THE_CLUSTER: Final = frozenset({"txnstore.placement"})
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

    outlived_ms: int | None = None
    """The archive's `retention.ms`, if the topic was made to keep its records for ever: some are older than that."""


def load(
    cluster: Cluster,
    path: Path,
    settings: Mapping[str, Any],
    topic_name: str | None = None,
    *,
    told: Callable[[int, int], None] | None = None,
) -> Loaded:
    """Produce what is in an archive to a topic; by default to that of its name.

    A topic that is not there is made, with the archive's partitions and settings; it keeps records for ever if some are
    too old for these.  `settings` are those of a client:
    where the database is.  `told` hears how many records are done, and of how many.

    Raises:
        OSError: the file cannot be read.
        InvalidRequest: it is not an archive, or is damaged; or the topic has fewer partitions, or would delete records.
        KafkaException: the records were refused, or the database cannot be reached; the next call goes on.
        TxnStoreError: a database refuses or cannot be reached.
    """
    with reading(path) as file:
        contents = Contents.of(file, str(path))
        name = topic_name or contents.topic
        topic, outlived_ms = _topic(cluster, name, contents, file)
        needed = max(contents.ranges, default=-1) + 1
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
            if (kept_ms := _outlived_ms(topic.settings, file, done)) is not None:
                # Retention would take some of them, and readers would get an archive without its beginning.
                raise InvalidRequest(
                    f"records of the archive are older than the retention.ms of {name}, {kept_ms}, and would be"
                    f" deleted: keep them with `txnstore topics alter {name} --config retention.ms=-1`, or load them"
                    " into another topic"
                )
            for number in range(done, count):
                loading.load(file, number)
                if told is not None:
                    told(sum(rows[: number + 1]), sum(rows))
    return Loaded(contents, name, sum(rows[done:]), sum(rows[:done]), outlived_ms)


def _outlived_ms(topic_settings: Settings, file: pq.ParquetFile, first_row_group: int = 0) -> int | None:
    """Return how long a topic keeps records, if some in these row groups are too old for it."""
    kept_ms: int = topic_settings["retention.ms"]
    stamps_itself = topic_settings["message.timestamp.type"] == "LogAppendTime"
    if "delete" not in topic_settings["cleanup.policy"] or kept_ms < 0 or stamps_itself:
        return None
    column = file.schema_arrow.get_field_index("timestamp")
    earliest_ms = time.time() * 1000 - kept_ms
    groups = [file.metadata.row_group(number) for number in range(first_row_group, file.metadata.num_row_groups)]
    for statistics in (group.column(column).statistics for group in groups if group.num_rows):
        if statistics is None or not statistics.has_min_max:
            raise InvalidRequest("the archive does not say how old its records are: it is not as it was exported")
        # As it is stored: no calendar has all of them.
        if statistics.min_raw < earliest_ms:
            return kept_ms
    return None


def _topic(cluster: Cluster, name: str, contents: Contents, file: pq.ParquetFile) -> tuple[Topic, int | None]:
    """Return the topic, and the archive's retention.ms if it was made without."""
    found = cluster.controller.read(lambda connection: find_topics(connection, [name]))
    if found:
        return found[0], None
    config = {key: value for key, value in contents.config.items() if key not in _OF_THE_CLUSTER}
    outlived_ms = _outlived_ms(settings_in_force(TOPIC_SETTINGS, config), file)
    if outlived_ms is not None:
        config["retention.ms"] = "-1"
    try:
        topic = create_topic(cluster, name, partition_count=contents.partition_count, config=config)
    except TopicAlreadyExists:
        # Another client was faster.
        (topic,) = cluster.controller.read(lambda connection: find_topics(connection, [name]))
        return topic, None
    return topic, outlived_ms


class _Loading:
    """The producer of one load, and the group by which it remembers how far it is."""

    def __init__(self, settings: Mapping[str, Any], topic: str, contents: Contents, row_group_ms: int) -> None:
        name = f"{INTERNAL_GROUP_PREFIX}load_{contents.archive_id}_{topic}"
        self._topic = topic
        # Of the group's offsets, the one of partition 0 counts row groups.
        self._place = TopicPartition(topic, 0)
        self._consumer = Consumer({**settings, "group.id": name, "enable.auto.commit": False})
        # The topic says what is too large.
        own = {"transactional.id": name, "transaction.timeout.ms": row_group_ms, "message.max.bytes": 1_000_000_000}
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
