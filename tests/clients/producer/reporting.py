"""A producer on a topic, and a delivery callback that keeps what it is told."""

from __future__ import annotations

import time

import pytest

from tests.clients.steps import PATIENCE_SECONDS, create_topic

TOPIC = "orders"
#: So long that nothing is sent before a flush.
NEVER_MS = 50_000


@pytest.fixture
def topic(url):
    return create_topic(url, TOPIC)


@pytest.fixture
def producer(make_producer, topic):
    return make_producer()


class Reports(list):
    """A delivery callback that keeps what it is told."""

    def __call__(self, error, message):
        self.append((error, message))

    def __bool__(self):
        return True

    @property
    def values(self):
        return [message.value() for _, message in self]

    @property
    def errors(self):
        return [error for error, _ in self]


def poll_until(producer, is_so):
    """Serve callbacks until it is so."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        producer.poll(0.05)


def take_all(accumulator):
    """Take every record that waits, and never report it."""
    with accumulator.changed:
        accumulator.give_up()
    batches = [queue.first(queue.record_count) for queues in accumulator.given_up for queue in queues.values()]
    accumulator.given_up.clear()
    return [batch for batch in batches if batch.record_count]
