"""A client that is dropped with the object that owns it is collected: neither thread nor connection stays."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from tests.databases import on_sqlite_alone
from txnstore import Consumer, Producer, TopicPartition
from txnstore.errors import StoreClosed

# It is collected until all threads have ended.
pytestmark = pytest.mark.usefixtures("collects_little")

PATIENCE_SECONDS = 60.0


class Owner:
    """An object that holds a client whose callbacks are methods of it."""

    def __init__(self, url):
        self.url = url
        self.client = None

    def called_back(self, *_arguments):
        """Be a callback."""

    def produce(self, **configuration):
        self.client = Producer({"bootstrap.servers": self.url, **configuration})
        self.client.produce("payments", b"42")
        assert self.client.flush(PATIENCE_SECONDS) == 0

    def produce_with_callback(self):
        self.client = Producer({"bootstrap.servers": self.url})
        self.client.produce("payments", b"42", on_delivery=self.called_back)
        assert self.client.flush(PATIENCE_SECONDS) == 0

    def consume(self, **configuration):
        self.client = Consumer({"bootstrap.servers": self.url, "group.id": "readers", **configuration})
        self.client.assign([TopicPartition("payments", 0, 0)])
        self.client.poll(0.1)

    def subscribe(self):
        self.client = Consumer({"bootstrap.servers": self.url, "group.id": "readers"})
        self.client.subscribe(["payments"], on_assign=self.called_back, on_revoke=self.called_back)
        self.client.poll(0.1)


WAYS = {
    "on_delivery": lambda owner: owner.produce(on_delivery=owner.called_back),
    "error_cb of a producer": lambda owner: owner.produce(error_cb=owner.called_back),
    "stats_cb": lambda owner: owner.produce(**{"stats_cb": owner.called_back, "statistics.interval.ms": 1000}),
    "a record's own": lambda owner: owner.produce_with_callback(),
    "error_cb of a consumer": lambda owner: owner.consume(error_cb=owner.called_back),
    "on_commit": lambda owner: owner.consume(on_commit=owner.called_back),
    "on_assign": lambda owner: owner.subscribe(),
}


@pytest.mark.slow
@pytest.mark.parametrize("use", WAYS.values(), ids=WAYS)
def test_a_client_that_is_dropped_with_its_owner_leaves_no_thread(url, use):
    before = set(threading.enumerate())
    owner = Owner(url)
    use(owner)
    threads = set(threading.enumerate()) - before
    assert threads, "a client without a thread shows nothing"
    del owner
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(thread.is_alive() for thread in threads):
        assert time.monotonic() < deadline, [thread.name for thread in threads if thread.is_alive()]
        gc.collect()
        for thread in threads:
            # It ends at once, unless it was at work in its client: then the garbage is to be collected again.
            thread.join(0.5)


class OwnLock(logging.Handler):
    """What holds a lock in which garbage may be collected, as `queue.Queue.put` does for a QueueHandler."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.own_lock = threading.Lock()
        self.events = []

    def emit(self, record):
        """Keep the event, or say that this thread would wait for itself for ever."""
        assert self.own_lock.acquire(timeout=PATIENCE_SECONDS)
        self.events.append((getattr(record, "event", ""), record.levelname, record.getMessage()))
        self.own_lock.release()


class FullDisk(logging.Handler):
    """Takes nothing."""

    def emit(self, record):
        """Refuse it."""
        raise OSError("no room for logs")


@pytest.fixture
def own_lock():
    handler = OwnLock()
    logging.getLogger("txnstore").addHandler(handler)
    yield handler
    logging.getLogger("txnstore").removeHandler(handler)


def send_all(producer):
    """Let all be sent, and no report be served."""
    with producer._changed:
        producer._sender.begin_flush()
        producer._thread.alarm.ring()
        assert producer._changed.wait_for(lambda: not producer._sender.has_something, PATIENCE_SECONDS)
        producer._sender.end_flush()


def join_threads(before):
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_SECONDS)


