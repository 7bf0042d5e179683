"""The options of the data source: their names, and values of a kind that several of them have.

Spark hands options over as text, with their names in lower case.  Names are those of Spark's Kafka source and sink;
a Kafka client's key may come with or without `kafka.` in front.  What is unknown is refused with the nearest known
name; what only brokers could do something with, in librdkafka or in Java, is accepted and has no effect.

Processes of Spark's that only look for data sources, or ask for a schema, import this: it brings no SQLAlchemy along.
"""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from txnstore.errors import InvalidConfiguration

_logger: Final = logging.getLogger("txnstore")
_KAFKA_PREFIX: Final = "kafka."
_SHOWN_LENGTH_MAX: Final = 80
_WHOLE_NUMBER: Final = re.compile(r"-?[0-9]{1,19}")
_NUMBER_MAX: Final = 2**63 - 1
#: Keys without a dot that Kafka's clients have, too.
_KEYS_WITHOUT_DOT: Final = frozenset({"partitioner"})
#: What Kafka's clients in Java call what only brokers could do something with, where librdkafka has no such key.
#: Levels of compression mean as little here as compression.level does, which a producer takes.
_JAVA_FAMILIES: Final = ("ssl.", "sasl.", "metrics.", "metadata.")
_JAVA_KEYS: Final = frozenset(
    {
        "auto.include.jmx.reporter",
        "buffer.memory",
        "compression.gzip.level",
        "compression.lz4.level",
        "compression.zstd.level",
        "default.api.timeout.ms",
        "enable.metrics.push",
        "exclude.internal.topics",
        "fetch.max.wait.ms",
        "group.protocol",
        "group.remote.assignor",
        "max.block.ms",
        "max.poll.records",
        "max.request.size",
        "metric.reporters",
        "partitioner.adaptive.partitioning.enable",
        "partitioner.availability.timeout.ms",
        "receive.buffer.bytes",
        "security.providers",
        "send.buffer.bytes",
        "socket.connection.setup.timeout.max.ms",
        "socket.connection.setup.timeout.ms",
    }
)
_SERIALIZATION: Final = "keys and values are binary columns: turn them into what you need with functions of Spark"


class Side(enum.Flag):
    """Which side of a query an option is for."""

    SOURCE = enum.auto()
    SINK = enum.auto()
    BOTH = SOURCE | SINK


@dataclass(frozen=True, slots=True)
class Option:
    """One option; `name` is its spelling in error texts."""

    name: str
    side: Side = Side.BOTH
    aliases: tuple[str, ...] = ()
    ignored: bool = False
    """Whether it is accepted for the sake of copied programs, and means nothing here."""

    refused: str = ""
    """Why it is an error to give it."""

    harmless: str | None = None
    """The value that asks for nothing, which is accepted although any other is refused."""

    def kafka_named(self) -> tuple[str, ...]:
        """Return its names, keys of Kafka's clients with and without `kafka.` in front."""
        return tuple(
            prefix + name
            for name in (self.name, *self.aliases)
            for prefix in (("", _KAFKA_PREFIX) if "." in name or name in _KEYS_WITHOUT_DOT else ("",))
        )


_OPTIONS: Final = (
    Option("url", aliases=("bootstrap.servers", "path", "database.url")),
    Option("password"),
    Option("txnstore.schema"),
    Option("includeHeaders"),
    Option("subscribe", Side.SOURCE),
    Option("subscribePattern", Side.SOURCE),
    Option("assign", Side.SOURCE),
    Option("startingOffsets", Side.SOURCE),
    Option("endingOffsets", Side.SOURCE),
    Option("startingTimestamp", Side.SOURCE),
    Option("endingTimestamp", Side.SOURCE),
    Option("startingOffsetsByTimestamp", Side.SOURCE),
    Option("endingOffsetsByTimestamp", Side.SOURCE),
    Option("startingOffsetsByTimestampStrategy", Side.SOURCE),
    Option("maxOffsetsPerTrigger", Side.SOURCE),
    Option("minOffsetsPerTrigger", Side.SOURCE),
    Option("maxTriggerDelay", Side.SOURCE),
    Option("minPartitions", Side.SOURCE),
    Option("maxRecordsPerPartition", Side.SOURCE),
    Option("failOnDataLoss", Side.SOURCE),
    Option("isolation.level", Side.SOURCE),
    Option("txnstore.delivery.order", Side.SOURCE),
    Option("group.id", Side.SOURCE),
    Option("topic", Side.SINK),
    Option("transactional.id", Side.SINK),
    Option("transaction.timeout.ms", Side.SINK),
    Option("compression.type", Side.SINK, aliases=("compression.codec",)),
    Option("partitioner", Side.SINK),
    Option("sticky.partitioning.linger.ms", Side.SINK),
    Option("batch.size", Side.SINK),
    Option("batch.num.messages", Side.SINK),
    Option("message.timeout.ms", Side.SINK, aliases=("delivery.timeout.ms",)),
    Option("allow.auto.create.topics"),
    Option("txnAppId", Side.SINK),
    Option("txnVersion", Side.SINK),
    Option("queryName", ignored=True),
    Option("checkpointLocation", ignored=True),
    Option("groupIdPrefix", Side.SOURCE, ignored=True),
    Option("kafkaConsumer.pollTimeoutMs", Side.SOURCE, ignored=True),
    Option("fetchOffset.numRetries", Side.SOURCE, ignored=True),
    Option("fetchOffset.retryIntervalMs", Side.SOURCE, ignored=True),
    Option("auto.offset.reset", Side.SOURCE, refused="say where to begin with startingOffsets"),
    Option("enable.auto.commit", Side.SOURCE, refused="a group's offsets are committed by the sink, with the records"),
    Option(
        "txnstore.delivery.atomic",
        Side.SOURCE,
        refused="it is for consumers; with txnstore.delivery.order=commit a micro-batch has each transaction from all"
        " partitions, unless maxOffsetsPerTrigger ends it earlier",
    ),
    Option("key.deserializer", Side.SOURCE, refused=_SERIALIZATION),
    Option("value.deserializer", Side.SOURCE, refused=_SERIALIZATION),
    Option("key.serializer", Side.SINK, refused=_SERIALIZATION),
    Option("value.serializer", Side.SINK, refused=_SERIALIZATION),
    Option(
        "partitioner.class",
        Side.SINK,
        refused="it names a class in Java; the option partitioner says which partition a key goes to",
    ),
    Option("partitioner.ignore.keys", Side.SINK, refused="partitioner=random does not look at keys", harmless="false"),
    Option("interceptor.classes", refused="interceptors are Java classes, and nothing here can run them"),
)


