"""Archives: what was committed is in the file, whole and exactly; and comes back, each record once."""

from __future__ import annotations

import datetime as dt
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import insert, select

from tests.moving.histories import HEADERS, messages
from tests.tools.cluster_changes import change_topic_configs
from txnstore import KafkaException, Producer, TopicPartition
from txnstore.admin import AdminClient, NewTopic
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.cluster.cluster import open_cluster
from txnstore.db.schema import groups, outbox, record_batches, transactions
from txnstore.errors import InvalidRequest, OffsetOutOfRange, UnknownTopicOrPartition, UnsupportedCompression
from txnstore.groups.administration import find_group, list_groups
from txnstore.log import retention
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import RecordBatchRow, decode, encode
from txnstore.log.columns import Codec
from txnstore.log.fetch import fetch
from txnstore.log.outbox.sequencer import drain_outbox
from txnstore.log.topics import get_topic
from txnstore.model import INTERNAL_GROUP_PREFIX, Record
from txnstore.moving import archiving, loading
from txnstore.moving.archive_files import SCHEMA, Contents, new_archive_id, reading
from txnstore.moving.archiving import RecordSelection, export
from txnstore.moving.loading import load
from txnstore.observability.store_figures import FigureLimits, StoreFigures, read_cluster_figures
from txnstore.testing.manual_clock import ManualClock

BASE_MS = 1_600_000_000_000


@pytest.fixture(autouse=True)
def _small_row_groups(monkeypatch):
    monkeypatch.setattr(archiving, "ROW_GROUP_ROWS_MAX", 5)


@pytest.fixture
def cluster(url):
    """A store with the topic `orders`: plain, committed, aborted and open records, headers, nulls, two codecs."""
    admin = AdminClient({"bootstrap.servers": url})
    config = {"retention.ms": "-1", "compression.type": "producer"}
    admin.create_topics([NewTopic("orders", 2, config=config)])["orders"].result()
    for codec in ("none", "gzip"):
        with Producer({"bootstrap.servers": url, "compression.type": codec}) as producer:
            for number in range(12):
                producer.produce(
                    "orders",
                    None if number % 5 == 0 else bytes([number]) * number,
                    None if number % 4 == 0 else f"k{number}",
                    partition=number % 2,
                    timestamp=BASE_MS + number,
                    headers=HEADERS if number % 3 == 0 else None,
                )
            producer.flush()
    for name, ending in (("good", "commit"), ("bad", "abort"), ("open", "none")):
        producer = Producer({"bootstrap.servers": url, "transactional.id": name})
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce("orders", name, partition=0, timestamp=BASE_MS + 100)
        producer.flush()
        if ending != "none":
            getattr(producer, f"{ending}_transaction")()
            producer.close()
        else:
            left = producer
    with open_cluster(url, create=False) as cluster:
        yield cluster
    left.close()


def rows(path):
    return pq.read_table(path).to_pylist()


