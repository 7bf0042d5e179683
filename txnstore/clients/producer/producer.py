"""The Producer as its users call it: arguments checked, records queued, callbacks served."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from txnstore.clients.callbacks import Callbacks, ErrorReporter, serve_on
from txnstore.clients.configuration.configuration import producer_configuration
from txnstore.clients.connection import DatabaseLook, OfOneProcess, StoreConnection, unreachable
from txnstore.clients.model.errors import HANDLE_CLOSED_TEXT, KafkaError, KafkaException, kafka_error_of
from txnstore.clients.model.metadata import ClusterMetadata
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.clients.producer.arguments import (
    PARTITION_MAX,
    TIMESTAMP_MAX,
    as_bytes,
    check_batch_message,
    check_produced_topic,
    check_sent_offsets,
    check_topic_text,
    checked_headers,
    prepared_state_of,
    whole_number,
    writer_ids_of,
)
from txnstore.clients.producer.endings import abort_after, commit_block, finish_or_leave
from txnstore.clients.producer.queue import PARTITION_UNASSIGNED, DeliveryCallback, make_intake, make_queue
from txnstore.clients.producer.requests import TRY_TIMEOUT_MS, UnassignedTopics, make_session
from txnstore.clients.producer.sender import Sender
from txnstore.clients.producer.state import CLOSED_TEXT, IN_TRANSACTION, INTERRUPTED_SECONDS
from txnstore.clients.producer.thread import SenderStopped, SenderThread, abandon
from txnstore.clients.statistics import Statistics
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.db.backend import Limits
from txnstore.deadline import Deadline, Ticks, check_timeout, wait_within
from txnstore.late_import import collecting_later
from txnstore.log.columns import pack_record_headers
from txnstore.transactions.tokens import PreparedTxnState

# A producer without transactions does without what they take.
if TYPE_CHECKING:
    from txnstore.clients.producer.progress import TransactionProgress
    from txnstore.clients.producer.transactions import ProducerTransactions
    from txnstore.clients.producer.writer import TransactionWriterClient

#: How long `close` tries to send what is queued, and to abort what is open.
CLOSE_TIMEOUT_SECONDS: Final = 30.0
#: How long a report takes at most where messages may take for ever.
REPORT_TIMEOUT_SECONDS: Final = 300.0
#: How long it then waits for the thread: one try of the database.
STOP_TIMEOUT_SECONDS: Final = 5.0

_numbers: Final = itertools.count(1)
Answer = TypeVar("Answer")


class Producer(OfOneProcess):
    """Writes records to topics; safe to share between threads, not between processes.

    `produce` only queues: a thread of the producer's own sends what has waited for `linger.ms` or fills a batch.
    Delivery reports are served by `poll`, `flush`, `close` and the calls that end a transaction, in the caller's
    thread, in the order of delivery within each partition.  Delivered means durable in the database.
    """

    #: A subclass that does not initialise this class has a producer that is closed.
    _is_closed = True

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Make a producer from a configuration in `confluent_kafka`'s form; nothing is connected yet.

        Args:
            arguments: one dict of configuration keys; `bootstrap.servers` is a database URL.
            keywords: more of them.

        Raises:
            TypeError: there is no dict.
            KafkaException: `_INVALID_ARG`: a key is unknown, a value is out of range, or two contradict each other.
        """
        configuration = producer_configuration(arguments, keywords)
        names = "on_delivery", "error_cb", "stats_cb"
        # For the producer to hold: what works for it knows them weakly, and does not hold the producer either.
        self._callbacks = callbacks = Callbacks(**{name: configuration[name] for name in names})
        self._configuration = configuration = configuration.without(*names)
        # Short tries: the sender looks between them whether what it tries is still wanted.
        self._connection = connection = StoreConnection(configuration, limits=Limits(retry_timeout_ms=TRY_TIMEOUT_MS))
        self._accumulator, self._reports, self._choice = make_queue(configuration, callbacks.weakly("on_delivery"))
        self._changed = changed = self._accumulator.changed
        self._directory = TopicDirectory(
            connection,
            refresh_ms=configuration["topic.metadata.refresh.interval.ms"],
            allow_create=configuration["allow.auto.create.topics"],
        )
        name = f"producer-{next(_numbers)}"
        reporter = ErrorReporter(callbacks.weakly("error_cb"), self._reports.events.put, lambda: connection.is_alone)
        self._thread = SenderThread(
            f"txnstore-{name}",
            changed,
            self._accumulator.alarm,
            backoff_seconds=configuration["retry.backoff.ms"] / 1000,
            backoff_max_seconds=configuration["retry.backoff.max.ms"] / 1000,
            report_trouble=reporter.report,
        )
        self._sender = Sender(
            self._thread,
            self._accumulator,
            self._reports,
            make_session(configuration, connection),
            UnassignedTopics(self._accumulator, self._directory, self._choice),
            configuration,
        )
        statistics = Statistics(
            name=name,
            client_id=configuration["client.id"],
            kind="producer",
            interval_seconds=configuration["statistics.interval.ms"] / 1000,
            callback=callbacks.weakly("stats_cb"),
            add_event=self._reports.events.put,
            collect=self._sender.facts,
            connection=connection,
        )
        self._transactions: ProducerTransactions | None = None
        self._writer: TransactionWriterClient | None = None
        #: Whether records may be produced, if they belong to a transaction.
        self._progress: TransactionProgress | TransactionWriterClient | None = None
        if configuration["txnstore.transaction.token"] is not None:
            with collecting_later():
                from txnstore.clients.producer.writer import TransactionWriterClient
            self._progress = self._writer = TransactionWriterClient(changed, self._sender, self._reports.serve_reports)
        elif configuration["transactional.id"]:
            with collecting_later():
                from txnstore.clients.producer.transactions import make_transactions
            self._transactions, self._progress = make_transactions(
                configuration, self._accumulator, self._sender, self._directory, self._reports.serve_reports
            )
        #: What tells an idle application of a database that is away, if it wants to hear of it.
        self._look: DatabaseLook | None = None
        if callbacks["error_cb"] is not None:
            self._look = DatabaseLook(connection, self._thread.submit, lambda e: reporter.report(kafka_error_of(e)))
        self._accumulator.gate = self._progress
        self._ticks = Ticks(configuration["txnstore.clock"])
        self._record_bytes_max: int = configuration["message.max.bytes"]
        self._is_closed = self._is_started = False
        self._intake = make_intake(self._accumulator, self._choice, self._directory.entries, self._ticks, configuration)
        #: Queues nearly all records, once the thread has started, and says of others that it has not.
        self._add_in_c: Callable[..., bool] | None = None
        dropped = weakref.ref(self, id)
        self._finalizer = weakref.finalize(self, abandon, dropped, self._thread, connection, self._reports)
        if statistics.due_seconds(0.0) is not None:
            self._thread.timed_work.append(statistics)
            self._thread.start()

    # --- records ----------------------------------------------------------------------------------------------------

    def produce(  # noqa: C901, PLR0912, PLR0915, PLR0917 - Kafka's arguments; every call less is felt a million times
        self,
        topic: str,
        value: str | bytes | None = None,
        key: str | bytes | None = None,
        partition: int = PARTITION_UNASSIGNED,
        callback: DeliveryCallback | None = None,
        on_delivery: DeliveryCallback | None = None,
        timestamp: int = 0,
        headers: Mapping[str, Any] | Sequence[tuple[str, Any]] | None = None,
    ) -> None:
        """Queue a record; text is stored as UTF-8.

        Args:
            topic: the topic's name; a topic that is not there is created if `allow.auto.create.topics` allows it.
            value: the payload; None is a tombstone and not the same as empty.
            key: what the partition is chosen by, and compaction keeps the newest of.
            partition: its number, or -1 to let the partitioner choose.
            callback: called with `(error or None, message)` once the record is delivered or has failed.
            on_delivery: the same by another name.
            timestamp: milliseconds since 1970; 0 is now.
            headers: a dict, or a list of `(name, value)`; names repeat, values are bytes, text or None.

        Raises:
            TypeError: an argument is not of its type.
            UnicodeEncodeError: a text holds half of a surrogate pair.
            BufferError: the queue is full; call `poll` and try again.
            KafkaException: `MSG_SIZE_TOO_LARGE`, `_UNKNOWN_PARTITION`, `_INVALID_ARG` (the topic's name is far too
                long), or the transaction is in no state for it.
            RuntimeError: the producer has been closed.
        """
        if self._is_closed or self._connection.is_inherited:
            self._check_open()
        progress = self._progress
        if progress is not None and progress.stage is not IN_TRANSACTION:
            progress.refuse_record()
        if callback is None:
            callback = on_delivery
        add = self._add_in_c
        if add is not None and headers is None and add(topic, value, key, partition, callback, timestamp, None):
            return
        if type(topic) is not str and not isinstance(topic, str):
            raise TypeError(f"argument 1 must be str, not {type(topic).__name__}")
        if type(value) is not bytes and value is not None:
            value = as_bytes(value)
        if type(key) is not bytes and key is not None:
            key = as_bytes(key)
        size_bytes = (len(value) if value else 0) + (len(key) if key else 0)
        packed: str | None = None
        if headers is not None:
            packed = pack_record_headers(tuple(checked_headers(headers)))
            if add is not None and add(topic, value, key, partition, callback, timestamp, packed):
                return
            size_bytes += len(packed) if packed else 0
        if callback is not None and not callable(callback):
            raise TypeError(f"a delivery callback must be callable, not {type(callback).__name__}")
        if size_bytes > self._record_bytes_max:
            reason = f"Unable to produce message: Broker: Message size too large ({size_bytes} bytes)"
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, reason))
        now_seconds = monotonic()
        if timestamp == 0:
            ticks = self._ticks
            timestamp_ms = ticks.now_ms if now_seconds < ticks.until_seconds else ticks.next(now_seconds)
        else:
            timestamp_ms = whole_number(timestamp, TIMESTAMP_MAX, "int too big to convert")
        if partition != PARTITION_UNASSIGNED:
            partition = whole_number(partition, PARTITION_MAX, "signed integer is greater than maximum")
        known = self._directory.cached(topic, partition)
        chosen = PARTITION_UNASSIGNED
        if known is None:
            check_produced_topic(topic)
        else:
            count = len(known.partition_ids)
            if partition != PARTITION_UNASSIGNED:
                chosen = partition
            elif count == 1:
                chosen = 0
            else:
                chosen = self._choice.choose(topic, key, count, now_seconds)
            if not 0 <= chosen < count:
                reason = "Unable to produce message: Local: Unknown partition"
                raise KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION, reason))
        self._accumulator.add(
            topic, chosen, known, value, key, timestamp_ms, packed, callback, now_seconds, size_bytes, partition
        )
        if not self._is_started:
            self._thread.start()
            self._is_started = True
            self._add_in_c = self._intake and self._intake.add

    def produce_batch(
        self,
        topic: str,
        messages: list[dict[str, Any]],
        partition: int = PARTITION_UNASSIGNED,
        callback: DeliveryCallback | None = None,
        on_delivery: DeliveryCallback | None = None,
    ) -> int:
        """Queue several records for one topic and return how many were queued.

        A message is a dict with `value`, `key`, `partition`, `timestamp`, `headers` and `callback`, all optional; one
        that is refused gets the `KafkaError` as `_error`, and the others go on.

        Raises:
            TypeError: the messages are not a list of dicts, or a cell is not of its type.
            RuntimeError: the producer has been closed.
        """
        self._check_open()
        if not isinstance(messages, list):
            raise TypeError("messages must be a list")
        for index, message in enumerate(messages):
            check_batch_message(message, index)
        default = on_delivery if callback is None else callback
        queued = 0
        for message in messages:
            message.pop("_error", None)
            own = message.get("callback", message.get("on_delivery"))
            try:
                self._produce_of_batch(
                    topic,
                    value=message.get("value"),
                    key=message.get("key"),
                    partition=message.get("partition", partition),
                    on_delivery=default if own is None else own,
                    timestamp=message.get("timestamp", 0),
                    headers=message.get("headers"),
                )
            except KafkaException as error:
                message["_error"] = error.args[0]
            except BufferError:
                message["_error"] = KafkaError(KafkaError._QUEUE_FULL)
            else:
                queued += 1
        return queued

    def _produce_of_batch(self, topic: str, **message: Any) -> None:
        """Queue one of a batch, by a subclass's `produce` where there is one."""
        self.produce(topic, **message)

    def poll(self, timeout: float = -1) -> int:
        """Serve callbacks and return how many events that were; wait for the first one up to `timeout` seconds.

        Below zero waits for as long as it takes.  An exception of a callback comes out here.

        Raises:
            RuntimeError: the producer has been closed.
        """
        self._check_open()
        timeout_seconds = check_timeout(timeout)
        if self._look is not None and self._thread.is_idle:
            with suppress(SenderStopped):  # closed by another thread since the call began
                self._look.polled()
        served = self._reports.serve()
        if served or timeout_seconds == 0:
            return served
        with self._changed:
            wait_within(self._changed, lambda: self._reports.are_waiting or self._is_closed, timeout_seconds)
        return self._reports.serve()

    def flush(self, timeout: float = -1) -> int:
        """Send everything without lingering, serve callbacks, and return how many records are left.

        Waits up to `timeout` seconds; below zero for as long as it takes, which `message.timeout.ms` bounds.

        Raises:
            RuntimeError: the producer has been closed.
        """
        self._check_open()
        return self._flush(check_timeout(timeout))

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        """Give up records that are not delivered: their reports say `_PURGE_QUEUE` or `_PURGE_INFLIGHT`.

        What is being written this moment may still be delivered; with `blocking` the call waits until that is known.
        What `commit_transaction_async` has taken stays: it is committed, or fails as a whole.

        Raises:
            RuntimeError: the producer has been closed.
        """
        self._check_open()
        self._sender.purge(in_queue=bool(in_queue), in_flight=bool(in_flight))
        if blocking and in_flight:
            self._sender.wait_until_dropped(STOP_TIMEOUT_SECONDS)

    # --- transactions -----------------------------------------------------------------------------------------------

    def init_transactions(self, timeout: float = -1, *, keep_prepared_txn: bool = False) -> None:
        """Claim the transactional id: what an older producer with it left open is aborted, and it is fenced.

        With `keep_prepared_txn` (KIP-939) it is not aborted: it waits for `complete_transaction`, `commit_transaction`
        or `abort_transaction`, and until then nothing else may be done.  If there is none, these return at once until
        the next transaction begins.

        Raises:
            KafkaException: `_NOT_CONFIGURED`, `_STATE`, `_TIMED_OUT` (retriable: call again to resume), or fatal;
                INVALID_REQUEST: `keep_prepared_txn` without `transaction.two.phase.commit.enable`, which the store
                has to allow too (a setting of the same name), else TRANSACTIONAL_ID_AUTHORIZATION_FAILED.
        """
        self._transactional().init(check_timeout(timeout), keep_prepared=bool(keep_prepared_txn))

    def begin_transaction(self) -> None:
        """Begin a transaction: all records until its end become visible together, or never.

        Raises:
            KafkaException: `_NOT_CONFIGURED`, `_STATE`, `_CONFLICT`, or the error that has to be dealt with first.
        """
        self._transactional().begin()

    def send_offsets_to_transaction(
        self, positions: list[TopicPartition], group_metadata: bytes, timeout: float = -1
    ) -> None:
        """Let the transaction commit consumed offsets of a group (KIP-447).

        Offsets of a group's member go with the commit, or by themselves after `linger.ms`; those of a consumer that
        only assigns are written at once, and `committed()` of others waits for the end of the transaction then.

        Args:
            positions: the next offsets to read; those below zero are left out.
            group_metadata: what `Consumer.consumer_group_metadata()` returned, in this process or another.
            timeout: seconds; at most, and by default, `transaction.timeout.ms`.

        Raises:
            TypeError: the arguments are not of their types.
            KafkaException: `_STATE`, `_TIMED_OUT` (retriable), or an error that takes an abort.
        """
        transactions = self._transactional()
        check_sent_offsets(positions, group_metadata)
        transactions.send_offsets(positions, bytes(group_metadata), check_timeout(timeout))

    def commit_transaction(self, timeout: float = -1, *, writers: Collection[int] | None = None) -> None:
        """Send what is queued and commit; when it returns, every reader of committed records sees all of it.

        Delivery reports are served here.  Without an answer in time the commit goes on in the background.

        Args:
            timeout: seconds; at most, and by default, `transaction.timeout.ms`.
            writers: which of the writers count that joined by `transaction_token()`, as `report_writer()` returned
                their ids; by default all that have reported.  The same decision aborts the records of all others.

        Raises:
            TypeError: the writers are not a collection of whole numbers.
            KafkaException: `_TIMED_OUT` (retriable: call again, with the same writers, to resume), an error that takes
                an abort (`_INCONSISTENT` if a record was not delivered, `INVALID_REQUEST` if a writer is named that is
                not in the transaction or has not reported), or a fatal one.
        """
        transactions = self._transactional()
        transactions.commit(check_timeout(timeout), None if writers is None else writer_ids_of(writers))

    def commit_transaction_async(self) -> Future[None]:
        """Commit without waiting: the next transaction may begin at once, and the future tells of this one.

            commits = []
            for order in orders:
                producer.begin_transaction()
                producer.produce("orders", order)
                commits.append(producer.commit_transaction_async())
            [commit.result() for commit in commits]  # durable, and visible to every reader of committed records

        Commits are done in the order of the calls, many of them by one database transaction.  If one fails, none that
        follows is made: their futures raise as well, and so does every call but `abort_transaction()`, which ends the
        transaction that is open by then and takes note of all that failed.  What was written in part before (it was
        large or slow, or holds offsets of a consumer that only assigns) is waited for by the next
        `begin_transaction()`; what has an enlisted connection is committed before this returns.  Of one that may stand
        though its producer was closed before it heard, the future raises `_TIMED_OUT` and tells its name for `outcome`.

        Raises:
            KafkaException: as `commit_transaction`; `_TIMED_OUT`, retriable: 256 commits are not done.
        """
        return self._transactional().commit_async()

    def abort_transaction(self, timeout: float = -1) -> None:
        """Abort: records that wait are given up (`_PURGE_QUEUE`), and nobody sees the others as committed.

        A consumer whose offsets the transaction held does not go back, and the next transaction's offsets would pass
        over what was aborted: close it and open another, or, in offset order, `seek()` to the first record of each
        partition that was handed out in the transaction, and nowhere else.

        Raises:
            KafkaException: `_TIMED_OUT` (retriable: call again to resume), or fatal.
        """
        self._transactional().abort(check_timeout(timeout))

    def prepare_transaction(self, timeout: float = -1) -> PreparedTxnState:
        """Send what is queued and prepare: from now on the transaction can only be committed or aborted (KIP-939).

        The answer, "producer id:epoch" as text, is for the application's own database: remembered in the same
        database transaction as the application's rows, it decides, whatever happens to this process.

            with database.begin() as connection:
                lock_own_number(connection)  # UPDATE ... WHERE id = ... AND number = own; fails if it finds no row
                connection.execute(...)  # the application's rows
                remember(connection, str(producer.prepare_transaction()))
            producer.complete_transaction(remembered)

        Such a transaction never times out; a process that is started again ends it by
        `init_transactions(keep_prepared_txn=True)` and `complete_transaction(what is remembered)`, and aborts what is
        not remembered yet.  So it has to raise the number of the id in that database first, by a commit of its own:
        `transactions/README.md` has all the lines.  Without them rows may stand there whose records were aborted.

        Args:
            timeout: seconds; at most, and by default, a minute.

        Raises:
            KafkaException: `_NOT_CONFIGURED`, INVALID_TXN_STATE without `transaction.two.phase.commit.enable`,
                `_STATE` outside of a transaction or after `transaction_token()`, `_TIMED_OUT` (retriable), or an error
                that takes an abort.
        """
        return self._transactional().prepare(check_timeout(timeout))

    def complete_transaction(self, state: PreparedTxnState | str, timeout: float = -1) -> None:
        """Commit the prepared transaction if it is the one that is remembered as `state`, else abort it (KIP-939).

        Where `init_transactions(keep_prepared_txn=True)` has found none, it has ended already, as is remembered.

        Raises:
            ValueError: the text is not one that `prepare_transaction` returned.
            KafkaException: INVALID_TXN_STATE: nothing is prepared, or it has ended, and not as is remembered; and as
                `commit_transaction`, `abort_transaction`.
        """
        if (commits := self._transactional().commits(prepared_state_of(state), check_timeout(timeout))) is not None:
            (self.commit_transaction if commits else self.abort_transaction)(timeout)

    def enlist(self, connection: object, timeout: float = -1) -> None:
        """Let the transaction and the database transaction on `connection` be one: all of both, or nothing.

            with engine.connect() as connection, producer.transaction():
                producer.enlist(connection)
                connection.execute(...)
                producer.produce("accounts", ...)

        The connection is one to the producer's own database: a `Connection` or `Session` of SQLAlchemy, a
        `psycopg.Connection` or a `sqlite3.Connection`; or, unless the transactions never time out (KIP-939), one to
        another PostgreSQL database with max_prepared_transactions, of which there may be several: they are prepared
        before the commit is decided, and end after it, by recovery if need be (`txnstore maintain --participant`).

        From now on `commit_transaction()` commits it together with the records and offsets (in one COMMIT if it is
        one database), and `abort_transaction()` rolls it back, on the thread that calls them; the connection's own
        `commit()` and `rollback()` are refused until then.  Afterwards it is its owner's again.

        Records wait in the queue for the commit, on PostgreSQL up to 16 MiB of them; delivery reports come with it.
        On SQLite the connection keeps all others from writing, from now on until the commit: be short.
        An error that takes an abort rolls the connection back as well; so does the loss of the connection.

        Args:
            connection: what to commit with the transaction; the same one again changes nothing.
            timeout: seconds to wait for records that are being sent; at most, and by default,
                `transaction.timeout.ms`.

        Raises:
            TypeError: it is not a connection.
            KafkaException: `_NOT_CONFIGURED`, `_STATE` outside of a transaction or if the database transaction has
                failed, INVALID_REQUEST: the connection is closed, in autocommit mode, on a database that cannot vote,
                or is to vote on offsets that a consumer has committed on it, not the first to this one, or another
                producer's; `_TIMED_OUT`: SQLite: others write.  The transaction goes on without it.
        """
        self._transactional().enlist(connection, check_timeout(timeout))

    def transaction_token(self, timeout: float = -1) -> bytes:
        """Open the transaction in the database, and return a token by which other processes can join it as writers.

            token = producer.transaction_token()
            # in any process, thread or machine:
            writer = Producer({"bootstrap.servers": url, "txnstore.transaction.token": token})
            writer.produce("accounts", ...)
            writer_id = writer.report_writer()
            # and here again:
            producer.commit_transaction(writers=[writer_id])

        The token is opaque, holds no credentials, and is good until this transaction ends: whoever comes later, or is
        still writing then, gets `_FENCED`.  Any number of writers may join, also several by one token; what they
        write becomes visible with the transaction's end, at once and in all partitions, or never.

        Args:
            timeout: seconds; at most, and by default, `transaction.timeout.ms`, which runs from now on.

        Raises:
            KafkaException: `_NOT_CONFIGURED`, `_STATE` outside of a transaction, `_TIMED_OUT` (retriable), or an
                error that takes an abort.
        """
        return self._transactional().token(check_timeout(timeout))

    def report_writer(self, timeout: float = -1) -> int:
        """Send what is queued, and report durably that this writer wrote everything; return its id for the commit.

        For a producer that joined a transaction by `txnstore.transaction.token`: without this call its records never
        count.  Afterwards it produces no more.  Delivery reports are served here; a second call returns the same.

        Args:
            timeout: seconds; at most, and by default, `message.timeout.ms`.

        Raises:
            KafkaException: `_NOT_CONFIGURED` without a token, `_TIMED_OUT` (retriable: call again to resume), or fatal:
                `_INCONSISTENT` if a record was not delivered, `_FENCED` if the transaction is over.
            RuntimeError: the producer has been closed.
        """
        self._check_open()
        if self._writer is None:
            reason = "report_writer() is for a producer that joined a transaction by txnstore.transaction.token"
            raise KafkaException(KafkaError(KafkaError._NOT_CONFIGURED, reason))
        longest_seconds = self._configuration["message.timeout.ms"] / 1000
        return self._writer.report(check_timeout(timeout), longest_seconds or REPORT_TIMEOUT_SECONDS)

    @contextmanager
    def transaction(self, timeout: float = -1) -> Iterator[Self]:
        """Commit what the block produces, all of it; an exception aborts it and comes out as it was.

            with producer.transaction():
                producer.produce("accounts", ...)

        A commit without an answer is asked for again until `timeout` seconds are over, by default
        `transaction.timeout.ms`; if it must be aborted instead, it is aborted and the error comes out.  After Ctrl-C
        the abort is waited for only half a second; `abort_transaction` or `close` takes it up.  A block that has called
        `commit_transaction` itself has nothing left to commit, and ends.  What it has prepared no exception aborts: it
        stays open, without any timeout, until `complete_transaction` ends it.

        Raises:
            KafkaException: see `begin_transaction` and `commit_transaction`; `_STATE`: the block has called
                `abort_transaction` itself.
        """
        transactions = self._transactional()
        timeout_seconds = check_timeout(timeout)
        if timeout_seconds < 0:
            timeout_seconds = self._configuration["transaction.timeout.ms"] / 1000
        transactions.begin()
        try:
            yield self
        except BaseException as error:
            abort_after(error, self.abort_transaction, transactions, timeout_seconds)
            raise
        commit_block(transactions, self.commit_transaction, self.abort_transaction, timeout_seconds)

    # --- the cluster ------------------------------------------------------------------------------------------------

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> ClusterMetadata:
        """Return what topics there are, or one of them.

        Raises:
            KafkaException: `_TRANSPORT`: the database did not answer in time.
        """
        self._check_open(HANDLE_CLOSED_TEXT)
        if topic is not None and not isinstance(topic, str):
            raise TypeError(f"argument 1 must be str, not {type(topic).__name__}")
        check_topic_text(topic or "")
        return self._ask(
            lambda: self._directory.cluster_metadata(topic), check_timeout(timeout), "Failed to get metadata"
        )

    def cluster_id(self, timeout: float = -1) -> str:
        """Return the store's uuid.

        Raises:
            KafkaException: `_TIMED_OUT`: the database did not answer in time.
        """
        self._check_open(HANDLE_CLOSED_TEXT)
        prefix, code = "Failed to retrieve cluster id", KafkaError._TIMED_OUT
        return self._ask(lambda: self._connection.store().store_uuid, check_timeout(timeout), prefix, code=code)

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Do nothing: who may do what is the database's business, and its URL says who asks."""
        self._check_open(HANDLE_CLOSED_TEXT)
        if not (isinstance(username, str) and isinstance(password, str)):
            raise TypeError("the user name and the password must be text")

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> bool:
        """Abort an open transaction, send what is queued, serve callbacks, and give back thread and connections.

        Takes at most about half a minute, whatever the database does; what could not be sent by then is reported as
        `_PURGE_QUEUE` or `_PURGE_INFLIGHT`.  A second call does nothing.

        Raises:
            Exception: the first that a callback has raised; all is done and served all the same.
        """
        if self._is_closed:
            return True
        if self._connection.is_lifeless:
            self._is_closed = True
            self._finalizer.detach()
            return True
        deadline, stop_seconds = Deadline(CLOSE_TIMEOUT_SECONDS), STOP_TIMEOUT_SECONDS
        errors: list[Exception] = []
        try:
            if self._transactions is not None and self._transactions.is_open:
                finish_or_leave(self._transactions, deadline.left_seconds(), errors)
            serve_on(lambda: self._flush(deadline.left_seconds()), errors)
        except BaseException:
            # Ctrl-C, SystemExit, a task that is cancelled: somebody wants an end at once.
            stop_seconds = min(stop_seconds, INTERRUPTED_SECONDS)
            raise
        finally:
            self._close_now(stop_seconds, errors)
        if errors:
            raise errors.pop()
        return True

    def __enter__(self) -> Self:
        """Return the producer, also a closed one."""
        if not self._is_closed:
            self._connection.check_process()
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it; an exception goes on."""
        self.close()

    def __len__(self) -> int:
        """Return how many records are queued, in flight, or wait for their report to be served."""
        if self._is_closed:
            return 0
        # In a forked child the lock may be held for ever.
        inherited = self._connection.is_inherited
        return self._accumulator.record_count if inherited else self._accumulator.settled_count()

    def __bool__(self) -> bool:
        """Return True: a producer without records is one all the same."""
        return True

    # --- inside -----------------------------------------------------------------------------------------------------

    def _check_open(self, closed_text: str = CLOSED_TEXT) -> None:
        if self._is_closed:
            raise RuntimeError(closed_text)
        self._connection.check_process()

    def _transactional(self) -> ProducerTransactions:
        self._check_open()
        if self._writer is not None:
            self._writer.refuse_call()
        if self._transactions is None:
            reason = "The Transactional API requires transactional.id to be configured"
            raise KafkaException(KafkaError(KafkaError._NOT_CONFIGURED, reason))
        return self._transactions

    def _flush(self, timeout_seconds: float) -> int:
        deadline = Deadline(timeout_seconds)
        accumulator, reports = self._accumulator, self._reports
        self._sender.begin_flush()
        try:
            while True:
                reports.serve()
                left_seconds = deadline.left_seconds()
                if accumulator.record_count == 0 or left_seconds <= 0 or self._sender.holds_everything:
                    return accumulator.record_count
                with self._changed:
                    wait_within(
                        self._changed, lambda: reports.are_waiting or accumulator.record_count == 0, left_seconds
                    )
        finally:
            self._sender.end_flush()

    def _ask(
        self, question: Callable[[], Answer], timeout_seconds: float, prefix: str, *, code: int = KafkaError._TRANSPORT
    ) -> Answer:
        """Return the answer of a question that the sender's thread puts to the database."""
        if timeout_seconds < 0:
            timeout_seconds = self._configuration["socket.timeout.ms"] / 1000
        try:
            return self._thread.ask(
                question, timeout_seconds, lambda began: unreachable(self._connection, prefix, began, code=code)
            )
        except SenderStopped:
            raise RuntimeError(CLOSED_TEXT) from None

    def _close_now(self, stop_seconds: float, errors: list[Exception]) -> None:
        self._is_closed = True
        self._accumulator.close(CLOSED_TEXT)
        deadline = Deadline(stop_seconds)
        try:
            self._thread.stop(stop_seconds)
        finally:
            self._sender.purge(in_queue=True, in_flight=False)
            self._sender.drop_in_flight(KafkaError(KafkaError._PURGE_INFLIGHT))
            self._connection.close(deadline.left_seconds())
            self._finalizer.detach()
            with self._changed:
                self._changed.notify_all()
            serve_on(self._reports.serve, errors)
