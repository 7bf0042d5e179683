"""The records of the outbox's rows: which topic and partition each belongs to, or why it cannot become a record.

A row is judged before anything is written for it: what the append would refuse, it would refuse for all rows.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from sqlalchemy import Connection, Row

from txnstore.config import Settings, is_compacted
from txnstore.db.cluster.catalogue import read_store_settings
from txnstore.errors import InvalidTopic, UnknownTopicOrPartition, WrongCluster
from txnstore.log.append import Append
from txnstore.log.codec import TIMESTAMP_MS_MAX, RecordColumns, encode_columns
from txnstore.log.columns import DamagedColumn, codec_at_hand, unpack_record_headers
from txnstore.log.partitioners import partitions_of_keys
from txnstore.log.topics import Topic, check_topic_name, ensure_topic, find_topics
from txnstore.model import Header

#: About how much goes into one batch: what producers send by default (batch.size).
BATCH_BYTES: Final = 1_000_000
#: What a record takes beside its key, value and headers, at most: positions and a timestamp.
RECORD_OVERHEAD_BYTES: Final = 64
#: How many topics one statement asks for; databases limit its parameters.
_NAMES_MAX: Final = 1_000
#: The producers' default.
PARTITIONER: Final = "consistent_random"

#: Where the columns stand in a row that was taken.
OUTBOX_ID, _, TOPIC, PARTITION_NUMBER, KEY = range(5)

#: A row on its way into a batch: its number, key, value, timestamp and headers.
_Item = tuple[int, bytes | None, bytes | None, int, Sequence[Header]]


@dataclass(frozen=True, slots=True)
class Destinations:
    """The topics that some rows name, as they are now."""

    topics: dict[str, Topic]
    refused: dict[str, str]
    """Why a topic cannot be written to."""

    missing: frozenset[str]
    """Those of them that are not there."""

    database_id: int
    """The database of the outbox: what lives in another one is out of its reach."""

    def partition_ids(self, wanted: Iterable[tuple[str, int | None]]) -> list[int]:
        """Return the partitions of this database that rows with these topics and partitions may go to."""
        found: set[int] = set()
        for name, wanted_number in wanted:
            topic = self.topics.get(name)
            for number, partition_id in enumerate(() if topic is None else topic.partition_ids):
                if wanted_number in (None, number) and topic is not None and topic.leaders[number] == self.database_id:
                    found.add(partition_id)
        return sorted(found)


@dataclass(slots=True)
class Sorted:
    """Rows on their way into partitions."""

    appends: list[Append] = field(default_factory=list)
    record_count: int = 0
    refusals: dict[int, str] = field(default_factory=dict)
    """By row, why it cannot become a record."""

    first_unsure_id: int | None = None
    """The first of them that could, with other topics and settings."""

    def refuse(self, outbox_id: int, why: str, *, may_change: bool) -> None:
        """Take note that a row cannot become a record."""
        self.refusals[outbox_id] = why
        if may_change and (self.first_unsure_id is None or outbox_id < self.first_unsure_id):
            self.first_unsure_id = outbox_id


def find_destinations(connection: Connection, names: Collection[str], database_id: int) -> Destinations:
    """Return the topics with these names; what is not there is created if the store creates topics by their use.

    Topics come before heads: a creator waits only for another creator.
    """
    refused: dict[str, str] = {}
    wanted: list[str] = []
    for name in sorted(set(names)):
        try:
            check_topic_name(name)
        except InvalidTopic as error:
            refused[name] = str(error)
        else:
            wanted.append(name)
    topics: dict[str, Topic] = {}
    for start in range(0, len(wanted), _NAMES_MAX):
        topics.update((topic.name, topic) for topic in find_topics(connection, wanted[start : start + _NAMES_MAX]))
    missing = [name for name in wanted if name not in topics]
    settings = read_store_settings(connection) if missing else None
    for name in missing:
        try:
            topics[name] = _create(connection, name, settings)
        except (InvalidTopic, UnknownTopicOrPartition, WrongCluster) as error:
            refused[name] = str(error)
    return Destinations(topics, refused, frozenset(missing), database_id)


def _create(connection: Connection, name: str, settings: Settings | None) -> Topic:
    assert settings is not None
    if not settings["auto.create.topics.enable"]:
        raise UnknownTopicOrPartition(f"there is no topic {name}, and the store does not create topics on first use")
    return ensure_topic(connection, name, partition_count=settings["num.partitions"])


def sort_rows(rows: Sequence[Row[Any]], found: Destinations, now_ms: int, random_: random.Random) -> Sorted:
    """Return the rows as batches for their partitions, in the order given, and why some cannot become records.

    Rows without key and partition go to one partition of each topic, so that they stay in order and make full batches.
    """
    result = Sorted()
    by_topic: dict[str, list[Row[Any]]] = {}
    for row in rows:
        by_topic.setdefault(row[TOPIC], []).append(row)
    for name, topic_rows in by_topic.items():
        topic = found.topics.get(name)
        if topic is None:
            for row in topic_rows:
                result.refuse(row[OUTBOX_ID], found.refused[name], may_change=name in found.missing)
            continue
        target = _Target.of(topic, found.database_id, now_ms, random_)
        # The append asks how old they are now; here it was judged by when each of them came.
        judged = replace(topic, settings={**topic.settings, "message.timestamp.before.max.ms": TIMESTAMP_MS_MAX})
        for number, items in _sort_topic(target, topic_rows, result).items():
            _encode_all(topic.partition_ids[number], judged, items, result)
    return result


@dataclass(frozen=True, slots=True)
class _Target:
    """A topic that rows go to, with what is asked of each of them."""

    topic: Topic
    own: frozenset[int]
    """The numbers of the partitions in the outbox's database."""

    keyless: int
    """The partition of what may go anywhere: where this outbox reaches."""

    now_ms: int
    before_max_ms: int
    earliest_ms: int
    latest_ms: int

    @classmethod
    def of(cls, topic: Topic, database_id: int, now_ms: int, random_: random.Random) -> Self:
        own = [number for number, leader in enumerate(topic.leaders) if leader == database_id]
        before_max_ms = latest_ms = TIMESTAMP_MS_MAX
        if topic.settings["message.timestamp.type"] == "CreateTime":
            before_max_ms = topic.settings["message.timestamp.before.max.ms"]
            latest_ms = min(latest_ms, now_ms + topic.settings["message.timestamp.after.max.ms"])
        earliest_ms = max(0, now_ms - before_max_ms)
        keyless = random_.choice(own or [0])
        return cls(topic, frozenset(own), keyless, now_ms, before_max_ms, earliest_ms, latest_ms)

    def took(self, timestamp_ms: int, inserted_ms: int | None) -> bool:
        """Return whether the topic would have taken a timestamp when its row came: that it waited is not its fault."""
        return inserted_ms is not None and max(0, inserted_ms - self.before_max_ms) <= timestamp_ms <= self.latest_ms


