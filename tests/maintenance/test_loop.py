"""The loop does each duty when it is due, and whatever becomes of one, the others are done."""

from __future__ import annotations

import logging
import math
import threading
from dataclasses import replace

import pytest
from sqlalchemy import delete

from tests.transactions.bench import bench_on
from txnstore.config import STORE_SETTINGS
from txnstore.db.closing import Move, MoveState, close, set_move, wait_for_writers
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.portions import FOUND_MAX
from txnstore.db.schema import maintenance_duties
from txnstore.errors import StoreMoved, StoreUnavailable
from txnstore.maintenance.duties import ABORT_INTERVAL, DUTIES, LONG_DUTIES, REMOVE_INTERVAL
from txnstore.maintenance.loop import LOOK_AGAIN_SECONDS, Maintenance
from txnstore.maintenance.turns import MaintenanceDuty
from txnstore.transactions.protocol import TransactionState

DAY_MS = 86_400_000


class Time(threading.Event):
    """Time that passes while the loop waits, for the store too, and a stop after a number of seconds of it."""

    def __init__(self, clock, stop_after_seconds):
        super().__init__()
        self.clock = clock
        self.begin_ms = clock.now_ms()
        self.waits = []
        self.at_time = {}
        self._stop_seconds = stop_after_seconds
        self._stopped = False
        #: What the clock, which has whole milliseconds, could not be moved on by.
        self._rest_seconds = 0.0

    def monotonic_seconds(self):
        return self.clock.now_ms() / 1000 + self._rest_seconds

    def elapsed_seconds(self):
        return (self.clock.now_ms() - self.begin_ms) / 1000

    def pass_by(self, seconds):
        self.clock.advance(round(seconds * 1000))

    def is_set(self):
        return self._stopped or self.elapsed_seconds() >= self._stop_seconds

    def set(self):
        self._stopped = True

    def wait(self, timeout=0.0):
        self.waits.append(timeout)
        self.pass_by(timeout)
        # What is due in the last digit of a float only: a wait that takes no time at all would never end.
        self._rest_seconds += timeout if round(timeout * 1000) == 0 else 0.0
        for seconds in [due for due in self.at_time if due <= self.elapsed_seconds()]:
            self.at_time.pop(seconds)()
        return self.is_set()


def duty(name, setting, work):
    """Return a duty that needs no import."""
    return MaintenanceDuty(name, setting, lambda: work)


@pytest.fixture
def done():
    """When which duty was done, in seconds since the beginning."""
    return []


@pytest.fixture
def fresh(shared_store, shared_clock):
    """Make the store one that nobody has looked after for long."""

    def forget():
        shared_store.write(lambda connection: connection.execute(delete(maintenance_duties)))
        shared_clock.advance(30 * DAY_MS)

    forget()
    return forget


@pytest.fixture
def run(fresh, shared_store, shared_clock, done):
    """Run the loop with these duties for some seconds of the store's time."""

    def run(duties, seconds, at_time=()):
        fresh()
        time = Time(shared_clock, seconds)
        time.at_time = dict(at_time)

        def noted(name, do):
            def note(_):
                done.append((name, time.elapsed_seconds()))
                return do(time)

            return note

        noted_duties = [duty(name, setting, noted(name, do)) for name, setting, do in duties]
        Maintenance(shared_store, duties=noted_duties, monotonic_seconds=time.monotonic_seconds).run(time)
        return time

    return run


@pytest.fixture
def settings(shared_store):
    """Change settings of the store until the test is over."""

    def change(**by_name):
        values = {"abort": ABORT_INTERVAL, "remove": REMOVE_INTERVAL}
        texts = {values[name]: str(text) for name, text in by_name.items()}
        shared_store.write(lambda connection: change_store_settings(connection, texts))

    yield change
    change(abort=10_000, remove=3_600_000)


def nothing(_):
    return 0


@pytest.mark.slow
def test_every_duty_is_done_at_once_and_then_at_its_own_interval(run, done):
    run([("abort", ABORT_INTERVAL, nothing), ("remove", REMOVE_INTERVAL, nothing)], 3650)
    assert [at for name, at in done if name == "abort"][:4] == [0.0, 10.0, 20.0, 30.0]
    assert [at for name, at in done if name == "remove"] == [0.0, 3600.0]
    assert len(done) == 2 + 365


