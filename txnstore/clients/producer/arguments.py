"""The arguments of `produce` and of calls that wait: what they may be, and what they become."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from txnstore.clients.model.errors import KafkaError, KafkaException
from txnstore.clients.model.topic_partition import TopicPartition
from txnstore.errors import InvalidRequest
from txnstore.model import OFFSET_MAX, Header
from txnstore.transactions.tokens import PreparedTxnState

PARTITION_MAX: Final = 2**31 - 1
TIMESTAMP_MAX: Final = 2**63 - 1
#: The longest name of a topic that librdkafka sends; a broker takes 249 characters.
_TOPIC_BYTES_MAX: Final = 512

_HEADERS_FORM: Final = "expected headers to be dict or list of (key, value) tuples"


def as_bytes(content: object) -> bytes:
    """Return a key, a value or a header's value as bytes; text as UTF-8.

    Raises:
        TypeError: it is neither bytes nor text.
        UnicodeEncodeError: the text holds half of a surrogate pair.
    """
    # What they hold, whatever methods a class of their own has: they would be called while a batch is made.
    if isinstance(content, bytes):
        return content if type(content) is bytes else bytes.__getitem__(content, slice(None))
    if isinstance(content, str):
        return str.encode(content)
    if isinstance(content, (bytearray, memoryview)):
        # A copy: the caller may change it before it is sent.
        return bytes(content)
    raise TypeError(f"a bytes-like object is required, not '{type(content).__name__}'")


def check_sent_offsets(positions: object, group_metadata: object) -> None:
    """Refuse what are not consumed offsets and a group's metadata.

    Raises:
        TypeError: they are not a list of TopicPartition, and bytes.
    """
    if not isinstance(positions, list):
        raise TypeError(f"expected list of TopicPartition, not {type(positions).__name__}")
    for position in positions:
        if not isinstance(position, TopicPartition):
            raise TypeError(f"expected list of TopicPartition, it holds {type(position).__name__}")
    if not isinstance(group_metadata, (bytes, bytearray, memoryview)):
        raise TypeError(f"expected bytes, {type(group_metadata).__name__} found")


def checked_headers(headers: object) -> Iterator[Header]:
    """Yield headers as pairs of text and bytes, in order; of a name that is not text, its text.

    Raises:
        TypeError: they are neither a dict nor a list of pairs, or a value is neither text, bytes nor None.
        UnicodeEncodeError: a name or a text holds half of a surrogate pair.
    """
    pairs: Iterable[Any]
    if isinstance(headers, Mapping):
        pairs = headers.items()
    elif isinstance(headers, list):
        pairs = headers
    else:
        raise TypeError(f"{_HEADERS_FORM}, not {type(headers).__name__}")
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:  # noqa: PLR2004 - a pair
            raise TypeError("Headers are expected to be a list of (key, value) tuples")
        name, content = pair
        if isinstance(name, bytes):
            name = name.decode()
        if not isinstance(name, str):
            try:
                name = str(name)
            except Exception as error:
                raise TypeError("expected header key to be unicode string") from error
        if not name.isascii():
            # Now, not when a whole batch is to be written.
            name.encode()
        if content is not None and not isinstance(content, (str, bytes, bytearray, memoryview)):
            raise TypeError(
                f"expected header value to be None, binary, or unicode string, not {type(content).__name__}"
            )
        yield name, None if content is None else as_bytes(content)


def check_batch_message(message: object, index: int) -> None:
    """Refuse what `produce_batch` could not queue whatever the state, before it has queued any message.

    Raises:
        TypeError: it is not a dict, or something in it is not of its type.
        ValueError: a text holds half of a surrogate pair.
        OverflowError: a number is too large.
    """
    if not isinstance(message, dict):
        raise TypeError(f"Message at index {index} must be a dict")
    for part in ("value", "key"):
        content = message.get(part)
        if content is not None and not isinstance(content, (str, bytes, bytearray, memoryview)):
            raise TypeError(f"Message {part} at index {index} must be bytes or str")
        if isinstance(content, str) and not content.isascii():
            content.encode()
    for callback in (message.get("callback"), message.get("on_delivery")):
        if callback is not None and not callable(callback):
            raise TypeError(f"Message callback at index {index} must be callable")
    if message.get("headers") is not None:
        for _ in checked_headers(message["headers"]):
            pass
    partition = message.get("partition", 0)
    if isinstance(partition, float) or not hasattr(partition, "__index__"):
        raise TypeError(f"Message partition at index {index} must be int")
    whole_number(partition, PARTITION_MAX, "signed integer is greater than maximum")
    whole_number(message.get("timestamp", 0), TIMESTAMP_MAX, "int too big to convert")


def check_topic_text(topic: str) -> None:
    """Refuse a topic's name that is not even text to a database.

    Raises:
        UnicodeEncodeError: it holds half of a surrogate pair.
    """
    if not topic.isascii():
        topic.encode()


def check_produced_topic(topic: str) -> None:
    """Refuse a topic's name that librdkafka refuses before it is sent to a broker, as one that is not text.

    Raises:
        UnicodeEncodeError: see `check_topic_text`.
        KafkaException: `_INVALID_ARG`: it is longer than 512 bytes.
    """
    if len(topic.encode()) > _TOPIC_BYTES_MAX:
        reason = "Unable to produce message: Local: Invalid argument or configuration"
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, reason))


def whole_number(number: object, most: int, too_large: str) -> int:
    """Return a number that an integer argument may be.

    Raises:
        TypeError: it is not a whole number.
        OverflowError: it is beyond `most`, with the text `too_large`.
    """
    if isinstance(number, float) or not hasattr(number, "__index__"):
        raise TypeError(f"'{type(number).__name__}' object cannot be interpreted as an integer")
    whole = operator.index(number)
    if abs(whole) > most:
        raise OverflowError(too_large)
    return whole


def writer_ids_of(writers: object) -> frozenset[int]:
    """Return the ids of writers that a commit names.

    Raises:
        TypeError: they are not a collection of whole numbers.
    """
    if isinstance(writers, (str, bytes)) or not isinstance(writers, Collection):
        raise TypeError(f"writers must be a collection of what report_writer() returned, not {type(writers).__name__}")
    return frozenset(whole_number(writer, OFFSET_MAX, "int too big to convert") for writer in writers)


def check_same_writers(writers: Collection[int] | None, begun: Collection[int] | None) -> None:
    """Refuse to take up a commit as one of other writers: it would look as if what they wrote were committed.

    Raises:
        KafkaException: `_INVALID_ARG`: `begun`, the writers of the commit that is under way, are others.
    """
    if writers != begun:
        reason = "a commit with other writers is under way: repeat it with the same writers; nothing was changed"
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, reason))


def prepared_state_of(state: object) -> PreparedTxnState:
    """Return what an application remembers of a prepared transaction.

    Raises:
        TypeError: it is neither text nor what `prepare_transaction` returned.
        ValueError: the text is not one that `prepare_transaction` returned.
    """
    if isinstance(state, PreparedTxnState):
        return state
    if not isinstance(state, str):
        raise TypeError(f"state must be what prepare_transaction() returned, or its text, not {type(state).__name__}")
    try:
        return PreparedTxnState.parse(state)
    except InvalidRequest as error:
        raise ValueError(str(error)) from None
