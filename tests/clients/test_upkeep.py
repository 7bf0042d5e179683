"""Clients that run do what is due for their store, in a thread of their own, and let go of it as they are closed."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from sqlalchemy import func, select, text, update

from tests.tools.journal import ENTRIES, add_old_entries
from txnstore import Consumer, Producer, TopicPartition
from txnstore.clients import upkeep
from txnstore.clients.configuration.configuration import admin_configuration
from txnstore.clients.producer.thread import Alarm, WriterHelp
from txnstore.clients.upkeep import EARLY_SECONDS, LOOK_SECONDS, PARTING_WAIT_SECONDS
from txnstore.clients.worker import Duties
from txnstore.db.cluster.cluster import open_cluster
from txnstore.db.opening import open_store
from txnstore.db.schema import maintenance_duties, record_batches, stores, transaction_log
from txnstore.errors import CorruptBatch, PermissionDenied, StoreBusy, StoreUnavailable
from txnstore.maintenance import duties, turns
from txnstore.maintenance.leases import LEASE_MS, PAUSE_MS_MAX
from txnstore.testing.postgres_server import connection_string
from txnstore.trouble import RepeatedTrouble

pytestmark = pytest.mark.takes_a_coordinator

PATIENCE_SECONDS = 60
DAY_MS = 86_400_000


#: Threads of clients that other tests hold to this day.
_strangers: set[threading.Thread] = set()


def looking():
    """Return the threads that look for clients of this file's tests."""
    return {thread for thread in threading.enumerate() if thread.name == "txnstore-upkeep"} - _strangers


@pytest.fixture(scope="module", autouse=True)
def _know_strangers():
    gc.collect()
    _strangers.update(looking())


@pytest.fixture(autouse=True)
def _has_not_looked(monkeypatch):
    """Begin as a process that has not looked at any store yet, and no more looks at that of the test before."""
    wait_until(lambda: not looking())
    monkeypatch.setattr(upkeep, "_next_looks", {})
    monkeypatch.setattr(upkeep, "_lasting", RepeatedTrouble(math.inf))


@pytest.fixture
def store(url, clock):
    with open_store(url, clock=clock) as store:
        add_old_entries(store, clock)
        yield store


@pytest.fixture
def configuration(url, clock):
    return {"bootstrap.servers": url, "txnstore.clock": clock}


@pytest.fixture
def patient(monkeypatch):
    """However slow the machine is, there is time for what is to be seen."""
    monkeypatch.setattr(upkeep, "PARTING_WAIT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(upkeep, "PARTING_TURN_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(upkeep, "TURN_SECONDS", PATIENCE_SECONDS)


def count(store, table):
    return store.read(lambda connection: connection.execute(select(func.count()).select_from(table)).scalar_one())


def write_one(configuration, **more):
    """Be there for a moment, as a web request is."""
    with Producer({**configuration, **more}) as producer:
        producer.produce("t", b"one")


def drop_one(configuration):
    """Do the same, and leave the rest to whoever collects garbage."""
    before = set(threading.enumerate())
    producer = Producer(configuration)
    producer.produce("t", b"one")
    assert producer.flush() == 0
    del producer
    join_threads(before)


def drop_consumer(configuration):
    """Read for a moment, after somebody else has written."""
    write_one(configuration, **{"txnstore.maintenance": False})
    before = set(threading.enumerate())
    consumer = Consumer({**configuration, "group.id": "g", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition("t", 0, 0)])
    assert consumer.poll(PATIENCE_SECONDS) is not None
    del consumer
    join_threads(before)


#: How a client is there for a moment, and ends.
ENDS = {
    "closed": write_one,
    "dropped": drop_one,
    "dropped one after the other": lambda configuration: [drop_one(configuration) for _ in range(3)],
    "a consumer that is dropped": drop_consumer,
}


def join_threads(before):
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def wait_until(is_so):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def noted_looks(monkeypatch):
    """Return a list that gets longer with each look at what is due."""
    looks = []
    look = turns.look_for_due

    def note(*arguments):
        looks.append(1)
        return look(*arguments)

    monkeypatch.setattr(turns, "look_for_due", note)
    return looks


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_producers_that_live_a_moment_look_after_their_store(store, clock, configuration, patient, end):
    end(configuration)
    assert count(store, transaction_log) == 0
    assert count(store, maintenance_duties) > 0
    # The records of the first ones go once they are old.
    written = count(store, record_batches)
    assert written > 0
    clock.advance(8 * DAY_MS)
    end(configuration)
    assert count(store, record_batches) == written


#: A program that is there for a moment, and has time for what it does last however slow the machine is.
PROGRAM = """
import os, sys, threading
from txnstore import Producer, background_thread
from txnstore.clients import upkeep
from txnstore.maintenance import turns

def wait_for(seconds):
    upkeep.PARTING_TURN_SECONDS = background_thread.ENDING_SECONDS = seconds

def write():
    producer = Producer({"bootstrap.servers": sys.argv[1]})
    producer.produce("t", b"one")
    producer.flush()
    return producer

"""
PROGRAMS = {
    "held to the end": "held = write()",
    "dropped": "write()",
    "one after the other": "held = [write() for _ in range(3)]",
    "with others that have nothing to send": "write(); held = Producer({'bootstrap.servers': sys.argv[1]})",
}


def run_program(url, program):
    ended = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM + program, url],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.fixture
