"""A client's part in the maintenance: now and then it looks what is due in its store, and does a portion of that.

It comes beside the client's own work and never in it: in a thread that exists while there is something to do, with
connections of the client's own pool.  A process looks at a store once in ten seconds, however many clients it has, for
the first time once a client has been there for two.  A client that lives for less than that looks as it is closed, and
then does what fits into a moment: closing a client waits for as long as that takes.  Of one that is dropped instead, or
whose program ends, a thread does so that the client has anyway.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from txnstore.clients.worker import Worker
from txnstore.clock import Clock
from txnstore.db.cluster.cluster import Cluster
from txnstore.deadline import result_within
from txnstore.errors import PermissionDenied, StoreClosed, StoreReadOnly, TxnStoreError
from txnstore.trouble import RepeatedTrouble

if TYPE_CHECKING:
    from txnstore.clients.configuration.configuration import Configuration
    from txnstore.db.store import Store
    from txnstore.maintenance.turns import MaintenanceDuty

_log = logging.getLogger(__name__)

#: How often a process looks what is due.
LOOK_SECONDS: Final = 10.0
#: How much earlier a look counts as due: who asks once in that time may do so a moment early, and would wait another.
EARLY_SECONDS: Final = 0.5
#: After how long a client has its first look: not while it has much to do, and mostly before it is closed.
FIRST_LOOK_SECONDS: Final = 2.0
#: While more is due than one turn does it has the next one this soon, and a turn takes so long.
BEHIND_SECONDS: Final = 1.0
TURN_SECONDS: Final = 0.2
#: A role that may not do it looks more rarely: it may be allowed to one day.
REFUSED_SECONDS: Final = 300.0
#: How long closing a client waits for a look, and for a turn, and for how long a turn begins portions then.
PARTING_WAIT_SECONDS: Final = 0.05
PARTING_TURN_SECONDS: Final = 0.02
#: What a process that ends has taken is free again this soon.
PARTING_LEASE_MS: Final = 2_000

#: By store: when this process looks next, by the clock of the client that looked last.
_next_looks: Final[dict[str, float]] = {}
#: Of lasting errors this process tells once, for each store and duty.
_lasting: Final = RepeatedTrouble(math.inf)


class Upkeep:
    """One client's part; `run` is for the thread that does what the client does now and then."""

    def __init__(
        self,
        configuration: Configuration,
        opened: Callable[[], Cluster | None],
        *,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look after the databases that are open whenever it is asked; it opens none."""
        self._is_wanted: bool = configuration["txnstore.maintenance"]
        self._clock: Clock | None = configuration["txnstore.clock"]
        self._opened = opened
        self._monotonic_seconds = monotonic_seconds
        self._next_seconds = monotonic_seconds() + FIRST_LOOK_SECONDS
        self._stop = threading.Event()
        self._helper: Worker | None = None
        self._is_busy = False

    def run(self) -> None:
        """Look if it is time to and nobody in this process has done it lately; in a thread of its own."""
        now_seconds = self._monotonic_seconds()
        if not self._is_wanted or now_seconds < self._next_seconds:
            return
        cluster = self._opened()
        if cluster is None:
            return
        self._next_seconds = now_seconds + LOOK_SECONDS - EARLY_SECONDS
        if self._is_busy or self._stop.is_set() or not self._claim(cluster):
            return
        self._is_busy = True
        try:
            self._worker().submit(partial(self._work, cluster))
        except RuntimeError:
            # The client was closed just now, or the interpreter ends and no new thread can be started.
            self._is_busy = False
        if self._stop.is_set():
            # Closed while the thread was made, which nobody would ever end.
            self.stop()

    def stop(self) -> None:
        """Begin no portion any more; the thread ends, and is not waited for."""
        self._stop.set()
        if self._helper is not None:
            self._helper.close(0.0)

    def part(self) -> None:
        """Have a last turn, if this process has not looked lately; then stop. For the thread that closes the client.

        It takes a moment, whatever the database does; what takes longer ends by itself.
        """
        try:
            turn = self.last_turn(self._in_a_moment)
            if turn is not None:
                turn()
        finally:
            self._stop.set()
            if self._helper is not None:
                self._helper.close(PARTING_WAIT_SECONDS)

    def last_turn(self, do: Callable[[Callable[[], Any]], Any] | None = None) -> Callable[[], None] | None:
        """Return the last turn, which is due if this process has not looked lately; None: it is not.

        What takes the database is done by `do`, or in the thread that has the turn.  It can be asked for anywhere, as
        where a client is collected: it waits for nothing.
        """
        cluster = self._opened()
        if not self._is_wanted or self._is_busy or cluster is None or not self._claim(cluster):
            return None
        return partial(self._have_last_turn, cluster, do or _here)

    def leave_to_others(self) -> None:
        """Let the next client of this process look: there is no thread for the last turn that was asked for."""
        cluster = self._opened()
        if cluster is not None:
            _next_looks.pop(self._key(cluster), None)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _worker(self) -> Worker:
        if self._helper is None:
            self._helper = Worker("txnstore-upkeep")
        return self._helper

    def _claim(self, cluster: Cluster) -> bool:
        """Return whether it is time to look, and see to it that no other client of this process does."""
        key, now_seconds = self._key(cluster), self._seconds()
        # A clock that was put back is no reason to wait.
        if now_seconds < _next_looks.get(key, -math.inf) <= now_seconds + LOOK_SECONDS:
            return False
        _next_looks[key] = now_seconds + LOOK_SECONDS - EARLY_SECONDS
        return True

    def _key(self, cluster: Cluster) -> str:
        store = cluster.controller
        return f"{store.store_uuid} {store.url} {store.schema} {self._clock is None}"

    def _seconds(self) -> float:
        return self._monotonic_seconds() if self._clock is None else self._clock.now_ms() / 1000

    def _work(self, cluster: Cluster) -> None:
        """Have turns until nothing is due."""
        try:
            while not self._stop.is_set() and self._turn(cluster, None, TURN_SECONDS):
                self._stop.wait(BEHIND_SECONDS)
        finally:
            self._is_busy = False

    def _in_a_moment(self, work: Callable[[], Any]) -> Any:
        return result_within(self._worker().submit(work), PARTING_WAIT_SECONDS)

    def _have_last_turn(self, cluster: Cluster, do: Callable[[Callable[[], Any]], Any]) -> None:
        try:
            due: list[MaintenanceDuty] = do(partial(_find_due, cluster))
            ready: list[MaintenanceDuty] = []
            began = self._monotonic_seconds()
            for duty in due:
                # Here, because it needs no database: so it takes nothing of the time in which that has to answer.
                duty.load()
                ready.append(duty)
                if self._monotonic_seconds() - began >= PARTING_TURN_SECONDS:
                    break
            if ready:
                is_behind = do(partial(self._turn, cluster, ready, PARTING_TURN_SECONDS))
                if is_behind or len(ready) < len(due):
                    _next_looks[self._key(cluster)] = self._seconds() + BEHIND_SECONDS
        except TimeoutError:
            _log.debug("the maintenance of %s goes on without the client that was closed", cluster)
        except (TxnStoreError, RuntimeError) as error:
            # When the interpreter ends, no new thread can be started.
            _log.debug("nothing could be done for the maintenance of %s: %s", cluster, error)

    def _turn(self, cluster: Cluster, duties: Sequence[MaintenanceDuty] | None, seconds: float) -> bool:
        """Have a turn in each database that is open; return whether more is due than there was time for."""
        # A client that lives for a moment only does not wait for these imports.
        from txnstore.db.portions import Portions
        from txnstore.maintenance.duties import DUTIES, KNOWN
        from txnstore.maintenance.leases import LEASE_MS
        from txnstore.maintenance.turns import report, take_turn

        is_behind = False
        lease_ms = LEASE_MS if duties is None else PARTING_LEASE_MS
        for store in cluster.opened():
            portions = Portions(seconds=seconds, stop=self._stop)
            try:
                turn = take_turn(store, cluster, duties or DUTIES, portions, lease_ms=lease_ms, known=KNOWN)
            except StoreClosed:
                return False
            except (PermissionDenied, StoreReadOnly) as error:
                _log.debug("the maintenance of %s is not for this client: %s", store.url, error)
                self._next_seconds = self._monotonic_seconds() + REFUSED_SECONDS
            except TxnStoreError as error:
                _log.log(
                    _level_of(store, "", error),
                    "no turn could be had in the maintenance of %s: %s",
                    store.url,
                    error,
                    extra={"event": "duty_failed", "store": str(store.url), "duty": "all"},
                )
            else:
                report(store, turn, level_of=partial(_level_of, store))
                is_behind = is_behind or bool(turn.unfinished)
        return is_behind


def _here(work: Callable[[], Any]) -> Any:
    return work()


def _level_of(store: Store, duty: str, error: Exception) -> int:
    """Return how loud an error is: a warning, once in a process, if somebody has to change something first."""
    from txnstore.maintenance.turns import is_lasting, level_of

    return level_of(_lasting, f"{store.url} {store.schema} {duty}", error) if is_lasting(error) else logging.DEBUG


def _find_due(cluster: Cluster) -> list[MaintenanceDuty]:
    """Return what is due in the databases that are open, first what has waited longest for somebody."""
    from txnstore.maintenance.duties import DUTIES
    from txnstore.maintenance.turns import look_for_due

    by_name = {duty.name: duty for duty in DUTIES}
    names = dict.fromkeys(name for store in cluster.opened() for name in look_for_due(store, DUTIES).due)
    return [by_name[name] for name in names]
