"""This file is how an application hears of trouble in the background: its `error_cb`, served like other callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final, NoReturn

from txnstore.clients.model.kafka_error import KafkaError, KafkaException

#: The application hears of the same trouble at most this often.
PERIOD_SECONDS: Final = 1.0


class Trouble:
    """Tells the application's error callback, not too often; holds no producer, so that one can be dropped."""

    def __init__(
        self,
        callback: Callable[[KafkaError], object] | None,
        add_event: Callable[[Callable[[], object]], None],
        is_alone: Callable[[], bool] = lambda: True,
    ) -> None:
        """Tell `callback`, if there is one; `add_event` lets a call wait until it is served.

        While `is_alone`, a database that is away is all that there is.
        """
        self._is_alone = is_alone
        self._add_event = add_event
        self._callback = callback
        self._said_seconds: dict[int, float] = {}

    def report(self, error: KafkaError) -> None:
        """Tell of an error, unless the same was told a moment ago; a fatal one is raised where it is served."""
        if self._callback is None:
            return
        if error.fatal():
            self._add_event(partial(_raise, error))
            return
        self._say(error)
        if error.code() == KafkaError._TRANSPORT and self._is_alone():
            self._say(KafkaError(KafkaError._ALL_BROKERS_DOWN, f"1/1 brokers are down: {error.str()}"))

    def _say(self, error: KafkaError) -> None:
        now_seconds = time.monotonic()
        callback = self._callback
        last_seconds = self._said_seconds.get(error.code())
        if callback is None or (last_seconds is not None and now_seconds - last_seconds < PERIOD_SECONDS):
            return
        self._said_seconds[error.code()] = now_seconds
        self._add_event(lambda: callback(error))


def _raise(error: KafkaError) -> NoReturn:
    raise KafkaException(error)