def _sort_topic(target: _Target, rows: Sequence[Any], result: Sorted) -> dict[int, list[_Item]]:
    """Return the rows of a topic by partition number, without those that cannot become records."""
    keys = [row[KEY] for row in rows if row[PARTITION_NUMBER] is None and row[KEY]]
    hashed = iter(partitions_of_keys(PARTITIONER, keys, len(target.topic.partition_ids)))
    sorted_: dict[int, list[_Item]] = {}
    for outbox_id, _, _, number, key, value, headers_text, timestamp_ms, inserted_ms in rows:
        if number is None:
            number = next(hashed) if key else target.keyless  # noqa: PLW2901 - where it goes
        if timestamp_ms is None:
            timestamp_ms = target.now_ms  # noqa: PLW2901 - when it was
        why, may_change = None, True
        headers: Sequence[Header] = ()
        if number not in target.own:
            # With more partitions a key goes elsewhere, and anywhere may be here; created again, a topic is led anew.
            why, may_change = _why_no_partition(target.topic, number), number >= 0
        elif key is None and is_compacted(target.topic.settings):
            why = f"topic {target.topic.name} is compacted, and its records need a key"
        elif not (target.earliest_ms <= timestamp_ms <= target.latest_ms or target.took(timestamp_ms, inserted_ms)):
            why = _why_no_time(target, timestamp_ms, inserted_ms)
        elif headers_text is not None:
            try:
                headers = _headers(headers_text)
            except (DamagedColumn, UnicodeEncodeError) as error:
                why = f"its headers are not [name, value, ...] with text, [hex digits] or null as values ({error})"
                may_change = False
        if why is None:
            sorted_.setdefault(number, []).append((outbox_id, key, value, timestamp_ms, headers))
        else:
            result.refuse(outbox_id, why, may_change=may_change)
    return sorted_


