"""The loop of a process that does nothing but the maintenance: turn after turn, until it is stopped.

A duty is done in portions until nothing of it is left.  Between two of them the other duties have their turn: what
others wait for does not wait until a week's journal is trimmed.

Any number may run at once, clients among them: the leases share the duties out.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from txnstore.db.closing import MoveState, read_move, refuse
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.portions import Portions
from txnstore.db.store import Store
from txnstore.errors import StoreMoved, TxnStoreError
from txnstore.maintenance.duties import DUTIES, KNOWN
from txnstore.maintenance.turns import (
    NOBODY,
    MaintenanceDuty,
    MaintenanceObserver,
    Turn,
    do_unleased,
    level_of,
    report,
    take_turn,
)
from txnstore.trouble import RepeatedTrouble

_log = logging.getLogger(__name__)

#: Somebody may have shortened an interval meanwhile, or died at a duty: the loop looks at least this often.
LOOK_AGAIN_SECONDS: Final = 10.0


class Maintenance:
    """The duties of one store; for one thread."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster | None = None,
        *,
        duties: Sequence[MaintenanceDuty] = DUTIES,
        observer: MaintenanceObserver | None = None,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look after `store` of `cluster`; `monotonic_seconds` tells how time passes for this process alone."""
        self._store = store
        self._cluster = cluster
        self._duties = duties
        self._observer = observer or NOBODY
        self._monotonic_seconds = monotonic_seconds
        self._level_of = partial(level_of, RepeatedTrouble(monotonic_seconds=monotonic_seconds))
        self.failed: dict[str, Exception] = {}
        """Why those failed that the last `run_once` has left out."""

        #: When those are due that are done more often than the store says.
        self._often: dict[str, float] = {}
        #: Of the duties that are not finished: how much was done so far.
        self._so_far: dict[str, int] = {}

    def run_once(self) -> dict[str, int]:
        """Do every duty now, all of it; return how much was done, by name.

        A duty that failed is logged and left out; `failed` says why.
        """
        done: dict[str, int] = {}
        left = list(self._duties)
        positions: dict[str, str] = {}
        self.failed = {}
        while left:
            turn = self._turn(left, Portions(), forced=True, positions=positions)
            positions = turn.positions
            done |= self._noted(turn)
            self.failed |= turn.failed
            left = [duty for duty in left if duty.name in turn.unfinished]
        return done

    def run(self, stop: threading.Event) -> None:
        """Do each duty whenever it is due, until `stop` is set; the portion that runs then is finished first.

        An error is logged, once a minute if it lasts, and the duty is tried again when it is due again; what was done
        of it stays done.

        Raises:
            StoreMoved: the store lives in another database by now; one that is closed may be opened again.
        """
        look_at = self._monotonic_seconds()
        while not stop.is_set():
            if look_at <= self._monotonic_seconds():
                look_at = self._monotonic_seconds() + self._look(stop)
            often_seconds = self._do_often(stop)
            stop.wait(max(0.0, min(look_at - self._monotonic_seconds(), often_seconds)))

    def _look(self, stop: threading.Event) -> float:
        """Have a turn, and return after how many seconds to look again."""
        try:
            turn = self._turn(self._duties, Portions(stop=stop))
        except TxnStoreError as error:
            if isinstance(error, StoreMoved):
                self._end_if_gone()
            _log.log(
                self._level_of("all", error),
                "maintenance of %s: no duty can be taken now: %s",
                self._store.url,
                error,
                extra={"event": "database_unavailable", "store": str(self._store.url)},
            )
            return LOOK_AGAIN_SECONDS
        self._noted(turn)
        return min(LOOK_AGAIN_SECONDS, turn.next_seconds)

    def _end_if_gone(self) -> None:
        try:
            move = self._store.read(read_move, retry_timeout_ms=0)
        except TxnStoreError:
            # The next look asks again.
            return
        if move is not None and move.state is MoveState.GONE:
            raise refuse(self._store.url, move)

    def _turn(
        self,
        duties: Sequence[MaintenanceDuty],
        portions: Portions,
        *,
        forced: bool = False,
        positions: Mapping[str, str] | None = None,
    ) -> Turn:
        turn = take_turn(
            self._store,
            self._cluster,
            duties,
            portions,
            forced=forced,
            positions=positions,
            known=KNOWN,
            observer=self._observer,
            monotonic_seconds=self._monotonic_seconds,
        )
        for duty in duties:
            if duty.name in turn.done or duty.name in turn.failed:
                self._often[duty.name] = self._monotonic_seconds() + _often_seconds(duty, turn)
        return turn

    def _do_often(self, stop: threading.Event) -> float:
        """Do what others wait for and costs one look, held or not; return after how many seconds again."""
        next_seconds = math.inf
        for duty in self._duties:
            if duty.interval_max_seconds == math.inf:
                continue
            now_seconds = self._monotonic_seconds()
            # What is not finished waits for nothing but the other duties' turn.
            is_due = duty.name in self._so_far or self._often.get(duty.name, -math.inf) <= now_seconds
            if is_due and not stop.is_set():
                turn = do_unleased(self._store, self._cluster, duty, Portions(stop=stop))
                done_seconds = self._monotonic_seconds()
                self._often[duty.name] = min(
                    now_seconds + duty.interval_max_seconds, done_seconds + _often_seconds(duty, turn)
                )
                self._observer.portion(duty.name, turn.done.get(duty.name), done_seconds - now_seconds)
                self._noted(turn)
            left_seconds = self._often.get(duty.name, now_seconds) - self._monotonic_seconds()
            next_seconds = min(next_seconds, 0.0 if duty.name in self._so_far else left_seconds)
        return next_seconds

    def _noted(self, turn: Turn) -> dict[str, int]:
        """Log what was done; return how much of what is finished."""
        report(self._store, turn, level_of=self._level_of)
        finished: dict[str, int] = {}
        for name in turn.failed:
            self._so_far.pop(name, None)
        for name, count in turn.done.items():
            total = self._so_far.pop(name, 0) + count
            if name in turn.unfinished:
                self._so_far[name] = total
                continue
            finished[name] = total
            if total:
                _log.info(
                    "maintenance of %s: %d %s",
                    self._store.url,
                    total,
                    name,
                    extra={"event": "duty_done", "store": str(self._store.url), "duty": name, "count": total},
                )
        return finished


def _often_seconds(duty: MaintenanceDuty, turn: Turn) -> float:
    """Return after how many seconds a duty is to be done again that others wait for, whatever the store says."""
    return min(duty.interval_max_seconds, turn.again_seconds.get(duty.name, math.inf))
