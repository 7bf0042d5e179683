"""Reads without Spark: a batch read, and a stream that is asked in the order in which Spark asks."""

from __future__ import annotations

import json
import uuid
from types import SimpleNamespace

import pytest

from txnstore.spark import source_readers
from txnstore.spark.sink_coordination import decide
from txnstore.spark.sink_run import run_of_query
from txnstore.spark.source_options import read_source_options
from txnstore.spark.source_readers import TxnStoreReader, TxnStoreStreamReader
from txnstore.spark.source_schema import source_schema


def url_of(log):
    return log.store.url.url.render_as_string(hide_password=False)


def reader(log, **given):
    options = {"url": url_of(log), "subscribe": log.name}
    options |= {name.replace("__", "."): value for name, value in given.items()}
    options = {name: value for name, value in options.items() if value is not None}
    read = read_source_options(options, streaming=False)
    return TxnStoreReader(read, source_schema(include_headers=read.include_headers))


def rows_of(reader, partitions=None):
    parts = reader.partitions() if partitions is None else partitions
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def values_of(reader, partitions=None):
    return [row["value"] for row in rows_of(reader, partitions)]


def all_again(log):
    """What startingOffsets says where a group's offsets are not to count: each partition's earliest, by name."""
    return json.dumps({log.name: dict.fromkeys(map(str, range(len(log.partition_ids))), -2)})


class Query:
    """A query as Spark runs it: offsets are written down before a batch, and it may be killed at any time."""

    def __init__(self, log, clock=None, **options):
        given = {"url": url_of(log), "subscribe": log.name}
        given |= {name.replace("__", "."): value for name, value in options.items()}
        self.options = {name: value for name, value in given.items() if value is not None}
        self.written: list[str] = []
        self.committed = 0
        self.clock = clock or (lambda: 0.0)
        self.restart()

    def restart(self):
        options = read_source_options(self.options, streaming=True)
        self.reader = TxnStoreStreamReader(options, source_schema(include_headers=False), self.clock)

    def start(self):
        return json.loads(self.written[self.committed - 1]) if self.committed else self.reader.initialOffset()

    def write_down(self, limit=None):
        """Ask for the next batch; return whether there is one, which is in the checkpoint then."""
        limit = self.reader.getDefaultReadLimit() if limit is None else limit
        start = self.start()
        end = json.dumps(self.reader.latestOffset(json.loads(json.dumps(start)), limit))
        # Spark compares texts.
        if self.committed and end == self.written[self.committed - 1]:
            return False
        self.written.append(end)
        return True

    def run(self):
        """Read the batch that was written down last."""
        assert len(self.written) == self.committed + 1
        end = json.loads(self.written[-1])
        batches = [
            batch for partition in self.reader.partitions(self.start(), end) for batch in self.reader.read(partition)
        ]
        rows = [
            (row["topic"], row["partition"], row["offset"], row["value"])
            for batch in batches
            for row in batch.to_pylist()
        ]
        # Within a partition in the order in which they come.
        return sorted(rows, key=lambda row: row[:2])

    def batch(self, limit=None):
        """Return the values of the next batch, or None if there is none."""
        if not self.write_down(limit):
            return None
        rows = self.run()
        self.committed += 1
        return [value for *_, value in rows]


class Pipeline(Query):
    """A query that reads as a group, with its sink; the group is called as the topic."""

    def __init__(self, log, *, transactional_id=None, **options):
        self.log = log
        self.transactional_id = transactional_id
        self.output: list[bytes] = []
        self.query_id = uuid.uuid4().hex
        of_group = {"kafka.group.id": log.name, "startingOffsets": "group"}
        super().__init__(log, **{"txnstore.delivery.order": "commit", **of_group, **options})

    @property
    def sink_run(self):
        return run_of_query(self.query_id, self.run_id, self.transactional_id)

    def restart(self):
        super().restart()
        self.run_id = uuid.uuid4().hex

    def begin_anew(self):
        """Go on without the checkpoint."""
        self.query_id, self.written, self.committed = uuid.uuid4().hex, [], 0
        self.restart()

    def go_back(self, batches):
        """Go on with an older checkpoint."""
        self.committed = max(self.committed - batches, 0)
        del self.written[self.committed :]
        self.restart()

    def run(self):
        """Read as the tasks do, which Spark tells what they work for."""
        told = {
            "sql.streaming.queryId": self.query_id,
            "streaming.sql.batchId": str(self.committed),
            "spark.jobGroup.id": self.run_id,
        }
        context = SimpleNamespace(get=lambda: SimpleNamespace(getLocalProperty=told.get))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(source_readers, "TaskContext", context)
            return super().run()

    def sink(self):
        """Read the batch that was written down, and decide it as the driver does; return its values if it is new."""
        values = [value for *_, value in self.run()]
        if not decide(self.log.store, self.sink_run, self.committed, ()):
            return None
        self.output += values
        return values

    def batch(self, limit=None):
        if not self.write_down(limit):
            return None
        values = self.sink()
        self.committed += 1
        return values