def as_seen(row):
    """Return a row of an archive as a reader sees the record."""
    milliseconds = (row["timestamp"] - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(milliseconds=1)
    kind = {"CreateTime": 1, "LogAppendTime": 2}[row["timestamp_type"]]
    headers = [(pair["key"], pair["value"]) for pair in row["headers"]]
    return row["partition"], row["offset"], (kind, milliseconds), row["key"], row["value"], headers or None


def test_what_is_committed_is_in_the_file_in_order_and_exactly(cluster, url, tmp_path) -> None:
    path = tmp_path / "orders.parquet"
    heard = []
    done = export(cluster, "orders", path, told=lambda *of: heard.append(of))
    found = rows(path)
    assert [as_seen(row) for row in found] == messages(url, "orders")
    assert done.record_count == len(found) == 25
    assert {row["value"] for row in found if row["is_transactional"]} == {b"good"}
    assert {row["topic"] for row in found} == {"orders"}
    assert [pair["value"] for pair in found[0]["headers"]] == [value for _, value in HEADERS]
    # The marker of `good`, the aborted record with its marker, and what is open are within no range or in no row.
    assert done.contents.ranges == {0: (0, 16), 1: (0, 12)}
    assert heard[-1] == (28, 28)
    with reading(path) as file:
        assert Contents.of(file, "") == done.contents
        assert (done.contents.topic, done.contents.partition_count) == ("orders", 2)
        assert done.contents.config["retention.ms"] == "-1"
        assert file.metadata.num_row_groups == 5
        assert file.schema_arrow.remove_metadata() == SCHEMA
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow_but_first
@pytest.mark.parametrize("part", ["key", "value", "headers"])
def test_a_row_group_is_no_larger_in_memory_than_it_may_be_however_small_a_codec_makes_it(
    url, tmp_path, monkeypatch, part
) -> None:
    path, zeros = tmp_path / "zeros.parquet", bytes(3_000)
    record: dict[str, Any] = {"value": b"", part: {"zeros": zeros} if part == "headers" else zeros}
    AdminClient({"bootstrap.servers": url}).create_topics([NewTopic("zeros", 1)])["zeros"].result()
    with Producer({"bootstrap.servers": url, "compression.type": "gzip", "linger.ms": 1_000}) as producer:
        for _ in range(10):
            producer.produce("zeros", **record)
    monkeypatch.setattr(archiving, "ROW_GROUP_BYTES_MAX", 7_000)
    with open_cluster(url, create=False) as cluster:
        export(cluster, "zeros", path)
    with reading(path) as file:
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
    assert sizes == [3, 3, 3, 1]
    assert [row["offset"] for row in rows(path)] == list(range(10))


@pytest.mark.parametrize("value", [None, bytes(20), bytes(1_000)], ids=["none", "20", "1000"])
@pytest.mark.parametrize("headers", [[], [("", None)], [(f"name-{number}", bytes(20)) for number in range(20)]])
def test_what_a_row_group_counts_is_about_what_it_takes(monkeypatch, headers, value) -> None:
    monkeypatch.setattr(archiving, "ROW_GROUP_ROWS_MAX", 1_000)
    records = [Record(value, b"key-%d" % number, number, tuple(headers)) for number in range(500)]
    columns = encode(records).columns() | {"partition_id": 1, "base_offset": 0, "last_offset": 499}
    batch = decode(cast(RecordBatchRow, SimpleNamespace(**columns)))
    group = archiving._RowGroup("orders", cast(pq.ParquetWriter, None))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        assert group.add(0, batch, 0, 500) == 500
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 < (after - before) / group.size_bytes < 1.2


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("selection", "offsets"),
    [
        (RecordSelection(partitions=[1]), {1: range(12)}),
        (RecordSelection(from_offset=3, until_offset=5), {0: range(3, 5), 1: range(3, 5)}),
        # Of a batch only what is within the range, on both sides.
        (RecordSelection(partitions=[1], from_offset=7, until_offset=11), {1: range(7, 11)}),
        (RecordSelection(partitions=[0], since_ms=BASE_MS + 50), {0: [12]}),
        (RecordSelection(partitions=[1], before_ms=BASE_MS + 5), {1: range(2)}),
        (RecordSelection(partitions=[1], since_ms=BASE_MS + 5, before_ms=BASE_MS + 9), {1: range(2, 4)}),
        (RecordSelection(since_ms=BASE_MS + 10**9), {}),
        (RecordSelection(from_offset=10**6), {}),
        (RecordSelection(until_offset=0), {}),
    ],
)
def test_a_range_is_what_was_asked_for(cluster, tmp_path, selection, offsets) -> None:
    path = tmp_path / "part.parquet"
    done = export(cluster, "orders", path, selection)
    found = rows(path)
    assert {(row["partition"], row["offset"]) for row in found} == {
        (number, offset) for number, those in offsets.items() for offset in those
    }
    assert len(found) == done.record_count
    assert set(done.contents.ranges) == set(selection.partitions or (0, 1))
    assert all(0 <= start <= end for start, end in done.contents.ranges.values())


