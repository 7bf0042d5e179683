"""The sink as Spark calls it: tasks write on the executors, the driver decides once.

One attempt of a task brings its rows into the log as a writer of a transaction:

    pull rows from Spark -> make record batches -> append them in one short database transaction -> pull the next ones

No database transaction is open while rows are pulled: Spark may take its time over them, and on SQLite its source may
be the same file.  Whatever ends the attempt (an error, a kill, a speculative twin that was faster) leaves records
of a writer that the driver does not name, which nobody will ever see.

What a stream's tasks and its driver have in common travels in the messages, for Spark makes a writer of its own for
each of them; a batch write has one writer, which is copied.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from txnstore.backoff import Backoff
from txnstore.clients.producer.sender import BATCHES_PER_PARTITION_MAX
from txnstore.clients.topic_directory import create_used_topic
from txnstore.db.store import Store
from txnstore.errors import InvalidConfiguration, InvalidRequest, OutcomeUnknown, TxnStoreError
from txnstore.log.append import Append
from txnstore.log.sequences import increment_sequence
from txnstore.log.topics import Topic, find_topics
from txnstore.spark.options import store_at
from txnstore.spark.sink_batches import BatchLimits, BatchMaker, PartitionOfRows, UnsentBatch
from txnstore.spark.sink_coordination import SinkRun, abort, decide, open_writer, run_of_job, run_of_query
from txnstore.spark.sink_options import SinkColumns, SinkOptions, find_columns, sink_options
from txnstore.transactions.writers import TransactionWriter, append_as_writer

Result = TypeVar("Result")
#: What one database transaction appends, about: enough for full batches, too little to keep others waiting.
APPEND_BYTES: Final = 8 * 1024 * 1024
APPEND_ROWS: Final = 100_000
#: Between two tries of a step whose outcome is not known.
_PAUSE_FIRST_SECONDS: Final = 0.1
_PAUSE_LAST_SECONDS: Final = 0.5
_logger: Final = logging.getLogger("txnstore")
#: What Spark tells the tasks of a micro-batch, as local properties of theirs.
_QUERY_ID: Final = "sql.streaming.queryId"
_RUN_ID: Final = "spark.jobGroup.id"
_BATCH_ID: Final = "streaming.sql.batchId"
#: What aborts is over soon or left to the next run: somebody waits for the error that led to it.
_ABORT_TIMEOUT_MS: Final = 5_000
Messages = Sequence[WriterCommitMessage | None]


@dataclass(frozen=True)
class SinkMessage(WriterCommitMessage):
    """What a task attempt tells the driver: whose transaction it wrote to, and as which writer."""

    run: SinkRun
    batch_id: int
    writer_id: int | None = None
    """None: it had no rows, or the batch was decided already."""


def write_rows(
    store: Store,
    run: SinkRun,
    batch_id: int,
    rows: Iterator[pa.RecordBatch],
    *,
    columns: SinkColumns,
    options: SinkOptions,
) -> SinkMessage:
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
            break
        chunk = following
    return SinkMessage(run, batch_id, attempt.writer_id)


def repeat_while_unknown(step: Callable[[int], Result], timeout_ms: int) -> Result:
    """Return what `step` returns, repeated while its outcome is not known; it recognises what it has done.

    It is given how many milliseconds it may try the database.

    Raises:
        OutcomeUnknown: it was still not known after `timeout_ms`.
        TxnStoreError: what else the step raises.
    """
    deadline = time.monotonic() + timeout_ms / 1000
    backoff = Backoff(_PAUSE_FIRST_SECONDS, _PAUSE_LAST_SECONDS)
    while True:
        left_ms = max(0, int((deadline - time.monotonic()) * 1000))
        try:
            return step(left_ms)
        except OutcomeUnknown:
            pause_seconds = backoff.back_off()
            if time.monotonic() + pause_seconds >= deadline:
                raise
        time.sleep(pause_seconds)


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


def stream_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> StreamSinkWriter:
    """Return the writer of a streaming query.

    Raises:
        InvalidConfiguration: an option or a column is not one of the sink's, or the output mode is not append.
    """
    if overwrite:
        raise InvalidConfiguration(
            'the sink appends: it takes outputMode("append"), not "complete", which would write the whole result'
            " again with every batch; with foreachBatch a program decides itself what to write"
        )
    return StreamSinkWriter(sink_options(options, is_stream=True), schema)


def batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> BatchSinkWriter:
    """Return the writer of a batch.

    Raises:
        InvalidConfiguration: an option or a column is not one of the sink's, or the save mode is not append.
    """
    if overwrite:
        raise InvalidConfiguration(
            'a log is only ever appended to: write with .mode("append"); to begin anew, delete the topic first'
        )
    return BatchSinkWriter(sink_options(options, is_stream=False), schema)


class StreamSinkWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a query, each exactly once."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self._options = options
        self._columns = find_columns(schema, topic=options.topic)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Append a task's rows as a writer of the micro-batch's transaction.

        Raises:
            TxnStoreError: see `sink_task.write_rows`.
        """
        context = TaskContext.get()
        properties = [context and context.getLocalProperty(name) for name in (_QUERY_ID, _RUN_ID, _BATCH_ID)]
        query_id, run_id, batch_id = properties
        if not (query_id and run_id and batch_id):
            raise InvalidRequest("Spark does not say which query and which batch this task belongs to")
        run = run_of_query(query_id, run_id, self._options.transactional_id)
        store = store_at(self._options.address, create=True)
        return write_rows(store, run, int(batch_id), iterator, columns=self._columns, options=self._options)

    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803 - Spark's name
        """Decide the micro-batch: its records are visible with its input's offsets, or were already.

        Raises:
            ProducerFenced: a newer run of the query has taken over, or the transaction is over; nothing was changed.
            TxnStoreError: the database refuses or cannot be reached.
        """
        _decide(self._options, messages)

    def abort(self, messages: Messages, batchId: int) -> None:  # noqa: N803 - Spark's name
        """Abort what is still open of this run; what is decided stands.

        If no task has told anything, there is nobody to abort for: the query's next run does it, or the timeout.
        """
        message = next(filter(None, messages), None)
        if isinstance(message, SinkMessage):
            _abort(self._options, message.run, message.batch_id)


