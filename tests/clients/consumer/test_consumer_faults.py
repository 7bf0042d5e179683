"""A consumer whose database hangs, breaks or refuses: every call keeps its time, errors say why, and it goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from tests.clients.consumer.log_writer import PATIENCE_SECONDS, eventually, polled_until, texts
from tests.tools.least_privilege import as_owner
from tests.tools.proxy import Proxy, upstream_of
from txnstore import Consumer, KafkaError, KafkaException, TopicPartition
from txnstore.db.opening import open_store
from txnstore.testing.postgres_server import connection_string

TP = TopicPartition
#: How much longer than its timeout a call may take on a machine that is busy; without a timeout it is half a minute.
SLACK_SECONDS = 20.0


@pytest.fixture
def topic(log):
    log.topic()
    log.write("t", 0, b"0", b"1")


def new_consumer(configuration):
    return Consumer(configuration)


@contextlib.contextmanager
def lasting_at_most(seconds):
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds + SLACK_SECONDS


def cost_of_waiting(consumer, seconds, enough):
    """Return how long a processor is busy while nothing comes, in the cheapest of some waits: others work as well."""
    costs: list[float] = []
    while len(costs) < 10 and not any(cost < enough for cost in costs):
        before = time.process_time()
        assert consumer.poll(seconds) is None
        costs.append(time.process_time() - before)
    return min(costs)


def threads_of(group_id):
    return [thread for thread in threading.enumerate() if f"txnstore-consumer-{group_id}" in thread.name]


@pytest.fixture
def hang(url, txnstore_postgres_server):
    """A URL of the store, and a function that makes its database hang: nobody is refused, somebody waits."""
    with contextlib.ExitStack() as stack:
        if url.startswith("sqlite"):

            def hold():
                connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
                stack.callback(connection.close)
                # Readers go on; who wants to write has to wait.
                connection.execute("BEGIN IMMEDIATE")

            yield url, hold
        else:
            proxy = stack.enter_context(Proxy(upstream_of(url)))
            yield proxy.url(url), proxy.swallow_everything


@pytest.mark.slow
@pytest.mark.parametrize("has_read", [True, False])
def test_every_call_keeps_its_timeout_while_the_database_hangs(hang, topic, has_read):
    address, hold = hang
    consumer = new_consumer({"bootstrap.servers": address, "group.id": "hung", "auto.offset.reset": "earliest"})
    try:
        consumer.assign([TP("t", 0)])
        if has_read:
            assert consumer.poll(PATIENCE_SECONDS).value() == b"0"
        hold()
        if has_read:
            # What was read before needs no database.
            assert consumer.poll(0).value() == b"1"
        for call in (
            lambda: consumer.poll(0.2),
            lambda: consumer.consume(5, 0.2),
            lambda: consumer.committed([TP("t", 0)], 0.2),
            lambda: consumer.get_watermark_offsets(TP("t", 0), 0.2),
            lambda: consumer.offsets_for_times([TP("t", 0, 0)], 0.2),
            lambda: consumer.list_topics(timeout=0.2),
            consumer.commit,
            lambda: consumer.seek(TP("t", 0, 0)),
            lambda: consumer.pause([TP("t", 0)]),
            lambda: consumer.resume([TP("t", 0)]),
            lambda: consumer.position([TP("t", 0)]),
            lambda: consumer.subscribe(["t"]),
            consumer.unassign,
        ):
            with lasting_at_most(0.2), contextlib.suppress(KafkaException):
                call()
    finally:
        with lasting_at_most(10):
            consumer.close()


def test_a_consumer_goes_on_after_the_network_was_gone(txnstore_postgresql_url, topic_on_postgresql):
    errors: list = []
    with Proxy(upstream_of(txnstore_postgresql_url)) as proxy:
        consumer = new_consumer(
            {
                "bootstrap.servers": proxy.url(txnstore_postgresql_url),
                "group.id": "g",
                "auto.offset.reset": "earliest",
                "error_cb": errors.append,
            }
        )
        with consumer:
            consumer.assign([TP("t", 0)])
            assert texts(consumer.consume(2, PATIENCE_SECONDS)) == [b"0", b"1"]
            proxy.refuse_connections()
            proxy.cut_connections()
            polled_until(consumer, lambda: errors)
            assert errors[0].code() == KafkaError._TRANSPORT
            assert errors[0].retriable()
            topic_on_postgresql.write("t", 0, b"2")
            proxy.accept_connections()
            assert consumer.poll(PATIENCE_SECONDS).value() == b"2"
            assert consumer.commit(asynchronous=False)[0].offset == 3


@pytest.fixture
def topic_on_postgresql(txnstore_postgresql_url):
    from tests.clients.consumer.log_writer import LogWriter

    with open_store(txnstore_postgresql_url) as store:
        log = LogWriter(store)
        log.topic()
        log.write("t", 0, b"0", b"1")
        yield log


@pytest.mark.slow
def test_a_consumer_goes_on_after_its_sessions_were_ended(txnstore_postgresql_url, topic_on_postgresql):
    log = topic_on_postgresql
    with new_consumer({"bootstrap.servers": txnstore_postgresql_url, "group.id": "g"}) as consumer:
        consumer.assign([TP("t", 0, 0)])
        assert texts(consumer.consume(2, PATIENCE_SECONDS)) == [b"0", b"1"]
        for number in range(3):
            with psycopg.connect(
                connection_string(as_owner(txnstore_postgresql_url)), autocommit=True
            ) as administrator:
                administrator.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            log.write("t", 0, b"%d" % number)
            assert consumer.poll(PATIENCE_SECONDS).value() == b"%d" % number


def test_missing_rights_are_said_with_their_reason_and_nothing_spins(
    txnstore_postgres_server, txnstore_postgresql_url, topic_on_postgresql
):
    server, database = txnstore_postgres_server, txnstore_postgresql_url.rpartition("/")[2]
    role = f"reader_{os.getpid()}"
    server.create_role(role, "secret")
    try:
        with server.connect(database) as administrator:
            administrator.execute(f"GRANT USAGE ON SCHEMA txnstore TO {role}")
            administrator.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA txnstore TO {role}")
            administrator.execute(f"REVOKE SELECT ON txnstore.record_batches FROM {role}")
        url = server.url(database, role, "secret")
        with new_consumer({"bootstrap.servers": url, "group.id": "g", "enable.auto.commit": False}) as consumer:
            consumer.assign([TP("t", 0, 0)])
            message = consumer.poll(PATIENCE_SECONDS)
            assert message.error().code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
            assert "secret" not in message.error().str()
            assert cost_of_waiting(consumer, 0.5, 0.25) < 0.25
            with server.connect(database) as administrator:
                administrator.execute(f"GRANT SELECT ON txnstore.record_batches TO {role}")
            assert consumer.poll(PATIENCE_SECONDS).value() == b"0"
    finally:
        with server.connect(database) as administrator:
            administrator.execute(f"DROP OWNED BY {role}")
        server.drop_role(role)


def test_a_database_that_is_no_store_is_said(tmp_path):
    path = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE txnstore_topics (id INTEGER)")
    with new_consumer({"bootstrap.servers": f"sqlite:///{path}", "group.id": "g"}) as consumer:
        consumer.assign([TP("t", 0, 0)])
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None
        assert not message.error().retriable()


def test_no_thread_and_no_connection_is_left_after_close(url, topic, log):
    consumer = new_consumer({"bootstrap.servers": url, "group.id": "leaves-nothing", "auto.offset.reset": "earliest"})
    consumer.subscribe(["t"])
    consumer.consume(2, PATIENCE_SECONDS)
    assert threads_of("leaves-nothing")
    store = consumer._core.connection.store()
    consumer.close()
    assert threads_of("leaves-nothing") == []
    assert store.engine.pool.checkedout() == 0
    if not url.startswith("sqlite"):
        with psycopg.connect(connection_string(url), autocommit=True) as administrator:
            count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> ALL(%s)"
            ours = [administrator.info.backend_pid, *log_sessions(log)]
            eventually(lambda: administrator.execute(count, [ours]).fetchone() == (0,))


def log_sessions(log):
    """Return the server processes of the test's own store, and of its announcer."""
    log.store.close()
    return []