@pytest.mark.slow
def test_two_archives_that_meet_in_time_have_each_record_once(cluster, tmp_path) -> None:
    paths = tmp_path / "first.parquet", tmp_path / "second.parquet"
    middle = BASE_MS + 6
    export(cluster, "orders", paths[0], RecordSelection(before_ms=middle))
    export(cluster, "orders", paths[1], RecordSelection(since_ms=middle))
    whole = tmp_path / "whole.parquet"
    export(cluster, "orders", whole)

    def places(path):
        return [(row["partition"], row["offset"]) for row in rows(path)]

    assert sorted(places(paths[0]) + places(paths[1])) == places(whole)


def test_an_archive_that_begins_where_another_one_ends_has_what_is_committed_late(url, cluster, tmp_path) -> None:
    paths = tmp_path / "first.parquet", tmp_path / "second.parquet", tmp_path / "third.parquet"
    later = BASE_MS + 10**9
    _, (_, end) = export(cluster, "orders", paths[0], RecordSelection(before_ms=later)).contents.ranges.values()
    with Producer({"bootstrap.servers": url}) as producer:
        producer.produce("orders", b"late", partition=1, timestamp=later - 1)
        producer.produce("orders", b"of then", partition=1, timestamp=later)
    export(cluster, "orders", paths[1], RecordSelection(partitions=[1], since_ms=later))
    export(cluster, "orders", paths[2], RecordSelection(partitions=[1], from_offset=end))
    assert b"late" not in [row["value"] for row in rows(paths[0])]
    assert [[row["value"] for row in rows(path)] for path in paths[1:]] == [[b"of then"], [b"late", b"of then"]]


def test_who_commits_meanwhile_is_in_no_partition_of_the_archive(url, tmp_path, monkeypatch) -> None:
    AdminClient({"bootstrap.servers": url}).create_topics([NewTopic("transfers", 3)])["transfers"].result()
    with Producer({"bootstrap.servers": url, "transactional.id": "bank"}) as producer:
        producer.init_transactions()

        def transfer(value):
            producer.begin_transaction()
            for partition in range(3):
                producer.produce("transfers", value, partition=partition)
            producer.commit_transaction()

        def then_transfer(connection, partition_ids):
            found = read_bounds(connection, partition_ids)
            transfer("late")
            return found

        transfer("early")
        monkeypatch.setattr(archiving, "read_bounds", then_transfer)
        path = tmp_path / "transfers.parquet"
        with open_cluster(url, create=False) as cluster:
            done = export(cluster, "transfers", path)
    assert {row["value"] for row in rows(path)} == {b"early"}
    assert done.contents.ranges == dict.fromkeys(range(3), (0, 2))


@pytest.mark.slow
def test_what_fails_leaves_no_file_and_the_one_that_was_there(cluster, tmp_path, monkeypatch) -> None:
    path = tmp_path / "orders.parquet"
    path.write_bytes(b"before")
    for topic, selection, error in (
        ("none", None, UnknownTopicOrPartition),
        ("orders", RecordSelection(partitions=[7]), UnknownTopicOrPartition),
    ):
        with pytest.raises(error):
            export(cluster, topic, path, selection)

    calls = []

    def deleted_meanwhile(connection, positions, **options):
        calls.append(positions)
        if len(calls) > 1:
            raise OffsetOutOfRange
        return fetch(connection, positions, **options)

    monkeypatch.setattr(archiving, "fetch", deleted_meanwhile)
    with pytest.raises(OffsetOutOfRange):
        export(cluster, "orders", path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.glob(".*.part")) == []
    with pytest.raises(OSError, match="No such file"):
        export(cluster, "orders", tmp_path / "no" / "such")


