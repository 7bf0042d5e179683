"""The loop that does each duty when its time has come, whatever becomes of the others.

A duty is done in portions until nothing of it is left.  Between two of them the other duties have their turn: what
others wait for does not wait until a week's journal is trimmed.

Any client may run one, and several may run at once: a duty locks the rows it is about and looks again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from txnstore.config import STORE_SETTINGS, settings_in_force
from txnstore.db.cluster.catalogue import read_store_settings
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.store import Store
from txnstore.errors import TxnStoreError
from txnstore.maintenance.duties import DUTIES, MaintenanceDuty
from txnstore.transactions.recovery import FOUND_MAX

_log = logging.getLogger(__name__)

#: Somebody may have shortened an interval meanwhile: the loop looks at least this often.
LOOK_AGAIN_SECONDS: Final = 10.0


class MaintenanceObserver(Protocol):
    """Hears of what a loop does, in its thread."""

    def due(self, count: int) -> None:
        """Hear of how many duties are due and not done."""
        ...

    def portion(self, duty: str, count: int | None, seconds: float) -> None:
        """Hear of a portion of a duty: how much it did, or None if it failed, and how long it took."""
        ...


class Maintenance:
    """The duties of one store, each with its time; for one thread."""

    def __init__(
        self,
        store: Store,
        cluster: Cluster | None = None,
        *,
        duties: Sequence[MaintenanceDuty] = DUTIES,
        monotonic_seconds: Callable[[], float] = time.monotonic,
        observer: MaintenanceObserver | None = None,
    ) -> None:
        """Look after `store` of `cluster`; every duty is due at once. `monotonic_seconds` tells how time passes."""
        self._store = store
        self._cluster = cluster
        self._duties = duties
        self._monotonic_seconds = monotonic_seconds
        self._observer = observer
        self._last_done: dict[str, float] = {}
        #: Of the duties that are not finished: how much was done so far.
        self._unfinished: dict[str, int] = {}
        self._settings = settings_in_force(STORE_SETTINGS, {})

    def run_once(self) -> dict[str, int]:
        """Do every duty now; return how much was done, by name. A duty that failed is logged and left out."""
        done: dict[str, int] = {}
        left = list(self._duties)
        while left:
            for duty in left:
                count = self._do(duty)
                if count is not None:
                    done[duty.name] = count
            left = [duty for duty in left if duty.name in self._unfinished]
        return done

    def run(self, stop: threading.Event) -> None:
        """Do each duty whenever it is due, until `stop` is set; the portion that runs then is finished first.

        An error is logged, and the duty is tried again when it is due again; what was done of it stays done.
        """
        while not stop.is_set():
            stop.wait(self._run_due(stop))

    def _run_due(self, stop: threading.Event) -> float:
        """Do a portion of what is due and return how many seconds to wait until something is again."""
        self._read_settings()
        for duty in self._duties:
            if self._left_seconds(duty) <= 0 and not stop.is_set():
                self._tell_due()
                self._do(duty)
                self._tell_due()
        return max(0.0, min(LOOK_AGAIN_SECONDS, *map(self._left_seconds, self._duties)))

    def _tell_due(self) -> None:
        if self._observer is not None:
            self._observer.due(sum(self._left_seconds(duty) <= 0 for duty in self._duties))

    def _left_seconds(self, duty: MaintenanceDuty) -> float:
        last = self._last_done.get(duty.name)
        if last is None or duty.name in self._unfinished:
            return 0.0
        interval_seconds: float = min(self._settings[duty.interval_setting] / 1000, duty.interval_max_seconds)
        return last + interval_seconds - self._monotonic_seconds()

    def _do(self, duty: MaintenanceDuty) -> int | None:
        """Do a portion of a duty, and return how much of it was done if nothing is left; None if it failed, or is."""
        total = self._unfinished.pop(duty.name, None)
        if total is None:
            # Counted from its beginning: what takes long does not come more rarely for it.
            self._last_done[duty.name] = self._monotonic_seconds()
            total = 0
        began_seconds = self._monotonic_seconds()
        count: int | None = None
        try:
            count = duty.do(self._store, self._cluster)
        except TxnStoreError as error:
            _log.warning(
                "maintenance of %s: could not be done now (%s): %s",
                self._store.url,
                duty.name,
                error,
                extra={"event": "duty_failed", "store": str(self._store.url), "duty": duty.name},
            )
            return None
        except Exception:  # noqa: BLE001 - a bug in one duty is no reason to let the others go undone
            _log.exception(
                "maintenance of %s: failed (%s)",
                self._store.url,
                duty.name,
                extra={"event": "duty_failed", "store": str(self._store.url), "duty": duty.name},
            )
            return None
        finally:
            if self._observer is not None:
                self._observer.portion(duty.name, count, self._monotonic_seconds() - began_seconds)
        total += count
        if count >= FOUND_MAX:
            self._unfinished[duty.name] = total
            return None
        if total:
            _log.info(
                "maintenance of %s: %d %s",
                self._store.url,
                total,
                duty.name,
                extra={"event": "duty_done", "store": str(self._store.url), "duty": duty.name, "count": total},
            )
        return total

    def _read_settings(self) -> None:
        try:
            self._settings = self._store.read(read_store_settings)
        except TxnStoreError as error:
            # The last ones known, or the defaults, will do until the store can be read again.
            _log.warning(
                "maintenance of %s: the settings cannot be read: %s",
                self._store.url,
                error,
                extra={"event": "database_unavailable", "store": str(self._store.url)},
            )