def test_no_wait_is_longer_than_the_time_after_which_settings_are_looked_at_again(run, settings):
    settings(abort=2**31 - 1, remove=2**31 - 1)
    time = run([("abort", ABORT_INTERVAL, nothing)], 100)
    assert max(time.waits) == LOOK_AGAIN_SECONDS
    assert min(time.waits) >= 0


def test_an_interval_that_is_shortened_holds_from_the_next_look_on(run, done, settings):
    settings(abort=2**31 - 1)
    run([("abort", ABORT_INTERVAL, nothing)], 63, at_time={45: lambda: settings(abort=5_000)})
    assert [at for _, at in done] == [0.0, 50.0, 55.0, 60.0]


def test_an_interval_counts_from_the_beginning_of_a_duty_that_takes_long(run, done):
    def take_seven_seconds(time):
        time.pass_by(7)
        return 0

    run([("abort", ABORT_INTERVAL, take_seven_seconds)], 45)
    assert [at for _, at in done] == [0.0, 10.0, 20.0, 30.0, 40.0]


def test_a_duty_that_takes_longer_than_its_interval_is_not_made_up_for(run, done):
    def take_a_minute(time):
        time.pass_by(60)
        return 0

    time = run([("abort", ABORT_INTERVAL, take_a_minute)], 290)
    assert [at for _, at in done] == pytest.approx([0, 60, 120, 180, 240], abs=0.1)
    assert len(time.waits) == 5


@pytest.mark.parametrize("error", [StoreUnavailable(), AssertionError("a bug of ours")])
def test_a_duty_that_fails_is_logged_and_tried_again_when_due_and_the_others_are_done(run, done, caplog, error):
    failures = [error, error]

    def fail_twice(_):
        if failures:
            raise failures.pop()
        return 3

    run([("trimmed", ABORT_INTERVAL, fail_twice), ("done", ABORT_INTERVAL, nothing)], 35)
    assert [at for name, at in done if name == "trimmed"] == [0.0, 10.0, 20.0, 30.0]
    assert [at for name, at in done if name == "done"] == [0.0, 10.0, 20.0, 30.0]
    (of_error,) = loud(caplog)
    assert "trimmed" in of_error.getMessage()
    # A bug shows where it is; a database that is away is one line.
    assert (of_error.exc_info is not None) is isinstance(error, AssertionError)


def loud(caplog):
    """Return what was logged that somebody is to hear of."""
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", [StoreUnavailable, AssertionError])
def test_a_failure_that_lasts_is_told_once_a_minute_and_another_one_at_once(run, caplog, kind):
    def fail(time):
        elapsed_seconds = time.elapsed_seconds()
        # A number makes it no other one.
        raise kind(f"{'the disk' if elapsed_seconds < 150 else 'the network'} is gone, for {elapsed_seconds} seconds")

    def other(_):
        raise kind("the disk is gone, for 0.0 seconds")

    told = []
    at_time = {seconds: lambda: told.append(len(loud(caplog))) for seconds in (50, 60, 110, 120, 140, 150)}
    time = run([("trimmed", ABORT_INTERVAL, fail)], 155, at_time=at_time)
    assert max(time.waits) <= LOOK_AGAIN_SECONDS
    # Before what is due then.
    assert told == [1, 1, 2, 2, 3, 3]
    assert [("the network" in f"{record.getMessage()} {record.exc_info}") for record in loud(caplog)] == [
        *[False] * 3,
        True,
    ]
    caplog.clear()
    run([("trimmed", ABORT_INTERVAL, fail), ("done", ABORT_INTERVAL, other)], 1)
    assert len(loud(caplog)) == 2


def test_a_store_that_is_away_is_looked_at_again_and_then_all_is_done_that_is_due(
    run, done, shared_store, monkeypatch, caplog
):
    def away(*_, **__):
        raise StoreUnavailable

    lose = lambda: monkeypatch.setattr(shared_store, "read", away)  # noqa: E731
    time = run([("abort", ABORT_INTERVAL, nothing)], 45, at_time={5: lose, 22: monkeypatch.undo})
    assert [at for _, at in done] == [0.0, 30.0, 40.0]
    # Twice, after five seconds and after fifteen.
    assert caplog.text.count("no duty can be taken now") == 1
    assert max(time.waits) <= LOOK_AGAIN_SECONDS


