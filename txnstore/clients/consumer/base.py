"""This file is what all calls of a consumer have in common: its parts, and how they wait for an answer."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from txnstore.clients.callbacks import Callbacks
from txnstore.clients.configuration.configuration import consumer_configuration
from txnstore.clients.connection import unreachable
from txnstore.clients.consumer.arguments import (
    failure,
    seconds_left,
)
from txnstore.clients.consumer.assigned_partition import AssignedPartition
from txnstore.clients.consumer.error_messages import prefixed
from txnstore.clients.consumer.parts import ConsumerParts
from txnstore.clients.model.error_mapping import kafka_error_of
from txnstore.clients.model.kafka_error import KafkaError, KafkaException
from txnstore.errors import TxnStoreError

Result = TypeVar("Result")


class ConsumerBase:
    """A consumer as far as its groups of calls share it."""

    #: A subclass that does not initialise this class has a consumer that is closed.
    _closed = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._closed = True
        if not args and not kwargs:
            raise TypeError("expected configuration dict")
        configuration = consumer_configuration(args, kwargs)
        names = ("on_commit", "error_cb", "stats_cb")
        self._callbacks = Callbacks(**{name: configuration[name] for name in names})
        self._subscription_callbacks: list[Callbacks] = []
        self._parts = ConsumerParts(configuration.without(*names), self._callbacks)
        self._process_id = self._parts.connection.process_id
        self._closed = False
        self._assignment_changed = False
        self._losing = False
        self._finalizer = weakref.finalize(self, self._parts.abandon)
        # At the end of the program the threads end by themselves, and the database may be gone.
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        return f"<txnstore.Consumer of group {self._parts.options.group_id!r}>"

    def _check(self, closed_text: str = "Consumer closed") -> None:
        if self._closed:
            raise RuntimeError(closed_text)
        if self._process_id != os.getpid():
            self._parts.connection.check_process()

    def _drop(self, removed: list[AssignedPartition]) -> None:
        """Commit what is stored of partitions that go, unless they are lost."""
        if removed and self._parts.options.commits_by_itself and not self._losing:
            self._parts.commit_in_background(removed)

    def _ask(
        self, work: Callable[[], Result], deadline: float, prefix: str, *, late_code: int = KafkaError._TIMED_OUT
    ) -> Result:
        return self._answer(lambda: self._parts.worker.submit(work), deadline, prefix, late_code=late_code)

    def _answer(
        self,
        submit: Callable[[], Future[Result]],
        deadline: float,
        prefix: str,
        *,
        unless: type[TxnStoreError] | tuple[()] = (),
        late_code: int = KafkaError._TIMED_OUT,
    ) -> Result:
        """Return what the worker found, as long as the caller waits for it."""
        began = time.monotonic()
        try:
            future = submit()
        except RuntimeError:
            # Closed by another thread since the call began.
            raise RuntimeError("Consumer closed") from None
        try:
            return future.result(seconds_left(deadline))
        except FutureTimeoutError:
            # Nobody needs it any more.
            future.cancel()
            connection = self._parts.connection
            if late_code != KafkaError._TIMED_OUT or connection.trouble_since(began) is not None:
                raise unreachable(connection, prefix, began, code=late_code) from None
            raise failure(KafkaError._TIMED_OUT, prefix) from None
        except CancelledError:
            raise RuntimeError("Consumer closed") from None
        except unless:
            raise
        except TxnStoreError as error:
            raise KafkaException(prefixed(prefix, kafka_error_of(error))) from error
        except KafkaException as error:
            raise KafkaException(prefixed(prefix, error.args[0])) from error