def test_the_file_is_on_disk_before_it_has_its_name(cluster, tmp_path, monkeypatch) -> None:
    path = tmp_path / "orders.parquet"
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.exists()))
    export(cluster, "orders", path)
    # The file itself first, then the name in its folder.
    assert synced == [False, True]


def test_a_damaged_batch_is_not_archived(cluster, tmp_path) -> None:
    from txnstore.errors import CorruptBatch

    cluster.controller.write(lambda connection: connection.execute(record_batches.update().values(crc=1)))
    with pytest.raises(CorruptBatch):
        export(cluster, "orders", tmp_path / "orders.parquet")
    assert not (tmp_path / "orders.parquet").exists()


def contents_of(found):
    """Return what is the same in another topic."""
    return [(place, stamp, key, value, headers) for place, _, stamp, key, value, headers in found]


def settings_of(cluster):
    return {"bootstrap.servers": cluster.controller.url.url.render_as_string(hide_password=False)}


@pytest.mark.slow
def test_what_is_loaded_is_what_was_exported_and_it_is_loaded_once(cluster, url, tmp_path) -> None:
    path = tmp_path / "orders.parquet"
    export(cluster, "orders", path)
    before = contents_of(messages(url, "orders"))
    heard = []
    done = load(cluster, path, {"bootstrap.servers": url}, "again", told=lambda *of: heard.append(of))
    assert (done.record_count, done.record_count_before) == (25, 0)
    assert [of for of, _ in heard] == sorted({of for of, _ in heard})
    assert heard[-1] == (25, 25)
    assert contents_of(messages(url, "again")) == before
    again = load(cluster, path, {"bootstrap.servers": url}, "again")
    assert (again.record_count, again.record_count_before) == (0, 25)
    assert contents_of(messages(url, "again")) == before
    # Another export is another archive, though it holds the same.
    other = tmp_path / "other.parquet"
    export(cluster, "orders", other)
    assert load(cluster, other, {"bootstrap.servers": url}, "again").record_count == 25
    assert len(messages(url, "again")) == 50
    described = AdminClient({"bootstrap.servers": url}).list_topics("again").topics["again"]
    assert len(described.partitions) == 2


def test_how_far_a_load_is_stands_in_no_list_of_consumers(cluster, url, tmp_path) -> None:
    path = tmp_path / "orders.parquet"
    export(cluster, "orders", path)
    load(cluster, path, {"bootstrap.servers": url}, "again")
    store = cluster.controller
    names = store.read(lambda connection: connection.execute(select(groups.c.group_id)).scalars().all())
    (name,) = (name for name in names if name.startswith(INTERNAL_GROUP_PREFIX))
    assert name not in {group.group_id for group in store.read(list_groups)}
    listed = AdminClient({"bootstrap.servers": url}).list_consumer_groups().result().valid
    assert listed is not None
    assert name not in {group.group_id for group in listed}
    figures = read_cluster_figures(cluster, FigureLimits())[store.database_id]
    assert isinstance(figures, StoreFigures)
    assert name not in {position.group_id for position in figures.positions}
    # It counts row groups: no retention waits for it.
    assert name not in {row.group_id for row in retention._committed(store)}
    assert store.read(lambda connection: find_group(connection, name)) is not None


LIVES = 3


class DyingProducer(Producer):
    """Dies at some place in the first row group that it writes, or just behind it, in the first of its lives."""

    at = ""
    lives: ClassVar[list[str]] = []
    left: ClassVar[list[Callable[[], object]]] = []

    def _come_by(self, place):
        if place == self.at and len(self.lives) < LIVES:
            self.flush()
            self.lives.append(place)
            raise KeyboardInterrupt

    def produce(self, *arguments, **options):
        super().produce(*arguments, **options)
        self._come_by("produce")

    def send_offsets_to_transaction(self, *arguments):
        super().send_offsets_to_transaction(*arguments)
        self._come_by("offsets")

    def commit_transaction(self, *arguments, **options):
        self._come_by("before commit")
        super().commit_transaction(*arguments, **options)
        self._come_by("after commit")

    def close(self, *_):
        """Leave everything as it is, as a process that is killed does; the test closes it."""
        self.left.append(super().close)


