"""Settings of a topic that change while a producer knows it: what was refused is judged by those that hold now."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.steps import PATIENCE_SECONDS, create_topic, error_of, read_to_end, values
from txnstore import KafkaError
from txnstore.log.topics import change_topic_configs, lock_topic_configs

#: No producer looks at its topics by itself again.
NEVER = {"topic.metadata.refresh.interval.ms": -1}
#: What makes the topic refuse a record, what it is changed to, the record, and how it is refused.
REFUSED: dict[str, tuple[str, str, str | None, dict[str, Any], int]] = {
    "size": ("max.message.bytes", "1000", "100000", {"value": b"v" * 5_000}, KafkaError.MSG_SIZE_TOO_LARGE),
    "timestamp": ("message.timestamp.before.max.ms", "1000", None, {"timestamp": 5}, KafkaError.INVALID_TIMESTAMP),
    "key": ("cleanup.policy", "compact", "delete", {"key": None}, KafkaError.INVALID_RECORD),
}
GOOD: dict[str, Any] = {"value": b"good", "key": b"k"}


@pytest.fixture(params=REFUSED)
def refused(request, url, log):
    """A topic, the record that it refuses, with which code, and what makes it take that."""
    name, text, other, record, code = REFUSED[request.param]
    topic = create_topic(url, "changing", 1, **{name: text})

    def change():
        log.store.write(lambda c: change_topic_configs(c, lock_topic_configs(c, topic), {name: other}))

    return topic, {**GOOD, "value": b"late", **record}, code, change


@pytest.mark.slow_but_first
def test_a_record_that_was_refused_is_taken_once_the_topic_allows_it(make_producer, url, refused):
    topic, record, code, change = refused
    producer = make_producer(NEVER)
    fates = []

    def produce():
        for each in (GOOD, record):
            producer.produce(topic, **each, on_delivery=lambda error, _: fates.append(error and error.code()))
        assert producer.flush(PATIENCE_SECONDS) == 0

    produce()
    produce()
    assert fates == [None, code] * 2
    change()
    produce()
    assert fates[-2:] == [None, None]
    assert values(read_to_end(url, topic)) == [b"good"] * 3 + [record["value"]]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("way", ["flushed", "with the commit", "by itself"])
def test_a_transaction_is_judged_by_the_settings_that_hold(make_producer, url, refused, way):
    topic, record, _, change = refused
    producer = make_producer({**NEVER, "transactional.id": "anna"})
    producer.init_transactions(PATIENCE_SECONDS)

    def commit():
        producer.begin_transaction()
        producer.produce(topic, **record)
        if way == "flushed":
            assert producer.flush(PATIENCE_SECONDS) == 0
        if way == "by itself":
            producer.commit_transaction_async().result(PATIENCE_SECONDS)
        else:
            producer.commit_transaction(PATIENCE_SECONDS)

    assert error_of(commit).txn_requires_abort()
    producer.abort_transaction(PATIENCE_SECONDS)
    change()
    commit()
    assert values(read_to_end(url, topic)) == [record["value"]]
