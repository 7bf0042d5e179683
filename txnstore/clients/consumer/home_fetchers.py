"""This file is the fetching threads of a consumer: one, and one more for each further database that it reads from.

A database that is away, or slow, holds up nothing but its own partitions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from txnstore.clients.connection import StoreConnection
from txnstore.clients.consumer.fetcher import Fetcher
from txnstore.clients.consumer.subscription import Subscription


class HomeFetchers:
    """The fetchers; the first one does the consumer's duties, listens for its group, and finds out what lives where."""

    def __init__(
        self,
        *,
        wanted: threading.Condition,
        subscription: Subscription,
        connection: StoreConnection,
        make: Callable[[int | None, Callable[[], None]], Fetcher],
    ) -> None:
        """Make fetchers by `make`: for a database, None for the first one; it is given what to call on new leaders."""
        self._wanted = wanted
        self._subscription = subscription
        self._connection = connection
        self._make = make
        self._first = make(None, self.start)
        self._further: dict[int, Fetcher] = {}
        self._closing = False

    def __iter__(self) -> Iterator[Fetcher]:
        """Return all of them."""
        yield self._first
        yield from list(self._further.values())

    @property
    def held_back_since(self) -> float | None:
        """Since when an open transaction keeps the reader from records; None: it does not."""
        if not self._further:
            return self._first.held_back_since
        return min((at for fetcher in self if (at := fetcher.held_back_since) is not None), default=None)

    @held_back_since.setter
    def held_back_since(self, since: float | None) -> None:
        self._first.held_back_since = since

    def start(self) -> None:
        """Start the threads that do not run yet and have something to read, or wake them."""
        if not self._connection.is_alone:
            self._make_further()
        for fetcher in self:
            fetcher.start()

    def stop(self) -> None:
        """Let the threads end as soon as they can."""
        with self._wanted:
            self._closing = True
            for fetcher in self:
                fetcher.stop()

    def close(self, timeout_seconds: float) -> bool:
        """Let the threads end, and wait for them; return whether they have ended."""
        self.stop()
        deadline = time.monotonic() + timeout_seconds
        ended = [fetcher.close(deadline - time.monotonic()) for fetcher in self]
        return all(ended)

    def _make_further(self) -> None:
        with self._wanted:
            if self._closing:
                return
            first_leader = self._first.home
            for partition in self._subscription:
                home = partition.home
                if home is not None and home != first_leader and home not in self._further:
                    self._further[home] = self._make(home, self.start)
