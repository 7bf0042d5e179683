"""Transactions of which nobody waits for the commit, and what their futures say."""

from __future__ import annotations

import pytest

from tests.clients.producer.transactional import *  # noqa: F403 - the fixtures
from tests.clients.steps import PATIENCE_SECONDS
from txnstore import KafkaException
from txnstore.clients.producer import sender as sender_module

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


@pytest.fixture
def ready(make_transactional, topic):
    """A producer that knows the topic, which has one record and its marker."""
    ready = make_transactional()
    begun(ready, topic, b"before")
    ready.commit_transaction(PATIENCE_SECONDS)
    return ready
