"""The options of a sink and the columns of its DataFrame, checked while the query is planned.

The producer's keys have the values and defaults that a producer gives them.  The options are picklable, because they go
to the executors, and no text made of them shows a password.

The columns are those of Spark's Kafka sink, and `timestamp` besides.  As there, other columns are left out; but one
whose name is nearly that of a missing column is refused as a misspelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from txnstore.clients.configuration.configuration import Configuration, producer_configuration
from txnstore.clients.model.errors import KafkaException
from txnstore.errors import InvalidConfiguration, InvalidRequest, InvalidTopic, UnsupportedCompression
from txnstore.log.columns import Codec, require_codec
from txnstore.log.topics import check_topic_name
from txnstore.model import NAME_BYTES_MAX
from txnstore.spark.options import Side, read_options, whole_number
from txnstore.spark.sink_coordination import TIMEOUT_MS_DEFAULT
from txnstore.spark.stores import StoreAddress, store_address
from txnstore.transactions.coordinator import TRANSACTIONAL_ID_LENGTH_MAX, check_transactional_id

#: What the sink takes of a producer's keys, by the producer's own rules.
_PRODUCER_KEYS: Final = (
    "transaction.timeout.ms",
    "compression.type",
    "partitioner",
    "sticky.partitioning.linger.ms",
    "batch.size",
    "batch.num.messages",
    "message.timeout.ms",
    "allow.auto.create.topics",
)
#: Room for what stands in front of it in a transactional id, with the name of a topic; within foreachBatch the query's
#: id has to fit, too, in what its versions are remembered under.
_APP_ID_LENGTH_MAX: Final = TRANSACTIONAL_ID_LENGTH_MAX - 300
_APP_ID_BYTES_MAX: Final = NAME_BYTES_MAX - 300
#: The types that each column may have, by its name, and how the documentation spells them.
_TYPES: Final[Mapping[str, tuple[tuple[type[DataType], ...], str]]] = MappingProxyType(
    {
        "key": ((StringType, BinaryType), "string or binary"),
        "value": ((StringType, BinaryType), "string or binary"),
        "topic": ((StringType,), "string"),
        "partition": ((IntegerType, ShortType, ByteType, LongType), "int"),
        "headers": ((ArrayType,), "array<struct<key:string,value:binary>>"),
        "timestamp": ((TimestampType,), "timestamp"),
    }
)


#: Columns of the source that the sink leaves out, whatever they resemble.
_OF_SOURCE_ALONE: Final = frozenset({"offset", "timestamptype"})


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options in force."""

    address: StoreAddress
    topic: str | None
    transactional_id: str | None
    transaction_timeout_ms: int | None
    """How long a batch may stay open; None: as long as usual, or less where the store allows no more."""

    delivery_timeout_ms: int
    """How long one step is tried while the database is busy or away."""

    partitioner: str
    sticky_seconds: float
    codec: Codec
    batch_bytes_max: int
    batch_records_max: int
    allow_create: bool
    app_id: str | None
    version: int | None


def sink_options(given: Mapping[str, str], *, is_stream: bool) -> SinkOptions:
    """Return the options of a sink; `is_stream`: of a streaming query.

    Raises:
        InvalidConfiguration: an option is unknown, belongs to the source, has a value that it does not take, or does
            not go together with another one.
        UnsupportedCompression: the package that implements the codec is not installed here.
    """
    values = read_options(given, Side.SINK)
    configuration = _as_producer(values)
    topic = values.get("topic")
    if topic is not None:
        try:
            check_topic_name(topic)
        except InvalidTopic as error:
            raise InvalidConfiguration(f"topic: {error}") from None
    app_id, version = _application(values, is_stream=is_stream)
    transactional_id = _transactional_id(values)
    if app_id is not None and transactional_id is not None:
        raise InvalidConfiguration("txnAppId names the writes already: give either it or transactional.id")
    codec = Codec[configuration["compression.type"].upper()]
    try:
        require_codec(codec)
    except UnsupportedCompression as error:
        raise UnsupportedCompression(f"compression.type={codec.label}: {error}") from None
    timeout_ms = configuration["transaction.timeout.ms"] if configuration.was_given("transaction.timeout.ms") else None
    longest_ms = TIMEOUT_MS_DEFAULT if timeout_ms is None else timeout_ms
    return SinkOptions(
        address=store_address(values),
        topic=topic,
        transactional_id=transactional_id,
        transaction_timeout_ms=timeout_ms,
        # What is tried for longer than its transaction may be open is aborted in any case.
        delivery_timeout_ms=min(configuration["message.timeout.ms"] or longest_ms, longest_ms),
        partitioner=configuration["partitioner"],
        sticky_seconds=configuration["sticky.partitioning.linger.ms"] / 1000,
        codec=codec,
        batch_bytes_max=configuration["batch.size"],
        batch_records_max=configuration["batch.num.messages"],
        allow_create=configuration["allow.auto.create.topics"] is not False,
        app_id=app_id,
        version=version,
    )