@pytest.mark.slow
@pytest.mark.slow_on_postgresql
@pytest.mark.parametrize("at", ["produce", "offsets", "before commit", "after commit"])
def test_a_load_that_dies_anywhere_is_ended_by_the_next_one_and_nothing_is_there_twice(
    cluster, url, tmp_path, monkeypatch, at
) -> None:
    path = tmp_path / "orders.parquet"
    export(cluster, "orders", path)
    before = contents_of(messages(url, "orders"))
    for name, value in (("at", at), ("lives", []), ("left", [])):
        monkeypatch.setattr(DyingProducer, name, value)
    monkeypatch.setattr(loading, "Producer", DyingProducer)
    for _ in range(LIVES):
        with pytest.raises(KeyboardInterrupt):
            load(cluster, path, {"bootstrap.servers": url}, "again")
    done = load(cluster, path, {"bootstrap.servers": url}, "again")
    # What was committed is not written again: three row groups of five.
    assert (done.record_count, done.record_count_before) == ((10, 15) if at == "after commit" else (25, 0))
    assert contents_of(messages(url, "again")) == before
    for close in DyingProducer.left:
        close()


@pytest.mark.slow
def test_old_records_are_not_loaded_into_a_topic_that_would_delete_them(cluster, url, tmp_path) -> None:
    path = tmp_path / "orders.parquet"
    export(cluster, "orders", path)
    admin = AdminClient({"bootstrap.servers": url})
    stamping = NewTopic("stamping", 2, config={"message.timestamp.type": "LogAppendTime"})
    for created in admin.create_topics([NewTopic("short", 2), NewTopic("small", 1), stamping]).values():
        created.result()
    with pytest.raises(InvalidRequest, match=r"retention\.ms of short, 604800000, .* topics alter short --config"):
        load(cluster, path, {"bootstrap.servers": url}, "short")
    assert messages(url, "short") == []
    # There they are as old as their load.
    assert load(cluster, path, {"bootstrap.servers": url}, "stamping").record_count == 25
    with pytest.raises(InvalidRequest, match="2 partitions, and the topic small has 1"):
        load(cluster, path, {"bootstrap.servers": url}, "small")
    empty = tmp_path / "empty.parquet"
    export(cluster, "orders", empty, RecordSelection(until_offset=0))
    assert load(cluster, empty, {"bootstrap.servers": url}, "short").record_count == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "lifted"),
    [
        ({}, {"retention.ms": 604_800_000}),
        ({"retention.ms": "1000"}, {"retention.ms": 1000}),
        ({"retention.ms": str(2**50)}, {}),
        ({"retention.ms": "-1"}, {}),
        ({"message.timestamp.type": "LogAppendTime"}, {}),
        ({"retention.ms": "-1", "retention.bytes": "900"}, {"retention.bytes": 900}),
        ({"retention.bytes": "0"}, {"retention.ms": 604_800_000, "retention.bytes": 0}),
        ({"retention.ms": "5", "retention.bytes": "5", "cleanup.policy": ""}, {}),
    ],
)
def test_a_topic_that_is_made_for_records_keeps_them(cluster, url, tmp_path, config, lifted) -> None:
    path = tmp_path / "orders.parquet"
    change_topic_configs(cluster, "orders", {"retention.ms": None} | config)
    export(cluster, "orders", path)
    told: dict[str, int] = {}
    done = load(cluster, path, {"bootstrap.servers": url}, "again", told_of_limit=told.__setitem__)
    assert (done.record_count, told) == (25, lifted)
    topic = cluster.controller.read(lambda connection: get_topic(connection, "again"))
    assert topic.config == {"compression.type": "producer"} | config | dict.fromkeys(lifted, "-1")


