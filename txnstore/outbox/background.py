"""The thread that looks after the outbox for an application that writes to it.

It is started by the first record and ends with its outbox: at `close`, or once the program has forgotten the outbox.
Without it, as where its role may not do so, the rows wait for a consumer of the store, `txnstore maintain` or `txnstore
relay`.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from txnstore.background_thread import BackgroundThread
from txnstore.backoff import Backoff
from txnstore.clients.connection import StoreConnection
from txnstore.deadline import Condition
from txnstore.errors import PermissionDenied, StoreBusy, StoreClosed, TxnStoreError
from txnstore.log.outbox.sequencer import OutboxPoller
from txnstore.trouble import RepeatedTrouble, kind_of, message_of

#: After this long without a record it looks more rarely: a caller's database transaction may still be open.
BUSY_SECONDS: Final = 60.0
IDLE_PAUSE_SECONDS: Final = 1.0
#: After an error of the database.
PAUSE_FIRST_SECONDS: Final = 0.1
PAUSE_LAST_SECONDS: Final = 5.0
#: How long closing tries where there is one writer: that may be who closes it, within a transaction of its own.
ONE_WRITER_SECONDS: Final = 1.0
_NO_TIME: Final = (
    "the database had no time for it (on SQLite perhaps for an open transaction of the caller's: commit before you"
    " close the outbox)"
)


class BackgroundSequencer:
    """Moves rows from the outbox into their partitions, as long as it runs; knows nothing of the outbox object."""

    def __init__(self, connection: StoreConnection, logger: logging.Logger) -> None:
        """Look after the store of `connection`, once started."""
        self._connection = connection
        self._logger = logger
        self._changed = Condition()
        self._thread = BackgroundThread("txnstore-outbox")
        self._closing = False
        self._closing_at = self._closes_at = 0.0
        self._left_why = ""
        self._hurries = False
        self._produced_at = 0.0

    def notice(self) -> None:
        """Look often from now on: a record was inserted, and is going to be committed."""
        self._produced_at = time.monotonic()
        if self._hurries and self._thread.is_started:
            return
        with self._changed:
            self._hurries = True
            if not self._thread.is_started and not self._closing:
                self._thread.start(self._run)
            self._changed.notify_all()

    def stop(self) -> None:
        """Let the thread end as soon as it can; it is not waited for."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self, timeout_seconds: float) -> bool:
        """Move all that is committed once more, let the thread end and wait for it; return whether it has ended.

        While somebody else is at the rows, or has the database to itself, that is tried until the time is over; for
        about a second at most where there is one writer, which may be the caller itself.  After any other error it is
        not tried again.
        """
        self._closing_at = time.monotonic()
        self._closes_at = self._closing_at + timeout_seconds
        self.stop()
        has_ended = self._thread.close(timeout_seconds)
        if not has_ended or self._left_why:
            self._logger.warning(
                "the outbox was closed before all its rows were moved: %s; those that wait are left to a consumer,"
                " `txnstore maintain` and the like",
                self._left_why or _NO_TIME,
                extra={"event": "outbox_left"},
            )
        return has_ended

    def _run(self) -> None:
        poller: OutboxPoller | None = None
        last_id: int | None = None
        backoff, trouble = Backoff(PAUSE_FIRST_SECONDS, PAUSE_LAST_SECONDS), RepeatedTrouble()
        while True:
            with self._changed:
                hurries, self._hurries = self._hurries, False
                closing = self._closing
            put_off_why, is_busy = "", False
            try:
                poller = poller or OutboxPoller(self._connection.store())
                if hurries:
                    poller.hurry()
                if closing and last_id is None:
                    last_id = poller.last_waiting_id()
                pause_seconds = poller.turn()
                # Once it is being closed, what has come since is not waited for: others may never be done with that.
                is_busy = poller.is_busy and not (closing and poller.has_none_up_to(last_id))
                backoff.succeeded()
                if trouble.passed():
                    self._logger.info("the rows of the outbox are moved again", extra={"event": "outbox_goes_on"})
            except StoreClosed:
                return
            except PermissionDenied as error:
                # Once: that changes with a grant, not by itself.
                self._logger.warning(
                    "this role may not move rows of the outbox, so they are left to `txnstore maintain` and the like:"
                    " %s",
                    error,
                    extra={"event": "outbox_not_permitted"},
                )
                return
            except Exception as error:  # noqa: BLE001 - a thread that died would leave the rows where they are
                put_off_why = message_of(error) or type(error).__name__
                self._tell(error, is_news=trouble.may_be_told(kind_of(error)))
                pause_seconds = backoff.back_off() if isinstance(error, TxnStoreError) else PAUSE_LAST_SECONDS
                is_busy = isinstance(error, StoreBusy)
            if closing and self._ends(pause_seconds, put_off_why, is_busy=is_busy):
                return
            if time.monotonic() - self._produced_at > BUSY_SECONDS:
                pause_seconds = max(pause_seconds, IDLE_PAUSE_SECONDS)
            self._sleep(pause_seconds, is_put_off=bool(put_off_why))

    def _tell(self, error: Exception, *, is_news: bool) -> None:
        if isinstance(error, TxnStoreError):
            fields = {"event": "outbox_put_off"}
            text = "the rows of the outbox cannot be moved at the moment; trying again: %s"
            self._logger.log(logging.WARNING if is_news else logging.DEBUG, text, error, extra=fields)
        else:
            fields = {"event": "background_work_failed"}
            level = logging.ERROR if is_news else logging.DEBUG
            self._logger.log(level, "moving the rows of the outbox failed", exc_info=error, extra=fields)

    def _ends(self, pause_seconds: float, put_off_why: str, *, is_busy: bool) -> bool:
        """Return whether the outbox, which is being closed, has no more to do, or no time; pause where it has."""
        if not is_busy:
            self._left_why = put_off_why
            return bool(put_off_why) or pause_seconds > 0.0
        cluster, closes_at = self._connection.opened, self._closes_at
        if cluster is None or cluster.controller.backend.has_one_writer:
            closes_at = min(closes_at, self._closing_at + ONE_WRITER_SECONDS)
        left_seconds = closes_at - time.monotonic()
        if left_seconds <= 0.0:
            self._left_why = _NO_TIME
            return True
        time.sleep(min(pause_seconds, left_seconds))
        return False

    def _sleep(self, seconds: float, *, is_put_off: bool) -> None:
        """Wait until a record comes; after an error to the end, or each record would be one more try."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or (self._hurries and not is_put_off), seconds)