def of_old(store):
    """A store that was made long ago, by the clock of the system, which other processes go by."""
    store.write(lambda connection: connection.execute(update(stores).values(created_ms=0)))
    return store


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_so_do_programs_that_end_without_closing_theirs(url, of_old, program):
    run_program(url, f"wait_for({PATIENCE_SECONDS}); {program}")
    assert count(of_old, transaction_log) == 0


@pytest.mark.slow
@pytest.mark.parametrize("program", list(PROGRAMS.values())[:2], ids=list(PROGRAMS)[:2])
def test_a_program_that_ends_waits_a_moment_whatever_the_database_does(url, of_old, program):
    run_program(url, f"turns.look_for_due = lambda *_: threading.Event().wait({2 * PATIENCE_SECONDS}); {program}")
    assert count(of_old, transaction_log) == ENTRIES


#: A program tells on its standard error if it waits for longer than for one.
WAITS_FOR_ALL_TOGETHER = """
close, waits = background_thread.BackgroundThread.close, []

def note(thread, timeout_seconds):
    # What tells readers of commits has a time of its own.
    if thread.name.startswith("txnstore-producer-"):
        waits.append(timeout_seconds)
    if sum(waits) > 1.5 * background_thread.ENDING_SECONDS:
        print("waits", waits, file=sys.stderr)
    return close(thread, timeout_seconds)

# Each as if it had a store of its own.
upkeep.Upkeep._claim = lambda *_: True
held = [write() for _ in range(3)]
for _ in range(2):
    write()
background_thread.BackgroundThread.close = note
"""


@pytest.mark.slow
def test_a_program_that_ends_waits_for_all_of_its_producers_together(url, of_old):
    hang = f"turns.look_for_due = lambda *_: threading.Event().wait({2 * PATIENCE_SECONDS})\n"
    run_program(url, hang + WAITS_FOR_ALL_TOGETHER)
    assert count(of_old, transaction_log) == ENTRIES


