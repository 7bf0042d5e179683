"""The task of a sink: it brings its rows into the log as a writer of a transaction.

    pull rows from Spark -> make record batches -> append them in one short database transaction -> pull the next ones

No database transaction is open while rows are pulled: Spark may take its time over them, and on SQLite its source may
be the same file.  Whatever ends the attempt (an error, a kill, a speculative twin that was faster) leaves records
of a writer that the driver does not name, which nobody will ever see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa

from txnstore.clients.producer.sender import BATCHES_PER_PARTITION_MAX
from txnstore.clients.topic_directory import create_used_topic
from txnstore.db.store import Store
from txnstore.log.append import Append
from txnstore.log.sequences import increment_sequence
from txnstore.log.topics import Topic, find_topics
from txnstore.spark.sink_batches import BatchLimits, BatchMaker, PartitionOfRows, UnsentBatch
from txnstore.spark.sink_coordination import open_writer
from txnstore.spark.sink_options import SinkColumns, SinkOptions
from txnstore.spark.sink_run import SinkRun
from txnstore.spark.stores import Result, check_are_here, repeat_while_unknown
from txnstore.transactions.writers import TransactionWriter, append_as_writer

#: What one database transaction appends, about: enough for full batches, too little to keep others waiting.
APPEND_BYTES: Final = 8 * 1024 * 1024
APPEND_ROWS: Final = 100_000


class Written(NamedTuple):
    """What an attempt has done."""

    writer_id: int | None
    """The writer that it was done as; None if nothing was written."""

    is_left_out: bool
    """Whether nothing was written because the batch was decided already."""


def write_rows(
    store: Store,
    run: SinkRun,
    batch_id: int,
    rows: Iterator[pa.RecordBatch],
    *,
    columns: SinkColumns,
    options: SinkOptions,
) -> Written:
    """Append all rows to the transaction of this batch; they are there once the driver has decided.

    Raises:
        ProducerFenced: a newer run of the query has taken over, or the transaction is over for another reason.
        TxnStoreError: a record cannot be stored, or the database refuses or cannot be reached.
    """
    attempt = _Attempt(store, run, batch_id, columns, options)
    chunks = _chunks(rows)
    chunk = next(chunks, None)
    while chunk is not None:
        # Pulled before this one is sent: the last one says so, which costs nothing then.
        following = next(chunks, None)
        if not attempt.send(chunk, is_last=following is None):
            for _ in chunks:
                pass
            return Written(None, is_left_out=True)
        chunk = following
    return Written(attempt.writer_id, is_left_out=False)


class _Attempt:
    """The writer of one task attempt, which joins the transaction with its first rows."""

    def __init__(self, store: Store, run: SinkRun, batch_id: int, columns: SinkColumns, options: SinkOptions) -> None:
        self._store = store
        self._run = run
        self._batch_id = batch_id
        self._options = options
        self._writer: TransactionWriter | None = None
        self._sequences: dict[int, int] = {}
        self._topics: dict[str, Topic] = {}
        self._rows_sent = 0
        self._maker = BatchMaker(
            columns,
            PartitionOfRows(options.partitioner, sticky_seconds=options.sticky_seconds),
            self._find_topics,
            topic=options.topic,
            limits=BatchLimits(options.batch_bytes_max, options.batch_records_max),
        )

    @property
    def writer_id(self) -> int | None:
        return None if self._writer is None else self._writer.writer_id

    def send(self, chunk: pa.RecordBatch, *, is_last: bool) -> bool:
        """Append rows; False if the batch is decided already and nothing is to be written."""
        if self._writer is None:
            self._writer = self._repeat(
                lambda left_ms: open_writer(
                    self._store,
                    self._run,
                    self._batch_id,
                    timeout_ms=self._options.transaction_timeout_ms,
                    retry_timeout_ms=left_ms,
                )
            )
            if self._writer is None:
                return False
        writer = self._writer
        requests = list(self._requests(writer, self._maker.make(chunk, self._rows_sent)))
        self._rows_sent += chunk.num_rows
        for appends in requests:
            self._append(writer, appends, report=is_last and appends is requests[-1])
        return True

    def _append(self, writer: TransactionWriter, appends: list[Append], *, report: bool) -> None:
        self._repeat(
            lambda left_ms: append_as_writer(self._store, writer, appends, report=report, retry_timeout_ms=left_ms)
        )

    def _requests(self, writer: TransactionWriter, batches: list[UnsentBatch]) -> Iterator[list[Append]]:
        """Yield the batches as database transactions that may be repeated: see BATCHES_PER_PARTITION_MAX."""
        by_turn: dict[int, list[Append]] = defaultdict(list)
        counts: dict[int, int] = defaultdict(int)
        for batch in batches:
            item = self._encode(writer, batch)
            by_turn[counts[item.partition_id] // BATCHES_PER_PARTITION_MAX].append(item)
            counts[item.partition_id] += 1
        yield from by_turn.values()

    def _encode(self, writer: TransactionWriter, batch: UnsentBatch) -> Append:
        partition_id = batch.topic.partition_id(batch.partition)
        sequence = self._sequences.get(partition_id, 0)
        self._sequences[partition_id] = increment_sequence(sequence, batch.record_count)
        return batch.encode(writer.identity, sequence, self._options.codec)

    def _repeat(self, step: Callable[[int], Result]) -> Result:
        return repeat_while_unknown(step, self._options.delivery_timeout_ms)

    def _find_topics(self, names: Sequence[str]) -> Mapping[str, Topic]:
        missing = [name for name in names if name not in self._topics]
        if missing:
            timeout_ms = self._options.delivery_timeout_ms
            found = self._store.read(lambda connection: find_topics(connection, missing), retry_timeout_ms=timeout_ms)
            self._topics |= {topic.name: topic for topic in found}
            for name in missing:
                if name not in self._topics:
                    self._topics[name] = create_used_topic(self._store, name, allow_create=self._options.allow_create)
            check_are_here(self._topics[name] for name in missing)
        return self._topics


def _chunks(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows in portions that one database transaction takes; none is empty."""
    waiting: list[pa.RecordBatch] = []
    size_bytes = row_count = 0
    for batch in rows:
        for part in _parts(batch):
            if waiting and (size_bytes + part.nbytes > APPEND_BYTES or row_count + part.num_rows > APPEND_ROWS):
                yield _joined(waiting)
                waiting, size_bytes, row_count = [], 0, 0
            waiting.append(part)
            size_bytes += part.nbytes
            row_count += part.num_rows
    if waiting:
        yield _joined(waiting)


def _parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch that is too large to be a portion by itself."""
    count = batch.num_rows
    if count == 0:
        return
    step = APPEND_ROWS if batch.nbytes <= APPEND_BYTES else min(APPEND_ROWS, count * APPEND_BYTES // batch.nbytes)
    step = max(1, step)
    for start in range(0, count, step):
        yield batch.slice(start, step)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
