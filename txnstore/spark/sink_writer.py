"""The sink as Spark calls it: tasks write on the executors (`sink_task`), the driver decides once.

What a stream's tasks and its driver have in common travels in the messages, for Spark makes a writer of its own for
each of them; a batch write has one writer, which is copied.

The driver's part runs in processes of its own, which need no Arrow: the tasks' part is imported where rows are written.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from txnstore.db.store import Store
from txnstore.errors import InvalidConfiguration, InvalidRequest, TxnStoreError
from txnstore.spark.sink_coordination import abort, decide, last_decision
from txnstore.spark.sink_options import SinkOptions, find_columns, sink_options
from txnstore.spark.sink_run import SinkRun, run_of_job, run_of_query
from txnstore.spark.stores import check_store_uuid, repeat_while_unknown, store_at
from txnstore.spark.worker_process import spare_what_is_loaded

if TYPE_CHECKING:
    import pyarrow as pa

_logger: Final = logging.getLogger("txnstore")
#: What Spark tells the tasks of a micro-batch, as local properties of theirs.
_QUERY_ID: Final = "sql.streaming.queryId"
_RUN_ID: Final = "spark.jobGroup.id"
_BATCH_ID: Final = "streaming.sql.batchId"
#: What aborts is over soon or left to the next run: somebody waits for the error that led to it. Nor does a batch that
#: is over wait for what is only told of it.
_ABORT_TIMEOUT_MS: Final = 5_000
_OF_OLDER_CHECKPOINT: Final = (
    "A restart repeats only the last batch, so its checkpoint is an older copy, or another query uses it as well: a"
    " copied checkpoint is the same query, and what one of them has read is not written for the other"
)
_OF_OLDER_VERSION: Final = "An older txnVersion is never written: if its data is new, give it a newer one"
Messages = Sequence[WriterCommitMessage | None]


@dataclass(frozen=True)
class SinkMessage(WriterCommitMessage):
    """What a task attempt tells the driver: whose transaction it wrote to, and as which writer."""

    run: SinkRun
    batch_id: int
    writer_id: int | None = None
    """None: it had no rows, or the batch was decided already."""

    is_left_out: bool = False
    """Whether it was told that the batch was decided already."""

    store_uuid: str = ""
    """The store that it wrote to: the path of an SQLite file leads to another one on another host."""


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
        from txnstore.spark.sink_task import write_rows

        store = _open_store(self._options)
        written = write_rows(store, run, int(batch_id), iterator, columns=self._columns, options=self._options)
        return SinkMessage(run, int(batch_id), *written, store.store_uuid)

    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803 - Spark's name
        """Decide the micro-batch: its records are visible with its input's offsets, or were already.

        Raises:
            ProducerFenced: a newer run of the query has taken over, or the transaction is over; nothing was changed.
            InvalidConfiguration: a task has written to another store, of another host; nothing was decided.
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
        self._run = run_of_job(
            str(uuid.uuid4()),
            app_id=options.app_id,
            topic=options.topic,
            transactional_id=options.transactional_id,
        )
        self._batch_id = options.version or 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Append a task's rows as a writer of the job's transaction.

        Raises:
            TxnStoreError: see `sink_task.write_rows`.
        """
        from txnstore.spark.sink_task import write_rows

        run, batch_id = self._run, self._batch_id
        context = TaskContext.get()
        if self._options.app_id is not None and context is not None:
            # Only tasks are told; within foreachBatch these are of the query, too.
            run = replace(run, query_id=context.getLocalProperty(_QUERY_ID))
        store = _open_store(self._options)
        written = write_rows(store, run, batch_id, iterator, columns=self._columns, options=self._options)
        return SinkMessage(run, batch_id, *written, store.store_uuid)

    def commit(self, messages: Messages) -> None:
        """Make all records visible; with txnAppId only if this version was not written before.

        Raises:
            ProducerFenced: the transaction is over, or another job has taken over its name, or another query may have
                written this version; nothing was changed.
            InvalidConfiguration: a task has written to another store, of another host; nothing was decided.
            TxnStoreError: the database refuses or cannot be reached.
        """
        _decide(self._options, messages)

    def abort(self, messages: Messages) -> None:
        """Abort what the job has written, unless it is decided."""
        _abort(self._options, self._run, self._batch_id)


def _open_store(options: SinkOptions) -> Store:
    return repeat_while_unknown(
        lambda left_ms: store_at(options.address, create=True, retry_timeout_ms=left_ms), options.delivery_timeout_ms
    )


def _decide(options: SinkOptions, messages: Messages) -> None:
    told = [message for message in messages if isinstance(message, SinkMessage)]
    if not told or len(told) != len(messages) or len({(message.run, message.batch_id) for message in told}) != 1:
        raise InvalidRequest("the tasks' messages are not those of one batch; nothing was decided")
    run, batch_id = told[0].run, told[0].batch_id
    store = _open_store(options)
    for message in told:
        if message.writer_id is not None:
            # A writer there may have the number of one here.
            check_store_uuid(store, message.store_uuid, "a task has written")
    writers = [message.writer_id for message in told if message.writer_id is not None]
    decided = repeat_while_unknown(
        lambda left_ms: decide(
            store,
            run,
            batch_id,
            writers,
            is_left_out=any(message.is_left_out for message in told),
            timeout_ms=options.transaction_timeout_ms,
            retry_timeout_ms=left_ms,
        ),
        options.delivery_timeout_ms,
    )
    if not decided:
        _tell_of_replay(store, run, batch_id)


def _tell_of_replay(store: Store, run: SinkRun, batch_id: int) -> None:
    """Log that a batch was dropped: as a warning, unless it is the last one, which a restart repeats."""
    try:
        last = store.read(lambda connection: last_decision(connection, run.sink_id), retry_timeout_ms=_ABORT_TIMEOUT_MS)
    except TxnStoreError:
        # It is only told: the batch is over all the same.
        last = None
    extra = {"event": "sink_batch_replayed", "batch_id": batch_id, "sink_id": run.sink_id}
    if last is None or last.batch_id == batch_id:
        _logger.info(
            "batch %d of %s had been decided before: nothing was written again", batch_id, run.sink_id, extra=extra
        )
        return
    _logger.warning(
        "batch %d of %s is dropped as written already: batch %d was decided at %s under %r. %s",
        batch_id,
        run.sink_id,
        last.batch_id,
        datetime.fromtimestamp(last.commit_ms / 1000, UTC).isoformat(timespec="seconds"),
        last.transactional_id[:80],
        _OF_OLDER_CHECKPOINT if run.is_of_query else _OF_OLDER_VERSION,
        extra=extra,
    )


def _abort(options: SinkOptions, run: SinkRun, batch_id: int) -> None:
    try:
        store = store_at(options.address, retry_timeout_ms=_ABORT_TIMEOUT_MS)
        abort(store, run, batch_id, retry_timeout_ms=_ABORT_TIMEOUT_MS)
    except TxnStoreError as error:
        # The error that led here is the one to show.
        _logger.warning(
            "what batch %d of %s has written could not be aborted (%s): the next run or its timeout aborts it",
            batch_id,
            run.sink_id,
            error,
            extra={"event": "transaction_left", "batch_id": batch_id, "sink_id": run.sink_id},
        )


# A process that plans a query imports this and opens no store.
spare_what_is_loaded()