def _headers(text: str) -> Sequence[Header]:
    headers = unpack_record_headers(text)
    for name, _ in headers:
        name.encode()
    return headers


def _why_no_partition(topic: Topic, number: int) -> str:
    count = len(topic.partition_ids)
    if not 0 <= number < count:
        return f"topic {topic.name} has partitions 0 to {count - 1}, not {number}"
    return (
        f"partition {number} of topic {topic.name} lives in another database of the cluster, and an outbox reaches"
        " only those in its own; produce to it with a producer"
    )


def _why_no_time(target: _Target, timestamp_ms: int, inserted_ms: int | None) -> str:
    if timestamp_ms < 0:
        return f"its timestamp is {timestamp_ms}, and timestamps are milliseconds since 1970 and never below 0"
    if timestamp_ms > target.latest_ms:
        side, of = "after", f"{timestamp_ms - target.now_ms} ms after the store's time"
    else:
        # A store may have a clock of its own, behind the database's.
        came_ms = target.now_ms if inserted_ms is None else min(target.now_ms, inserted_ms)
        side, of = "before", f"{came_ms - timestamp_ms} ms before its INSERT"
    return (
        f"its timestamp lies {of}, more than the topic's message.timestamp.{side}.max.ms; SET timestamp_ms = NULL,"
        " refusal = NULL gives it the time at which it becomes a record"
    )


def _encode_all(partition_id: int, topic: Topic, items: list[_Item], result: Sorted) -> None:
    largest: int = topic.settings["max.message.bytes"]
    bytes_max = min(BATCH_BYTES, largest)
    start = size_bytes = 0
    for index, (_, key, value, _, headers) in enumerate(items):
        item_bytes = RECORD_OVERHEAD_BYTES + len(key or b"") + len(value or b"")
        for name, content in headers:
            item_bytes += RECORD_OVERHEAD_BYTES + len(name) + len(content or b"")
        if index > start and size_bytes + item_bytes > bytes_max:
            _encode(partition_id, topic, items[start:index], result)
            start, size_bytes = index, 0
        size_bytes += item_bytes
    _encode(partition_id, topic, items[start:], result)


def _encode(partition_id: int, topic: Topic, items: list[_Item], result: Sorted) -> None:
    """Add one batch, or two halves of one that came out larger than the topic allows."""
    columns = RecordColumns(
        [item[1] for item in items],
        [item[2] for item in items],
        [item[3] for item in items],
        [item[4] for item in items],
    )
    batch = encode_columns(columns, codec=codec_at_hand(topic.settings["compression.type"]))
    largest: int = topic.settings["max.message.bytes"]
    if batch.size_bytes <= largest:
        result.appends.append(Append(partition_id, batch, topic.settings))
        result.record_count += len(items)
    elif len(items) == 1:
        why = f"it takes {batch.size_bytes} bytes, above the max.message.bytes of topic {topic.name}, {largest}"
        result.refuse(items[0][0], why, may_change=True)
    else:
        half = len(items) // 2
        _encode(partition_id, topic, items[:half], result)
        _encode(partition_id, topic, items[half:], result)
