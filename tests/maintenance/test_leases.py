"""Who takes a duty does it, and others pass it by, until its time is over or it is due again."""

from __future__ import annotations

from functools import partial

import pytest
from sqlalchemy import select, update

from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.db.schema import maintenance_duties, stores
from txnstore.db.store import server_now_ms
from txnstore.maintenance.duties import ABORT_INTERVAL, LOG_INTERVAL
from txnstore.maintenance.leases import LEASE_MS, DutyLease, PortionOutcome, leave, look, renew, take

DAY_MS = 86_400_000
INTERVAL_MS = 10_000
DUTIES = {"abort": ABORT_INTERVAL, "trim": LOG_INTERVAL}


class Client:
    """Somebody who looks after the store, under a name."""

    def __init__(self, store, name):
        self.store = store
        self.name = name

    def look(self):
        return self.store.read(partial(look, settings_of=DUTIES))

    def take(self, **options):
        taken = self.store.write(partial(take, settings_of=DUTIES, holder=self.name, **options))
        return {lease.duty: lease for lease in taken}

    def leave(self, *done, untouched=()):
        self.store.write(partial(leave, holder=self.name, done=done, untouched=untouched))

    def renew(self, *duties):
        self.store.write(partial(renew, duties=duties, holder=self.name))


@pytest.fixture
def second(store, clock):
    # The store of the test may be a copy of one that was made by another clock.
    store.write(lambda connection: connection.execute(update(stores).values(created_ms=clock.now_ms())))
    return Client(store, "second")


@pytest.fixture
def first(store, clock, second):
    """A client of a store in which everything is due."""
    clock.advance(DAY_MS)
    return Client(store, "first")


def rows(store):
    found = store.read(lambda connection: connection.execute(select(maintenance_duties)).all())
    return {row.duty: row for row in found}


def done(lease, *, is_unfinished=False, position=None):
    return PortionOutcome(lease.duty, lease.begun_ms, is_unfinished, position)


@pytest.mark.parametrize(
    ("lease", "due_in_ms"),
    [
        (DutyLease("d", 1_000), 0),
        (DutyLease("d", 90_000), 0),
        (DutyLease("d", 90_001), 1),
        (DutyLease("d", 100_000), INTERVAL_MS),
        # The clock was put back: what was begun in the future is no reason to wait.
        (DutyLease("d", 100_001), 0),
        (DutyLease("d", 99_000, is_unfinished=True), 0),
        (DutyLease("d", 1_000, held_until_ms=100_000), 0),
        (DutyLease("d", 1_000, held_until_ms=100_001), 1),
        (DutyLease("d", 99_000, is_unfinished=True, held_until_ms=103_000), 3_000),
        (DutyLease("d", 99_000, held_until_ms=101_000), 9_000),
        (DutyLease("d", 1_000, held_until_ms=100_000 + LEASE_MS), LEASE_MS),
        # Nobody holds anything for so long: the clock was put back.
        (DutyLease("d", 1_000, held_until_ms=100_001 + LEASE_MS), 0),
    ],
)
def test_when_a_duty_may_be_taken(lease, due_in_ms):
    assert lease.due_in_ms(100_000, INTERVAL_MS) == due_in_ms


@pytest.mark.parametrize(
    ("lease", "overdue_ms"),
    [
        (DutyLease("d", 1_000), 89_000),
        (DutyLease("d", 90_000), 0),
        (DutyLease("d", 95_000), 0),
        # Somebody is at it.
        (DutyLease("d", 1_000, held_until_ms=100_001), 0),
        (DutyLease("d", 1_000, held_until_ms=100_000), 89_000),
        # What is left of a round is due at once, and has waited since somebody left it.
        (DutyLease("d", 1_000, is_unfinished=True, turn_ms=97_000), 3_000),
        # The clock was put back.
        (DutyLease("d", 100_001), 0),
        (DutyLease("d", 1_000, is_unfinished=True, turn_ms=100_001), 0),
    ],
)
def test_how_long_a_duty_has_waited_for_somebody(lease, overdue_ms):
    assert lease.overdue_ms(100_000, INTERVAL_MS) == overdue_ms


def test_in_a_new_store_nothing_is_due_before_its_interval_has_passed(store, clock, second):
    assert second.look().due == []
    assert second.look().next_ms == INTERVAL_MS
    assert second.take() == {}
    clock.advance(INTERVAL_MS)
    assert second.look().due == ["abort"]
    assert list(second.take()) == ["abort"]