class Threads:
    """Several threads that run until they are told to end, or until one of them fails."""

    def __init__(self):
        self.done = threading.Event()
        self.failures = []
        self.threads = []

    def start(self, step):
        def run():
            try:
                while not self.done.is_set():
                    step()
            except Exception as error:  # noqa: BLE001 - the test fails by it
                self.failures.append(error)
                self.done.set()

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def end(self):
        self.done.set()
        for thread in self.threads:
            thread.join(PATIENCE_SECONDS)
        assert self.failures == []


def test_many_threads_use_one_consumer(url, log):
    log.topic()
    for first in range(0, 4_000, 100):
        log.write("t", 0, *[b"%d" % number for number in range(first, first + 100)])
    seen: list = []
    threads = Threads()
    with new_consumer({"bootstrap.servers": url, "group.id": "many", "auto.offset.reset": "earliest"}) as consumer:
        consumer.assign([TP("t", 0)])

        def read():
            messages = [*consumer.consume(50, 0.05), consumer.poll(0.01)]
            seen.extend(message.offset() for message in messages if message is not None)
            if len(seen) >= 4_000:
                threads.done.set()

        def disturb():
            consumer.pause([TP("t", 0)])
            consumer.commit()
            consumer.position([TP("t", 0)])
            consumer.resume([TP("t", 0)])
            consumer.committed([TP("t", 0)], PATIENCE_SECONDS)
            threads.done.wait(0.005)

        for step in (read, read, disturb):
            threads.start(step)
        threads.done.wait(PATIENCE_SECONDS)
        threads.end()
    # Nothing twice, nothing missing: pauses, commits and two readers notwithstanding.
    assert sorted(seen) == list(range(4_000))


