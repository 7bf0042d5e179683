"""Reads without Spark: a batch read, and a stream that is asked in the order in which Spark asks."""

from __future__ import annotations

import json

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