@pytest.mark.parametrize("is_in_circle", [False, True])
def test_a_producer_that_is_dropped_with_records_says_so_and_not_within_the_collection(url, own_lock, is_in_circle):
    """Nor are those told of that were delivered and whose reports nobody has asked for."""
    before = set(threading.enumerate())
    owner = Owner(url)
    callbacks = {"error_cb": owner.called_back} if is_in_circle else {}
    owner.client = producer = Producer({"bootstrap.servers": url, "linger.ms": 30_000, **callbacks})
    del callbacks
    for number in range(2):
        producer.produce("payments", str(number))
    send_all(producer)
    for number in range(3):
        producer.produce("payments", str(number))
    assert len(producer) == 5
    # Whoever logs something at this moment, in any thread, does so within the lock.
    with own_lock.own_lock:
        del owner, producer
        gc.collect()
        assert own_lock.events == []
    join_threads(before)
    ((event, level, text),) = own_lock.events
    assert (event, level) == ("records_dropped", "WARNING")
    assert "up to 3 records" in text


def test_a_producer_is_closed_at_the_end_of_the_program_whatever_the_log_says(url):
    producer = Producer({"bootstrap.servers": url, "linger.ms": 30_000})
    producer.produce("payments", b"42")
    logger = logging.getLogger("txnstore")
    handler = FullDisk(logging.WARNING)
    logger.addHandler(handler)
    try:
        with pytest.raises(OSError, match="no room for logs"):
            # As the interpreter calls it.
            producer._finalizer()
    finally:
        logger.removeHandler(handler)
    with pytest.raises(StoreClosed):
        producer._connection.cluster()
    producer.purge()
    producer.close()


ENDS = {"nothing": True, "del client": True, "client.flush()": False, "client.close()": False, "client.purge()": False}


@pytest.mark.slow
@pytest.mark.parametrize(("end", "is_told"), ENDS.items(), ids=ENDS)
def test_a_program_that_ends_without_sending_its_records_says_so(url, end, is_told):
    """As librdkafka does: nobody else would know of them. Without any handler for logs, too."""
    program = f"""
import sys
from txnstore import Producer
client = Producer({{"bootstrap.servers": sys.argv[1], "linger.ms": 30_000}})
client.produce("payments", b"42", on_delivery=print)
{end if end != "nothing" else "pass"}
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, url], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )
    assert ("up to 1 records were not sent" in ended.stderr) == is_told == bool(ended.stderr), ended.stderr


#: An object that uses its client and closes it when it is dropped, and is there until the interpreter has ended all
#: threads.
LAST_OWNER = """
import sys
from txnstore import Consumer, KafkaException, Producer, TopicPartition

class Owner:
    def __init__(self, client, use):
        self.client, self.use = client, use

    def __del__(self, refusal=KafkaException):
        try:
            self.use(self.client)
        except refusal as error:
            print(error.args[0].name(), flush=True)
        self.client.close()
        print("closed", flush=True)

def producer(**settings):
    client = Producer({"bootstrap.servers": sys.argv[1], "linger.ms": 30_000, **settings})
    if settings:
        client.init_transactions()
        client.begin_transaction()
    client.produce("payments", b"42")
    return client

def consumer(use):
    client = Consumer({"bootstrap.servers": sys.argv[1], "group.id": "readers"})
    use(client)
    client.poll(0.1)
    return client

"""
LAST_CLIENTS = {
    "a producer": "producer(), Producer.flush",
    "a transactional producer": 'producer(**{"transactional.id": "bank"}), Producer.commit_transaction',
    "a consumer": 'consumer(lambda client: client.assign([TopicPartition("payments", 0, 0)])), Consumer.unsubscribe',
    "a member": 'consumer(lambda client: client.subscribe(["payments"])), Consumer.commit',
}


@pytest.mark.slow
@on_sqlite_alone
@pytest.mark.parametrize("client", LAST_CLIENTS.values(), ids=LAST_CLIENTS)
def test_a_client_that_is_closed_while_the_interpreter_ends_waits_for_no_thread(url, client):
    """On SQLite alone: there is no thread any more to ask a database for anything."""
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", textwrap.dedent(LAST_OWNER) + f"owner = Owner({client})", url],
        capture_output=True,
        text=True,
        check=False,
        timeout=6 * PATIENCE_SECONDS,
    )
    assert (ended.returncode, ended.stdout) == (0, "_STATE\nclosed\n"), ended.stderr
