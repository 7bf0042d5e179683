"""A producer that joined the transaction of another one: it writes, reports that it is done, and no more.

The transaction is not its own: it neither begins nor ends it.  Whatever goes wrong ends this writer for good; the
transaction can go on without it, with a new writer in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NoReturn

from txnstore.clients.model.errors import KafkaError, KafkaException, kafka_error_of
from txnstore.clients.producer.requests import TRY_TIMEOUT_MS, timed_out
from txnstore.clients.producer.sender import Sender
from txnstore.clients.producer.state import CLOSED_TEXT, FENCED, TransactionStage, failed_delivery
from txnstore.clients.producer.thread import SenderStopped
from txnstore.deadline import bounded, result_within
from txnstore.errors import TxnStoreError
from txnstore.transactions.writers import report_writer

_S = TransactionStage

_REPORTING: Final = "report_writer() was called and is not done: call it again; nothing is added to what it reports"
_REPORTED: Final = "the writer has reported that it wrote everything; another writer may join the transaction"
_NOT_ITS_OWN: Final = (
    "this producer writes in the transaction of another one (txnstore.transaction.token): it can produce, flush,"
    " report_writer() and close"
)


class TransactionWriterClient:
    """The transactional side of a producer with a token; hears of deliveries as the sender's listener."""

    def __init__(self, changed: threading.Condition, sender: Sender, serve_reports: Callable[[], object]) -> None:
        """Begin as a writer; it joins with its first record, or as it reports."""
        self.stage = _S.IN_TRANSACTION
        self._changed = changed
        self._sender = sender
        sender.listener = self
        self._serve_reports = serve_reports
        self._error: KafkaError | None = None
        self._failed_count = 0
        self._first_failure = ""
        #: The writer's id once its report is durable.
        self._reported: int | None = None

    def report(self, timeout_seconds: float, longest_seconds: float) -> int:
        """Send what is queued, report, and return the writer's id; what takes longer than its time goes on.

        Raises:
            KafkaException: `_TIMED_OUT` (retriable: call again), `_INCONSISTENT` if records were not delivered, or
                `_FENCED` because the transaction is over.
        """
        with self._changed:
            if self._error is not None:
                raise KafkaException(self._error)
            if self._reported is not None:
                return self._reported
            self.stage = _S.BEGIN_COMMIT
        try:
            work = self._sender.thread.submit(self._report_work)
            return result_within(work, bounded(timeout_seconds, longest_seconds))
        except TimeoutError:
            raise timed_out(self._sender.thread, self._sender.session.connection) from None
        except SenderStopped:
            raise RuntimeError(CLOSED_TEXT) from None
        finally:
            self._serve_reports()

    def refuse_record(self) -> NoReturn:
        """Raise what `produce` raises once the writer is done, or has failed.

        Raises:
            KafkaException: always.
        """
        text = _REPORTING if self._reported is None else _REPORTED
        if self._error is not None:
            text = self._error.str()
        code = KafkaError._FATAL if self._error is not None else KafkaError._STATE
        raise KafkaException(KafkaError(code, f"Unable to produce message: {text}"))

    @staticmethod
    def refuse_call() -> NoReturn:
        """Raise what the calls raise that begin or end a transaction.

        Raises:
            KafkaException: always.
        """
        raise KafkaException(KafkaError(KafkaError._STATE, _NOT_ITS_OWN))

    # --- what the sender tells ----------------------------------------------------------------------------------------

    def writing(self) -> None:
        """Nothing follows: the transaction is open already."""

    def delivery_failed(self, record_count: int, error: KafkaError) -> None:
        """Count records that make what the writer wrote incomplete."""
        with self._changed:
            if not self._failed_count:
                self._first_failure = error.str()
            self._failed_count += record_count

    def records_refused(self, error: KafkaError) -> None:
        """End this writer: the store does not take a record of it."""
        self._fail(KafkaError(error.code(), f"{error.str()}: another writer has to write everything again", fatal=True))

    def transaction_failed(self, error: TxnStoreError) -> None:
        """End this writer: the transaction is over, or does not take its records."""
        self._fail(_fatal(error))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _report_work(self) -> int:
        session = self._sender.session
        self._sender.send_everything()
        with self._changed:
            if self._error is not None:
                raise KafkaException(self._error)
        if self._failed_count:
            reason = failed_delivery(self._failed_count, self._first_failure)
            self._fail_and_raise(KafkaError(KafkaError._INCONSISTENT, reason, fatal=True))

        def request() -> int:
            session.obtain_identity()
            assert session.writer is not None
            cluster = session.connection.cluster()
            store = cluster.coordinator_of(session.writer.transactional_id)
            report_writer(store, session.writer, cluster, retry_timeout_ms=TRY_TIMEOUT_MS)
            return session.writer.writer_id

        try:
            self._reported = self._sender.thread.until_answered(request)
        except TxnStoreError as error:
            self._fail_and_raise(_fatal(error))
        return self._reported

    def _fail(self, error: KafkaError) -> None:
        with self._changed:
            if self._error is not None:
                return
            self._error = error
            self.stage = _S.FATAL_ERROR
        self._sender.purge(in_queue=True, in_flight=False)
        self._sender.drop_in_flight(KafkaError(KafkaError._PURGE_INFLIGHT))
        self._sender.thread.report_fatal(error)

    def _fail_and_raise(self, error: KafkaError) -> NoReturn:
        self._fail(error)
        raise KafkaException(error)


def _fatal(error: TxnStoreError) -> KafkaError:
    if isinstance(error, FENCED):
        return KafkaError(KafkaError._FENCED, str(error), fatal=True)
    return kafka_error_of(error, fatal=True, retriable=False)
