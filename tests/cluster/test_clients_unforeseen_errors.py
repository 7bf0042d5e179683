"""Errors that nobody foresees in `tests/clients/producer/`, once more over a cluster of two SQLite files."""

from __future__ import annotations

import pytest

from tests.clients.producer.test_unforeseen_errors import (
    TOPIC,
    begun,
    records_wait_for_their_commit,
    test_a_lasting_mistake_ends_the_producer_and_the_outcome_is_unknown,
    test_at_every_step_of_a_commit,
    test_at_every_step_of_a_commit_in_the_background,
    the_thread_is_done_with_what_was_answered,
)
from tests.clients.steps import PATIENCE_SECONDS, create_topic, error_of, read_to_end, values
from tests.cluster.again import *  # noqa: F403 - the fixtures
from txnstore.background_thread import BackgroundThread

__all__ = [
    "records_wait_for_their_commit",
    "test_a_lasting_mistake_ends_the_producer_and_the_outcome_is_unknown",
    "test_at_every_step_of_a_commit",
    "test_at_every_step_of_a_commit_in_the_background",
    "the_thread_is_done_with_what_was_answered",
]

pytestmark = pytest.mark.slow


def test_a_database_for_which_no_thread_can_be_started_ends_no_producer(make_producer, url, monkeypatch):
    create_topic(url, TOPIC, 2)
    producer = make_producer({"transactional.id": "anna", "linger.ms": 50_000})
    producer.init_transactions(PATIENCE_SECONDS)
    start = BackgroundThread.start

    def refuse(self, run):
        if "database-" in self.name:
            raise RuntimeError("can't start new thread")
        start(self, run)

    with monkeypatch.context() as patched:
        patched.setattr(BackgroundThread, "start", refuse)
        for value in (b"in vain", b"in vain again"):
            begun(producer, value)
            producer.produce(TOPIC, value, partition=1)
            assert error_of(producer.commit_transaction, PATIENCE_SECONDS).txn_requires_abort()
            producer.abort_transaction(PATIENCE_SECONDS)
    begun(producer, b"1")
    producer.produce(TOPIC, b"1", partition=1)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, TOPIC, partitions=(0, 1))) == [b"1", b"1"]