def test_records_are_not_loaded_into_a_topic_whose_size_is_limited(cluster, url, tmp_path) -> None:
    """How much they will take there nobody knows before."""
    path = tmp_path / "orders.parquet"
    export(cluster, "orders", path)
    config = {"retention.ms": "-1", "retention.bytes": "1000000000"}
    AdminClient({"bootstrap.servers": url}).create_topics([NewTopic("sized", 2, config=config)])["sized"].result()
    with pytest.raises(
        InvalidRequest, match=r"may take more than the retention\.bytes of sized, .* retention\.bytes=-1"
    ):
        load(cluster, path, {"bootstrap.servers": url}, "sized")
    change_topic_configs(cluster, "sized", {"retention.bytes": "-1"})
    assert load(cluster, path, {"bootstrap.servers": url}, "sized").record_count == 25
    change_topic_configs(cluster, "sized", {"retention.bytes": "1000000000"})
    assert load(cluster, path, {"bootstrap.servers": url}, "sized").record_count == 0


def test_how_old_records_are_is_told_by_the_clock_of_the_store(url, tmp_path) -> None:
    path, later = tmp_path / "now.parquet", ManualClock(time.time_ns() // 1_000_000 + 8 * 86_400_000)
    with Producer({"bootstrap.servers": url}) as producer:
        producer.produce("now", b"v")
    with open_cluster(url, create=False, clock=later) as cluster:
        export(cluster, "now", path)
        lifted: dict[str, int] = {}
        load(cluster, path, {"bootstrap.servers": url}, "again", told_of_limit=lifted.__setitem__)
        assert lifted == {"retention.ms": 604_800_000}


def test_only_partitions_with_records_need_to_be_there(cluster, url, tmp_path) -> None:
    path = tmp_path / "orders.parquet"
    export(cluster, "orders", path, RecordSelection(since_ms=BASE_MS + 50))
    config = {"retention.ms": "-1"}
    AdminClient({"bootstrap.servers": url}).create_topics([NewTopic("one", 1, config=config)])["one"].result()
    assert load(cluster, path, {"bootstrap.servers": url}, "one").record_count == 1


@pytest.mark.slow
def test_a_load_goes_on_with_what_is_young_enough_and_one_that_is_complete_is_not_refused(
    cluster, url, tmp_path, monkeypatch
) -> None:
    path = tmp_path / "mixed.parquet"
    with Producer({"bootstrap.servers": url}) as producer:
        for number in range(10):
            producer.produce("mixed", b"v", timestamp=BASE_MS if number < 5 else 0)
    export(cluster, "mixed", path)
    settings = {"bootstrap.servers": url}
    for name, value in (("at", "after commit"), ("lives", [""] * (LIVES - 1)), ("left", [])):
        monkeypatch.setattr(DyingProducer, name, value)
    with monkeypatch.context() as patched:
        patched.setattr(loading, "Producer", DyingProducer)
        with pytest.raises(KeyboardInterrupt):
            load(cluster, path, settings, "again")
    for close in DyingProducer.left:
        close()
    change_topic_configs(cluster, "again", {"retention.ms": None})
    done = load(cluster, path, settings, "again")
    assert (done.record_count, done.record_count_before) == (5, 5)
    assert load(cluster, path, settings, "again").record_count == 0
    with pytest.raises(InvalidRequest, match=r"are older than the retention\.ms of mixed"):
        load(cluster, path, settings, "mixed")


@pytest.mark.slow
def test_records_are_loaded_that_are_as_large_as_their_topic_allows(url, tmp_path) -> None:
    path, value = tmp_path / "large.parquet", b"x" * 1_500_000
    config = {"max.message.bytes": "2000000", "retention.ms": "-1"}
    AdminClient({"bootstrap.servers": url}).create_topics([NewTopic("large", 1, config=config)])["large"].result()
    with Producer({"bootstrap.servers": url, "message.max.bytes": 2_000_000}) as producer:
        producer.produce("large", value)
    with open_cluster(url, create=False) as cluster:
        export(cluster, "large", path)
        assert load(cluster, path, {"bootstrap.servers": url}, "again").record_count == 1
    ((_, _, _, _, found, _),) = messages(url, "again")
    assert found == value


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "is_there"), [("none", True), ("gzip", True), ("zstd", True), ("zstd", False)])
def test_records_are_as_small_as_they_were(url, tmp_path, monkeypatch, codec, is_there) -> None:
    """A record that is too large for its topic without a codec comes back, too."""
    path, value = tmp_path / "small.parquet", bytes(50_000 if codec == "none" else 5_000_000)
    settings = {"bootstrap.servers": url}
    with Producer({**settings, "compression.type": codec, "message.max.bytes": 10_000_000}) as producer:
        producer.produce("small", value)

    def refuse(wanted):
        if wanted is not Codec.GZIP:
            raise UnsupportedCompression

    if not is_there:
        monkeypatch.setattr(loading, "require_codec", refuse)
    with open_cluster(url, create=False) as cluster:
        assert export(cluster, "small", path).contents.codec == codec
        assert load(cluster, path, settings, "again").record_count == 1
        codecs = select(record_batches.c.codec).where(record_batches.c.control_type.is_(None))
        found = cluster.controller.read(lambda connection: connection.execute(codecs).scalars().all())
    assert sorted(found) == sorted([Codec.named(codec), Codec.named(codec) if is_there else Codec.GZIP])
    assert [found for *_, found, _ in messages(url, "again")] == [value]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("longest_ms", "timeout_ms"), [("900000", 300_000), ("5000", 5_000)])
