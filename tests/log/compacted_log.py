"""A compacted topic of one test: records and transactions are put there, and what is left is read."""

from __future__ import annotations

import itertools

from sqlalchemy import select

from tests.clients.consumer.log_writer import LogWriter
from txnstore.db.schema import partition_storage, record_batches
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.compaction import compact_partitions
from txnstore.log.fetch import fetch
from txnstore.log.partition_storage import batch_bytes
from txnstore.log.topics import DEFAULT_TOPIC_SETTINGS, change_topic_configs, lock_topic_configs
from txnstore.model import IsolationLevel, Record

_numbers = itertools.count(1)


class CompactedLog(LogWriter):
    """A compacted topic of this test alone, with time that passes when told."""

    def __init__(self, store, clock, **config):
        super().__init__(store)
        self.clock = clock
        self.name = f"compacted-{next(_numbers)}"
        self.topic(self.name, 2)
        self.configure(**{"cleanup_policy": "compact", "min_cleanable_dirty_ratio": 0, **config})
        self.partition = self.partition_id(self.name, 0)

    def configure(self, **config):
        texts = {name.replace("_", "."): str(value) for name, value in config.items()}
        self.store.write(lambda c: change_topic_configs(c, lock_topic_configs(c, self.name), texts))

    def encoded(self, *records, **more):
        now_ms = self.clock.now_ms()
        return encode([Record(value, key=key, timestamp_ms=now_ms) for key, value in records], **more)

    def put(self, *records, partition=None, topic_settings=None, **more):
        """Append a batch of keys and values of this moment; return where it begins."""
        batch = self.encoded(*records, **more)
        item = Append(partition or self.partition, batch, topic_settings or DEFAULT_TOPIC_SETTINGS)
        return self.store.write(lambda c: append(c, [item]))[0].base_offset

    def begin(self):
        return Transaction(self)

    def commit(self, *records):
        """Append records in a transaction of their own."""
        transaction = self.begin()
        transaction.put(*records)
        transaction.end(commit=True)

    def run(self):
        return compact_partitions(self.store)

    def read(self, isolation=IsolationLevel.READ_COMMITTED):
        """Return offset, key and value of every record that a reader gets, from the first on."""
        position, found = 0, []
        while True:
            pages = self.store.read(lambda c, at=position: fetch(c, {self.partition: at}, isolation=isolation))
            page = pages[self.partition]
            found += [(r.offset, r.key, r.value) for batch in page.batches for r in batch.records(position)]
            if page.next_offset == position:
                return found
            position = page.next_offset

    def table(self):
        """Return what a reader ends with who keeps the newest value of each key."""
        found = {key: value for _, key, value in self.read()}
        return {key: value for key, value in found.items() if value is not None}

    def rows(self, table):
        of_partition = select(table).where(table.c.partition_id == self.partition).order_by(*table.primary_key.columns)
        return self.store.read(lambda c: c.execute(of_partition).all())

    def assert_storage_is_true(self):
        (storage,) = self.rows(partition_storage)
        batches = self.rows(record_batches)
        counted = [batch_bytes(batch.size_bytes) for batch in batches if batch.last_offset < storage.counted_offset]
        assert storage.size_bytes == sum(counted)
        compacted = [batch_bytes(batch.size_bytes) for batch in batches if batch.last_offset < storage.compacted_offset]
        assert storage.compacted_bytes == sum(compacted)


class Transaction:
    """A transaction of a producer of its own."""

    def __init__(self, log):
        self.log = log
        self.transactional_id = f"compacted-writer-{next(_numbers)}"
        self.identity = log.coordinator.init_producer_id(self.transactional_id, 900_000).identity
        self.sequence = 0

    def put(self, *records):
        batch = self.log.encoded(*records, producer=self.identity, base_sequence=self.sequence, is_transactional=True)
        self.sequence += len(records)
        item = Append(self.log.partition, batch)
        self.log.coordinator.append(self.transactional_id, self.identity, [item])

    def end(self, *, commit):
        self.log.coordinator.end_transaction(self.transactional_id, self.identity, commit=commit)
