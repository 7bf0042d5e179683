"""A turn does what there is time for, at least one portion, and gives the rest back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import func, select, update

from tests.tools.journal import ENTRIES, add_old_entries
from txnstore.db import portions as portions_module
from txnstore.db.portions import (
    BYTES_AT_ONCE,
    COMMIT_SECONDS,
    FIRST_BYTES,
    FIRST_ROWS,
    HELD_SECONDS,
    LEAST_BYTES,
    LEAST_ROWS,
    Portions,
    undisturbed_seconds,
)
from txnstore.db.schema import maintenance_duties, transaction_log
from txnstore.db.store import ROWS_AT_ONCE
from txnstore.errors import CorruptBatch, StoreBusy, StoreUnavailable, WriteConflict
from txnstore.log.topics import create_topic
from txnstore.maintenance import leases
from txnstore.maintenance.duties import ABORT_INTERVAL, COMPACTION_INTERVAL, DUTIES, LONG_DUTIES, REMOVE_INTERVAL
from txnstore.maintenance.leases import FORGOTTEN_AFTER_MS, LEASE_MS, PAUSE_MS_MAX
from txnstore.maintenance.loop import Maintenance
from txnstore.maintenance.turns import MaintenanceDuty, look_for_due, take_turn
from txnstore.transactions.recovery import trim_journal

DAY_MS = 86_400_000


class Seconds:
    """Time that passes when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def journal(store, clock):
    """So many entries that are old enough to go."""
    add_old_entries(store, clock)


def count(store, table):
    return store.read(lambda connection: connection.execute(select(func.count()).select_from(table)).scalar_one())


def duty_names(store):
    return set(store.read(lambda connection: connection.execute(select(maintenance_duties.c.duty)).scalars().all()))


def duty(name, work, setting=REMOVE_INTERVAL):
    return MaintenanceDuty(name, setting, lambda: work)


def test_who_has_no_time_does_one_portion_and_the_next_one_goes_on(store, clock, journal):
    trim = [each for each in DUTIES if each.name == "journal entries deleted"]
    left: list[int] = []
    while not left or left[-1]:
        turn = take_turn(store, None, trim, Portions(seconds=0.0))
        left.append(count(store, transaction_log))
        assert turn.unfinished == ["journal entries deleted"]
    # Each turn comes a portion further, however many processes they are of.
    assert left == [95, 70, 45, 20, 0]
    assert take_turn(store, None, trim, Portions(seconds=3_600)).unfinished == []
    assert take_turn(store, None, trim, Portions(seconds=3_600)).done == {}


def test_what_there_was_no_time_for_is_due_for_the_next_one(store, clock):
    clock.advance(DAY_MS)
    seconds, done = Seconds(), []

    def work(name):
        def do(portion):
            done.append(name)
            seconds.now += 1
            # Who has more to do asks.
            return 0 if portion.portions.is_over else 1

        return duty(name, do)

    duties = [work(name) for name in "abc"]
    turn = take_turn(store, None, duties, Portions(seconds=1.5, monotonic_seconds=seconds))
    assert done == ["a", "b"]
    # The one at which the time was over was cut short, and the last one was not begun.
    assert turn.unfinished == ["b", "c"]
    clock.advance(5)
    take_turn(store, None, duties, Portions(seconds=1.5, monotonic_seconds=seconds))
    assert sorted(done[2:]) == ["b", "c"]


class Failing:
    """A duty that raises this, or is done."""

    def __init__(self, error):
        self.error = error

    def __call__(self, _):
        if self.error is not None:
            raise self.error
        return 0


