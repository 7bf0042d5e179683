"""The outbox's part of a relay: rows become records as soon as they are committed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from txnstore.db.store import Store
from txnstore.errors import TxnStoreError
from txnstore.log.outbox.sequencer import OutboxPoller
from txnstore.relay.errors import Failing, Patience

_log = logging.getLogger(__name__)


def relay_outbox(store: Store, stop: threading.Event) -> int:
    """Move rows of the outbox into their topics until `stop` is set; return how many were moved.

    A database that is away for a while is waited for.

    Raises:
        TxnStoreError: an error that stays.
    """
    poller = OutboxPoller(store)
    trouble = Patience("the outbox", None)
    while not stop.is_set():
        try:
            pause_seconds = poller.turn()
        except TxnStoreError as error:
            if not (error.retriable or error.outcome_unknown):
                raise
            trouble.met(error)
            pause_seconds = trouble.left_seconds()
        else:
            trouble.passed()
        stop.wait(pause_seconds)
    return poller.moved_count


@contextmanager
def outbox_beside(store: Store, stop: threading.Event, failing: Failing) -> Iterator[None]:
    """Relay the outbox in a thread while the body runs; an error there stops the body through `stop`, and is raised.

    It is raised also where the body has failed meanwhile: it stays, and what ended the body may pass.  `failing` hears
    of it at once.

    Raises:
        TxnStoreError: as `relay_outbox`.
    """
    errors: list[Exception] = []
    ended = threading.Event()

    def run() -> None:
        try:
            relay_outbox(store, ended)
        except Exception as error:  # noqa: BLE001 - it comes out below
            errors.append(error)
            # It comes out only after the body, which may be waiting for Kafka.
            _log.error("the outbox is not relayed any more: %s", error, extra={"event": "relay_outbox_failed"})
            failing(error)
            stop.set()

    thread = threading.Thread(target=run, name="txnstore-relay-outbox", daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        # Also one from before the copying, and before the wait for the outbox.
        failing(error)
        _end(thread, ended)
        if errors:
            _log.error("the relay had ended as well: %s", error, extra={"event": "relay_failed"})
            raise errors[0] from error
        raise
    finally:
        _end(thread, ended)
    if errors:
        raise errors[0]


def _end(thread: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    thread.join()
