"""Transactions of which nobody waits for the commit, and what their futures say."""

from __future__ import annotations

import time

import pytest

from tests.clients.producer.transactional import *  # noqa: F403 - the fixtures
from tests.clients.steps import PATIENCE_SECONDS
from txnstore import KafkaException
from txnstore.clients.producer import sender as sender_module
from txnstore.clients.producer.thread import SenderThread
from txnstore.db.cluster.catalogue import change_store_settings
from txnstore.db.opening import open_store
from txnstore.deadline import Deadline
from txnstore.log.topics import delete_topic

#: How long a thread that has answered may take to look for other work.
IDLE_SECONDS = 5
ABORTABLE, FATAL = (True, False), (False, True)


def begun(producer, topic, *written, partition=0, reports=None):
    producer.begin_transaction()
    for value in written:
        report = None if reports is None else lambda error, message: reports.append((error, message.value()))
        producer.produce(topic, value, partition=partition, on_delivery=report)


def left(producer, topic, *written, **named):
    """Write a transaction, and leave its commit to itself."""
    begun(producer, topic, *written, **named)
    return producer.commit_transaction_async()


def delete_for_good(url, topic):
    """Delete a topic that nobody makes anew by using it."""
    with open_store(url) as store:
        store.write(lambda connection: change_store_settings(connection, {"auto.create.topics.enable": "false"}))
        store.write(lambda connection: delete_topic(connection, topic))


def flags_of(error):
    return error.txn_requires_abort(), error.fatal()


def failure_of(future):
    with pytest.raises(KafkaException) as failure:
        future.result(PATIENCE_SECONDS)
    return failure.value.args[0]


@pytest.fixture(autouse=True)
def records_wait_for_their_commit(monkeypatch):
    """However long a busy machine takes from one to the other: what was sent before is not left to the pipeline."""
    monkeypatch.setattr(sender_module, "COMMIT_COMES_SECONDS", 3_600.0)


@pytest.fixture(autouse=True)
def the_thread_is_done_with_what_was_answered(monkeypatch):
    """The sender's thread may still be in a job that it has answered: a commit is sealed only once it is out of it."""
    run_here = SenderThread.run_here

    def once_idle(self, job):
        # Not for ever: some tests hold the thread in its job.
        deadline = Deadline(IDLE_SECONDS)
        while (self._is_working or self._jobs) and deadline.left_seconds() > 0:
            time.sleep(0.001)
        return run_here(self, job)

    monkeypatch.setattr(SenderThread, "run_here", once_idle)


@pytest.fixture
def ready(make_transactional, topic):
    """A producer that knows the topic, which has one record and its marker."""
    ready = make_transactional()
    begun(ready, topic, b"before")
    ready.commit_transaction(PATIENCE_SECONDS)
    return ready