def test_a_duty_that_found_as_much_as_it_looks_for_is_done_again_at_once(run, done, caplog):
    caplog.set_level("INFO")
    counts = [FOUND_MAX, FOUND_MAX + 1, 7]
    run([("aborted", ABORT_INTERVAL, lambda _: counts.pop(0))], 5)
    assert [at for _, at in done] == pytest.approx([0.0, 0.0, 0.0], abs=0.01)
    assert f"{2 * FOUND_MAX + 8} aborted" in caplog.text


def test_a_duty_that_is_far_behind_keeps_no_other_one_from_its_time(run, done):
    portions = [FOUND_MAX] * 60 + [3]

    def trim(time):
        time.pass_by(0.7)
        return portions.pop(0) if portions else 0

    run([("trim", REMOVE_INTERVAL, trim), ("abort", ABORT_INTERVAL, nothing)], 50)
    assert [at for name, at in done if name == "abort"] == pytest.approx([0, 10, 20, 30, 40], abs=4)
    assert len([at for name, at in done if name == "trim"]) == 61


def test_what_failed_is_tried_again_when_due_also_if_a_part_of_it_was_done(run, done):
    answers = [FOUND_MAX, StoreUnavailable(), 1]

    def work(_):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    run([("work", ABORT_INTERVAL, work)], 15)
    assert [at for _, at in done] == pytest.approx([0, 0, 10], abs=0.1)


def test_stop_ends_the_loop_after_the_duty_that_runs(run, done):
    def stop(time):
        time.set()
        return FOUND_MAX

    run([("first", ABORT_INTERVAL, stop), ("second", ABORT_INTERVAL, nothing)], 100)
    assert [name for name, _ in done] == ["first"]


@pytest.mark.parametrize("state", [MoveState.CLOSED, MoveState.GONE])
def test_of_a_store_that_has_gone_the_loop_ends_and_of_one_that_is_closed_it_goes_on(store, clock, caplog, state):
    move = Move(MoveState.CLOSED, "00000000-0000-4000-8000-000000000001", "sqlite:////new/shop.db")

    def close_store(connection):
        wait_for_writers(connection)
        close(connection, move)
        set_move(connection, replace(move, state=state))

    store.write(close_store)
    time = Time(clock, 60)
    some = duty("abort", ABORT_INTERVAL, nothing)
    loop = Maintenance(store, duties=[some], monotonic_seconds=time.monotonic_seconds)
    if state is MoveState.GONE:
        with pytest.raises(StoreMoved, match=r"it has moved to sqlite:////new/shop\.db: use that one"):
            loop.run(time)
        assert not time.is_set()
    else:
        loop.run(time)
        assert "it moves to sqlite:////new/shop.db: use that one once" in caplog.text


def test_a_loop_that_waits_ends_as_soon_as_it_is_told(shared_store, shared_clock):
    stop, waits = threading.Event(), threading.Event()

    def signal(*_):
        waits.set()
        return 0

    last = duty("signals", REMOVE_INTERVAL, signal)
    shared_clock.advance(DAY_MS)
    thread = threading.Thread(target=Maintenance(shared_store, duties=[last]).run, args=[stop])
    thread.start()
    assert waits.wait(60)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()


def test_a_loop_that_was_stopped_before_it_began_does_nothing(run, done):
    run([("abort", ABORT_INTERVAL, nothing)], 0)
    assert done == []


def test_every_interval_is_a_setting_of_the_store(shared_store):
    assert {duty.interval_setting for duty in (*DUTIES, *LONG_DUTIES)} <= set(STORE_SETTINGS)
    assert len({duty.name for duty in (*DUTIES, *LONG_DUTIES)}) == len(DUTIES) + len(LONG_DUTIES)


class Told:
    """Hears of what the loop does."""

    def __init__(self):
        self.due_counts = []
        self.portions = []

    def due(self, count):
        self.due_counts.append(count)

    def portion(self, duty, count, seconds):
        self.portions.append((duty, count, seconds))