def test_a_row_group_has_time_to_be_loaded_but_no_more_than_the_store_allows(
    cluster, url, tmp_path, longest_ms, timeout_ms
) -> None:
    path = tmp_path / "orders.parquet"
    export(cluster, "orders", path)
    store = cluster.controller
    store.write(lambda connection: change_store_settings(connection, {"transaction.max.timeout.ms": longest_ms}))
    load(cluster, path, {"bootstrap.servers": url}, "again")
    ours = select(transactions.c.timeout_ms).where(
        transactions.c.transactional_id.startswith(INTERNAL_GROUP_PREFIX, autoescape=True)
    )
    assert store.read(lambda connection: connection.execute(ours).scalar_one()) == timeout_ms


@pytest.mark.slow
def test_times_that_no_calendar_has_are_loaded_too(url, tmp_path) -> None:
    path, at_ms = tmp_path / "later.parquet", 2**60
    config = {"message.timestamp.after.max.ms": str(2**62)}
    AdminClient({"bootstrap.servers": url}).create_topics([NewTopic("later", 1, config=config)])["later"].result()
    with Producer({"bootstrap.servers": url}) as producer:
        producer.produce("later", "v", timestamp=at_ms)
    with open_cluster(url, create=False) as cluster:
        export(cluster, "later", path)
        lifted: dict[str, int] = {}
        done = load(cluster, path, {"bootstrap.servers": url}, "again", told_of_limit=lifted.__setitem__)
    assert (done.record_count, lifted) == (1, {})
    ((_, _, stamp, _, _, _),) = messages(url, "again")
    assert stamp[1] == at_ms


@pytest.mark.slow
def test_a_time_of_zero_does_not_become_the_present(url, tmp_path) -> None:
    """A producer takes 0 as the present time, so the first millisecond of 1970 becomes the second one."""
    AdminClient({"bootstrap.servers": url}).create_topics([NewTopic("first", 1)])["first"].result()
    with open_cluster(url, create=False) as cluster:
        cluster.controller.write(
            lambda connection: connection.execute(insert(outbox).values(topic="first", timestamp_ms=0))
        )
        drain_outbox(cluster.controller)
        export(cluster, "first", tmp_path / "first.parquet")
        load(cluster, tmp_path / "first.parquet", {"bootstrap.servers": url}, "again")
    assert [stamp[1] for _, _, stamp, *_ in messages(url, "first") + messages(url, "again")] == [0, 1]


