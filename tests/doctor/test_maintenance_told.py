"""Maintenance that nobody does, or that fails, is told of by doctor."""

from __future__ import annotations

from sqlalchemy import update

from tests.doctor.test_examination import HOUR_MS, seen, was_there_long
from txnstore.db.opening import open_store
from txnstore.db.schema import maintenance_duties, stores
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