def test_what_one_has_taken_others_pass_by_until_he_leaves_it(store, clock, first, second):
    taken = first.take()
    assert list(taken) == ["abort", "trim"]
    assert second.look().due == []
    assert second.look().next_ms == LEASE_MS
    assert second.take() == {}
    first.leave(done(taken["abort"]), untouched=["trim"])
    # One was done and has its time, the other one was not.
    assert second.look().due == ["trim"]
    assert list(second.take()) == ["trim"]
    clock.advance(INTERVAL_MS)
    assert list(first.take()) == ["trim", "abort"]


def test_what_somebody_held_who_died_is_free_when_his_time_is_over_and_due_as_before(store, clock, first, second):
    first.take()
    clock.advance(LEASE_MS - 1)
    assert second.take() == {}
    clock.advance(1)
    assert list(second.take()) == ["abort", "trim"]


def test_who_was_overtaken_changes_nothing_any_more(store, clock, first, second):
    late = first.take()
    clock.advance(LEASE_MS)
    taken = second.take()
    before = rows(store)
    first.leave(done(late["abort"], is_unfinished=True, position="far"), untouched=["trim"])
    first.renew("abort", "trim")
    assert rows(store) == before
    assert all(row.holder == "second" for row in before.values())
    second.leave(*map(done, taken.values()))
    assert all(row.holder is None and row.held_until_ms is None for row in rows(store).values())


def test_who_takes_long_renews_his_time(store, clock, first, second):
    first.take()
    clock.advance(LEASE_MS - 1)
    first.renew("abort")
    clock.advance(1)
    assert list(second.take()) == ["trim"]


def test_an_unfinished_duty_goes_on_where_it_was_left_and_counts_from_its_beginning(store, clock, first, second):
    begun_ms = clock.now_ms()
    taken = first.take()
    clock.advance(500)
    first.leave(done(taken["abort"], is_unfinished=True, position="g-7"), done(taken["trim"]))
    again = second.take()
    assert again["abort"].position == "g-7"
    assert again["abort"].begun_ms == begun_ms
    assert list(again) == ["abort"]
    second.leave(done(again["abort"]))
    assert rows(store)["abort"].position is None
    clock.advance(INTERVAL_MS - 501)
    assert first.look().due == []
    clock.advance(1)
    assert first.look().due == ["abort"]


def test_those_go_first_that_have_waited_longest_for_somebody(store, clock, first, second):
    taken = first.take(duties_max=1)
    assert list(taken) == ["abort"]
    clock.advance(5)
    first.leave(done(taken["abort"], is_unfinished=True))
    assert second.look().due == ["trim", "abort"]
    assert list(second.take(duties_max=1)) == ["trim"]


def test_an_interval_that_is_shortened_holds_for_everybody_at_once(store, clock, first, second):
    first.leave(*map(done, first.take().values()))
    clock.advance(2_000)
    assert second.look().due == []
    store.write(lambda connection: change_store_settings(connection, {ABORT_INTERVAL: "1500"}))
    assert second.look().due == ["abort"]


def test_who_is_told_to_do_everything_takes_what_is_not_due_and_what_others_hold(store, clock, first, second):
    first.take(duties_max=1)
    assert set(second.take(forced=True)) == {"abort", "trim"}
    assert {row.holder for row in rows(store).values()} == {"second"}


def test_what_somebody_is_taking_at_this_moment_is_not_waited_for(store, clock, first, second):
    first.leave(*map(done, first.take().values()))
    clock.advance(DAY_MS)
    taken = []

    def take_beside(connection):
        mine = take(connection, DUTIES, "first")
        if store.backend.name == "postgresql":
            taken.append(second.take())
        return mine

    assert len(store.write(take_beside)) == 2
    assert taken in ([], [{}])


def test_times_are_the_database_servers(url):
    with open_store(url) as store:
        client = Client(store, "client")
        assert set(client.take(forced=True)) == {"abort", "trim"}
        now_ms = store.read(lambda connection: connection.execute(select(server_now_ms())).scalar_one())
        assert all(abs(row.held_until_ms - LEASE_MS - now_ms) < 60_000 for row in rows(store).values())