def test_what_is_no_archive_or_was_cut_off_is_refused(cluster, url, tmp_path) -> None:
    path = tmp_path / "orders.parquet"
    export(cluster, "orders", path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(InvalidRequest, match="was cut off"):
        load(cluster, path, settings_of(cluster), "again")
    pq.write_table(pa.table({"value": [b"x"]}), path)
    with pytest.raises(InvalidRequest, match="other columns"):
        load(cluster, path, settings_of(cluster), "again")
    pq.write_table(pa.Table.from_pylist([], SCHEMA), path)
    with pytest.raises(InvalidRequest, match="did not make it"):
        load(cluster, path, settings_of(cluster), "again")
    with pytest.raises(OSError, match="No such file"):
        load(cluster, tmp_path / "none", settings_of(cluster), "again")
    assert "again" not in AdminClient({"bootstrap.servers": url}).list_topics().topics


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": 2}, "an archive of version 2, and this txnstore reads version 1"),
        ({"version": None}, "does not say of itself"),
        ({"ranges": [1]}, "does not say of itself"),
        ({"ranges": {"0": [1]}}, "does not say of itself"),
        ({"ranges": {"first": [0, 1]}}, "does not say of itself"),
        ({"ranges": {"0": [0, float("inf")]}}, "does not say of itself"),
        ({"config": None}, "does not say of itself"),
        ({"config": ["retention.ms"]}, "does not say of itself"),
        ({"topic": None}, "does not say of itself"),
        ({"partition_count": "many"}, "does not say of itself"),
        ({"archive_id": "orders\0"}, "does not say of itself"),
        ({"archive_id": 7}, "does not say of itself"),
        (b"\xff{", "does not say of itself"),
        (b"[" * 200_000, "does not say of itself"),
    ],
)
def test_what_says_other_things_of_itself_than_an_archive_is_refused(tmp_path, changes, told) -> None:
    path = tmp_path / "forged.parquet"
    (name,), (text,) = zip(*Contents(new_archive_id(), "orders", 1, {}, {0: (0, 1)}).to_metadata().items(), strict=True)
    stated = json.loads(text)
    assert stated["version"] == 1
    if isinstance(changes, bytes):
        text = changes
    else:
        text = json.dumps({key: value for key, value in (stated | changes).items() if value is not None}).encode()
    pq.write_table(pa.Table.from_pylist([], SCHEMA.with_metadata({name: text})), path)
    with reading(path) as file, pytest.raises(InvalidRequest, match=told):
        Contents.of(file, str(path))


@pytest.mark.slow
def test_an_archive_that_was_written_anew_without_its_statistics_is_refused(cluster, tmp_path) -> None:
    path = tmp_path / "orders.parquet"
    change_topic_configs(cluster, "orders", {"retention.ms": None})
    export(cluster, "orders", path)
    pq.write_table(pq.read_table(path), path, write_statistics=False)
    with pytest.raises(InvalidRequest, match="lacks the age of its records"):
        load(cluster, path, settings_of(cluster), "again")


@pytest.mark.slow
def test_a_record_that_is_refused_leaves_its_row_group_out(cluster, url, tmp_path) -> None:
    path = tmp_path / "orders.parquet"
    export(cluster, "orders", path)
    admin = AdminClient({"bootstrap.servers": url})
    # Its records need keys, and some of the archive have none.
    admin.create_topics([NewTopic("keyed", 2, config={"cleanup.policy": "compact"})])["keyed"].result()
    with pytest.raises(KafkaException):
        load(cluster, path, {"bootstrap.servers": url}, "keyed")
    assert messages(url, "keyed") == []
    assert TopicPartition("keyed", 0).partition == 0
