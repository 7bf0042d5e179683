"""The word of a client for a database that it cannot reach: why it did not answer, and what `error_cb` is told.

librdkafka connects by itself and says at once that all brokers are down.  Here nobody connects before there is
something to ask; so a client with an `error_cb` that has nothing to ask looks now and then, while its program polls.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection, select

from txnstore.clients.connection import StoreConnection
from txnstore.clients.model.kafka_error import KafkaError, KafkaException
from txnstore.errors import StoreUnavailable, TxnStoreError

#: A client that is polled looks for its database at most this often.
LOOK_SECONDS: Final = 1.0
#: What was heard of a database so long before a call is still the reason why that gets no answer.
RECENT_SECONDS: Final = 1.0


def unreachable(
    connection: StoreConnection, prefix: str, began_seconds: float, *, code: int = KafkaError._TRANSPORT
) -> KafkaException:
    """Return what a call says whose time is up, or to whom the database is away: the cause, where one is known."""
    # Between two tries nothing new is heard of a database that is away.
    trouble = connection.trouble_since(began_seconds - RECENT_SECONDS)
    waited_seconds = time.monotonic() - began_seconds
    cause = f"the database has not answered within {waited_seconds:.1f} s" if trouble is None else str(trouble)
    return KafkaException(KafkaError(code, f"{prefix}: {cause}", retriable=True))


class DatabaseLook:
    """Looks whether the database is there, for a client whose application wants to hear of it."""

    def __init__(
        self,
        connection: StoreConnection,
        submit: Callable[[Callable[[], None]], object],
        report: Callable[[StoreUnavailable], None],
    ) -> None:
        """Look on the thread that `submit` hands work to; `report` is told on it."""
        self._connection = connection
        self._submit = submit
        self._report = report
        self._is_looking = False
        self._next_seconds = 0.0

    def polled(self) -> None:
        """Look, in the background, if that was not done for a while."""
        now_seconds = time.monotonic()
        if now_seconds < self._next_seconds or self._is_looking:
            return
        self._is_looking = True
        try:
            self._submit(self._look)
        except BaseException:
            self._is_looking = False
            raise

    def _look(self) -> None:
        # Told of the first try that fails, not of the last one.
        self._connection.on_unavailable = self._report
        try:
            # What is not an outage is said by whoever asks for something.
            with contextlib.suppress(TxnStoreError, KafkaException):
                self._connection.store().read(_nothing, retry_timeout_ms=0)
        finally:
            self._connection.on_unavailable = None
            self._next_seconds = time.monotonic() + LOOK_SECONDS
            self._is_looking = False


def _nothing(connection: Connection) -> None:
    connection.execute(select(1))
