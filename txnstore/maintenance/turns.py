"""The turn: a process with time to spare looks which duties are due, takes them, and does a portion of each.

A turn of somebody who has little time does what there is time for, at least a portion, and gives the rest back.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, Protocol

from sqlalchemy import Connection

from txnstore.db.cluster.cluster import Cluster
from txnstore.db.portions import FOUND_MAX, LOCK_TIMEOUT_MS, Portions
from txnstore.db.row_security import check_sees_store
from txnstore.db.store import Store
from txnstore.errors import Recovery, StoreBusy, TxnStoreError, WriteConflict
from txnstore.maintenance import leases
from txnstore.maintenance.leases import LEASE_MS, PAUSE_MS_MAX, DutyLease, PortionOutcome
from txnstore.trouble import RepeatedTrouble, kind_of

_log = logging.getLogger(__name__)

#: Leases are renewed once so much of their time has passed.
_RENEWED_AFTER_SECONDS: Final = LEASE_MS / 1000 / 3
#: After how long what was passed by, since somebody held it, is looked for again at the latest.
_PASSED_BY_MS: Final = 60_000


@dataclass(slots=True)
class Portion:
    """What the duties of a turn are done with, one after the other."""

    store: Store
    cluster: Cluster | None
    portions: Portions
    position: str | None = None
    """Where the one before ended, for duties that cannot tell by what is left; the duty says where this one has."""

    again_seconds: float | None = None
    """After how many seconds there will be something to do again, if the duty knows."""

    has_newest_settings: bool = False
    """Whether a duty of this turn has asked the controller for them: the others need not."""

    def begin(self, position: str | None) -> None:
        """Begin the next duty, which the last time ended at `position`."""
        self.position = position
        self.again_seconds = None
        self.portions.was_told_over = False
        self.portions.was_busy = False


#: Does a portion of a duty and returns how much was done: FOUND_MAX or more, or all that there was; or `portions` are
#: over.
Work = Callable[[Portion], int]


class MaintenanceDuty(NamedTuple):
    """One thing to do."""

    name: str
    """What was done, said of a number: "3 {name}"."""

    interval_setting: str
    """The setting of the store that says, in milliseconds, how often."""

    load: Callable[[], Work]
    """Import what does it, and return that: where nothing is due, nothing is imported."""

    interval_max_seconds: float = math.inf
    """A process that does nothing but the maintenance does it at least so often, whatever the setting says."""


class MaintenanceObserver(Protocol):
    """Hears of what is done in turns, in the thread that does it."""

    def due(self, count: int) -> None:
        """Hear of how many duties are due, not done, and taken by nobody else."""
        ...

    def portion(self, duty: str, count: int | None, seconds: float) -> None:
        """Hear of a portion of a duty: how much it did, or None if it failed, and how long it took."""
        ...


class _Nobody:
    """Hears nothing."""

    def due(self, count: int) -> None:
        pass

    def portion(self, duty: str, count: int | None, seconds: float) -> None:
        pass


NOBODY: Final = _Nobody()


@dataclass(slots=True)
class Turn:
    """What has become of a turn."""

    done: dict[str, int] = field(default_factory=dict)
    """How much was done of each duty."""

    unfinished: list[str] = field(default_factory=list)
    """Of which duties something is left; those that were not begun for want of time are among them."""

    positions: dict[str, str] = field(default_factory=dict)
    """Where those of them go on that cannot tell by what is left."""

    failed: dict[str, Exception] = field(default_factory=dict)
    again_seconds: dict[str, float] = field(default_factory=dict)
    """Of the duties that know: after how many seconds there will be something to do again."""

    next_seconds: float = 0.0
    """After how many seconds something may be due again; 0: something is now."""


def look_for_due(store: Store, duties: Sequence[MaintenanceDuty]) -> leases.Look:
    """Return which duties are due; one look, which changes nothing."""
    settings_of = {duty.name: duty.interval_setting for duty in duties}
    return store.read(partial(leases.look, settings_of=settings_of), retry_timeout_ms=0)


def take_turn(
    store: Store,
    cluster: Cluster | None,
    duties: Sequence[MaintenanceDuty],
    portions: Portions,
    *,
    lease_ms: int = LEASE_MS,
    forced: bool = False,
    positions: Mapping[str, str] | None = None,
    known: Collection[str] | None = None,
    observer: MaintenanceObserver = NOBODY,
    monotonic_seconds: Callable[[], float] = time.monotonic,
) -> Turn:
    """Do a portion of each duty that is due and that nobody is at; with `forced` of each, even one that somebody is at.

    Where somebody else has stopped, or failed, is nothing to go by for who is to do all of a duty: with `forced` each
    begins at its position in `positions`, or at the start.
    What fails is tried again where it was, after a pause, and keeps no other duty from being done.
    What nobody has been at for long is forgotten, unless it is among the `known` duties, or these; None: nothing is.

    Raises:
        PermissionDenied: this role lacks a right, or row-level security shows it a part of the store.
        TxnStoreError: the leases cannot be taken; nothing was done.
    """
    turn = Turn()
    by_name = {duty.name: duty for duty in duties}
    settings_of = {duty.name: duty.interval_setting for duty in duties}
    if not forced:
        due = look_for_due(store, duties)
        if not due.due:
            observer.due(0)
            turn.next_seconds = due.next_ms / 1000
            return turn
        settings_of = {name: settings_of[name] for name in due.due}
    holder = leases.new_holder()
    retry_timeout_ms = LOCK_TIMEOUT_MS if portions.is_bounded else None

    def take(connection: Connection) -> list[DutyLease]:
        check_sees_store(store, connection, "what is old or done is still needed")
        spared = None if known is None else {*known, *by_name}
        return leases.take(connection, settings_of, holder, lease_ms=lease_ms, forced=forced, known=spared)

    taken = store.write(take, retry_timeout_ms=retry_timeout_ms)
    if forced:
        taken = [lease._replace(position=(positions or {}).get(lease.duty)) for lease in taken]
    outcomes: list[PortionOutcome] = []
    portion = Portion(store, cluster, portions)
    renewed_at = time.monotonic()
    observer.due(len(taken))
    for number, lease in enumerate(taken):
        # The first one is done in any case: every turn comes further.
        if number and portions.is_over:
            break
        if time.monotonic() - renewed_at > _RENEWED_AFTER_SECONDS:
            renewed_at = time.monotonic()
            # Those that are done as well: what has become of them is noted at the end.
            store.write(partial(leases.renew, duties=[each.duty for each in taken], holder=holder, lease_ms=lease_ms))
        began_seconds = monotonic_seconds()
        outcomes.append(_do(by_name[lease.duty], lease, portion, turn))
        observer.portion(lease.duty, turn.done.get(lease.duty), monotonic_seconds() - began_seconds)
        observer.due(len(taken) - len(outcomes) + len(turn.unfinished))
    untouched = [lease.duty for lease in taken[len(outcomes) :]]
    turn.unfinished += untouched
    store.write(
        partial(leases.leave, holder=holder, done=outcomes, untouched=untouched), retry_timeout_ms=retry_timeout_ms
    )
    return turn


def do_unleased(store: Store, cluster: Cluster | None, duty: MaintenanceDuty, portions: Portions | None = None) -> Turn:
    """Do a duty beside its holder: for what costs less than asking who that is."""
    turn = Turn()
    _do(duty, DutyLease(duty.name, 0), Portion(store, cluster, portions or Portions()), turn)
    return turn


def _do(duty: MaintenanceDuty, lease: DutyLease, portion: Portion, turn: Turn) -> PortionOutcome:
    portion.begin(lease.position)
    try:
        count = duty.load()(portion)
    except Exception as error:  # noqa: BLE001 - neither an outage nor a bug in one duty leaves the others undone
        turn.failed[duty.name] = error
        # Else what comes later might never be reached; where it fails again it starts over, for what comes before.
        goes_on = lease.is_unfinished and not lease.pauses
        position = lease.position if goes_on else None
        pause_ms = LEASE_MS if isinstance(error, StoreBusy | WriteConflict) else _pause_ms(lease)
        return PortionOutcome(duty.name, lease.begun_ms, goes_on, position, pause_ms, has_failed=True)
    # One that only looked, however long that took, has left nothing.
    is_unfinished = count >= FOUND_MAX or portion.position is not None or portion.portions.was_told_over
    turn.done[duty.name] = count
    if portion.again_seconds is not None:
        turn.again_seconds[duty.name] = portion.again_seconds
    if is_unfinished:
        turn.unfinished.append(duty.name)
    if portion.position is not None:
        turn.positions[duty.name] = portion.position
    if portion.portions.was_busy and not is_unfinished:
        # What somebody at work held is still to be done, by and by: not as soon as this turn is over.
        pause_ms = min(_pause_ms(lease), _PASSED_BY_MS)
        return PortionOutcome(duty.name, lease.begun_ms, is_unfinished=True, position=None, pause_ms=pause_ms)
    return PortionOutcome(duty.name, lease.begun_ms, is_unfinished, portion.position)


def _pause_ms(lease: DutyLease) -> int:
    """Return for how long a duty is left alone for which somebody, or time, has to do something first."""
    return min(max(lease.interval_ms, LEASE_MS), PAUSE_MS_MAX)


def is_lasting(error: Exception) -> bool:
    """Return whether an error will come again until somebody has changed something."""
    return not isinstance(error, TxnStoreError) or error.recovery is Recovery.FIX


def level_of(failures: RepeatedTrouble, failed: str, error: Exception) -> int:
    """Return how loud the error of a duty, or of whatever has failed, is: a warning, once a minute if it lasts."""
    return logging.WARNING if failures.may_be_told((failed, kind_of(error))) else logging.DEBUG


def report(
    store: Store, turn: Turn, *, level_of: Callable[[str, Exception], int] = lambda _duty, _error: logging.WARNING
) -> None:
    """Log what went wrong in a turn; a bug shows where it is, a database that is away is one line."""
    for name, error in turn.failed.items():
        fields = {"event": "duty_failed", "store": str(store.url), "duty": name}
        level = level_of(name, error)
        if isinstance(error, TxnStoreError):
            _log.log(level, "maintenance of %s: could not be done now (%s): %s", store.url, name, error, extra=fields)
        else:
            level = logging.ERROR if level == logging.WARNING else level
            _log.log(level, "maintenance of %s: failed (%s)", store.url, name, exc_info=error, extra=fields)