def overdue_ms(store, duties):
    settings_of = {duty.name: duty.interval_setting for duty in duties}
    return store.read(lambda connection: leases.overdue_ms(connection, settings_of))


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("error", "setting", "pause_ms"),
    [
        # Somebody at work holds what is to go, and will be done with it long before the next hour.
        (StoreBusy(), REMOVE_INTERVAL, LEASE_MS),
        (WriteConflict(), REMOVE_INTERVAL, LEASE_MS),
        (StoreUnavailable(), REMOVE_INTERVAL, PAUSE_MS_MAX),
        # What somebody has to change first is tried as often as it is done, or now and then.
        (CorruptBatch(), COMPACTION_INTERVAL, 15_000),
        (AssertionError(), REMOVE_INTERVAL, PAUSE_MS_MAX),
        (CorruptBatch(), ABORT_INTERVAL, 10_000),
    ],
)
def test_a_duty_that_fails_is_due_again_after_a_pause_and_keeps_no_other_from_being_done(
    store, clock, error, setting, pause_ms
):
    clock.advance(DAY_MS)
    duties = [duty("fails", Failing(error), setting), duty("done", lambda _: 0, REMOVE_INTERVAL)]
    turn = take_turn(store, None, duties, Portions(seconds=10))
    assert turn.failed == {"fails": error}
    assert turn.done == {"done": 0}
    # Not at once: nobody does it again and again.
    assert turn.unfinished == []
    clock.advance(pause_ms - 1)
    assert take_turn(store, None, duties, Portions(seconds=10)).failed == {}
    assert look_for_due(store, duties).next_ms == 1
    clock.advance(1)
    assert take_turn(store, None, duties, Portions(seconds=10)).failed == {"fails": error}


def test_a_duty_that_fails_stays_overdue_until_somebody_has_done_it(store, clock):
    clock.advance(DAY_MS)
    fails = Failing(None)
    duties = [duty("fails", fails, ABORT_INTERVAL), duty("done", lambda _: 0, REMOVE_INTERVAL)]
    take_turn(store, None, duties, Portions())
    assert overdue_ms(store, duties) == []
    fails.error = StoreBusy()
    for count in range(4):
        clock.advance(LEASE_MS)
        assert take_turn(store, None, duties, Portions()).failed
        # Since it was due first, however often it was tried since.
        assert overdue_ms(store, duties) == [count * LEASE_MS] * (count > 0)
    fails.error = None
    clock.advance(LEASE_MS)
    assert take_turn(store, None, duties, Portions()).done == {"fails": 0}
    assert overdue_ms(store, duties) == []
    # From then on at its own interval.
    clock.advance(9_999)
    assert look_for_due(store, duties).due == []
    clock.advance(1)
    assert look_for_due(store, duties).due == ["fails"]


def test_what_was_passed_by_because_somebody_held_it_is_done_soon_and_not_at_once(store, clock):
    clock.advance(DAY_MS)
    held = ["somebody holds it"]

    def forget(portion):
        def work(_):
            if held:
                raise StoreBusy
            return 3

        return portion.portions.write_unless_busy(portion.store, work, 0)

    duties = [duty("forgets", forget), duty("later", lambda _: 0)]
    turn = take_turn(store, None, duties, Portions(seconds=10))
    assert turn.done == {"forgets": 0, "later": 0}
    assert turn.unfinished == []
    clock.advance(59_999)
    assert look_for_due(store, duties).due == []
    clock.advance(1)
    held.clear()
    assert take_turn(store, None, duties, Portions(seconds=10)).done == {"forgets": 3}
    clock.advance(60_000)
    assert look_for_due(store, duties).due == []