_BY_NAME: Final[Mapping[str, Option]] = {name.lower(): option for option in _OPTIONS for name in option.kafka_named()}


#: What a typing error is compared with: names as people write them.
_SPELLINGS: Final[Mapping[str, str]] = {
    name.lower(): name
    for option in _OPTIONS
    if not option.refused
    for name in (option.name, *option.aliases, *(f"{_KAFKA_PREFIX}{name}" for name in (option.name,) if "." in name))
}


def check_names(given: Mapping[str, str]) -> None:
    """Refuse names that no side knows.

    Raises:
        InvalidConfiguration: there is no such option.
    """
    for name in given:
        if name.lower() not in _BY_NAME:
            _find(name, Side.BOTH)


def read_options(given: Mapping[str, str], side: Side) -> dict[str, str]:
    """Return the options that mean something on this side, by their names.

    An option that is given under two names must have one value.

    Raises:
        InvalidConfiguration: an option is unknown, belongs to the other side, or cannot be given here.
    """
    values: dict[str, str] = {}
    ignored: list[str] = []
    for given_name, text in given.items():
        option = _find(given_name, side, text)
        if option is None or option.ignored or option.harmless is not None:
            ignored.append(given_name)
        elif values.setdefault(option.name, text) != text:
            names = " and ".join(sorted(name for name in given if _BY_NAME.get(name.lower()) is option))
            raise InvalidConfiguration(f"the options {names} are names of the same option, but have different values")
    if ignored:
        _logger.debug("options without a meaning for a database: %s", ", ".join(sorted(ignored)))
    return values


def _find(name: str, side: Side, text: str | None = None) -> Option | None:
    """Return the option, or None for a key of Kafka's clients that means nothing here."""
    option = _BY_NAME.get(name.lower())
    if option is None:
        if name.lower().startswith(_KAFKA_PREFIX) and _is_key(name[len(_KAFKA_PREFIX) :].lower()):
            return None
        raise InvalidConfiguration(_unknown(name, side))
    if side not in option.side:
        here, there = ("source", "sink") if side is Side.SOURCE else ("sink", "source")
        raise InvalidConfiguration(f"{option.name} is an option of the {there}; the {here} does not take it")
    if option.refused and (text is None or text.strip().lower() != option.harmless):
        raise InvalidConfiguration(f"the option {name} cannot be given: {option.refused}")
    return option


def _is_key(name: str) -> bool:
    """Return whether Kafka's clients have a key of this name."""
    from txnstore.clients.configuration.keys import KEYS_BY_ALIAS  # brings SQLAlchemy along, for few queries

    return name in KEYS_BY_ALIAS or name in _JAVA_KEYS or name.startswith(_JAVA_FAMILIES)


def _unknown(name: str, side: Side) -> str:
    text = f"there is no option {name[:_SHOWN_LENGTH_MAX]!r}"
    known = [lowered for lowered in _SPELLINGS if side & _BY_NAME[lowered].side]
    near = get_close_matches(name.lower().replace("_", "."), known, n=1, cutoff=0.7)
    return f"{text}; did you mean {_SPELLINGS[near[0]]!r}?" if near else text


def boolean(values: Mapping[str, str], name: str, default: bool) -> bool:
    """Return the value of an option that is true or false.

    Raises:
        InvalidConfiguration: it is neither.
    """
    text = values.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false"):
        raise InvalidConfiguration(f"{name} is true or false, not {text[:_SHOWN_LENGTH_MAX]!r}")
    return text.lower() == "true"


def whole_number(values: Mapping[str, str], name: str, *, at_least: int) -> int | None:
    """Return the value of an option that is a whole number, or None if it was not given.

    Raises:
        InvalidConfiguration: it is not a whole number, or too small.
    """
    text = values.get(name)
    if text is None:
        return None
    # int() would take "1_000" as well.
    if not _WHOLE_NUMBER.fullmatch(text.strip()) or not at_least <= int(text) <= _NUMBER_MAX:
        raise InvalidConfiguration(
            f"{name} must be a whole number of at least {at_least} and at most {_NUMBER_MAX}, not"
            f" {text[:_SHOWN_LENGTH_MAX]!r}"
        )
    return int(text)


def one_of(values: Mapping[str, str], name: str, words: tuple[str, ...], default: str) -> str:
    """Return the value of an option that is one of a few words, in lower case.

    Raises:
        InvalidConfiguration: it is another word.
    """
    text = values.get(name, default).strip().lower()
    if text not in words:
        raise InvalidConfiguration(f"{name} is {' or '.join(words)}, not {text[:_SHOWN_LENGTH_MAX]!r}")
    return text