@pytest.mark.slow
def test_seeking_while_another_thread_reads_gives_the_records_from_there(url, log):
    log.topic()
    log.write("t", 0, *[b"%d" % number for number in range(500)])
    with new_consumer({"bootstrap.servers": url, "group.id": "seeks"}) as consumer:
        consumer.assign([TP("t", 0, 0)])
        seen: list = []
        threads = Threads()

        def read():
            message = consumer.poll(0.05)
            if message is not None:
                seen.append(message.offset())

        threads.start(read)
        for _ in range(20):
            mark = len(seen)
            consumer.seek(TP("t", 0, 250))
            eventually(lambda mark=mark: 250 in seen[mark:])
        threads.end()
    jumps = [after for before, after in pairwise(seen) if after != before + 1]
    assert set(jumps) <= {250}


def test_closing_ends_a_poll_that_waits_in_another_thread(url, topic):
    consumer = new_consumer({"bootstrap.servers": url, "group.id": "ends"})
    consumer.assign([TP("t", 0, 2)])
    ended = []

    def wait():
        with pytest.raises(RuntimeError, match="Consumer closed"):
            consumer.poll(-1)
        ended.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: consumer._core.group.waiting)
    consumer.close()
    thread.join(PATIENCE_SECONDS)
    assert ended == [True]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_leaves_the_parent_alone(url, topic):
    with new_consumer({"bootstrap.servers": url, "group.id": "forks"}) as consumer:
        consumer.assign([TP("t", 0, 0)])
        assert consumer.poll(PATIENCE_SECONDS).value() == b"0"
        child = os.fork()
        if child == 0:
            code = 1
            try:
                consumer.poll(0)
            except KafkaException as error:
                if error.args[0].code() == KafkaError._STATE:
                    consumer.close()
                    code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert consumer.poll(PATIENCE_SECONDS).value() == b"1"


@pytest.mark.slow
@pytest.mark.parametrize("call", ["poll(-1)", "consume(5)", "poll(600)"])
def test_an_interrupt_ends_a_call_that_waits(url, topic, call):
    program = f"""
        import threading
        from txnstore import Consumer, TopicPartition
        consumer = Consumer({{"bootstrap.servers": {url!r}, "group.id": "g"}})
        consumer.assign([TopicPartition("t", 0, 2)])
        consumer.poll(0.1)
        pause = threading.Event()

        def say_when_it_waits():
            while not consumer._core.group.waiting:
                pause.wait(0.005)
            print("waiting", flush=True)

        try:
            threading.Thread(target=say_when_it_waits, daemon=True).start()
            consumer.{call}
        except KeyboardInterrupt:
            consumer.close()
            print("interrupted", flush=True)
    """
    child: Any = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "waiting\n"
        child.send_signal(signal.SIGINT)
        output, _ = child.communicate(timeout=PATIENCE_SECONDS)
    finally:
        child.kill()
        child.wait()
    assert output == "interrupted\n"


@pytest.mark.slow
def test_a_waiting_consumer_costs_next_to_nothing(url, topic):
    with new_consumer({"bootstrap.servers": url, "group.id": "idle"}) as consumer:
        consumer.assign([TP("t", 0, 2)])
        consumer.poll(1.0)
        assert cost_of_waiting(consumer, 2.0, 2.0 * 0.03) < 2.0 * 0.03
