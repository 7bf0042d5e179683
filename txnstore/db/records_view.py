"""The view `records`: the log as SQL users see it, one row a record.

The view opens batches with nothing but SQL, in time that grows with the number of records and not with the size of
their batches.  What is pushed down to the index of the batches, on both databases, are conditions on `topic`,
`partition` and the columns `batch_...`.  No database derives a condition on batches from one on `offset` or
`timestamp_ms`: these are checked record by record.  So a query for a few records of a long log says both:

    SELECT * FROM txnstore.records
    WHERE topic = 'orders' AND partition = 0
      AND batch_last_offset >= 5000 AND batch_base_offset < 6000  -- which batches to open
      AND "offset" >= 5000 AND "offset" < 6000                    -- which of their records to show

`batch_last_offset` leads an index, so that a lower bound on it is where the reading begins: every record at or above an
offset is in a batch at or above it.  So it is with `batch_running_max_timestamp_ms` and timestamps on SQLite;
PostgreSQL's index by time leaves out groups of pages, once autovacuum has seen them.  An upper bound on
`batch_base_offset` keeps batches from being opened, not from being looked at.  There is none for timestamps, which need
not ascend.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

#: Expressions that are the same on both databases; `finished` is how the transaction of a batch has ended.
STATUS: Final = """CASE
        WHEN NOT batch.is_transactional OR finished.outcome = 1 THEN 'committed'
        WHEN finished.outcome = 0 THEN 'aborted'
        ELSE 'open'
    END"""
CODEC: Final = """CASE batch.codec
        WHEN 0 THEN 'none' WHEN 1 THEN 'gzip' WHEN 2 THEN 'snappy' WHEN 3 THEN 'lz4' WHEN 4 THEN 'zstd'
    END"""

#: The columns of the view, in order, and what each holds.
RECORDS_COLUMNS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "topic": "The topic's name.",
        "partition": "The partition's number within the topic.",
        "offset": "The record's offset; OFFSET is a keyword of SQL, so write it in double quotes.",
        "timestamp_ms": "The record's timestamp, in milliseconds since 1970.",
        "key": "The key as bytes; NULL if the key is null or the batch is compressed.",
        "value": "The value as bytes; NULL if the value is null or the batch is compressed.",
        "headers": "JSON: [name, value, ...]; a value that is not text is [hex digits]; NULL if there are no headers.",
        "producer_id": "The producer that wrote it; -1 if the producer was not idempotent.",
        "producer_epoch": "The producer's epoch; -1 without a producer id.",
        "is_transactional": "Whether the record counts only once its transaction has been committed.",
        "status": "committed, open or aborted; committed if there is no transaction.",
        "codec": "How the batch is compressed: none, gzip, snappy, lz4 or zstd.",
        "batch_base_offset": "The first offset of the record's batch; for use in conditions.",
        "batch_last_offset": "The last offset of the record's batch; for use in conditions, with an index.",
        "batch_max_timestamp_ms": "The largest timestamp of the record's batch; for use in conditions.",
        "batch_running_max_timestamp_ms": "The largest timestamp once it was appended; for conditions, with an index.",
    }
)
