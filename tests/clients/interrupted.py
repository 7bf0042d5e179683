"""The child processes of the tests of interrupts: a client that waits for a database that hangs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from txnstore import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition
from txnstore.clients.consumer import consumer as consumer_module
from txnstore.clients.producer import pipeline as pipeline_module
from txnstore.clients.producer import producer as producer_module

#: What is written to, and what is read: only the latter has an end.
TOPIC, READ_TOPIC = "t", "read"
LOOK_SECONDS = 0.005
TICK_SECONDS = 0.05
PATIENCE_SECONDS = 60.0
#: How long a client that is being closed waits here for a database that hangs; by default it is half a minute.
CLOSE_SECONDS = 0.3


def partitions():
    return [TopicPartition(READ_TOPIC, 0, OFFSET_BEGINNING)]


class Case:
    """A client, what it does while the database is well, and the call in which it then waits."""

    def __init__(self, url):
        self.client = self.make({"bootstrap.servers": url})

    def make(self, configuration):
        return Producer({"linger.ms": 0, **configuration})

    def prepare(self):
        self.client.list_topics(TOPIC, PATIENCE_SECONDS)

    def block(self):
        raise NotImplementedError


class Polls(Case):
    def block(self):
        self.client.poll(-1)


class Flushes(Case):
    def block(self):
        self.client.produce(TOPIC, b"v")
        self.client.flush(-1)


class Lists(Case):
    def block(self):
        self.client.list_topics()


class Closes(Case):
    def prepare(self):
        super().prepare()
        producer_module.CLOSE_TIMEOUT_SECONDS = producer_module.STOP_TIMEOUT_SECONDS = PATIENCE_SECONDS

    def block(self):
        self.client.produce(TOPIC, b"v")
        try:
            self.client.close()
        finally:
            shorten_closing()


class Initializes(Case):
    def make(self, configuration):
        return super().make({"transactional.id": "x", **configuration})

    def block(self):
        self.client.init_transactions()


class InTransaction(Initializes):
    def prepare(self):
        super().prepare()
        self.client.init_transactions(PATIENCE_SECONDS)
        self.client.begin_transaction()
        self.client.produce(TOPIC, b"v")
        assert self.client.flush(PATIENCE_SECONDS) == 0


class Commits(InTransaction):
    def block(self):
        self.client.commit_transaction()


class Aborts(InTransaction):
    def block(self):
        self.client.abort_transaction()


class SendsOffsets(InTransaction):
    def prepare(self):
        super().prepare()
        self.offsets = [TopicPartition(TOPIC, 0, 1)]

    def block(self):
        self.client.send_offsets_to_transaction(self.offsets, b"CGMDv2:\xff\xff\xff\xffreaders\x00\x00\x01")


class CommitsBlock(Initializes):
    def prepare(self):
        super().prepare()
        self.client.init_transactions(PATIENCE_SECONDS)

    def block(self):
        with self.client.transaction():
            self.client.produce(TOPIC, b"v")


class LeavesCommits(CommitsBlock):
    """Waits once there is room for no more."""

    def prepare(self):
        super().prepare()
        pipeline_module.PENDING_MAX = 3
        self.client.begin_transaction()
        self.client.produce(TOPIC, b"v")
        self.client.commit_transaction_async().result(PATIENCE_SECONDS)

    def block(self):
        while True:
            self.client.begin_transaction()
            self.client.produce(TOPIC, b"v")
            self.client.commit_transaction_async()


class IsInBlock(CommitsBlock):
    def block(self):
        with self.client.transaction():
            self.client.produce(TOPIC, b"v")
            self.client.flush(-1)


class Reads(Case):
    def make(self, configuration):
        return Consumer({"group.id": "readers", "auto.offset.reset": "earliest", **configuration})

    def prepare(self):
        self.client.assign(partitions())
        message = self.client.poll(PATIENCE_SECONDS)
        assert message is not None
        assert message.error() is None

    def block(self):
        self.client.poll(-1)


class Consumes(Reads):
    def block(self):
        self.client.consume(5, -1)


class ReadsCommitted(Reads):
    def block(self):
        self.client.committed(partitions())


class CommitsOffsets(Reads):
    def block(self):
        self.client.commit(asynchronous=False)


class ListsToConsumer(Reads):
    def block(self):
        self.client.list_topics()


class AsksForWatermarks(Reads):
    def block(self):
        self.client.get_watermark_offsets(partitions()[0])


class ClosesConsumer(Reads):
    def prepare(self):
        super().prepare()
        consumer_module.CLOSE_SECONDS = PATIENCE_SECONDS

    def block(self):
        try:
            self.client.close()
        finally:
            shorten_closing()


#: Calls that wait when nobody may write.
WAIT_FOR_WRITERS = (
    Polls, Flushes, Closes, Initializes, Commits, Aborts, SendsOffsets, CommitsBlock, LeavesCommits, IsInBlock, Reads,
    Consumes, CommitsOffsets, ClosesConsumer,
)  # fmt: skip
#: Calls that wait when nobody may read either.
WAIT_FOR_READERS = (Lists, ReadsCommitted, ListsToConsumer, AsksForWatermarks)
CASES = {case.__name__: case for case in WAIT_FOR_WRITERS + WAIT_FOR_READERS}


def shorten_closing():
    producer_module.CLOSE_TIMEOUT_SECONDS = producer_module.STOP_TIMEOUT_SECONDS = CLOSE_SECONDS
    consumer_module.CLOSE_SECONDS = CLOSE_SECONDS


def run_case(pipe, url, name, ticks):
    """Wait in a call until interrupted, close the client, and say what is left of it once the database is well."""
    threading.Thread(target=_tick, args=(ticks,), daemon=True).start()
    try:
        _run_case(pipe, url, name, ticks)
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        raise


def _tick(ticks):
    """Count the time that this process is given: where a machine is busy, it passes as slowly as all else here."""
    pause = threading.Event()
    while not pause.wait(TICK_SECONDS):
        ticks.value += 1


def _run_case(pipe, url, name, ticks):
    shorten_closing()
    before = descriptors()
    case = CASES[name](url)
    case.prepare()
    pipe.send(("ready", None))
    pipe.recv()
    threading.Thread(target=_say_when_waiting, args=(pipe,), daemon=True).start()
    try:
        case.block()
    except KeyboardInterrupt:
        pipe.send(("interrupted", ticks.value))
    else:
        pipe.send(("not interrupted", None))
    with contextlib.suppress(KafkaException):
        case.client.close()
    pipe.send(("closed", ticks.value))
    pipe.recv()
    pipe.send(("left", what_is_left(before)))


def what_is_left(before):
    """Return threads and connections that do not go away."""
    deadline = time.monotonic() + PATIENCE_SECONDS / 2
    pause = threading.Event()
    while True:
        left = [_whereabouts(thread) for thread in threading.enumerate() if thread.name.startswith("txnstore")]
        left += sorted(descriptors() - before)
        if not left or time.monotonic() > deadline:
            return left
        pause.wait(LOOK_SECONDS)


def _whereabouts(thread):
    frame = sys._current_frames().get(thread.ident)
    return thread.name + ("" if frame is None else " in " + "".join(traceback.format_stack(frame)))


def descriptors():
    """Return the open sockets and database files of this process."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:") or ".db" in target:
                found.add(target)
    return found


def _say_when_waiting(pipe):
    """Say so once the main thread waits in a call of a client."""
    pause = threading.Event()
    main = threading.main_thread().ident
    assert main is not None
    while not _waits(sys._current_frames()[main]):
        pause.wait(LOOK_SECONDS)
    pipe.send(("waiting", None))


def _waits(frame):
    if Path(frame.f_code.co_filename).name not in {"threading.py", "deadline.py"}:
        return False
    while frame is not None:
        if f"{os.sep}clients{os.sep}" in frame.f_code.co_filename and "txnstore" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
