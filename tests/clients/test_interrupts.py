"""Ctrl-C in every call that waits for a database that hangs, clients that nobody closes, and programs that just end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import psycopg
import pytest

from tests.clients.consumer.log_writer import LogWriter, eventually
from tests.clients.interrupted import (
    CASES,
    CLOSE_SECONDS,
    PATIENCE_SECONDS,
    READ_TOPIC,
    TICK_SECONDS,
    TOPIC,
    WAIT_FOR_READERS,
    run_case,
)
from tests.tools.fork_server import fork_server
from tests.tools.proxy import Proxy, upstream_of
from txnstore.clients.producer import producer as producer_module
from txnstore.db.opening import open_store
from txnstore.testing.postgres_server import connection_string

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

#: How soon an interrupt has to come out of a call, by a clock that is held up with the call where a machine is busy.
INTERRUPTED_TICKS_MAX = 20
CLOSED_TICKS_MAX = 3 * CLOSE_SECONDS / TICK_SECONDS + INTERRUPTED_TICKS_MAX


class Child:
    """A process with one client in it."""

    def __init__(self, url, name):
        context = fork_server()
        self._pipe, theirs = context.Pipe()
        self.ticks = context.Value("Q")
        self.process = context.Process(target=run_case, args=(theirs, url, name, self.ticks), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, expected):
        """Wait until it says what is expected, and return what it says with it."""
        assert self._pipe.poll(PATIENCE_SECONDS), f"not {expected!r} within {PATIENCE_SECONDS} s"
        word, about = self._pipe.recv()
        assert word == expected, about
        return about

    def tell(self):
        self._pipe.send(None)

    def interrupt(self):
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGINT)

    def close(self):
        self.process.kill()
        self.process.join()
        self._pipe.close()


@pytest.fixture(scope="module")
def url(module_url):
    """One store of each database for all these tests, with topics in it."""
    with open_store(module_url) as store:
        log = LogWriter(store)
        log.topic(TOPIC)
        log.topic(READ_TOPIC)
        log.write(READ_TOPIC, 0, b"first")
    return module_url


@pytest.fixture
def hang(url, hold_database):
    """A URL of the store, and a context in which its database answers nobody, or lets nobody write."""
    if url.startswith("sqlite"):
        yield url, lambda: hold_database(url)
        return
    with Proxy(upstream_of(url)) as proxy:

        @contextlib.contextmanager
        def swallow():
            proxy.swallow_everything()
            yield
            proxy.heal()
            proxy.cut_connections()

        yield proxy.url(url), swallow


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", CASES)
def test_an_interrupt_comes_at_once_and_the_client_can_be_closed(url, hang, name):
    if url.startswith("sqlite") and CASES[name] in WAIT_FOR_READERS:
        pytest.skip("an SQLite file can always be read")
    address, hanging = hang
    child = Child(address, name)
    try:
        child.hear("ready")
        with hanging():
            child.tell()
            child.hear("waiting")
            before = child.ticks.value
            child.interrupt()
            interrupted = child.hear("interrupted")
            assert interrupted - before < INTERRUPTED_TICKS_MAX
            # An abort or a commit that is under way, what is queued, and the thread: each is waited for once.
            assert child.hear("closed") - interrupted < CLOSED_TICKS_MAX
        child.tell()
        assert child.hear("left") == []
        child.process.join(PATIENCE_SECONDS)
        assert child.process.exitcode == 0
    finally:
        child.close()
    if not url.startswith("sqlite"):
        assert_no_sessions(url)


def assert_no_sessions(url):
    count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with psycopg.connect(connection_string(url), autocommit=True) as connection:
        eventually(lambda: connection.execute(count).fetchone() == (0,))


PROGRAM = """
    import sys
    from txnstore import Consumer, Producer, TopicPartition

    url, patience_seconds = sys.argv[1:]
    plain = Producer({"bootstrap.servers": url, "linger.ms": 0})
    transactional = Producer({"bootstrap.servers": url, "linger.ms": 0, "transactional.id": "x"})
    consumer = Consumer({"bootstrap.servers": url, "group.id": "g", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition("read", 0, 0)])
    assert consumer.poll(60).error() is None
    plain.produce("t", b"v")
    assert plain.flush(60) == 0
    transactional.init_transactions(60)
    transactional.begin_transaction()
    transactional.produce("t", b"v")
    assert transactional.flush(60) == 0
    print("ready", flush=True)
    sys.stdin.readline()
    plain.produce("t", b"v")
    transactional.produce("t", b"v")
    consumer.commit()
    try:
        transactional.commit_transaction(float(patience_seconds))
    except Exception as error:
        print(error.args[0].name(), flush=True)
    else:
        print("committed", flush=True)
"""

ENDS = {
    "as it comes": "",
    "in a function": "def main(one, two, three): sys.exit(0)\nmain(plain, transactional, consumer)",
    "by an interrupt": """
import os, signal
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
os.kill(os.getpid(), signal.SIGINT)
plain.poll(-1)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "hangs"),
    [("as it comes", False), ("as it comes", True), ("in a function", False), ("by an interrupt", True)],
)
def test_a_program_ends_at_once_whatever_its_clients_are_doing(url, hang, end, hangs):
    address, hanging = hang
    program = textwrap.dedent(PROGRAM) + ENDS[end]
    before = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-X", "dev", "-c", program, address, str(1 if hangs else PATIENCE_SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            assert child.stdout.readline() == "ready\n", child.stderr.read()
            started_seconds = time.monotonic() - before
            with hanging() if hangs else contextlib.nullcontext():
                child.stdin.write("\n")
                child.stdin.flush()
                assert child.stdout.readline() == ("_TIMED_OUT\n" if hangs else "committed\n")
                before = time.monotonic()
                code = child.wait(PATIENCE_SECONDS)
                ended_seconds = time.monotonic() - before
            # What was not sent is told of; the record of the plain producer may have had no time.
            told = "records were not sent"
            unsent: list[str] = []
            errors: list[str] = []
            for line in child.stderr:
                (unsent if told in line else errors).append(line)
        finally:
            child.kill()
    assert (code, errors, len(unsent) > 0 or not hangs) == (0, [], True)
    # No client waits for less than this when it is closed; where a machine is busy, the start took long as well.
    assert ended_seconds < max(2 * started_seconds, producer_module.STOP_TIMEOUT_SECONDS - 1)
    if not url.startswith("sqlite"):
        assert_no_sessions(url)