class BatchSinkWriter(DataSourceArrowWriter):
    """Writes a DataFrame, all of it or nothing."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self._options = options
        self._columns = find_columns(schema, topic=options.topic)
        self._run = run_of_job(str(uuid.uuid4()), app_id=options.app_id, transactional_id=options.transactional_id)
        self._batch_id = options.version or 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Append a task's rows as a writer of the job's transaction.

        Raises:
            TxnStoreError: see `sink_task.write_rows`.
        """
        store = store_at(self._options.address, create=True)
        return write_rows(store, self._run, self._batch_id, iterator, columns=self._columns, options=self._options)

    def commit(self, messages: Messages) -> None:
        """Make all records visible; with txnAppId only if this version was not written before.

        Raises:
            ProducerFenced: the transaction is over, or another job has taken over its name; nothing was changed.
            TxnStoreError: the database refuses or cannot be reached.
        """
        _decide(self._options, messages)

    def abort(self, messages: Messages) -> None:
        """Abort what the job has written, unless it is decided."""
        _abort(self._options, self._run, self._batch_id)


def _decide(options: SinkOptions, messages: Messages) -> None:
    told = [message for message in messages if isinstance(message, SinkMessage)]
    if not told or len(told) != len(messages) or len({(message.run, message.batch_id) for message in told}) != 1:
        raise InvalidRequest("the tasks' messages are not those of one batch; nothing was decided")
    run, batch_id = told[0].run, told[0].batch_id
    writers = [message.writer_id for message in told if message.writer_id is not None]
    store = store_at(options.address, create=True)
    decided = repeat_while_unknown(
        lambda left_ms: decide(
            store,
            run,
            batch_id,
            writers,
            timeout_ms=options.transaction_timeout_ms,
            retry_timeout_ms=left_ms,
        ),
        options.delivery_timeout_ms,
    )
    if not decided:
        _logger.info("batch %d of %s had been decided before: nothing was written again", batch_id, run.sink_id)


def _abort(options: SinkOptions, run: SinkRun, batch_id: int) -> None:
    try:
        store = store_at(options.address)
        abort(store, run, batch_id, retry_timeout_ms=_ABORT_TIMEOUT_MS)
    except TxnStoreError as error:
        # The error that led here is the one to show.
        _logger.warning(
            "what batch %d of %s has written could not be aborted (%s): the next run or its timeout aborts it",
            batch_id,
            run.sink_id,
            error,
        )