def _as_producer(values: Mapping[str, str]) -> Configuration:
    """Return the producer's keys as a producer without transactions reads them."""
    keys = {key: values[key] for key in _PRODUCER_KEYS if key in values}
    try:
        return producer_configuration(({"bootstrap.servers": "sqlite://", **keys},), {})
    except KafkaException as error:
        raise InvalidConfiguration(error.args[0].str()) from None


def _transactional_id(values: Mapping[str, str]) -> str | None:
    transactional_id = values.get("transactional.id")
    if transactional_id == "":
        raise InvalidConfiguration("transactional.id is empty, and would fence nobody; leave the option out for that")
    if transactional_id is not None:
        _check_name("transactional.id", transactional_id)
    return transactional_id


def _check_name(option: str, name: str) -> None:
    """Refuse what is not a transactional id, or a part of one."""
    try:
        check_transactional_id(name)
    except InvalidRequest as error:
        raise InvalidConfiguration(f"{option}: {error}") from None


def _application(values: Mapping[str, str], *, is_stream: bool) -> tuple[str | None, int | None]:
    app_id = values.get("txnAppId")
    if app_id is None and "txnVersion" not in values:
        return None, None
    if is_stream:
        raise InvalidConfiguration(
            "txnAppId and txnVersion are for batch writes, also inside foreachBatch: a stream's batches have numbers"
        )
    if not app_id or "txnVersion" not in values:
        raise InvalidConfiguration("txnAppId and txnVersion make a write idempotent together: give both, or neither")
    _check_name("txnAppId", app_id)
    if len(app_id) > _APP_ID_LENGTH_MAX:
        raise InvalidConfiguration(f"txnAppId has at most {_APP_ID_LENGTH_MAX} characters, not {len(app_id)}")
    if (size := len(app_id.encode())) > _APP_ID_BYTES_MAX:
        raise InvalidConfiguration(f"txnAppId has at most {_APP_ID_BYTES_MAX} bytes of UTF-8, not {size}")
    return app_id, whole_number(values, "txnVersion", at_least=0)


@dataclass(frozen=True, slots=True)
class SinkColumns:
    """Where each column stands in the DataFrame; None: it has none of this name."""

    value: int
    key: int | None = None
    topic: int | None = None
    partition: int | None = None
    headers: int | None = None
    timestamp: int | None = None


def find_columns(schema: StructType, *, topic: str | None) -> SinkColumns:
    """Return where the sink's columns are; `topic` is the option of this name.

    Names are compared without regard to case, as Spark does.

    Raises:
        InvalidConfiguration: there is no value, no topic, a column is there twice, is not of its type or seems to be
            misspelt.
    """
    places: dict[str, int] = {}
    others = []
    for place, field in enumerate(schema.fields):
        name = field.name.lower()
        if name in _OF_SOURCE_ALONE:
            continue
        if name not in _TYPES:
            others.append(field.name)
            continue
        if name in places:
            raise InvalidConfiguration(f"the DataFrame has two columns {name!r}; the sink takes one")
        _check_type(name, field.dataType)
        places[name] = place
    missing = _TYPES.keys() - places.keys()
    for other in others:
        near = get_close_matches(other.lower(), sorted(missing), n=1, cutoff=0.8)
        if near:
            raise InvalidConfiguration(
                f"the sink has no column {other[:80]!r} (did you mean {near[0]!r}?); rename the column, or leave it out"
            )
    if "value" in missing:
        raise InvalidConfiguration(
            "the DataFrame has no column 'value'; the sink takes the columns"
            " value, and key, topic, partition, headers and timestamp if they are there"
        )
    if "topic" in missing and topic is None:
        raise InvalidConfiguration(
            "there is neither an option 'topic' nor a column 'topic': say where the records are to go"
        )
    return SinkColumns(**places)


def _check_type(name: str, type_: DataType) -> None:
    types, spelt = _TYPES[name]
    if not isinstance(type_, types) or (isinstance(type_, ArrayType) and not _are_headers(type_)):
        raise InvalidConfiguration(f"the column {name!r} is {type_.simpleString()[:80]}, but the sink takes {spelt}")


def _are_headers(array: ArrayType) -> bool:
    header = array.elementType
    return (
        isinstance(header, StructType)
        and header.names == ["key", "value"]
        and isinstance(header["key"].dataType, StringType)
        and isinstance(header["value"].dataType, BinaryType)
    )
