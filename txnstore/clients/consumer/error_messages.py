"""This file is the messages that are no records: what poll() says of a partition or of the consumer as a whole."""

from __future__ import annotations

from typing import Final

from txnstore.clients.model.constants import TIMESTAMP_NOT_AVAILABLE
from txnstore.clients.model.kafka_error import KafkaError
from txnstore.clients.model.message import Message

_NO_TIMESTAMP: Final = (TIMESTAMP_NOT_AVAILABLE, -1)


def error_message(
    error: KafkaError, topic: str | None = None, partition: int = -1, offset: int | None = None
) -> Message:
    """Return the message that says `error`; its value is the error's text, as in confluent-kafka."""
    where = {} if offset is None else {"offset": offset}
    text = error.str().encode(errors="backslashreplace")
    return Message(topic=topic, partition=partition, value=text, error=error, timestamp=_NO_TIMESTAMP, **where)


def end_of_partition(topic: str, partition: int, offset: int, high_watermark: int) -> Message:
    """Return the message that says that the reader has reached the end of what it may see."""
    text = f"reached the end of the partition at offset {offset} (high watermark {high_watermark})"
    return error_message(KafkaError(KafkaError._PARTITION_EOF, text), topic, partition, offset)


def prefixed(prefix: str, error: KafkaError) -> KafkaError:
    """Return the error with what failed before its text: "Commit failed: ..."."""
    return KafkaError(
        error.code(), f"{prefix}: {error.str()}", error.fatal(), error.retriable(), error.txn_requires_abort()
    )
