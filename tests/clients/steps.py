"""The steps that most tests of the clients take: make a topic, read to the end, look at an error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from txnstore import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from txnstore.admin import AdminClient, NewTopic
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.store import Store
from txnstore.transactions.protocol import FenceReason
from txnstore.transactions.recovery import abort_timed_out
from txnstore.transactions.rows import read_row

#: Longer than anything takes that ends at all.
PATIENCE_SECONDS = 60.0
#: The group metadata of a consumer that is in no group: generation -1, no member, no instance.
NO_MEMBER = b"CGMDv2:\xff\xff\xff\xffreaders\x00\x00\x01"

BOTH_ISOLATION_LEVELS = ("read_committed", "read_uncommitted")


class Refusal(NamedTuple):
    """What a refused call says: its code, and its text unless any will do."""

    code: int
    text: str | None = None
    is_fatal: bool = False
    is_retriable: bool = False
    requires_abort: bool = False

    @classmethod
    def of(cls, error: KafkaError) -> Refusal:
        return cls(error.code(), error.str(), error.fatal(), error.retriable(), error.txn_requires_abort())


def error_of(call: Callable[..., object], *arguments: object, **named: object) -> KafkaError:
    """Return the error that the call raises."""
    with pytest.raises(KafkaException) as caught:
        call(*arguments, **named)
    error: KafkaError = caught.value.args[0]
    return error


def refusal_of(call: Callable[..., object], *arguments: object, **named: object) -> Refusal | None:
    """Return what the call says if it is refused."""
    try:
        call(*arguments, **named)
    except KafkaException as exception:
        return Refusal.of(exception.args[0])
    return None


def bring_to_an_end(producer: Producer) -> None:
    """Do what a program does with a producer that it wants to use again."""
    refused = refusal_of(producer.abort_transaction, PATIENCE_SECONDS)
    if refused is None:
        return
    # A commit is under way, or it is over.
    assert refused.is_retriable or str(refused.text).endswith("state Ready"), refused
    refused = refusal_of(producer.commit_transaction, PATIENCE_SECONDS)
    if refused is not None and refused.requires_abort:
        producer.abort_transaction(PATIENCE_SECONDS)
    else:
        assert refused is None or str(refused.text).endswith("state Ready"), refused


def create_topic(url: str, name: str, partition_count: int = 1, **settings: str) -> str:
    """Make a topic; settings have underscores for dots."""
    config = {key.replace("_", "."): value for key, value in settings.items()}
    topics = [NewTopic(name, partition_count, 1, config=config)]
    AdminClient({"bootstrap.servers": url}).create_topics(topics)[name].result(PATIENCE_SECONDS)
    return name


def time_out(store: Store, transactional_id: str = "anna", cluster: Cluster | None = None) -> None:
    """See to it that the transaction is aborted whose time is up; a client that has met it may have done so before."""
    abort_timed_out(store, cluster)
    row = store.read(lambda connection: read_row(connection, transactional_id)).row
    assert row is not None
    assert row.fence_reason is FenceReason.TIMEOUT


def read_to_end(
    url: str, topic: str, *, isolation: str = "read_committed", partitions: tuple[int, ...] = (0,), **configuration: Any
) -> list[Message]:
    """Return what a reader who is in no group gets of the partitions, from their beginning to their end."""
    consumer = Consumer(
        {
            "bootstrap.servers": url,
            "group.id": "nobody",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 0,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            **configuration,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions])
        return _messages_to_end(consumer, len(partitions))
    finally:
        consumer.close()


def _messages_to_end(consumer: Consumer, partition_count: int) -> list[Message]:
    messages: list[Message] = []
    ended: set[int | None] = set()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(ended) < partition_count:
        message = consumer.poll(max(0, deadline - time.monotonic()))
        assert message is not None, f"the end of {partition_count} partitions was not reached; read {len(messages)}"
        error = message.error()
        if error is None:
            messages.append(message)
        else:
            assert error.code() == KafkaError._PARTITION_EOF, error
            ended.add(message.partition())
    return messages


def values(messages: list[Message]) -> list[bytes | None]:
    """Return the messages' values, in order."""
    return [message.value() for message in messages]
