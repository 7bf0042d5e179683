"""A topic with transactions in it, written straight into the log, and what the plain reader makes of it."""

from __future__ import annotations

from collections.abc import Sequence

from tests.clients.steps import PATIENCE_SECONDS
from txnstore import Consumer, KafkaError, Message, TopicPartition
from txnstore.db.store import Store
from txnstore.log.append import Append, append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.columns import Codec
from txnstore.log.deleting import delete_records
from txnstore.log.fetch import fetch
from txnstore.log.locked_partitions import Marker, write_markers
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.log.topics import create_topic, grow_topic
from txnstore.model import ControlType, IsolationLevel, ProducerIdentity, Record, StoredRecord


class SourceLog:
    def __init__(self, store: Store, name: str = "settlements", *, partition_count: int = 2) -> None:
        self.store = store
        self.name = name
        topic = store.write(lambda connection: create_topic(connection, name, partition_count=partition_count))
        self.partition_ids = topic.partition_ids

    def grow(self, partition_count: int) -> None:
        topic = self.store.write(lambda connection: grow_topic(connection, self.name, partition_count=partition_count))
        self.partition_ids = topic.partition_ids

    def plain(self, partition: int, *values: bytes | None, timestamp_ms: int = 0) -> None:
        self.records(partition, [Record(value, timestamp_ms=timestamp_ms) for value in values])

    def records(self, partition: int, records: Sequence[Record], codec: Codec = Codec.NONE) -> None:
        self._append(Append(self.partition_ids[partition], encode(records, codec=codec)))

    def begin(self, partition: int, *values: bytes | None) -> ProducerIdentity:
        """Write records of a transaction that stays open."""
        producer = ProducerIdentity(self.store.write(allocate_producer_id), 0)
        self.transactional(producer, partition, [Record(value) for value in values])
        return producer

    def transactional(
        self, producer: ProducerIdentity, partition: int, records: Sequence[Record], codec: Codec = Codec.NONE
    ) -> None:
        batch = encode(records, codec=codec, producer=producer, base_sequence=0, is_transactional=True)
        self._append(Append(self.partition_ids[partition], batch))

    def end(self, producer: ProducerIdentity, kind: ControlType, *partitions: int) -> None:
        newer = ProducerIdentity(producer.producer_id, producer.epoch + 1)
        markers = [Marker(self.partition_ids[partition], newer, kind) for partition in partitions]
        self.store.write(lambda connection: write_markers(connection, markers))

    def commit(self, producer: ProducerIdentity, *partitions: int) -> None:
        self.end(producer, ControlType.COMMIT, *partitions)

    def abort(self, producer: ProducerIdentity, *partitions: int) -> None:
        self.end(producer, ControlType.ABORT, *partitions)

    def delete(self, partition: int, before_offset: int) -> None:
        delete_records(self.store, self.partition_ids[partition], before_offset)

    def read(self, partition: int, isolation: IsolationLevel = IsolationLevel.READ_COMMITTED) -> list[StoredRecord]:
        """Return every record as the plain reader gets it, one by one."""
        partition_id, found = self.partition_ids[partition], []
        position = self.store.read(lambda connection: read_bounds(connection, [partition_id]))[
            partition_id
        ].log_start_offset
        while True:
            asked = {partition_id: position}
            page = self.store.read(lambda connection: fetch(connection, asked, isolation=isolation))[partition_id]  # noqa: B023
            found += [record for batch in page.batches for record in batch.records(position)]
            if page.next_offset == position:
                return found
            position = page.next_offset

    def _append(self, item: Append) -> None:
        self.store.write(lambda connection: append(connection, [item], coordinated=True))


def consume_all(url: str, topic: str, *partitions: int, order: str = "offset") -> list[Message]:
    """Return what the plain consumer gets of these partitions, up to their ends."""
    messages: list[Message] = []
    settings = {"group.id": "oracle", "enable.auto.commit": False, "enable.partition.eof": True}
    with Consumer({"bootstrap.servers": url, "txnstore.delivery.order": order, **settings}) as consumer:
        consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
        ends = 0
        while ends < len(partitions):
            message = consumer.poll(PATIENCE_SECONDS)
            assert message is not None, "the consumer came to no end"
            error = message.error()
            if error is None:
                messages.append(message)
            else:
                assert error.code() == KafkaError._PARTITION_EOF, error
                ends += 1
    return messages
