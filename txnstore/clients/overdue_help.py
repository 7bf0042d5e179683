"""The help of clients with abandoned transactions: a client held back by one ends it as soon as its time is up."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection
from typing import Final

from txnstore.db.cluster.cluster import Cluster
from txnstore.db.store import Store
from txnstore.errors import StoreClosed, TxnStoreError

_log = logging.getLogger(__name__)

#: While other transactions hold it back, one after the other, a reader asks at most this often how long they may.
ASK_SECONDS_MIN: Final = 0.5
#: How soon it looks again at the least where a time is about to be up: others may be a moment later.
DUE_SECONDS_MIN: Final = 0.1


class OverdueHelp:
    """What holds one reader back in one database, and when to look whether it still may; for one thread.

    A reader that nothing holds back asks nothing.  One that is held back asks once who does that and for how long,
    and again when that time is over.
    """

    def __init__(
        self,
        store: Callable[[], Store],
        cluster: Callable[[], Cluster] | None = None,
        *,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Help in the store that `store` returns, at each look; `cluster` returns the one that it belongs to."""
        self._store = store
        self._cluster = cluster
        self._monotonic_seconds = monotonic_seconds
        #: What each partition is held back at.
        self._held: dict[int, int] = {}
        self._asked_at = -math.inf
        self._due_at = math.inf

    def held_back(self, partition_id: int, offset: int) -> None:
        """Take note that the partition cannot be read from this offset on: it names the transaction that is open."""
        if self._held.get(partition_id) != offset:
            self._held[partition_id] = offset
            self._due_at = min(self._due_at, self._asked_at + ASK_SECONDS_MIN)

    def let_go(self, partition_id: int) -> None:
        """Take note that nothing holds the partition back."""
        if self._held.pop(partition_id, None) is not None and not self._held:
            self._due_at = math.inf

    def help(self) -> float:
        """End what is in the way and overdue; return in how many seconds to call again."""
        now = self._monotonic_seconds()
        if now >= self._due_at:
            self._asked_at = now
            left_seconds = end_overdue(self._store, self._held, self._cluster)
            # Where more is overdue than one look ends, the next one is due at once: each has done its share of it.
            self._due_at = now if left_seconds == 0.0 else now + max(DUE_SECONDS_MIN, left_seconds)
        return max(0.0, self._due_at - now)


def end_overdue(
    store: Callable[[], Store],
    partition_ids: Collection[int],
    cluster: Callable[[], Cluster] | None = None,
    *,
    after_error_seconds: float = ASK_SECONDS_MIN,
) -> float:
    """End what holds these partitions back and is overdue; return in how many seconds more may be, or infinity.

    0: more is overdue than what was ended.  After an error it is `after_error_seconds`.
    """
    # A client that nothing holds back does not wait for the import of what transactions are made of.
    from txnstore.transactions.recovery import abort_overdue_in

    try:
        left_ms = abort_overdue_in(store(), partition_ids, None if cluster is None else cluster())
    except StoreClosed:
        return math.inf
    except TxnStoreError as error:
        # Somebody else may help; the reader only waits longer.
        _log.debug("could not look for transactions whose time is up: %s", error)
        return after_error_seconds
    return math.inf if left_ms is None else left_ms / 1000
