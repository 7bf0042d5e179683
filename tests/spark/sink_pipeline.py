"""A pipeline from the topic `in` to the topic `out`, and what has to hold of it whatever happened."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import txnstore
from txnstore.db.opening import open_store
from txnstore.db.store import Store
from txnstore.groups.offsets import read_offsets
from txnstore.log.bounds import read_bounds
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic, find_topics
from txnstore.model import IsolationLevel

PARTITIONS = 2
GROUP = "pipeline"
SECONDS = 240
RECORDS_A_TRANSACTION = 20


def make_topics(url: str) -> None:
    """Make `in` and `out`."""
    with open_store(url) as store:
        for name in ("in", "out"):
            store.write(lambda connection, name=name: create_topic(connection, name, partition_count=PARTITIONS))


def fill(url: str, first: int, count: int) -> None:
    """Produce records with these numbers to `in`, and as many between them in transactions that are aborted."""
    producer = txnstore.Producer({"bootstrap.servers": url, "transactional.id": "filler"})
    producer.init_transactions()
    for begin in range(first, first + count, RECORDS_A_TRANSACTION):
        for outcome in ("aborted", "committed"):
            producer.begin_transaction()
            for number in range(begin, min(begin + RECORDS_A_TRANSACTION, first + count)):
                producer.produce(
                    "in", key=f"key-{number % 7}", value=f"{outcome}-{number}", headers={"number": str(number)}
                )
            # What is still with the producer would not be written at all.
            producer.flush()
            producer.commit_transaction() if outcome == "committed" else producer.abort_transaction()
    producer.close()


def start(
    spark,
    url: str,
    checkpoint: Path,
    *,
    steps=None,
    per_batch: int = 100,
    starting: str = "earliest",
    order: str = "offset",
    group: str | None = GROUP,
):
    """Start the query; it ends with what is there."""
    source = (
        spark.readStream.format("txnstore")
        .option("url", url)
        .option("subscribe", "in")
        .option("includeHeaders", "true")
        .option("startingOffsets", starting)
        .option("txnstore.delivery.order", order)
        .option("maxOffsetsPerTrigger", per_batch)
    )
    if group is not None:
        source = source.option("kafka.group.id", group)
    sink = (
        source.load()
        .selectExpr("key", "value", "headers", "timestamp")
        .writeStream.format("txnstore" if steps is None else "txnstore_stepped")
        .option("url", url)
        .option("topic", "out")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
    )
    if steps is not None:
        sink = sink.option("test.folder", str(steps.folder))
    return sink.start()


def finish(query) -> None:
    """Wait until the query has read what was there when it began; its error is raised."""
    assert query.awaitTermination(SECONDS), "the query has not come to its end in time"


def read(store: Store, topic: str, isolation=IsolationLevel.READ_COMMITTED):
    """The records of a topic, by partition: key, value, headers, timestamp."""
    found: dict[int, list[tuple[object, ...]]] = {}
    (partition_ids,) = [made.partition_ids for made in store.read(lambda connection: find_topics(connection, [topic]))]
    for number, partition_id in enumerate(partition_ids):
        found[number] = []
        position, end = 0, 1
        while position < end:
            page = store.read(
                lambda connection, at={partition_id: position}: fetch(connection, at, isolation=isolation)
            )[partition_id]
            found[number] += [
                (record.key, record.value, list(record.headers), record.timestamp_ms)
                for batch in page.batches
                for record in batch.records()
            ]
            position, end = page.next_offset, page.bounds.end(isolation)
    return found


def check(url: str) -> None:
    """Assert that `out` holds what `in` holds, once, in order, where it belongs, and that nothing is left open."""
    with open_store(url) as store:
        records_in, records_out = read(store, "in"), read(store, "out")
        assert sum(map(len, records_in.values())) > 0
        assert sum(map(len, records_out.values())) == sum(map(len, records_in.values())), "not exactly once"
        for number, records in records_in.items():
            by_key: tuple[dict[bytes | None, list[object]], ...] = (defaultdict(list), defaultdict(list))
            for side, found in zip(by_key, (records, records_out[number]), strict=True):
                for record in found:
                    side[record[0]].append(record)
            assert by_key[1] == by_key[0], f"partition {number}"

        def ends(connection):
            topics = {topic.name: topic.partition_ids for topic in find_topics(connection, ["in", "out"])}
            bounds = read_bounds(connection, [*topics["in"], *topics["out"]])
            committed = read_offsets(connection, GROUP, topics["in"]).offsets
            return (
                {number: bounds[number].high_watermark for number in topics["in"]},
                {number: found.offset for number, found in committed.items()},
                [bounds[number] for number in topics["out"]],
            )

        high_watermarks, committed, out_bounds = store.read(ends)
        assert committed == high_watermarks
        for bounds in out_bounds:
            assert bounds.last_stable_offset == bounds.high_watermark, "something is left open"
