"""Maintenance that nobody does, or that fails, is told of by doctor."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from tests.doctor.test_examination import HOUR_MS, seen, was_there_long
from txnstore.db.opening import open_store
from txnstore.db.schema import maintenance_duties, stores
from txnstore.maintenance.duties import DUTIES
from txnstore.maintenance.loop import Maintenance


def done_later(hours):
    """Let all that was done have been done so much later, by a clock that was ahead."""
    return update(maintenance_duties).values(turn_ms=maintenance_duties.c.turn_ms + hours * HOUR_MS - 60_000)


def test_what_was_done_while_the_clock_was_ahead_is_not_taken_to_have_been_done(url):
    with open_store(url) as store:
        was_there_long(store)
        Maintenance(store).run_once()
        assert seen(url) == {}
        store.write(lambda connection: connection.execute(done_later(10)))
        assert seen(url) == {"nobody-maintains": "nobody has done any of the maintenance for 3 hours"}
        store.write(lambda connection: connection.execute(update(stores).values(move_state=1)))
        assert seen(url) == {}


@pytest.mark.slow
def test_a_duty_that_fails_is_told_of_though_others_are_done(url):
    """For as long as it has not been done; once it is, that is over."""
    duty = DUTIES[0]
    fail = lambda _: 1 // 0  # noqa: E731
    with open_store(url) as store:
        Maintenance(store).run_once()
        Maintenance(store, duties=[duty._replace(load=lambda: fail)]).run_once()
        # It may be done a moment later.
        assert seen(url) == {}
        of_duty = update(maintenance_duties).where(maintenance_duties.c.duty == duty.name)
        late = of_duty.values(begun_ms=maintenance_duties.c.begun_ms - 5 * HOUR_MS - 60_000)
        store.write(lambda connection: connection.execute(late))
        told = f"it failed when it was last tried, and was last done 5 hours ago: {duty.name}"
        assert seen(url) == {"nobody-maintains": told}
        # Nobody tries it any more.
        given_up = of_duty.values(held_until_ms=maintenance_duties.c.held_until_ms - 3 * HOUR_MS)
        store.write(lambda connection: connection.execute(given_up))
        assert seen(url) == {}
        Maintenance(store, duties=[duty._replace(load=lambda: fail)]).run_once()
        assert seen(url) == {"nobody-maintains": told}
        Maintenance(store).run_once()
        assert seen(url) == {}