def test_an_observer_hears_of_every_portion_and_of_what_is_due(fresh, shared_store, shared_clock):
    told, time, left = Told(), Time(shared_clock, 5), [FOUND_MAX, 3]

    def behind(_):
        time.pass_by(0.25)
        return left.pop(0)

    def fail(_):
        raise StoreUnavailable

    duties = [
        duty("behind", ABORT_INTERVAL, behind),
        duty("failing", ABORT_INTERVAL, fail),
        duty("broken", ABORT_INTERVAL, lambda _: 1 // 0),
    ]
    Maintenance(shared_store, duties=duties, observer=told, monotonic_seconds=time.monotonic_seconds).run(time)
    assert told.portions == [
        ("behind", FOUND_MAX, 0.25),
        ("broken", None, 0),
        ("failing", None, 0),
        ("behind", 3, 0.25),
    ]
    # As they are taken, and behind each portion; the first duty stays due until nothing of it is left.
    assert told.due_counts == [3, 3, 2, 1, 1, 0, 0]


def test_what_readers_wait_for_is_looked_for_every_second_however_long_the_interval_is(
    fresh, shared_store, shared_clock, settings
):
    settings(abort=3_600_000)
    time = Time(shared_clock, 5)
    done: list[float] = []

    def note(_: object) -> int:
        done.append(time.elapsed_seconds())
        return 0

    waited_for = [duty for duty in DUTIES if duty.name == "timed out transactions aborted"]
    noted = [duty._replace(load=lambda: note) for duty in waited_for]
    Maintenance(shared_store, duties=noted, monotonic_seconds=time.monotonic_seconds).run(time)
    assert done == [0.0, 1.0, 2.0, 3.0, 4.0]


class ShortTime(Time):
    """For a loop that waits no time and does nothing it would never be over."""

    def wait(self, timeout=0.0):
        assert len(self.waits) < 100
        return super().wait(timeout)


def test_what_others_wait_for_and_is_not_finished_goes_on_at_once(fresh, shared_store, shared_clock):
    """Also between the looks for what is due."""
    time, left, done = ShortTime(shared_clock, 9), [0], []

    def work(_):
        count = min(FOUND_MAX, left[0])
        left[0] -= count
        done.append((time.elapsed_seconds(), count))
        return count

    time.at_time = {5: lambda: left.__setitem__(0, 2 * FOUND_MAX + 1)}
    often = MaintenanceDuty("often", ABORT_INTERVAL, lambda: work, interval_max_seconds=1.0)
    Maintenance(shared_store, duties=[often], monotonic_seconds=time.monotonic_seconds).run(time)
    assert [each for each in done if each[1]] == [(5.0, FOUND_MAX), (5.0, FOUND_MAX), (5.0, 1)]
    assert [at for at, count in done if not count] == [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0]


def test_what_is_done_beside_its_lease_begins_no_portion_after_the_stop(fresh, shared_store, shared_clock):
    time = Time(shared_clock, 5)
    left_seconds: list[float] = []

    def work(portion):
        if left_seconds:
            time.set()
        left_seconds.append(portion.portions.left_seconds)
        return 0

    often = MaintenanceDuty("often", ABORT_INTERVAL, lambda: work, interval_max_seconds=1.0)
    Maintenance(shared_store, duties=[often], monotonic_seconds=time.monotonic_seconds).run(time)
    assert left_seconds == [math.inf, 0.0]


def test_a_duty_that_knows_when_there_is_more_to_do_is_done_then(fresh, shared_store, shared_clock):
    time = Time(shared_clock, 4)
    done = []

    def work(portion):
        done.append(time.elapsed_seconds())
        portion.again_seconds = {0.0: 0.25, 0.25: 5.0, 1.25: None, 2.25: 0.5}.get(done[-1])
        return 0

    often = MaintenanceDuty("often", ABORT_INTERVAL, lambda: work, interval_max_seconds=1.0)
    Maintenance(shared_store, duties=[often], monotonic_seconds=time.monotonic_seconds).run(time)
    assert done == [0.0, 0.25, 1.25, 2.25, 2.75, 3.75]


def test_a_transaction_is_aborted_as_soon_as_its_time_is_up(store, clock):
    bench = bench_on(store, clock)
    time = Time(bench.clock, 3)
    opened = {name: bench.started(timeout_ms=timeout_ms) for name, timeout_ms in (("a", 1_600), ("b", 1_650))}
    for producer in opened.values():
        producer.send(bench.partition_ids[0], b"a")
    aborted: dict[str, float] = {}

    class Noting:
        def due(self, count):
            pass

        def portion(self, duty, count, seconds):
            for name, producer in opened.items():
                if bench.row(producer.transactional_id).state is TransactionState.COMPLETE_ABORT:
                    aborted.setdefault(name, time.elapsed_seconds())

    Maintenance(bench.store, observer=Noting(), monotonic_seconds=time.monotonic_seconds).run(time)
    assert aborted == {"a": 1.601, "b": 1.651}
