"""The leases: which duties are due, and who is at them.

Each duty has a row.  A client that finds one due takes it for a while, and meanwhile all others pass it by; so they
do not do the same twice, and that is all: a duty looks again under the locks of what it is about, no matter who else is
at it.  One whose holder died is due again when its lease is over.  One that failed has been done by nobody: it stays
due, and has a pause first, which is a lease without a holder.  All times are the database server's.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, bindparam, delete, func, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from txnstore.config import Settings
from txnstore.db.cluster.catalogue import read_store_settings
from txnstore.db.schema import maintenance_duties, stores
from txnstore.db.statements import HotStatement
from txnstore.db.store import server_now_ms

#: How long a duty is taken for at most.
LEASE_MS: Final = 10_000
#: The longest pause of a duty that failed.
PAUSE_MS_MAX: Final = 300_000
#: What nobody has been at for so long is forgotten, if it is not among those that every process knows: the duty of a
#: participant of which `txnstore maintain` was told once.
FORGOTTEN_AFTER_MS: Final = 30 * 86_400_000

_NOW: Final = server_now_ms().label("now_ms")
_ROWS: Final = select(maintenance_duties, _NOW).order_by(maintenance_duties.c.duty)
# All duties, which are few: a process that looks only once does not wait for a list to be rendered.
_READ: Final = HotStatement(_ROWS)
# A duty that somebody else is taking at this moment belongs to somebody else.
_LOCK: Final = _ROWS.where(maintenance_duties.c.duty.in_(bindparam("duties", expanding=True))).with_for_update(
    skip_locked=True
)
_BEGINNING: Final = HotStatement(select(stores.c.created_ms, _NOW))
# Whoever is taking one is not waited for, and who has taken it meanwhile keeps it; who died at it does not.
_FORGOTTEN: Final = (
    select(maintenance_duties.c.duty)
    .where(
        maintenance_duties.c.duty.in_(bindparam("duties", expanding=True)),
        maintenance_duties.c.turn_ms < bindparam("before_ms"),
        func.coalesce(maintenance_duties.c.held_until_ms, 0) <= bindparam("now_ms"),
    )
    .with_for_update(skip_locked=True)
)
_FORGET: Final = delete(maintenance_duties).where(maintenance_duties.c.duty.in_(_FORGOTTEN))
_ENTER: Final = upsert(maintenance_duties).on_conflict_do_nothing(index_elements=["duty"])
_OF_DUTY: Final = maintenance_duties.c.duty == bindparam("of_duty")
_HOLD: Final = (
    update(maintenance_duties)
    .where(_OF_DUTY)
    .values(holder=bindparam("new_holder"), held_until_ms=bindparam("new_held_until_ms"))
)
_HELD: Final = maintenance_duties.c.holder == bindparam("of_holder")
# When it was begun stays as it was: who asks is to see that nobody has done it. But it has had its turn, so that
# others that are due come first.
_LEAVE_FAILED: Final = (
    update(maintenance_duties)
    .where(_OF_DUTY, _HELD)
    .values(
        is_unfinished=bindparam("new_is_unfinished"),
        position=bindparam("new_position"),
        turn_ms=server_now_ms(),
        holder=None,
        held_until_ms=server_now_ms() + bindparam("pause_ms"),
    )
)
_LEAVE: Final = _LEAVE_FAILED.values(begun_ms=bindparam("new_begun_ms"))
_GIVE_BACK: Final = update(maintenance_duties).where(_OF_DUTY, _HELD).values(holder=None, held_until_ms=None)
_RENEW: Final = (
    update(maintenance_duties).where(_OF_DUTY, _HELD).values(held_until_ms=server_now_ms() + bindparam("lease_ms"))
)

#: When somebody was last at a duty that nobody was at yet.
_NEVER: Final = -1
_numbers: Final = itertools.count(1)


class DutyLease(NamedTuple):
    """What is known of one duty."""

    duty: str
    begun_ms: int
    is_unfinished: bool = False
    position: str | None = None
    turn_ms: int = _NEVER
    held_until_ms: int | None = None
    pauses: bool = False
    """Whether nobody holds it, and it waits for the end of its pause: it failed, or something was in its way."""

    interval_ms: int = 0
    """Of one that was taken because it was due: how often it is done."""

    def due_in_ms(self, now_ms: int, interval_ms: int) -> int:
        """Return in how many milliseconds somebody may take it; 0: now.

        A clock that was put back makes it due: what seems to have been begun, or is held, too far in the future.
        """
        held_ms = 0 if self.held_until_ms is None else self.held_until_ms - now_ms
        if not 0 <= held_ms <= (PAUSE_MS_MAX if self.pauses else LEASE_MS):
            held_ms = 0
        age_ms = now_ms - self.begun_ms
        left_ms = 0 if self.is_unfinished or self.pauses or age_ms < 0 else max(0, interval_ms - age_ms)
        return max(held_ms, left_ms)

    def overdue_ms(self, now_ms: int, interval_ms: int) -> int:
        """Return for how many milliseconds it has been due with nobody at it; 0: it is not, or somebody is.

        In the pause after it failed nobody is.
        """
        if not self.pauses and self.due_in_ms(now_ms, interval_ms) > 0:
            return 0
        # What failed has had its turn, and was not done.
        due_since_ms = self.turn_ms if self.is_unfinished and not self.pauses else self.begun_ms + interval_ms
        return max(0, now_ms - due_since_ms)


class Look(NamedTuple):
    """What is due."""

    due: Sequence[str]
    """The duties that may be taken now, those first that have waited longest for somebody."""

    next_ms: int
    """In how many milliseconds the first of the others is due."""


class PortionOutcome(NamedTuple):
    """What has become of a portion."""

    duty: str
    begun_ms: int
    is_unfinished: bool
    position: str | None
    pause_ms: int = 0
    """For how long it is left alone; 0: it is done, or goes on at once."""

    has_failed: bool = False


def new_holder() -> str:
    """Return the name under which somebody takes leases once."""
    return f"{socket.gethostname()[:100]}:{os.getpid()}:{next(_numbers)}"


def look(connection: Connection, settings_of: Mapping[str, str]) -> Look:
    """Return which of these duties, each with the setting of its interval, are due; nothing is changed."""
    leases, now_ms = _read(connection, settings_of)
    return _sorted_out(_of(settings_of, leases), now_ms, settings_of, read_store_settings(connection))


def overdue_ms(connection: Connection, settings_of: Mapping[str, str]) -> list[int]:
    """Return for how long each of those of these duties has been due that wait for somebody, the longest first."""
    leases, now_ms = _read(connection, settings_of)
    settings = read_store_settings(connection)
    each_ms = (lease.overdue_ms(now_ms, settings[settings_of[lease.duty]]) for lease in _of(settings_of, leases))
    return sorted(filter(None, each_ms), reverse=True)


def take(
    connection: Connection,
    settings_of: Mapping[str, str],
    holder: str,
    *,
    lease_ms: int = LEASE_MS,
    duties_max: int | None = None,
    forced: bool = False,
    known: Collection[str] | None = None,
) -> list[DutyLease]:
    """Take those of these duties that are due, so many or all; with `forced` all of them, due or not, held or not.

    Each is returned with when its round began: now, unless it goes on without a pause.  Duties that are neither among
    these nor `known` are forgotten if nobody has been at them for long; None: no duty is.
    """
    leases, now_ms = _read(connection, settings_of)
    missing = [lease for lease in _of(settings_of, leases) if lease.turn_ms == _NEVER]
    if missing:
        rows = [
            {"duty": lease.duty, "begun_ms": lease.begun_ms, "is_unfinished": False, "turn_ms": lease.begun_ms}
            for lease in missing
        ]
        connection.execute(_ENTER, rows)
    locked = {row.duty: _lease_of(row) for row in connection.execute(_LOCK, {"duties": list(settings_of)})}
    if forced:
        # One that somebody else is taking at this moment, too.
        wanted = [locked.get(duty, leases[duty]) for duty in settings_of]
    else:
        # As they are now, under the locks.
        settings = read_store_settings(connection)
        due = _sorted_out(locked.values(), now_ms, settings_of, settings).due
        wanted = [locked[duty]._replace(interval_ms=settings[settings_of[duty]]) for duty in due[:duties_max]]
    held = {"new_holder": holder, "new_held_until_ms": now_ms + lease_ms}
    if taken := [{"of_duty": lease.duty, **held} for lease in wanted if lease.duty in locked]:
        connection.execute(_HOLD, taken)
    if known is not None:
        others = leases.keys() - settings_of.keys() - set(known)
        before_ms = now_ms - FORGOTTEN_AFTER_MS
        if left := [duty for duty in others if leases[duty].turn_ms < before_ms]:
            connection.execute(_FORGET, {"duties": left, "before_ms": before_ms, "now_ms": now_ms})
    goes_on = [lease.is_unfinished and not lease.pauses for lease in wanted]
    return [lease if on else lease._replace(begun_ms=now_ms) for lease, on in zip(wanted, goes_on, strict=True)]


def renew(connection: Connection, duties: Collection[str], holder: str, *, lease_ms: int = LEASE_MS) -> None:
    """Take these duties for as long again, unless somebody else has taken them meanwhile."""
    connection.execute(_RENEW, [{"of_duty": duty, "of_holder": holder, "lease_ms": lease_ms} for duty in duties])


def leave(connection: Connection, holder: str, done: Sequence[PortionOutcome], untouched: Collection[str]) -> None:
    """Note what has become of duties, and give back those that there was no time for.

    What somebody else has taken meanwhile stays as it is.
    """
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    for outcome in done:
        row = {
            "of_duty": outcome.duty,
            "of_holder": holder,
            "new_is_unfinished": outcome.is_unfinished,
            "new_position": outcome.position,
            "pause_ms": outcome.pause_ms or None,
        }
        if outcome.has_failed:
            failed.append(row)
        else:
            rows.append({**row, "new_begun_ms": outcome.begun_ms})
    if rows:
        connection.execute(_LEAVE, rows)
    if failed:
        connection.execute(_LEAVE_FAILED, failed)
    if untouched:
        connection.execute(_GIVE_BACK, [{"of_duty": duty, "of_holder": holder} for duty in untouched])


def _read(connection: Connection, duties: Collection[str]) -> tuple[dict[str, DutyLease], int]:
    """Return what is known of all duties, and the time; of these, one without a row was begun when the store was."""
    rows = _READ.rows(connection)
    leases = {row.duty: _lease_of(row) for row in rows}
    missing = [duty for duty in duties if duty not in leases]
    if not missing:
        return leases, rows[0].now_ms
    created_ms, now_ms = _BEGINNING.row(connection)
    return leases | {duty: DutyLease(duty, created_ms) for duty in missing}, now_ms


def _of(duties: Collection[str], leases: Mapping[str, DutyLease]) -> list[DutyLease]:
    return [leases[duty] for duty in duties]


def _sorted_out(leases: Collection[DutyLease], now_ms: int, settings_of: Mapping[str, str], settings: Settings) -> Look:
    due_in_ms = {lease.duty: lease.due_in_ms(now_ms, settings[settings_of[lease.duty]]) for lease in leases}
    due = [lease.duty for lease in sorted(leases, key=lambda lease: lease.turn_ms) if due_in_ms[lease.duty] == 0]
    return Look(due, min((left_ms for left_ms in due_in_ms.values() if left_ms > 0), default=LEASE_MS))


def _lease_of(row: Any) -> DutyLease:
    pauses = row.holder is None and row.held_until_ms is not None
    return DutyLease(
        row.duty, row.begun_ms, bool(row.is_unfinished), row.position, row.turn_ms, row.held_until_ms, pauses
    )