def test_duties_that_fail_slowly_take_no_turn_of_one_that_works(store, clock):
    """A turn has time for one: the first, and those that failed are due again sooner than the others."""
    clock.advance(DAY_MS)
    failing = [Failing(None) for _ in range(3)]
    slow = [duty(f"fails {number}", each, ABORT_INTERVAL) for number, each in enumerate(failing)]
    duties = [*slow, duty("works", lambda _: 0, ABORT_INTERVAL)]
    take_turn(store, None, duties, Portions(seconds=10))
    for each in failing:
        each.error = StoreBusy()
    clock.advance(LEASE_MS)
    done: list[str] = []
    for _ in range(12):
        done += take_turn(store, None, duties, Portions(seconds=0)).done
        clock.advance(LEASE_MS // 2)
    assert done == ["works"] * 3


def test_a_duty_that_fails_goes_on_where_it_was_and_begins_anew_if_it_fails_there_again(store, clock):
    clock.advance(DAY_MS)
    begun, failing = [], {"b"}

    def work(portion):
        begun.append(portion.position)
        if portion.position in failing:
            raise StoreBusy
        portion.position = {None: "a", "a": "b", "b": None}[portion.position]
        return 0

    def rounds(count):
        begun.clear()
        for _ in range(count):
            take_turn(store, None, [duty("passes", work, ABORT_INTERVAL)], Portions())
            clock.advance(10_000)
        return begun

    # What fails for good keeps back no more than what comes after it.
    assert rounds(7) == [None, "a", "b", "b", None, "a", "b"]
    failing.clear()
    assert rounds(3) == ["b", None, "a"]


@pytest.mark.parametrize("turns", [1, 3], ids=["another one has stopped", "it has failed"])
def test_who_does_all_of_a_duty_begins_where_it_begins_whatever_others_have_left(store, clock, turns):
    clock.advance(DAY_MS)
    begun, failing = [], {"b"}

    def work(portion):
        begun.append(portion.position)
        if portion.position in failing:
            raise StoreBusy
        portion.position = {None: "a", "a": "b", "b": None}[portion.position]
        if len(begun) == 1 and not failing:
            # Another one goes on with it meanwhile, and comes further.
            take_turn(store, None, [passes], Portions(), forced=True, positions={"passes": "a"})
        return 0

    passes = duty("passes", work, ABORT_INTERVAL)
    for _ in range(turns):
        take_turn(store, None, [passes], Portions())
    assert begun == [None, "a", "b"][:turns]
    begun.clear()
    failing.clear()
    assert Maintenance(store, duties=[passes]).run_once() == {"passes": 0}
    assert begun == [None, "a", "a", "b"]


def test_a_turn_that_takes_longer_than_its_leases_keeps_the_rest(store, clock, monkeypatch):
    clock.advance(DAY_MS)
    monkeypatch.setattr("txnstore.maintenance.turns._RENEWED_AFTER_SECONDS", -1.0)
    others = []

    def take_long(_):
        clock.advance(LEASE_MS - 1)
        others.append(take_turn(store, None, duties, Portions()).done)
        return 0

    duties = [duty(name, take_long) for name in "abc"]
    # The own ones are over for whoever looks within: they would be done twice.
    assert list(take_turn(store, None, duties, Portions()).done) == ["a", "b", "c"]
    assert others == [{}, {}, {}]


def test_who_holds_a_duty_and_is_killed_keeps_nobody_from_it_for_longer_than_his_lease(store, clock):
    clock.advance(DAY_MS)

    def die(_):
        raise KeyboardInterrupt

    duties = [duty("dangerous", die), duty("other", lambda _: 0)]
    with pytest.raises(KeyboardInterrupt):
        take_turn(store, None, duties, Portions())
    duties[0] = duty("dangerous", lambda _: 7)
    assert take_turn(store, None, duties, Portions()).done == {}
    clock.advance(LEASE_MS)
    assert take_turn(store, None, duties, Portions()).done == {"dangerous": 7, "other": 0}
    assert count(store, maintenance_duties) == 2


@pytest.mark.parametrize("forced", [False, True])
def test_a_duty_that_nobody_has_been_at_for_a_month_is_forgotten_by_those_who_do_not_know_it(store, clock, forced):
    """That of a database of which `txnstore maintain` is not told any more; it failed last, perhaps."""
    clock.advance(DAY_MS)
    known = [duty("often", lambda _: 0, ABORT_INTERVAL), duty("rare", lambda _: 0, REMOVE_INTERVAL)]
    of_others = [duty("fails", Failing(StoreUnavailable()), ABORT_INTERVAL), *(duty(n, lambda _: 0) for n in "abc")]
    take_turn(store, None, [*known, *of_others], Portions())

    def change(name, **values):
        change = update(maintenance_duties).where(maintenance_duties.c.duty == name).values(values)
        store.write(lambda connection: connection.execute(change))

    def names():
        return duty_names(store)

    clock.advance(FORGOTTEN_AFTER_MS)
    take_turn(store, None, known[:1], Portions(), forced=forced, known=())
    assert names() == {"often", "rare", "fails", "a", "b", "c"}
    clock.advance(10_000)
    # Who does not know which ones all know forgets none.
    take_turn(store, None, known[:1], Portions(), forced=forced)
    assert len(names()) == 6
    clock.advance(10_000)
    # One that is rare, and not due, is known all the same; of the others somebody is at one, and died at another.
    change("rare", begun_ms=clock.now_ms())
    change("a", holder="db9:1:1", held_until_ms=clock.now_ms() + 1)
    change("b", holder="db9:1:1", held_until_ms=clock.now_ms())
    take_turn(store, None, known[:1], Portions(), forced=forced, known=["rare"])
    assert names() == {"often", "rare", "a"}


def test_who_does_a_part_forgets_nothing_of_what_others_do(store, clock):
    """`txnstore maintain` has a thread for what takes long, and a client that ends does some duties alone."""
    clock.advance(DAY_MS)
    often, long, all_of_them = (
        Maintenance(store, duties=duties) for duties in (DUTIES[:1], LONG_DUTIES, (*DUTIES, *LONG_DUTIES))
    )
    all_of_them.run_once()
    before = duty_names(store)
    take_turn(store, None, [duty("branches ended in db9:5432/bank", lambda _: 0)], Portions())
    clock.advance(FORGOTTEN_AFTER_MS + 1)
    for part in (long, often):
        part._look(threading.Event())
        assert duty_names(store) == before
    all_of_them.run_once()
    assert duty_names(store) == before


def test_what_somebody_takes_at_this_moment_is_not_forgotten_and_nobody_waits_for_it(txnstore_postgresql_store):
    """On SQLite there is one writer at a time."""
    store = txnstore_postgresql_store
    known, other = duty("known", lambda _: 0, ABORT_INTERVAL), duty("other", lambda _: 0, ABORT_INTERVAL)
    take_turn(store, None, [known, other], Portions(), forced=True)
    store.write(lambda connection: connection.execute(update(maintenance_duties).values(begun_ms=0, turn_ms=0)))

    def beside(connection):
        assert leases.take(connection, {"other": ABORT_INTERVAL}, "db9:1:1")
        assert take_turn(store, None, [known], Portions(), known=()).done == {"known": 0}

    store.write(beside)
    assert duty_names(store) == {"known", "other"}


def test_portions_grow_while_they_are_quick_and_shrink_as_soon_as_others_wait(store):
    seconds = Seconds()
    portions = Portions(seconds=10.0, monotonic_seconds=seconds)
    sizes = []

    def hold(held_seconds):
        def work(_):
            seconds.now += held_seconds

        sizes.append(portions.rows)
        portions.write(store, work)

    for held_seconds in (0.0, 0.0, HELD_SECONDS, 0.0, 0.0, 3 * HELD_SECONDS, 3 * HELD_SECONDS):
        hold(held_seconds)
    assert sizes == [FIRST_ROWS, 50, 100, 100, ROWS_AT_ONCE, ROWS_AT_ONCE, 100]
    for _ in range(12):
        hold(3 * HELD_SECONDS)
    assert portions.rows == 1
    assert not portions.is_over
    seconds.now += 10
    assert portions.is_over


@pytest.mark.parametrize(
    ("commit_seconds", "rows"), [(COMMIT_SECONDS / 2, ROWS_AT_ONCE), (2 * COMMIT_SECONDS, ROWS_AT_ONCE // 2)]
)
def test_a_slow_commit_makes_no_portion_smaller_unless_it_is_very_slow(store, monkeypatch, commit_seconds, rows):
    """It waits for the disk, as others' do, however little there is to write."""
    seconds = Seconds()
    portions = Portions(monotonic_seconds=seconds)
    commit = store.backend.commit

    def commit_slowly(connection):
        seconds.now += commit_seconds
        commit(connection)

    monkeypatch.setattr(store.backend, "commit", commit_slowly)
    portions.write(store, lambda _: None)
    assert seconds.now > 100.0
    assert portions.rows == rows


@contextmanager
def one_processor_for_two():
    """Somebody else wants the processor that this process has, all the time."""
    own = os.sched_getaffinity(0)
    program = "print(flush=True)\nwhile True: pass"
    os.sched_setaffinity(0, {min(own)})
    try:
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
            try:
                assert other.stdout is not None
                assert other.stdout.readline()
                yield
            finally:
                other.kill()
    finally:
        os.sched_setaffinity(0, own)


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="needs Linux's count of who waits")
def test_time_in_which_somebody_else_has_the_processor_is_not_a_portion_s():
    with one_processor_for_two():
        began, work_began, ran = time.monotonic(), undisturbed_seconds(), time.thread_time()
        while time.thread_time() < ran + 0.2:
            pass
        passed, worked = time.monotonic() - began, undisturbed_seconds() - work_began
        assert passed > worked + 0.1
        # What is waited for else counts: a lock, or the disk.
        work_began = undisturbed_seconds()
        threading.Event().wait(0.05)
        assert undisturbed_seconds() - work_began > 0.04


def test_who_has_a_process_of_its_own_gets_on_however_slow_the_disk_is(store):
    seconds = Seconds()
    portions = Portions(monotonic_seconds=seconds)

    def wait(_):
        seconds.now += 3 * HELD_SECONDS

    for _ in range(12):
        portions.write(store, wait)
    assert (portions.rows, portions.size_bytes) == (LEAST_ROWS, LEAST_BYTES)


def test_portions_that_nobody_waits_for_stay_large_on_postgresql(store, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(portions_module, "pause_after_portion", pauses.append)
    seconds = Seconds()
    portions = Portions(monotonic_seconds=seconds)

    def take_long(_):
        seconds.now += 3 * HELD_SECONDS

    for _ in range(3):
        portions.write(store, take_long, is_apart=True)
    if store.backend.name == "postgresql":
        assert (portions.rows, portions.size_bytes, pauses) == (ROWS_AT_ONCE, BYTES_AT_ONCE, [])
    else:
        # Every writer waits for it there.
        assert portions.rows < ROWS_AT_ONCE
        assert len(pauses) == 3


def test_who_has_little_time_takes_more_at_once_also_of_what_nobody_waits_for(store):
    portions = Portions(seconds=10.0, monotonic_seconds=Seconds())
    portions.write(store, lambda _: None, is_apart=True)
    assert portions.rows == 2 * FIRST_ROWS
    assert portions.size_bytes > FIRST_BYTES


def test_a_duty_is_unfinished_if_it_had_to_stop_and_not_because_it_took_long_to_look(store, clock):
    seconds = Seconds()

    def look(_):
        seconds.now += 1.0
        return 0

    def stop(portion):
        seconds.now += 1.0
        return 0 if portion.portions.is_over else 1

    for name, work, unfinished in (("look", look, []), ("stop", stop, ["stop"])):
        clock.advance(DAY_MS)
        turn = take_turn(store, None, [duty(name, work)], Portions(seconds=0.5, monotonic_seconds=seconds))
        assert turn.done == {name: 0}
        assert turn.unfinished == unfinished
        # What is left of it is due at once, the rest after its interval.
        assert list(look_for_due(store, [duty(name, work)]).due) == unfinished


def test_portions_are_over_as_soon_as_somebody_says_so():
    stop = threading.Event()
    assert not Portions(stop=stop).is_over
    assert not Portions(seconds=100, stop=stop).is_over
    stop.set()
    assert Portions(stop=stop).is_over
    assert Portions(seconds=100, stop=stop).is_over


def test_who_has_little_time_waits_for_no_lock_of_somebody_at_work(store, clock, journal, monkeypatch):
    """Another one holds the database for himself, or what is to go."""
    monkeypatch.setattr(portions_module, "LOCK_TIMEOUT_MS", 1)
    create = lambda connection: create_topic(connection, "t")  # noqa: E731
    store.write(create)

    def hold(connection):
        if store.backend.name == "postgresql":
            connection.execute(select(transaction_log).with_for_update())
        with pytest.raises(StoreBusy):
            trim_journal(store, Portions(seconds=10))

    store.write(hold)
    assert trim_journal(store, Portions(seconds=10)) == ENTRIES
