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


def test_a_producer_that_is_dropped_with_records_says_so(url, caplog):
    producer = Producer({"bootstrap.servers": url, "linger.ms": 30_000})
    for number in range(3):
        producer.produce("payments", str(number))
    with caplog.at_level(logging.WARNING, "txnstore"):
        del producer
        gc.collect()
    (told,) = [record for record in caplog.records if getattr(record, "event", "") == "records_dropped"]
    assert (told.count, told.levelname) == (3, "WARNING")
    assert "up to 3 records" in told.getMessage()


ENDS = {"nothing": True, "client.flush()": False, "client.close()": False, "client.purge()": False}


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
    assert ("up to 1 records that were not sent" in ended.stderr) == is_told == bool(ended.stderr), ended.stderr


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