#: The turn of the one that was dropped goes on in the parent while the child ends.
DURING_A_LAST_TURN = f"""
looks = threading.Event()
turns.look_for_due = lambda *_: looks.set() or threading.Event().wait({2 * PATIENCE_SECONDS})
write()
assert looks.wait({PATIENCE_SECONDS})
assert background_thread._ending
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("before", ["held = write()", DURING_A_LAST_TURN], ids=["held", "during a last turn"])
def test_a_child_of_a_fork_that_ends_leaves_that_to_its_parent(url, of_old, before):
    program = f"{before}\nchild = os.fork()\nif child:\n    os._exit(os.waitpid(child, 0)[1])"
    # A child that waits for its parent's threads does so for longer than anybody waits here for it.
    run_program(url, f"wait_for({2 * PATIENCE_SECONDS})\n{program}")
    assert count(of_old, transaction_log) == ENTRIES


def test_a_producer_that_is_dropped_with_records_has_no_turn(store, configuration, patient):
    """Its database may be away."""
    before = set(threading.enumerate())
    producer = Producer({**configuration, "linger.ms": 30_000})
    producer.list_topics()
    producer.produce("t", b"one")
    del producer
    join_threads(before)
    assert count(store, transaction_log) == ENTRIES


@pytest.mark.slow
def test_so_do_those_that_have_no_time_a_portion_each(store, clock, configuration, monkeypatch):
    monkeypatch.setattr(upkeep, "PARTING_WAIT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(upkeep, "PARTING_TURN_SECONDS", 0.0)
    for _ in range(100):
        write_one(configuration)
        clock.advance(LOOK_SECONDS * 1000)
        if count(store, transaction_log) == 0:
            break
    assert count(store, transaction_log) == 0


@pytest.mark.slow
@pytest.mark.parametrize("end", [write_one, drop_one])
def test_a_process_looks_once_in_a_while_however_many_clients_it_has(
    store, clock, configuration, patient, monkeypatch, end
):
    looks = noted_looks(monkeypatch)
    for _ in range(3):
        end(configuration)
    # One to see that something is due, one more of the turn.
    assert len(looks) == 2
    clock.advance(int((LOOK_SECONDS - EARLY_SECONDS) * 1000) - 1)
    end(configuration)
    assert len(looks) == 2
    clock.advance(1)
    end(configuration)
    assert len(looks) > 2
    # A clock that was put back does not keep it from looking.
    clock.advance(-DAY_MS)
    before = len(looks)
    end(configuration)
    assert len(looks) > before


def test_a_client_that_is_dropped_without_a_thread_leaves_the_look_to_the_next_one(store, configuration, patient):
    """One that has only asked what there is, say."""
    consumer = Consumer({**configuration, "group.id": "g"})
    consumer.list_topics()
    del consumer
    gc.collect()
    assert count(store, transaction_log) == ENTRIES
    write_one(configuration)
    assert count(store, transaction_log) == 0


@pytest.mark.slow_but_first
@pytest.mark.parametrize("off", [False, "false"])
def test_the_clients_part_can_be_turned_off(store, configuration, patient, off):
    write_one(configuration, **{"txnstore.maintenance": off})
    with Consumer({**configuration, "group.id": "g", "txnstore.maintenance": off}) as consumer:
        consumer.subscribe(["t"])
        consumer.poll(0.1)
        consumer._core.connection.upkeep._next_seconds = 0.0
        consumer._core.connection.upkeep.run()
    assert count(store, transaction_log) == ENTRIES
    assert count(store, maintenance_duties) == 0


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", ["producer", "consumer"])
def test_a_client_that_stays_has_its_turns_beside_its_work(store, configuration, patient, monkeypatch, kind):
    """It is asked to look by the thread that is awake anyway, for the first time soon."""
    looks = noted_looks(monkeypatch)
    # Those of closed clients may take a moment to end.
    others = threading.enumerate()
    monkeypatch.setattr(upkeep, "FIRST_LOOK_SECONDS", 0.0)
    monkeypatch.setattr("txnstore.clients.producer.thread.WRITER_ASKS_SECONDS", 0.01)
    monkeypatch.setattr("txnstore.clients.consumer.core.FIRST_LOOK_SECONDS", 0.0)
    monkeypatch.setattr("txnstore.clients.consumer.core.LOOK_SECONDS", 3_600.0)
    client: Producer | Consumer
    if kind == "producer":
        client = Producer(configuration)
        client.produce("t", b"one")
        client.flush()
    else:
        client = Consumer({**configuration, "group.id": "g"})
        # Before the thread asks for the first time.
        client.list_topics()
        client.subscribe(["t"])
        client.poll(0.1)
    with client:
        wait_until(lambda: count(store, transaction_log) == 0)
        threads = [thread.name for thread in threading.enumerate() if thread not in others]
        assert threads.count("txnstore-upkeep") == 1
        # Until the next look is due, which is a while.
        wait_until(lambda: not client._connection.upkeep._is_busy)
        looks.clear()
    # Whoever closes it waits for no look.
    assert not looks
    wait_until(lambda: not looking())


def test_a_producer_that_has_nothing_to_do_any_more_looks_again_and_again(
    store, clock, configuration, patient, monkeypatch
):
    """Its thread sleeps without an end as soon as nothing is due, which is so during a look."""
    monkeypatch.setattr(upkeep, "FIRST_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr("txnstore.clients.producer.thread.WRITER_ASKS_SECONDS", 0.01)
    monkeypatch.setattr("txnstore.clients.producer.thread.IDLE_ASKS_SECONDS", 0.01)
    looks = threading.Semaphore(0)
    run = upkeep.Upkeep.run

    def look(own):
        wait_until(lambda: producer._thread.alarm._sleeps_until == math.inf)
        looks.release()
        run(own)

    monkeypatch.setattr(upkeep.Upkeep, "run", look)
    with Producer(configuration) as producer:
        producer.produce("t", b"one")
        producer.flush()
        for _ in range(3):
            assert looks.acquire(timeout=PATIENCE_SECONDS)
        wait_until(lambda: count(store, transaction_log) == 0)
        # Days later all is due once more.
        add_old_entries(store, clock)
        wait_until(lambda: count(store, transaction_log) == 0)


class Seconds:
    """Time that passes as the test says."""

    def __init__(self):
        self.now_seconds = 1_000.0

    def __call__(self):
        return self.now_seconds


@pytest.mark.parametrize("kind", ["producer", "consumer"])
def test_a_quiet_client_that_asks_a_moment_early_is_not_passed_over(store, configuration, monkeypatch, kind):
    """Once in ten seconds, by threads that take now longer, now less long to wake."""
    seconds, looks, late_seconds = Seconds(), [], iter([0.030, 0.002, 0.020, 0.000, 0.010])
    here: Any = SimpleNamespace(submit=lambda work: work())
    with open_cluster(configuration["bootstrap.servers"]) as cluster:
        settings = admin_configuration(({"bootstrap.servers": configuration["bootstrap.servers"]},), {})
        of_client = upkeep.Upkeep(settings, lambda: cluster, monotonic_seconds=seconds)

        def note(_):
            looks.append(seconds())
            of_client._is_busy = False

        def ask():
            seconds.now_seconds += next(late_seconds)
            of_client.run()

        monkeypatch.setattr(of_client, "_worker", lambda: here)
        monkeypatch.setattr(of_client, "_work", note)
        helps = WriterHelp(lambda: cluster, lambda _: here, ask, Alarm(threading.RLock()), monotonic_seconds=seconds)
        of_consumer = Duties(seconds)
        of_consumer.add(LOOK_SECONDS, ask)
        for _ in range(5):
            if kind == "producer":
                seconds.now_seconds = helps.due_seconds(seconds()) or math.nan
                helps.run()
            else:
                seconds.now_seconds += of_consumer.run_due()
                of_consumer.run_due()
    assert len(looks) == 5
    assert looks[-1] - looks[0] < 4 * LOOK_SECONDS + 0.1


def test_a_client_that_is_behind_has_its_next_turn_soon(store, configuration, monkeypatch):
    """On a slow machine one duty takes a turn's whole time; what was not begun does not wait for the next look."""
    monkeypatch.setattr(upkeep, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(upkeep, "BEHIND_SECONDS", 0.0)
    with Producer(configuration) as producer:
        producer.produce("t", b"one")
        producer.flush()
        producer._connection.upkeep._next_seconds = 0.0
        producer._connection.upkeep.run()
        wait_until(lambda: count(store, transaction_log) == 0)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", ["producer", "consumer", "consumer in a group"])
def test_a_client_is_closed_while_the_interpreter_ends(store, configuration, monkeypatch, kind):
    """As functions of `atexit` do; Python 3.12 starts no new thread then."""
    client: Producer | Consumer
    if kind == "producer":
        client = Producer(configuration)
        client.produce("t", b"one")
        client.flush()
    else:
        write_one(configuration)
        client = Consumer({**configuration, "group.id": "g", "auto.offset.reset": "earliest"})
        client.subscribe(["t"]) if "group" in kind else client.assign([TopicPartition("t", 0, 0)])
        assert client.poll(PATIENCE_SECONDS) is not None

    def start(_thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    upkeep._next_looks.clear()
    entries = count(store, transaction_log)
    with monkeypatch.context() as ending:
        ending.setattr(threading.Thread, "start", start)
        client.close()
    # It was left to others.
    assert count(store, transaction_log) == entries


def test_a_look_for_which_no_thread_can_be_started_is_for_the_next_one(store, configuration, patient, monkeypatch):
    monkeypatch.setattr(upkeep, "FIRST_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.0)
    with Producer({**configuration, "txnstore.maintenance": False}) as producer:
        producer.produce("t", b"one")
        producer.flush()
        own = upkeep.Upkeep(admin_configuration((configuration,), {}), lambda: producer._connection.opened)
        with monkeypatch.context() as ending:

            def start(_thread):
                raise RuntimeError("can't create new thread at interpreter shutdown")

            ending.setattr(threading.Thread, "start", start)
            own.run()
        own.run()
        wait_until(lambda: count(store, transaction_log) == 0)
        own.part()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("stands_still", ["the look", "the turn"])
def test_who_closes_a_client_waits_a_moment_whatever_the_database_does(store, configuration, monkeypatch, stands_still):
    standing, goes_on, over = threading.Event(), threading.Event(), []
    name = "look_for_due" if stands_still == "the look" else "take_turn"
    real = getattr(turns, name)

    def stand(*arguments, **options):
        standing.set()
        goes_on.wait(PATIENCE_SECONDS)
        try:
            return real(*arguments, **options)
        finally:
            over.append(1)

    monkeypatch.setattr(turns, name, stand)
    monkeypatch.setattr(upkeep, "PARTING_WAIT_SECONDS", PARTING_WAIT_SECONDS if name == "look_for_due" else 1.0)
    write_one(configuration)
    # Closed, while that still stands there.
    assert standing.is_set()
    assert not over
    assert not goes_on.is_set()
    goes_on.set()
    wait_until(lambda: over)
    # It finds the store closed: nothing is done, and nothing is kept open.
    wait_until(lambda: not looking())
    assert count(store, transaction_log) == ENTRIES


def test_a_client_that_is_closed_during_its_turn_ends_it_with_the_portion(store, clock, configuration, monkeypatch):
    monkeypatch.setattr(upkeep, "FIRST_LOOK_SECONDS", 0.0)
    began, closing = threading.Event(), threading.Event()
    portions = []

    def work(portion):
        began.set()
        while not portion.portions.is_over:
            portions.append(1)
            closing.wait(0.01)
        return 0

    monkeypatch.setattr(upkeep, "TURN_SECONDS", 3_600.0)
    duty = turns.MaintenanceDuty("goes on and on", "log.cleaner.backoff.ms", lambda: work)
    monkeypatch.setattr("txnstore.maintenance.duties.DUTIES", (duty,))
    producer = Producer(configuration)
    producer.produce("t", b"one")
    producer.flush()
    producer._connection.upkeep.run()
    assert began.wait(PATIENCE_SECONDS)
    closing.set()
    producer.close()
    wait_until(lambda: not looking())
    (row,) = store.read(lambda connection: connection.execute(select(maintenance_duties)).all())
    # Whether or not it could still say so, somebody else goes on.
    clock.advance(LEASE_MS)
    assert list(turns.look_for_due(store, [duty]).due) == [row.duty]


@pytest.mark.slow
def test_a_client_tells_once_of_a_duty_that_somebody_has_to_do_something_about(
    store, clock, configuration, patient, monkeypatch, caplog
):
    caplog.set_level("WARNING")
    errors: list[Exception] = []

    def fail(_):
        raise errors[0]

    failing = turns.MaintenanceDuty("batches read", duties.COMPACTION_INTERVAL, lambda: fail)
    monkeypatch.setattr(duties, "DUTIES", (failing,))

    def told():
        """Let some clients have their turns; return what they tell."""
        caplog.clear()
        for _ in range(3):
            clock.advance(PAUSE_MS_MAX)
            write_one(configuration)
        return [record.getMessage() for record in caplog.records]

    for error, count_told in (
        (CorruptBatch("the batch at 7 is damaged"), 1),
        (CorruptBatch("the batch at 9 is damaged"), 0),
        (CorruptBatch("the batch of tea is damaged"), 1),
        (CorruptBatch("the batch at 7 is damaged"), 0),
        # That goes away by itself.
        (StoreBusy("it is locked"), 0),
        (StoreUnavailable("it is away"), 0),
    ):
        errors[:] = [error]
        found = told()
        assert len(found) == count_told
        assert all("batches read" in message and str(error) in message for message in found)


def test_a_store_that_may_only_be_read_is_left_alone(url, store, clock, configuration, monkeypatch, caplog):
    """A client without the rights does its work, and says nothing."""

    def refuse(*_, **__):
        raise PermissionDenied

    monkeypatch.setattr(turns, "take_turn", refuse)
    monkeypatch.setattr(upkeep, "PARTING_WAIT_SECONDS", PATIENCE_SECONDS)
    write_one(configuration)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert count(store, record_batches) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_of_a_fork_leaves_its_parents_turn_alone(store, configuration, patient, monkeypatch):
    # However long it lives, its only turn is the last one.
    monkeypatch.setattr(upkeep, "FIRST_LOOK_SECONDS", math.inf)
    with Producer(configuration) as producer:
        producer.produce("t", b"one")
        producer.flush()
        child = os.fork()
        if child == 0:
            producer.close()
            os._exit(0 if count_entries(configuration) == ENTRIES else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert count(store, transaction_log) == 0


def count_entries(configuration):
    with open_store(configuration["bootstrap.servers"]) as store:
        return count(store, transaction_log)


@pytest.mark.slow
def test_clients_that_come_and_go_beside_due_work_leave_no_connection_and_lose_no_record(
    store, clock, configuration, monkeypatch
):
    """Closed in the middle of their turns, many times, by exact account."""
    monkeypatch.setattr(upkeep, "PARTING_WAIT_SECONDS", 0.002)
    monkeypatch.setattr(upkeep, "_next_looks", _Never())
    rounds, clients = 12, 4
    # Of clients that other tests have left behind, perhaps.
    before = set(threading.enumerate())

    def come_and_go(number):
        for index in range(rounds):
            with Producer(configuration) as producer:
                producer.produce("t", f"{number}-{index}".encode())

    threads = [threading.Thread(target=come_and_go, args=[number]) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: set(threading.enumerate()) <= before)
    batches = store.read(
        lambda connection: connection.execute(select(func.sum(record_batches.c.record_count))).scalar()
    )
    assert batches == rounds * clients
    if store.backend.name == "postgresql":
        asking = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        # Within one transaction it would see the same answer again and again.
        with psycopg.connect(connection_string(configuration["bootstrap.servers"]), autocommit=True) as own:
            own_of_store = store.engine.pool.checkedin() + store.engine.pool.checkedout()
            wait_until(lambda: own.execute(asking).fetchall()[0][0] <= own_of_store)
    else:
        assert store.read(lambda connection: connection.execute(text("PRAGMA quick_check")).scalar()) == "ok"


class _Never(dict):
    """What a process remembers that forgets at once that it has looked."""

    def get(self, key, default=None):
        return default


def test_a_client_that_nobody_holds_any_more_leaves_no_thread(configuration, monkeypatch):
    monkeypatch.setattr(upkeep, "FIRST_LOOK_SECONDS", 0.0)
    producer = Producer(configuration)
    producer.produce("t", b"one")
    producer.flush()
    producer._connection.upkeep.run()
    assert looking()
    del producer
    gc.collect()
    wait_until(lambda: not looking())


def test_a_client_that_is_closed_as_its_thread_is_made_leaves_none(configuration, monkeypatch):
    monkeypatch.setattr(upkeep, "FIRST_LOOK_SECONDS", 0.0)
    with Producer(configuration) as producer:
        producer.produce("t", b"one")
        producer.flush()
        of_client = producer._connection.upkeep
        make = of_client._worker

        def close_before():
            monkeypatch.setattr(of_client, "_worker", make)
            of_client.stop()
            return make()

        monkeypatch.setattr(of_client, "_worker", close_before)
        of_client.run()
        wait_until(lambda: not looking())
